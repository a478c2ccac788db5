"""What a cluster costs on one machine: the same run with worker processes and over Ray, step by step.

    python -m benchmarks.cluster                                        # two ranks and an engine on two quiet cores: minutes
    python -m benchmarks.cluster --peer-python .venv-bench/bin/python   # and TRL's way from one process to two
    python -m benchmarks.cluster --model tiny --steps 1 --warmup 1      # does it run

`overhead`: step of one rank and one engine actor over that of one process with one engine worker, which computes the same bits; both
have two copies of the weights, and publish them once a step. `bytes`: what passes the controller per trained token, to the ranks
and back, to the engine and back, as pickled; Ray's own envelopes are not counted. `start`: from the call to the end of the first step, Ray included. `scaling`: update of one rank
over that of two replicas, and beside it the same of TRL with whichever of its experts are faster, both on the 64 answers of 128 tokens of `benchmarks.peer`. `reduce=tree`: update
of two replicas that add gradients along a tree over that of two that do not. Medians over the measured steps. Targets: overhead under 5 %, 64
bytes, 20 s.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from rich.console import Console

from benchmarks.c3po import MODELS
from benchmarks.peer import workload as w
from benchmarks.peer.compare import STAGES, run_once, variants
from benchmarks.peer.model import build
from rollkeel.config import Config
from rollkeel.loop import steps as loop
from rollkeel.loop.assemble import assemble, policy_of
from rollkeel.loop.check import validate
from rollkeel.loop.machines import Machines
from rollkeel.loop.one_process import OneProcess
from rollkeel.recipe import load
from rollkeel.record.live import LiveView
from rollkeel.record.runfolder import RunFolder
from rollkeel.record.stopping import StopFlag

SIDES: dict[str, list[str]] = {
    "one process, one engine worker": ["engine.processes=1"],
    "one rank, one engine actor": ["cluster.trainers=1", "cluster.engines=1"],
    "two replicas, one engine actor": ["train.mesh.replicate=2", "cluster.engines=1"],
    "the same, train.reduce=tree": ["train.mesh.replicate=2", "train.reduce=tree", "cluster.engines=1"],
}
OVERHEAD, BYTES, START_S = 0.05, 64, 20.0


def config_of(args: argparse.Namespace, words: list[str]) -> Config:
    return load(
        None,
        [
            f"run.steps={args.warmup + args.steps}",
            f"model.overrides={json.dumps(MODELS[args.model])}",
            f"rollout.prompts={args.prompts}",
            f"sampling.max_new_tokens={args.tokens}",
            "sft.steps=0",
            "eval={every: 0, items: 1, samples: 1, greedy: false}",
            "checkpoint.every=0",
            "report.rollouts=false",
            "alarms.on_alarm=off",
            *words,
        ],
    )


class Counted:
    """Bytes of messages between the controller and engines, as they are pickled."""

    def __init__(self, engine: Any) -> None:
        self.bytes = 0
        for part in engine.parts:
            part.send, part.receive = self._counting(part.send, False), self._counting(part.receive, True)

    def _counting(self, call: Any, back: bool) -> Any:
        def counted(*args: Any) -> Any:
            value = call(*args)
            self.bytes += len(pickle.dumps(value if back else args))
            return value

        return counted


def measure(args: argparse.Namespace, words: list[str]) -> dict[str, float]:
    """Seconds of a step, its update and its publication, of the start, and bytes per token, of one run."""
    config, began = config_of(args, words), time.perf_counter()
    validate(config)
    with (
        tempfile.TemporaryDirectory() as path,
        LiveView(console=Console(file=io.StringIO())) as view,
        StopFlag(view) as stop,
    ):
        folder = RunFolder.create(Path(path) / "run", config)
        with (
            closing(machines_of(config, folder, view)) as machines,
            closing(assemble(config, folder, machines.policy, view, stop, machines=machines)) as run,
        ):
            run.publish()
            engine = Counted(run.engine)
            seconds, start = list[float](), 0.0
            for step in range(1, config.run.steps + 1):
                before = time.perf_counter()
                loop.step_once(run, step)
                seconds.append(time.perf_counter() - before)
                start = start or time.perf_counter() - began
            carried = engine.bytes + getattr(run.trainer, "carried", 0)
        rows = folder.metrics()
        folder.close()
    tokens = sum(row["rollout/tokens"] for row in rows)
    measured = rows[args.warmup :]
    return {
        "step": statistics.median(seconds[args.warmup :]),
        "update": statistics.median(row["time/update_s"] for row in measured),
        "sync": statistics.median(row["time/sync_s"] for row in measured),
        "start": start,
        "bytes": carried / tokens,
    }


def beside_peer(args: argparse.Namespace) -> None:
    """How the update of one and the same batch scales from one process to two, here and in TRL."""
    stage = next(stage for stage in STAGES if stage.name == "train-equal")
    with tempfile.TemporaryDirectory() as folder:
        model = str(build(Path(folder) / "model"))
        same = [
            f"model.path={model}",
            "model.overrides={}",
            f"rollout.prompts={w.ROLLOUTS // w.GROUP_SIZE}",
            f"rollout.samples={w.GROUP_SIZE}",
        ]
        same += [
            f"train.micro_batch_tokens={16 * (w.PROMPT_TOKENS + w.NEW_TOKENS)}",
            f"sampling.max_new_tokens={w.NEW_TOKENS}",
            "train.updates_per_step=1",
        ]
        ours = [measure(args, [*words, *same])["update"] for words in list(SIDES.values())[1:3]]
        theirs = {1: list[float](), 2: list[float]()}
        for variant in variants("trl", stage, ("1x1", "2x1")):
            timings = run_once(variant, stage, args.peer_python, model, args.steps, True)["seconds"]
            theirs[variant.processes].append(statistics.median(timings))
    one, two = (min(seconds) for seconds in theirs.values())
    print(f"64 answers of 128 tokens, one rank {ours[0]:.3f} s, two {ours[1]:.3f} s: {ours[0] / ours[1]:.2f}x")
    print(f"TRL, one process {one:.3f} s, two {two:.3f} s: {one / two:.2f}x")


def machines_of(config: Config, folder: RunFolder, view: LiveView) -> Machines:
    if not config.clustered:
        return OneProcess(config, policy_of(config))
    from rollkeel.cluster.machines import RayMachines

    return RayMachines(config, folder, view)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=tuple(MODELS), default="wide", help="see benchmarks/c3po.py")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step")
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--peer-python", help="interpreter with TRL: how it scales on the same batch")
    args = parser.parse_args()
    found = {name: measure(args, words) for name, words in SIDES.items()}
    for name, numbers in found.items():
        told = "  ".join(f"{key} {numbers[key]:.3f} s" for key in ("step", "update", "sync"))
        print(f"{name:32} {told}  start {numbers['start']:.1f} s  {numbers['bytes']:.1f} bytes/token", flush=True)
    alone, one, two, tree = found.values()
    print(f"overhead of controller and Ray: {one['step'] / alone['step'] - 1:+.1%} of a step (target {OVERHEAD:.0%})")
    print(f"bytes through the controller: {one['bytes']:.1f} per token (target {BYTES})")
    print(f"start to first step: {two['start']:.1f} s (target {START_S:g} s)")
    print(f"trainer, one rank over two: {one['update'] / two['update']:.2f}x")
    print(f"price of train.reduce=tree: {tree['update'] / two['update'] - 1:+.1%} of an update")
    if args.peer_python:
        beside_peer(args)


if __name__ == "__main__":
    main()
