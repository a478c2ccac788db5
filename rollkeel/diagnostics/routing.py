"""Whether the engine that samples and the engine that trains send a token to the same experts."""

from __future__ import annotations

import torch

from rollkeel.errors import BadInput


def routing_metrics(engine: torch.Tensor | None, trainer: torch.Tensor | None) -> dict[str, float]:
    """`routing/flip_rate`: fraction of (token, layer) whose expert *sets* differ; `routing/flipped_tokens`: fraction of
    tokens that differ in some layer.

    Args: expert ids `[T, layers, k]` at the position that predicts each response token, k distinct ids in any order.
    Nothing if either is None or there are no tokens. Raises `BadInput` for shapes that differ.
    """
    if engine is None or trainer is None:
        return {}
    if engine.shape != trainer.shape or engine.dim() != 3:
        raise BadInput(
            f"routing: expected experts [T, layers, k] of both engines, got {list(engine.shape)} and {list(trainer.shape)}"
        )
    if engine.numel() == 0:
        return {}
    # Sets of the same size differ iff some id of one is missing in the other.
    missing = [(trainer != engine[..., j, None]).all(-1) for j in range(engine.shape[-1])]
    flipped = torch.stack(missing).any(0)
    rate, tokens = torch.stack([flipped.double().mean(), flipped.any(-1).double().mean()]).tolist()
    return {"routing/flip_rate": rate, "routing/flipped_tokens": tokens}
