"""SkyRL: recipes as policy losses, `trainer.algorithm.policy_loss_type=rollkeel_kpop`. Tested with the sources of commit
a956457.

    from rollkeel.integrations.skyrl import register
    register("kpop", {"name": "kpop", "phi": 0.1})

Call it where your entry point registers other losses. SkyRL folds its `loss_reduction` into the advantages: it stays the
denominator.

A trace while it trains: `trainer.add_callback(rollkeel.integrations.skyrl.trace("mytrace"))`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rollkeel.errors import BadInput
from rollkeel.integrations.padded import alone, flat, needing, padded
from rollkeel.integrations.traces import needed
from rollkeel.objectives import Objective
from rollkeel_doctor.traces.own import save_batch


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


def trace(folder: str | Path) -> Any:
    """A callback that writes every step's batch into the trace `folder`. Raises `BadInput` without SkyRL."""
    with needing("skyrl", "SkyRL", "install skyrl beside rollkeel"):
        from skyrl.train.utils.callbacks import TrainingCallback  # pyright: ignore[reportMissingImports]

    class Trace(TrainingCallback):
        def on_step_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
            temperature = trainer.cfg.generator.sampling_params.temperature
            save_trace(folder, callback_input.global_step, callback_input.batch, temperature=temperature)

    return Trace()


def save_trace(folder: str | Path, step: int, batch: Any, *, temperature: float) -> None:
    """A `TrainingInputBatch`. SkyRL has dropped the rewards by then; groups are its prompts' boundaries."""
    ids, own, about = batch["sequences"], batch["response_mask"].bool(), batch.metadata
    rows, width = own.shape
    rows -= about.get("pad_size") or 0
    seen = batch["attention_mask"].bool().clone()
    seen[:, ids.shape[1] - width :] &= ~own
    starts = {first for first, _ in about.get("policy_prompt_boundaries") or ()}
    groups, group = [], -1
    for row in range(rows):
        group += row in starts or not starts
        groups.append(group)
    columns: dict[str, Any] = {
        "token_ids": ids[:, -width:],
        "mask": batch["loss_mask"],
        "rollout_logprobs": needed(batch, "rollout_logprobs", "SkyRL", "set generator.sampling_params.logprobs=1"),
        "train_logprobs": batch["action_log_probs"],
        "advantages": batch["advantages"],
    }
    for name, values in columns.items():
        columns[name] = padded([row[kept] for row, kept in zip(values[:rows], own, strict=False)])
    save_batch(
        folder,
        step,
        **columns,
        groups=groups,
        prompt_ids=[row[kept] for row, kept in zip(ids[:rows], seen, strict=False)],
        sampling={"temperature": temperature},
        engine="vllm",
    )


def register(name: str, objective: str | Mapping[str, Any] | Objective | None = None) -> None:
    """Make an objective available as `policy_loss_type=rollkeel_NAME`. Raises `BadInput` without SkyRL."""
    with needing("skyrl", "SkyRL", "install skyrl beside rollkeel"):
        from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry  # pyright: ignore[reportMissingImports]
    PolicyLossRegistry.register(f"rollkeel_{name}", policy_loss(objective or name))
