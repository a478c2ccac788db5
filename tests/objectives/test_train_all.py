"""A recipe that is exact on random tokens and crashes in a run is of no use: each of them trains the default task for 30 steps.

Tiny settings, an fp8 sampler so that train and rollout policies really differ, two updates per step so that r ≠ 1. Every
metric the recipe promises must be in metrics.jsonl. Not covered: whether it learns (tests/test_learning.py).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TINY, rows

from rollkeel.loop.job import train
from rollkeel.objectives import RECIPES, Objective, build
from rollkeel.recipe import load

STEPS = 30
QUICK = [
    *TINY,
    f"run.steps={STEPS}",
    "engine.dtype=fp8",
    "eval.every=0",
    "checkpoint.every=0",
    "report.samples=0",
    "report.rollouts=false",
]
IN_THE_NORMAL_RUN = ("kpop", "dppo_topk_kl", "ac_mis_po")
"""One of each kind: decoupled with a weight, top-K log-probs, a controller with state."""
ALWAYS = {
    "loss/total",
    "loss/policy",
    "objective/kept",
    "objective/clamped_log_ratios",
    "bias/j",
    "bias/delta_j",
    "bias/delta_j_ratio",
    "mask/bad_updates",
    "mismatch/source",
    "mismatch/ratio_std",
    "mismatch/kl_k3",
    "mismatch/ess",
    "policy/prob_mean",
    "policy/entropy",
    "staleness/max",
    "routing/flip_rate",
    "optimizer/grad_norm",
}


def promised(objective: Objective) -> set[str]:
    """Metrics that some row must have; what is a mean over dropped tokens needs a dropped token and is not among them."""
    names = set(ALWAYS)
    for mask in objective.masks:
        names |= {f"mask/{mask.name}/{key}" for key in ("kept", "dropped", "dropped_gradient_mass", *mask.parameters)}
    if objective.weight:
        names |= {"weight/mean", "weight/max"}
    if objective.surrogate.name in ("ppo_clip", "sequence_ppo_clip", "geometric_ppo_clip", "weighted_logprob"):
        names |= {"clip/high", "clip/low"}
    if objective.gap_penalty:
        names.add("loss/gap_penalty")
    return names


def run(path: Path, name: str, *words: str) -> tuple[Objective, list[dict[str, Any]]]:
    config = load(None, [*QUICK, f"objective.name={name}", *words, f"run.dir={path}"])
    train(config)
    return build(name, config.objective.options), rows(path)[1:]


def check(name: str, tmp_path: Path) -> None:
    objective, found = run(
        tmp_path / "run", name, *(["objective.acceptance=0.5"] if name == "random_rejection" else [])
    )
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    seen = set().union(*found)
    assert promised(objective) - seen == set()
    assert all(math.isfinite(v) for row in found for v in row.values() if isinstance(v, float))
    assert sum(row.get("optimizer/grad_norm", 0.0) > 0 for row in found) >= STEPS / 2
    for mask in objective.masks:
        for row in found:
            if f"mask/{mask.name}/kept" in row:
                assert row[f"mask/{mask.name}/kept"] + row[f"mask/{mask.name}/dropped"] == pytest.approx(1.0)
    if name == "ac_mis_po":
        bounds = [row["controller/bound"] for row in found if "controller/bound" in row]
        assert len(bounds) == STEPS
        assert all(math.log(1.0002) <= bound <= math.log(1.01) for bound in bounds)


@pytest.mark.usually("dppo_topk_kl")
@pytest.mark.parametrize("name", IN_THE_NORMAL_RUN)
def test_recipe_trains(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, recipe in RECIPES.items() if recipe.__module__.startswith("rollkeel.")])
def test_every_recipe_trains(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["kpop", "objective.phi={drop_rate: 0.02}"],
        ["gspo", "objective.perturb=[{distort_low_probability: {delta: 2}}, {weight_noise: {sigma: 0.2}}]"],
        ["dppo_binary_tv", "objective.anchor=old"],
        ["icepop", "objective.denominator=kept"],
        ["composed", "objective.masks=[{ratio_band: {low: 0.5, high: 5}}]", "objective.weight=mismatch"],
    ],
    ids=lambda words: words[0],
)
def test_options_train_too(words: list[str], tmp_path: Path) -> None:
    _, found = run(tmp_path / "run", *words)
    assert len(found) == STEPS
    if words[0] == "kpop":
        assert {"controller/kpop/bound", "controller/kpop/acceptance", "controller/kpop/target"} <= set(found[-1])
