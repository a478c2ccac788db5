"""verl: every recipe as a registered policy loss, `actor.policy_loss.loss_mode=rollkeel_kpop`. Tested with the sources of
0.10.0.dev.

Name this module as `actor_rollout_ref.model.external_lib` and it registers `rollkeel_NAME` for each recipe with its
defaults; from a module of your own, `register("mine", {"name": "kpop", "phi": 0.05})` registers others. verl's
`loss_agg_mode` stays the denominator.

verl hands no log-probs of the sampler to a loss. They come from its weights o/q where
`algorithm.rollout_correction={rollout_is: token, rollout_is_threshold: 1e9}` computes them untruncated; in its bypass mode
`old_log_prob` is the sampler's itself.

`trace(trainer, "mytrace")` has a `RayPPOTrainer` write a trace while it trains, with
`actor_rollout_ref.rollout.calculate_log_probs=True`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rollkeel.errors import BadInput
from rollkeel.integrations.padded import alone, coefficients_of, flat, needing
from rollkeel.integrations.traces import before, needed
from rollkeel.objectives import RECIPES, Objective
from rollkeel_doctor.traces.own import save_batch


def policy_loss(
    objective: str | Mapping[str, Any] | Objective, agg_loss: Callable[..., torch.Tensor]
) -> Callable[..., Any]:
    """A loss with the signature of verl's registry; `agg_loss`: of `verl.trainer.ppo.core_algos`."""
    made = alone(objective, "verl")

    def loss(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        counts = {} if config is None else config.global_batch_info
        share = coefficients_of(lambda x: agg_loss(x, response_mask, loss_agg_mode, **counts), log_prob.detach())
        sampled = old_log_prob if rollout_is_weights is None else old_log_prob - rollout_is_weights.log()
        out = made(
            flat(
                log_prob,
                response_mask,
                rollout_logprobs=sampled,
                advantages=advantages,
                coefficients=share,
                old_logprobs=old_log_prob,
            )
        )
        return out.loss, {f"actor/rollkeel/{name}": value for name, value in out.metrics.items()}

    return loss


def trace(trainer: Any, folder: str | Path) -> None:
    """Have a `RayPPOTrainer` write every batch into the trace `folder`, before its actor learns from it."""

    def save(batch: Any) -> None:
        rollout = trainer.config.actor_rollout_ref.rollout
        save_trace(folder, trainer.global_steps, batch, temperature=rollout.temperature, engine=rollout.name)

    before(trainer, "_update_actor", save)


def save_trace(folder: str | Path, step: int, batch: Any, *, temperature: float, engine: str = "") -> None:
    """A `DataProto` behind `compute_advantage`. In bypass mode its old log-probs are the sampler's, and show no gap."""
    t, width = batch.batch, batch.batch["responses"].shape[1]
    seen = t["attention_mask"][:, :-width].bool()
    save_batch(
        folder,
        step,
        token_ids=t["responses"],
        mask=t["response_mask"],
        rollout_logprobs=needed(
            t, "rollout_log_probs", "verl", "set actor_rollout_ref.rollout.calculate_log_probs=True"
        ),
        train_logprobs=t["old_log_probs"],
        advantages=t["advantages"],
        rewards=t["token_level_scores"].sum(-1),
        groups=list(batch.non_tensor_batch["uid"]),
        prompt_ids=[row[kept] for row, kept in zip(t["prompts"], seen, strict=True)],
        sampling={"temperature": temperature},
        engine=engine,
    )


def register(name: str, objective: str | Mapping[str, Any] | Objective | None = None) -> None:
    """Make an objective available as `loss_mode=rollkeel_NAME`. Raises `BadInput` without verl."""
    with needing("verl", "verl", "install verl beside rollkeel"):
        from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss  # pyright: ignore[reportMissingImports]
    register_policy_loss(f"rollkeel_{name}")(policy_loss(objective or name, agg_loss))


def register_all() -> None:
    """Every recipe that needs no more than verl hands over."""
    for name in RECIPES:
        with contextlib.suppress(BadInput):
            register(name)


register_all()
