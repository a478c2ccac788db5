"""The asynchronous loop against the synchronous one: trained tokens per second on the same cores, each in its own best layout.

    python -m benchmarks.overlap                                # both workloads, tens of minutes on two quiet cores
    python -m benchmarks.overlap --steps 3 --warmup 1 --rounds 1 --median 8 --prompts 4     # does it run

Workloads: `default`, the default recipe (answers of 13 tokens); `tail`, forced lognormal lengths as in `benchmarks/c3po.py` (σ of
the logarithm 1.0, cut at 16 × the median). Layouts are written engine processes x trainer processes, 0 engine processes being
the trainer's own. Every layout of both loops is run once, then the best of each side alternate for `--rounds` more rounds; a
side's number is the median over its best layout's runs. The clock runs from the end of the last warm-up step to the end of
the last measured one, publication, waiting and bookkeeping included. Target: 1.15x.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
from rich.console import Console

from benchmarks.c3po import CUT, MODELS, lengths_of
from rollkeel.config import Config
from rollkeel.loop import steps as loop
from rollkeel.loop.assemble import assemble
from rollkeel.models.loading import load_policy
from rollkeel.recipe import load
from rollkeel.record.live import LiveView
from rollkeel.record.runfolder import RunFolder
from rollkeel.record.stopping import StopFlag
from rollkeel.types import Request

TARGET = 1.15
LAYOUTS = {"sync": ((0, 1), (0, 2), (1, 2), (2, 1), (2, 2)), "async": ((1, 1), (2, 1), (1, 2), (2, 2))}
"""(engine processes, trainer processes)."""


def config_of(args: argparse.Namespace, workload: str, kind: str, layout: tuple[int, int]) -> Config:
    words = [
        f"run.loop={kind}",
        f"run.steps={args.warmup + args.steps + 8}",  # sampling must not run dry before the last measured step
        f"rollout.prompts={args.prompts}",
        f"engine.processes={layout[0]}",
        f"train.processes={layout[1]}",
        f"rollout.overlap.max_staleness={args.staleness}",
        f"engine.kv={args.kv}",
        "eval.every=0",
        "checkpoint.every=0",
        "report.rollouts=false",
    ]
    if workload == "tail":
        words += [
            f"model.overrides={json.dumps(MODELS[args.model] | {'max_position_embeddings': CUT * args.median + 64})}",
            f"sampling.max_new_tokens={CUT * args.median}",
            f"engine.slots={args.slots}",
        ]
    return load(None, words)


def force(engine: Any, median: int) -> None:
    """Make requests of `engine` end after their length in tokens."""
    submit, lengths = engine.submit, lengths_of(median)

    def forced(requests: Sequence[Request], *rest: Any) -> None:
        limited = [
            replace(r, sampling=replace(r.sampling, max_new_tokens=lengths.of(0, r.id), stop_token_ids=()))
            for r in requests
        ]
        submit(limited, *rest)

    engine.submit = forced


def measure(args: argparse.Namespace, workload: str, kind: str, layout: tuple[int, int]) -> dict[str, float]:
    """Trained tokens per second of one run, and what it waited for."""
    config = config_of(args, workload, kind, layout)
    with (
        tempfile.TemporaryDirectory() as path,
        LiveView(console=Console(file=io.StringIO())) as view,
        StopFlag(view) as stop,
    ):
        folder = RunFolder.create(Path(path) / "run", config)
        run = assemble(config, folder, load_policy(config.model, "cpu"), view, stop)
        began = time.perf_counter()
        try:
            if workload == "tail":
                force(run.engine, args.median)
            run.publish()
            for step in range(1, args.warmup + args.steps + 1):
                loop.step_once(run, step)
                if step == args.warmup:
                    began = time.perf_counter()
            seconds = time.perf_counter() - began
        finally:
            run.close()
        rows = folder.metrics()[args.warmup :]
        folder.close()
    return {
        "rate": sum(r["rollout/tokens"] for r in rows) / seconds,
        "waited": sum(r["time/rollout_s"] for r in rows) / seconds,
        "staleness": float(np.mean([r["staleness/mean"] for r in rows])),
        "max": max(r["staleness/max"] for r in rows),
    }


def show(workload: str, kind: str, layout: tuple[int, int], found: dict[str, float]) -> None:
    print(
        f"{workload:>8} {kind:>6} {layout[0]}x{layout[1]}  {found['rate']:9.0f} tokens/s  waits for rollouts"
        f" {found['waited']:5.1%}  staleness mean {found['staleness']:.2f} max {found['max']:.0f}",
        flush=True,
    )


def compare(args: argparse.Namespace, workload: str) -> dict[str, Any]:
    """Scout every layout, then alternate between the best of each side."""
    rates: dict[str, dict[tuple[int, int], list[float]]] = {kind: {} for kind in LAYOUTS}

    def once(kind: str, layout: tuple[int, int]) -> None:
        found = measure(args, workload, kind, layout)
        show(workload, kind, layout, found)
        rates[kind].setdefault(layout, []).append(found["rate"])

    for kind, layouts in LAYOUTS.items():
        for layout in layouts:
            once(kind, layout)
    best = {kind: max(found, key=lambda layout: found[layout][0]) for kind, found in rates.items()}
    for _ in range(args.rounds):
        for kind, layout in best.items():
            once(kind, layout)
    medians = {kind: statistics.median(rates[kind][layout]) for kind, layout in best.items()}
    ratio = medians["async"] / medians["sync"]
    names = {kind: f"{engine}x{trainer}" for kind, (engine, trainer) in best.items()}
    verdict = "" if ratio >= TARGET else "  below target"
    print(
        f"{workload}: async ({names['async']}) {medians['async']:.0f} against sync ({names['sync']}) {medians['sync']:.0f}"
        f" trained tokens/s: {ratio:.2f}x (target {TARGET}x){verdict}",
        flush=True,
    )
    runs = {kind: {f"{e}x{t}": found for (e, t), found in by.items()} for kind, by in rates.items()}
    return {"ratio": ratio, "best": names, "medians": medians, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workload", choices=("default", "tail"), nargs="+", default=["tail", "default"])
    parser.add_argument("--model", choices=tuple(MODELS), default="tiny", help="of `tail`, see benchmarks/c3po.py")
    parser.add_argument("--median", type=int, default=32, help="tokens, of `tail`")
    parser.add_argument("--slots", type=int, default=64, help="sequences decoded together per process, of `tail`")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step")
    parser.add_argument("--staleness", type=int, default=4, help="rollout.overlap.max_staleness; 4 updates are a step")
    parser.add_argument("--kv", choices=("recompute", "keep"), default="recompute")
    parser.add_argument("--steps", type=int, default=24, help="measured steps")
    parser.add_argument("--warmup", type=int, default=6, help="steps before them")
    parser.add_argument("--rounds", type=int, default=4, help="alternating runs of the best layouts after the first")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    found = {workload: compare(args, workload) for workload in args.workload}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
