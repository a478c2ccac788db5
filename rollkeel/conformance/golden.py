"""The right answers: `golden.json`, written by `python -m rollkeel.conformance.golden` and compared with the objectives by a
test."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollkeel.advantages import ESTIMATORS, compute
from rollkeel.conformance import batch as batches
from rollkeel.conformance.readings import KL_SAYS
from rollkeel.conformance.readings import compute as coefficients
from rollkeel.errors import BadInput
from rollkeel.objectives import RECIPES, Objective, build
from rollkeel.objectives.described import summaries
from rollkeel.objectives.kl import ESTIMATORS as KL_ESTIMATORS

FILE = batches.HERE / "golden.json"
LEFT_OUT = ("random_rejection",)
"""Recipes whose answer is a draw."""
VARIANTS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "kpop": ({"mode": "rollout"}, {"mode": "mask_only"}, {"phi": 2.0}),
    "mis": (
        {"level": "sequence", "weight": "sequence", "cap": 3.0},
        {"level": "sequence"},
        {"level": "geometric", "cap": 2.0},
    ),
    "tis": ({"cap": 3.0},),
    "ipo": ({"delta": 0.1, "gap_penalty": 0.001}, {"delta": 0.2, "directional": True, "gap_penalty": 0.001}),
    "opsm": ({"anchor": "old"},),
    "dppo_binary_tv": ({"cap": 3.0}, {"anchor": "old"}),
    "dppo_binary_kl": ({"cap": 3.0},),
    "dppo_topk_tv": ({"other": False},),
}
"""Options beside the defaults whose answers stand in the file."""


def objective(recipe: str, options: Mapping[str, Any]) -> Objective:
    """A recipe by name; `kl:NAME` is the KL term alone, where A = 0. Raises `BadInput` for a name that is neither."""
    kind, _, name = recipe.partition(":")
    if kind == "kl" and name in KL_ESTIMATORS:
        return build("grpo", options, kl_coefficient=1.0, kl_estimator=name)
    if recipe in LEFT_OUT:
        raise BadInput(f"conformance {recipe}: its answer is a draw; name another recipe")
    return build(recipe, options)


def load(name: str, recipe: str, **more: Any) -> batches.Batch:
    """A stored batch as `recipe` is judged on it: without advantages for a KL term."""
    batch = batches.load(name, **more)
    return batch if not recipe.startswith("kl:") else replace(batch, advantages=batch.advantages * 0.0)


def key(recipe: str, options: Mapping[str, Any]) -> str:
    """Name of an entry: the recipe and those of its options that are no denominator."""
    own = {k: v for k, v in options.items() if k not in ("aggregate", "denominator", "length")}
    return recipe + "".join(f" {k}={json.dumps(own[k])}" for k in sorted(own))


@functools.cache
def stored() -> dict[str, Any]:
    """`golden.json`."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def source(recipe: str) -> str:
    """One line on what the right answers come from: the rule and its paper, or where the estimators of credit are."""
    kind, _, name = recipe.partition(":")
    if kind == "advantages":
        return "rollkeel.advantages.compute"
    return KL_SAYS.get(name, recipe) if kind == "kl" else dict(summaries()).get(recipe, recipe)


def entries() -> dict[str, Any]:
    """What the file has to say: for each recipe and batch the coefficient of every token, A included."""
    named = [
        (recipe, options) for recipe in RECIPES if recipe not in LEFT_OUT for options in ({}, *VARIANTS.get(recipe, ()))
    ]
    named += [(f"kl:{name}", {}) for name in KL_ESTIMATORS]
    recipes = {}
    for recipe, options in named:
        made = {
            name: coefficients(objective(recipe, options), load(name, recipe)).coefficient for name in batches.stored()
        }
        recipes[key(recipe, options)] = {
            "source": source(recipe),
            **{name: _short(values.tolist()) for name, values in made.items()},
        }
    credit = {
        name: {
            batch: _short(compute(name, loaded.rewards, loaded.groups, loaded.lengths).tolist())
            for batch, loaded in ((b, batches.load(b)) for b in batches.stored())
        }
        for name in ESTIMATORS
    }
    return {"recipes": recipes, "advantages": credit}


def _short(values: list[float]) -> list[float]:
    return [float(f"{x:.9g}") + 0.0 for x in values]


def text() -> str:
    """`golden.json`, one line a recipe and batch."""
    lines = json.dumps(entries(), separators=(", ", ": "), ensure_ascii=False)
    return (
        lines.replace('}, "', '},\n"').replace(', "branches"', ',\n "branches"').replace(', "answers"', ',\n "answers"')
        + "\n"
    )


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
