"""SkyRL: recipes as policy losses, `trainer.algorithm.policy_loss_type=rollkeel_kpop`. Tested with the sources of commit
a956457.

    from rollkeel.integrations.skyrl import register
    register("kpop", {"name": "kpop", "phi": 0.1})

Call it where your entry point registers other losses. SkyRL folds its `loss_reduction` into the advantages: it stays the
denominator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rollkeel.errors import BadInput
from rollkeel.integrations.padded import alone, flat, needing
from rollkeel.objectives import Objective


def policy_loss(objective: str | Mapping[str, Any] | Objective) -> Callable[..., Any]:
    """A loss with the signature of SkyRL's registry. Only for objectives that are linear in A: those without a gap penalty."""
    made = alone(objective, "SkyRL")
    if made.gap_penalty or made.positive_nll:
        raise BadInput(f"SkyRL: {made.name} has a term without A, and SkyRL's denominator lies in A; set it to 0")

    def loss(
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        config: Any,
        loss_mask: torch.Tensor | None = None,
        rollout_logprobs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        sampled = old_log_probs if rollout_logprobs is None else rollout_logprobs
        out = made(
            flat(
                log_probs,
                torch.ones_like(log_probs) if loss_mask is None else loss_mask,
                rollout_logprobs=sampled,
                advantages=advantages,
                coefficients=torch.ones_like(advantages),
                old_logprobs=old_log_probs,
            )
        )
        return out.loss, dict(out.metrics)

    return loss


def register(name: str, objective: str | Mapping[str, Any] | Objective | None = None) -> None:
    """Make an objective available as `policy_loss_type=rollkeel_NAME`. Raises `BadInput` without SkyRL."""
    with needing("skyrl", "SkyRL", "install skyrl beside rollkeel"):
        from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry  # pyright: ignore[reportMissingImports]
    PolicyLossRegistry.register(f"rollkeel_{name}", policy_loss(objective or name))
