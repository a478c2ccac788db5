"""Settings that experiments share, word for word, so that they share runs."""

from __future__ import annotations

from typing import Any

from rollkeel.lab.preset import Arm

ASYNC_FP8 = ("engine.dtype=fp8", "experiment.lag=16", "run.steps=100")
"""A sampler in fp8 that serves weights 16 steps old: where objectives separate."""
STALE = ("experiment.lag=8", "run.steps=200")
"""No rounding at all: an fp32 sampler that serves weights 8 steps old."""
SYNC_FP8 = ("engine.dtype=fp8", "run.steps=200")
"""A sampler in fp8 with the weights of now, four updates per batch: where the gap alone would have to grow."""
SAME_STALENESS = (
    "The gap here comes from weights 8 steps old under an fp32 sampler, and not from bf16 or from an engine's kernels."
)


def arm(name: str, objective: str, *words: str, **options: Any) -> Arm:
    """An arm that trains with `objective` and these options of it."""
    chosen = (f"objective.name={objective}", *(f"objective.{key}={value}" for key, value in options.items()))
    return Arm(name=name, words=(*chosen, *words))
