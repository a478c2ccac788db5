"""What `memory.offload` saves on one machine: a colocated run whose memory stays, and the same whose memory moves.

    python -m benchmarks.residency                                                # one rank and one engine on two quiet cores: minutes
    python -m benchmarks.residency --model tiny --steps 2 --prompts 4 --tokens 4  # does it run

Memory is what the two processes hold themselves (files that are mapped and what is shared are left out), looked at every 5 ms. `rollouts`:
the median in the second half of each step's rollouts; `peak`: the most of the sum, from the first step on. Targets: the trainer holds at
least 90 % of its moments and gradients less during rollouts; the peak is within 10 % of the largest phase that the plan foresees, beside
what processes hold without large tensors: a run of the tiny model, of whose peak its own largest phase is taken off; the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from benchmarks.c3po import MODELS
from rollkeel.host import resident
from rollkeel.loop.job import train
from rollkeel.recipe import load
from rollkeel.report.memory import memory

LEVELS = ("none", "optimizer", "all")
FALL, OVER = 0.9, 0.1
VOLATILE = ("time/", "throughput/", "memory/")
Sample = tuple[float, int, int]
"""When, and bytes of trainer and engine."""


class Watch:
    """Samples of the processes of a run."""

    def __init__(self, run: Path) -> None:
        self.samples, self._run, self._end = list[Sample](), run, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def end(self) -> list[Sample]:
        self._end.set()
        self._thread.join()
        return self.samples

    def _look(self) -> None:
        pids: list[int] = []
        while not self._end.wait(0.005):
            if len(pids) < 2:
                pids = [e["pid"] for e in events_of(self._run) if e["event"] == "actor"]
                continue
            trainer, engine = (resident(pid)[0] for pid in pids)
            self.samples.append((time.time(), trainer, engine))


def events_of(run: Path) -> list[dict[str, Any]]:
    file = run / "events.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.is_file() else []
    return [json.loads(line) for line in lines]


def measure(args: argparse.Namespace, level: str, run: Path) -> dict[str, Any]:
    """Megabytes and seconds of a run."""
    config = load(
        None,
        [
            f"run.steps={args.steps}",
            f"run.dir={run}",
            f"model.overrides={json.dumps(MODELS[args.model])}",
            "cluster.trainers=1",
            "cluster.engines=1",
            "cluster.placement=colocated",
            f"memory.offload={level}",
            f"rollout.prompts={args.prompts}",
            f"sampling.max_new_tokens={args.tokens}",
            f"train.micro_batch_tokens={args.micro}",
            f"reward.overlong.buffer={args.tokens}",  # rewards of an untrained model vary
            "train.updates_per_step=1",
            "train.warmup_steps=0",
            f"engine.kv_memory_gb={args.kv}",
            "sft.steps=0",
            "eval.every=0",
            "eval.items=8",
            "checkpoint.every=0",
            "alarms.on_alarm=off",
        ],
    )
    watch = Watch(run)
    train(config)
    samples, events = watch.end(), events_of(run)
    stages = [e for e in events if e["event"] in ("stage", "run_end")]
    first = next(e["time"] for e in stages if e.get("step", 0) >= 1)
    during = list[Sample]()
    for one, after in pairwise(stages):
        if one.get("stage") == "rollout" and one["step"] > 1:  # there are no moments in the first
            middle = (one["time"] + after["time"]) / 2
            during += [s for s in samples if middle <= s[0] < after["time"]]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "trainer": statistics.median(s[1] for s in during) / 1e6,
        "engine": statistics.median(s[2] for s in during) / 1e6,
        "peak": max(s[1] + s[2] for s in samples if s[0] >= first) / 1e6,
        "step": statistics.median(row["time/step_s"] for row in rows[2:] or rows[1:]),
        "waited": statistics.median(sum(v for k, v in row.items() if k.endswith("waited_s")) for row in rows[1:]),
        "rows": [{k: v for k, v in row.items() if not k.startswith(VOLATILE)} for row in rows],
        "table": memory(events, rows),
        "plan": next((e["phases"] for e in events if e["event"] == "residency"), {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=tuple(MODELS), default="wide", help="see benchmarks/c3po.py")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step")
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--micro", type=int, default=1024, help="tokens of a pass")
    parser.add_argument("--kv", type=float, default=0.1, help="GiB of KV")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    tiny = argparse.Namespace(model="tiny", prompts=4, tokens=8, micro=64, kv=0.01, steps=2)
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder:
        small = measure(tiny, "all", Path(folder) / "tiny")
        found = {level: measure(args, level, Path(folder) / level) for level in LEVELS}
    beside = small["peak"] - max(p.planned for p in small["table"].phases)
    for level, seen in found.items():
        told = "  ".join(f"{name} {seen[name]:,.0f} MB" for name in ("trainer", "engine", "peak"))
        print(f"{level:10} rollouts: {told}  step {seen['step']:.2f} s, waited {seen['waited']:.3f} s", flush=True)
    moved, stayed = found["all"], found["none"]
    table = moved["table"]
    print(
        f"{'phase':12}{'planned':>10}{'held':>10}{'peak':>10}  MB, the last two less {beside:,.0f} of the processes themselves"
    )
    for p in table.phases:
        seen = (p.held - beside, p.peak - beside)
        print(f"{p.name:12}{p.planned:10,.0f}{seen[0]:10,.0f}{seen[1]:10,.0f}  moved {p.moved:,.0f}")
    sizes = {name: mb for places in moved["plan"]["update"].values() for name, mb in places.items()}
    leaves = sizes["moments"] + sizes["gradients"]
    for level in LEVELS[1:]:
        less = stayed["trainer"] - found[level]["trainer"]
        share = f"{less / leaves:.0%} of moments and gradients (target {FALL:.0%})"
        print(f"{level}: trainer holds {less:,.0f} MB less in rollouts, {share}")
    largest = max(p.planned for p in table.phases)
    over = [(one["peak"] - beside) / largest - 1 for one in (moved, stayed)]
    print(f"peak over the largest planned phase: {over[0]:+.1%} (target {OVER:.0%}), without moves {over[1]:+.1%}")
    print(f"all components together over it: {sum(sizes.values()) / largest - 1:+.1%}")
    print(f"same bits: {all(one['rows'] == stayed['rows'] for one in found.values())}")


if __name__ == "__main__":
    main()
