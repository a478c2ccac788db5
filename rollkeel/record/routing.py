"""Whether the engine that samples and the engine that trains send a token to the same experts."""

from __future__ import annotations

import torch

from rollkeel.errors import BadInput


def flipped_layers(engine: torch.Tensor, trainer: torch.Tensor) -> torch.Tensor:
    """`[T]` int16: layers in which a token's expert sets differ. Args as for `routing_metrics`, not None."""
    return _flipped(engine, trainer).sum(-1).to(torch.int16)


def routing_metrics(engine: torch.Tensor | None, trainer: torch.Tensor | None) -> dict[str, float]:
    """`routing/flip_rate`: fraction of (token, layer) whose expert *sets* differ; `routing/flipped_tokens`: fraction of
    tokens that differ in some layer.

    Args: expert ids `[T, layers, k]` at the position that predicts each response token, k distinct ids in any order.
    Nothing if either is None or there are no tokens. Raises `BadInput` for shapes that differ.
    """
    if engine is None or trainer is None:
        return {}
    flipped = _flipped(engine, trainer)
    if engine.numel() == 0:
        return {}
    rate, tokens = torch.stack([flipped.double().mean(), flipped.any(-1).double().mean()]).tolist()
    return {"routing/flip_rate": rate, "routing/flipped_tokens": tokens}


def _flipped(engine: torch.Tensor, trainer: torch.Tensor) -> torch.Tensor:
    """`[T, layers]` bool."""
    if engine.shape != trainer.shape or engine.dim() != 3:
        raise BadInput(
            f"routing: expected experts [T, layers, k] of both engines, got {list(engine.shape)} and {list(trainer.shape)}"
        )
    # Sets of the same size differ iff some id of one is missing in the other.
    missing = [(trainer != engine[..., j, None]).all(-1) for j in range(engine.shape[-1])]
    return torch.stack(missing).any(0) if missing else torch.zeros(engine.shape[:2], dtype=torch.bool)
