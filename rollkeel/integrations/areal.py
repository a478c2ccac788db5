"""AReaL: a loss for `engine.train_batch(data, loss_fn=…, loss_weight_fn=lambda d: d["loss_mask"].count_nonzero())`.

    from rollkeel.integrations.areal import loss_fn
    engine.train_batch(data, loss_fn=loss_fn({"name": "kpop", "phi": 0.1}), loss_weight_fn=…)

in the place of `grpo_loss_fn`. AReaL weighs micro-batches by their tokens: a mean over tokens stays the denominator, counted
before any mask. Tested with tensors in the layout of 2.0.0, padded and packed; it needs nothing of AReaL itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rollkeel.integrations.padded import alone, flat, padded
from rollkeel.objectives import Objective


def loss_fn(objective: str | Mapping[str, Any] | Objective) -> Callable[..., torch.Tensor]:
    """A function of AReaL's (logprobs, entropy, input_data), padded `[S, L]` or packed `[T]` with `cu_seqlens`."""
    made = alone(objective, "AReaL")

    def loss(
        logprobs: torch.Tensor, entropy: torch.Tensor, input_data: Mapping[str, Any], **unused: Any
    ) -> torch.Tensor:
        mask, starts = input_data["loss_mask"].bool(), input_data.get("cu_seqlens")
        names = ("logprobs", "advantages", "prox_logp")
        held = {name: input_data.get(name) for name in names}
        values = {
            "p": logprobs,
            "entropy": entropy.detach(),
            **{n: logprobs.detach() if v is None else v for n, v in held.items()},
        }
        if mask.dim() == 1:
            assert starts is not None
            sizes = starts.diff().tolist()
            mask = padded(mask.split(sizes))
            values = {n: padded(v.split(sizes)) for n, v in values.items()}
        if not mask.any():
            return logprobs.sum() * 0.0
        return made.loss(
            flat(
                values["p"],
                mask,
                rollout_logprobs=values["logprobs"],
                advantages=values["advantages"],
                coefficients=mask / mask.sum(),
                old_logprobs=values["prox_logp"],
                entropy=values["entropy"],
            )
        )

    return loss
