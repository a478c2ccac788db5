"""Runs with nothing wrong in them, of every kind that the doctor must not call a bug."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_BUDGET = ["run.loop=budgeted", "run.steps=36", "rollout.budget.tokens=700", "rollout.budget.capacity=128"]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One sort of healthy run."""

    words: Sequence[str] = ()
    """Overrides of the config."""
    models: tuple[str, ...] = ("moe", "dense")
    killed_at: int = 0
    """Step in which the run dies; it is resumed from its last checkpoint."""


KINDS: dict[str, Kind] = {
    "fp32": Kind(),
    "fast": Kind(words=["engine.forward=fast", "objective.name=grpo"]),
    "bf16": Kind(words=["engine.dtype=bf16"]),
    "fp8": Kind(words=["engine.dtype=fp8"]),
    "fp8_weights": Kind(words=["engine.dtype=fp8_weights", "objective.name=grpo"]),
    "int8": Kind(words=["engine.dtype=int8"]),
    "stale": Kind(words=["rollout.lag=1", "objective.name=grpo"]),
    "async": Kind(words=["run.loop=async", "engine.processes=1", "rollout.overlap.max_staleness=4"]),
    "budgeted": Kind(words=_BUDGET),
    "kept_kv": Kind(words=[*_BUDGET, "engine.kv=keep"]),
    "r3": Kind(words=["engine.dtype=bf16", "rollout.replay_routing=true"], models=("moe", "moe2")),
    "resumed": Kind(words=["checkpoint.every=5"], killed_at=13),
    "top_p": Kind(words=["sampling.top_p=0.9"]),
    "top_k": Kind(words=["sampling.top_k=4", "sampling.min_p=0.02"]),
    "cool": Kind(words=["sampling.temperature=0.7"]),
    "hot": Kind(words=["sampling.temperature=1.2", "engine.dtype=bf16"]),
}
