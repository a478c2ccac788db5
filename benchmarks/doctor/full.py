"""Whole runs of the kinds people make: each shipped recipe at its full length, every engine dtype, and those that came to nothing.

Short runs show what is wrong from the first step. What selection does to a policy that sharpens takes a hundred steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.doctor import patches as broken
from benchmarks.doctor.silent import SILENT
from benchmarks.doctor.workloads import Patch

_DRY = ("reward_lost", "no_reward_signal", "learning_rate", "entropy_collapse", "policy_lag")


@dataclass(frozen=True, kw_only=True)
class Full:
    """One sort of run."""

    recipe: str = "default"
    words: Sequence[str] = ()
    """Overrides of the recipe."""
    wanted: tuple[str, ...] = ()
    """Causes that are right as the first; none: the run is healthy."""
    patches: Callable[[int], Sequence[Patch]] = lambda seed: ()
    """What is broken in the run of a seed."""


FULL: dict[str, Full] = {
    "fp8": Full(recipe="fp8"),
    "default": Full(),
    "bf16": Full(words=["engine.dtype=bf16"]),
    "fp8_weights": Full(words=["engine.dtype=fp8_weights"]),
    "int4": Full(words=["engine.dtype=int4"]),
    "int8": Full(words=["engine.dtype=int8"]),
    "shuffled": Full(recipe="shuffled", wanted=("wrong_advantages", *_DRY)),
    "dense": Full(recipe="dense"),
    "dapo": Full(recipe="dapo"),
    "c3po": Full(recipe="c3po"),
    "async": Full(recipe="async"),
    "unwarmed": Full(words=["sft.steps=20", "run.steps=60"], wanted=("no_reward_signal",)),
    "dense_fp8": Full(recipe="dense", words=["engine.dtype=fp8"]),
    "grpo_bf16": Full(words=["engine.dtype=bf16", "objective.name=grpo"]),
    "sudoku_turns": Full(recipe="sudoku_turns"),
    "addition": Full(recipe="addition"),
    "stale": Full(words=["objective.name=grpo", "rollout.lag=2"]),
    "far_stale": Full(words=["objective.name=grpo", "rollout.lag=8", "train.lr=1e-3"], wanted=_DRY),
    "c3po_fp8": Full(recipe="c3po", words=["engine.dtype=fp8"]),
    "async_bf16": Full(recipe="async", words=["engine.dtype=bf16"]),
    "dapo_fp8": Full(recipe="dapo", words=["engine.dtype=fp8"]),
    "replayed": Full(words=["engine.dtype=fp8", "rollout.replay_routing=true"]),
    "top_p": Full(words=["sampling.top_p=0.9", "engine.dtype=bf16"]),
    "hot_fp8": Full(words=["sampling.temperature=1.2", "engine.dtype=fp8"]),
    "turns_int8": Full(recipe="sudoku_turns", words=["engine.dtype=int8"]),
    "fast": Full(words=["train.lr=3e-3"], wanted=_DRY),
    "late_bf16": Full(
        words=["engine.dtype=bf16"],
        wanted=("stale_version",),
        patches=lambda seed: [lambda: broken.updates_dropped(lambda n: n < 90)],
    ),
    "late_fp8": Full(
        recipe="fp8",
        wanted=("stale_version",),
        patches=lambda seed: [lambda: broken.updates_dropped(lambda n: n < 90 or n % 3 == 0)],
    ),
}


def silent(name: str, words: Sequence[str]) -> Full:
    """A fault of `SILENT` in a run of `words`."""
    wanted, more, patch = SILENT[name]
    patches = (lambda seed: ()) if patch is None else (lambda seed: [lambda: patch(seed)])
    return Full(words=(*words, *more), wanted=wanted, patches=patches)


FULL |= {f"silent {name}": silent(name, ["run.steps=24"]) for name in SILENT}
QUICK = (
    "checkpoint.every=25",
    "eval.every=0",
    "eval.items=1",
    "eval.samples=1",
    "eval.greedy=false",
    "report.samples=0",
)
"""Evaluation changes nothing of what is trained."""
