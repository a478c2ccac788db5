"""Every experiment of `rollkeel lab` at full size, and the tables of `docs/lab.md` from what came out.

    python -m benchmarks.lab --out FOLDER                    # all of them: some hours on two cores; goes on where it stopped
    python -m benchmarks.lab --out FOLDER --only anchor relax
    python -m benchmarks.lab --out FOLDER --table            # run nothing: print what FOLDER holds

Presets share runs, so "core minutes" of one, the time its runs took, add up to more than was spent. Exit code 1 if a band is
missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rollkeel.lab.command import default_store, run_preset
from rollkeel.lab.preset import Preset
from rollkeel.lab.presets import PRESETS, find
from rollkeel.lab.runs import plan

COST = "core_minutes"


def core_minutes(preset: Preset, seeds: range, store: Path) -> float | None:
    """What the steps of its training runs took; None for measurements, whose rows do not tell."""
    rows = [row for run in plan(preset, seeds, store) for row in run.rows]
    seconds = sum(row["time/step_s"] for row in rows if "time/step_s" in row)
    return seconds / 60 if seconds else None


def section(found: dict[str, Any]) -> Iterator[str]:
    """One experiment in Markdown: verdict, size, one row per claim."""
    runs = f"{len(found['seeds'])} seeds"
    cost = found.get(COST)
    yield f"### `{found['preset']}`\n"
    yield f"{found['verdict']} ({runs}{f', {cost:.0f} core minutes' if cost else ''}.)\n"
    yield "| claim | source | measured | verdict |\n|---|---|---|---|"
    for f in found["findings"]:
        band = {True: "; band met", False: "; **band missed**", None: ""}[f["met"]]
        yield f"| {f['claim']} | {f['source']} | {f['numbers']} | {f['verdict']}{band} |"
    yield ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.lab", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder per experiment is made in it")
    parser.add_argument("--only", nargs="*", default=list(PRESETS), help="names of experiments")
    parser.add_argument("--seeds", type=int, default=5, help="at least; an experiment that asks for more gets more")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at once")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is there")
    args = parser.parse_args()
    chosen = [find(name) for name in args.only]
    met = True
    for preset in [] if args.table else chosen:
        seeds, out, began = max(args.seeds, preset.seeds), args.out / preset.name, time.perf_counter()
        result = run_preset(preset, out=out, seeds=seeds, jobs=args.jobs, say=lambda line: print(line, flush=True))
        file = out / "lab.json"
        cost = core_minutes(preset, range(preset.first_seed, preset.first_seed + seeds), default_store())
        file.write_text(json.dumps({**json.loads(file.read_text()), COST: cost}, indent=1) + "\n")
        print(f"{preset.name}: {result.sentence} ({time.perf_counter() - began:.0f} s)", flush=True)
        met &= result.met
    for preset in chosen:
        if (file := args.out / preset.name / "lab.json").is_file():
            print("\n".join(section(json.loads(file.read_text()))))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
