"""slime: `--loss-type custom_loss --custom-loss-function-path rollkeel.integrations.slime.kpop`. Tested with the sources of
0.3.0.

A recipe's name with its defaults is a function here; from a module of your own, `loss = custom_loss({"name": "kpop", "phi":
0.05})` makes others. slime's mean over rollouts (or over tokens, `--calculate-per-token-loss`) stays the denominator.
Collect the sampler's log-probs (`--use-rollout-logprobs`, or any correction), and recompute the old ones
(`--get-mismatch-metrics`) for recipes that need o.

A trace while it trains: `--rollout-data-postprocess-path mine.trace`, where `mine.py` says `trace =
rollkeel.integrations.slime.tracer("mytrace")`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rollkeel.errors import BadInput
from rollkeel.integrations.padded import alone, coefficients_of, flat, needing, padded
from rollkeel.integrations.traces import folder_of, needed
from rollkeel.objectives import RECIPES, Objective
from rollkeel_doctor.traces.own import save_batch

Scores = Callable[[torch.Tensor, Any, Mapping[str, Any]], Sequence[torch.Tensor]]
"""Logits, arguments and batch → the log-probs of each answer."""


def custom_loss(objective: str | Mapping[str, Any] | Objective, scores: Scores | None = None) -> Callable[..., Any]:
    """A function of slime's (args, batch, logits, sum_of_sample_mean). `scores`: None for slime's own, from its Megatron
    backend."""
    made = alone(objective, "slime")

    def loss(
        args: Any,
        batch: Mapping[str, Any],
        logits: torch.Tensor,
        sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        p = (scores or _megatrons)(logits, args, batch)
        if not batch.get("rollout_log_probs"):
            raise BadInput(
                "rollkeel.integrations.slime: expected rollout_log_probs in the batch, got none; see its docstring"
            )
        old = batch.get("log_probs") or [x.detach() for x in p]
        share = coefficients_of(sum_of_sample_mean, torch.cat([x.detach() for x in p]))
        out = made(
            flat(
                padded(p),
                padded(batch["loss_masks"]),
                rollout_logprobs=padded(batch["rollout_log_probs"]),
                advantages=padded(batch["advantages"]),
                coefficients=padded(share.split([len(x) for x in p])),
                old_logprobs=padded(old),
            )
        )
        metrics = {
            name.replace("/", "_"): torch.tensor(value, device=out.loss.device) for name, value in out.metrics.items()
        }
        return out.loss, {"loss": out.loss.detach(), **metrics}

    return loss


def tracer(folder: str | Path) -> Callable[..., None]:
    """A function of slime's (args, rollout_id, rollout_data) that writes a rank's sequences into the trace `folder`.

    Ranks without log-probs (other stages of a pipeline, other parts of a tensor) write nothing. Raises `BadInput` without the
    log-probs of both sides, and with context parallelism.
    """

    def trace(args: Any, rollout_id: int, rollout_data: Mapping[str, Any]) -> None:
        if not _writes():
            return
        if getattr(args, "context_parallel_size", 1) > 1:
            raise BadInput("rollkeel.integrations.slime: a trace needs whole sequences; set context_parallel_size to 1")
        todo = "collect the sampler's (--use-rollout-logprobs) and recompute (--get-mismatch-metrics)"
        q, o = (needed(rollout_data, name, "slime", todo) for name in ("rollout_log_probs", "log_probs"))
        tokens = rollout_data["tokens"]
        lengths = rollout_data["response_lengths"]
        rewards = rollout_data.get("local_raw_reward")  # `raw_reward` is of all ranks
        cut = rollout_data.get("truncated")
        prompts = [row[: len(row) - n] for row, n in zip(tokens, lengths, strict=True)]
        save_batch(
            folder_of(folder),
            rollout_id + 1,
            token_ids=padded([row[len(row) - n :] for row, n in zip(tokens, lengths, strict=True)]),
            mask=padded(rollout_data["loss_masks"]),
            rollout_logprobs=padded(q),
            train_logprobs=padded(o),
            advantages=padded(rollout_data["advantages"]),
            rewards=rewards,
            groups=[tuple(row.tolist()) for row in prompts],
            status=None if cut is None else ["length" if each else "finished" for each in cut],
            prompt_ids=prompts,
            sampling={"temperature": args.rollout_temperature},
            engine="sglang",
        )

    return trace


def _writes() -> bool:
    try:
        from megatron.core import mpu  # pyright: ignore[reportMissingImports]
    except ImportError:
        return True
    return mpu.get_tensor_model_parallel_rank() == 0 and mpu.is_pipeline_last_stage()


def _megatrons(logits: torch.Tensor, args: Any, batch: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    with needing("slime", "slime", "run it inside slime's environment"):
        from slime.backends.megatron_utils.loss import (  # pyright: ignore[reportMissingImports]
            get_log_probs_and_entropy,
            get_rollout_top_p_logprob_kwargs,
        )
    about = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    more = get_rollout_top_p_logprob_kwargs(args, batch)
    return get_log_probs_and_entropy(logits, args=args, with_entropy=False, **about, **more)[1]["log_probs"]


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in RECIPES:
        raise AttributeError(name)
    return custom_loss(name)
