"""prime-rl: a custom loss. Tested with the sources of 0.8.0.

    [trainer.loss]
    type = "custom"
    import_path = "rollkeel.integrations.prime_rl.loss"
    kwargs = { objective = "dppo_binary_tv", delta = 0.15 }

prime-rl divides by the number of tokens of all micro-batches: that stays the denominator. It recomputes no old log-probs, so
recipes have to be anchored at the sampler (`kpop` with `mode = "rollout"`).

A trace while it trains is prime-rl's own: `trainer.enable_token_export = true`. `rollkeel doctor`, `replay --objective` and
`report` read its folder.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from rollkeel.errors import BadInput
from rollkeel.integrations.padded import alone, flat, needing
from rollkeel.objectives import Objective


@functools.lru_cache(maxsize=8)
def _made(objective: str, options: tuple[tuple[str, Any], ...]) -> Objective:
    made = alone({"name": objective, **dict(options)}, "prime-rl")
    if made.needs & {"old_logprobs", "ref_logprobs"}:
        raise BadInput(
            f"prime-rl: {made.name} needs {', '.join(sorted(made.needs))}, which its losses are not given;"
            " choose one anchored at the sampler"
        )
    return made


def loss(inputs: Any, *, objective: str = "dppo_binary_tv", **options: Any) -> Any:
    """`LossInputs` of one answer → `LossOutputs`. `options`: the recipe's."""
    with needing("prime_rl", "prime-rl", "run it inside prime-rl's environment"):
        from prime_rl.trainer.rl.loss import LossOutputs  # pyright: ignore[reportMissingImports]
    value, metrics = loss_and_metrics(inputs, objective=objective, **options)
    return LossOutputs(loss=value, metrics=metrics)


def loss_and_metrics(inputs: Any, *, objective: str, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same without prime-rl's class."""
    made, p = _made(objective, tuple(sorted(options.items()))), inputs.trainer_logprobs
    if not inputs.loss_mask.any():
        return p.sum() * 0.0, {}
    weights = torch.ones_like(p) if inputs.loss_weights is None else inputs.loss_weights
    rows = {
        name: value[None]
        for name, value in (("q", inputs.inference_logprobs), ("a", inputs.advantages), ("c", weights))
    }
    out = made(
        flat(p[None], inputs.loss_mask[None], rollout_logprobs=rows["q"], advantages=rows["a"], coefficients=rows["c"])
    )
    return out.loss, {name: torch.tensor(value, device=p.device) for name, value in out.metrics.items()}
