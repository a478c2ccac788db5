"""What `run.parity` costs: a step's rollouts and update with it and without, in the same minutes.

    python -m benchmarks.parity [--steps 12] [RECIPE[:bf16] …] [--set KEY=VALUE …]

Runs take turns, so that both meet the same load; medians of `time/rollout_s` and `time/update_s` over all steps but the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from rollkeel.loop.job import train
from rollkeel.recipe import load

STAGES = ("time/rollout_s", "time/update_s")
BF16 = ["model.dtype=bfloat16", "engine.dtype=bf16"]


def rows(recipe: str, more: list[str], steps: int) -> list[dict[str, float]]:
    """The metrics rows of a run, without its first step."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        quiet = [f"run.dir={run}", f"run.steps={steps}", "run.device=cpu", "eval.every=0", "checkpoint.every=0"]
        train(load(recipe, [*more, *quiet]))
        found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return [row for row in found if row["step"] > 1]


def main() -> None:
    """Print a row of a table for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--set", nargs="*", default=[], help="overrides of every run")
    parser.add_argument("recipes", nargs="*", default=["default", "dense", "default:bf16", "dense:bf16"])
    asked = parser.parse_args()
    lines = ["| recipe | stage | without | with parity | times | largest ratio_std |", "|---|---|---|---|---|---|"]
    for name in asked.recipes:
        recipe, _, low = name.partition(":")
        own = BF16 if low else []
        found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for parity in (False, True, True, False):
            found[parity] += rows(recipe, [*own, *asked.set, f"run.parity={str(parity).lower()}"], asked.steps)
        worst = max(row["mismatch/ratio_std"] for row in found[True])
        for stage in STAGES:
            plain, exact = (statistics.median(row[stage] for row in found[parity]) for parity in (False, True))
            ratio = exact / plain
            lines.append(f"| {name} | {stage} | {plain:.3f} s | {exact:.3f} s | {ratio:.2f} | {worst:.3g} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
