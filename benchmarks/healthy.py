"""Do the checks stay silent on healthy runs? Shipped recipes, numeric modes, loops and seeds, each for some tens of steps.

    nice python -m benchmarks.healthy                    # 30 runs: the better part of an hour on one busy core
    python -m benchmarks.healthy --only fp8,async --seeds 1 --steps 2

Prints a line per run with the checks and alarms it raised. Exit code 1 if any check was raised.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

from rollkeel.errors import RollkeelError
from rollkeel.loop.job import train
from rollkeel.recipe import load

RUNS: dict[str, tuple[str, ...]] = {
    "default": ("default",),
    "fp8": ("fp8",),
    "bf16": ("default", "engine.dtype=bf16"),
    "fp8_weights": ("default", "engine.dtype=fp8_weights"),
    "int8": ("default", "engine.dtype=int8"),
    "int4": ("default", "engine.dtype=int4"),
    "shuffled": ("shuffled",),
    "async": ("async",),
    "dense": ("dense",),
    "bfloat16": ("default", "model.dtype=bfloat16", "train.lr=1e-3"),
    "short warm start": ("default", "sft.steps=60"),
    "several updates": ("default", "train.updates_per_step=4", "experiment.lag=2"),
    "sharp": ("default", "train.lr=3e-3", "sampling.temperature=0.6"),
    "addition": ("addition",),
    "c3po": ("c3po",),
    "dapo": ("dapo",),
    "game24": ("game24", "sft.steps=200"),
    "sudoku": ("sudoku_turns", "sft.steps=100"),
}


def raised(words: tuple[str, ...], folder: Path, seed: int, steps: int) -> tuple[list[str], str]:
    """Checks and alarms of a run as `name@step`, and how it ended."""
    extra = [f"run.seed={seed}", f"run.steps={steps}", f"run.dir={folder}", "eval.every=0", "eval.items=4"]
    config = load(words[0], [*words[1:], *extra])
    end = "done"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            train(config)
        except RollkeelError as error:
            end = str(error)
    log = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    found = [f"{e.get('check', e.get('alarm'))}@{e['step']}" for e in log if e["event"] in ("check", "alarm")]
    rewards = [row["reward/mean"] for row in map(json.loads, (folder / "metrics.jsonl").open()) if "reward/mean" in row]
    return found, f"{end}; reward {rewards[0]:.2f} → {rewards[-1]:.2f}" if rewards else end


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(RUNS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="seed to begin with")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    wrong = 0
    for name in options.only.split(","):
        for seed in range(options.first, options.first + options.seeds):
            with tempfile.TemporaryDirectory() as scratch:
                found, end = raised(RUNS[name], Path(scratch) / "run", seed, options.steps)
            wrong += any(not f.startswith(("gap@", "entropy@", "reward@")) for f in found)
            print(f"{name:18} seed {seed}: {', '.join(found) or 'silent'}; {end}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
