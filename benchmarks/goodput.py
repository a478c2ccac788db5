"""Does `rollkeel simulate-goodput` tell what a real cluster does? One run over a local Ray whose actors are killed, against the simulator.

    nice python -m benchmarks.goodput                           # about ten kills in as many minutes on two cores
    nice python -m benchmarks.goodput --steps 30 --every 20     # does it run

`measured`: useful steps × mean undisturbed step / clock, from the first step's begin to the last one's end. `simulated`: the same job
in `rollkeel.cluster.goodput` with the means of this run as costs (step, checkpoint, noticing, restart of all, an engine's start): once
with the kills at the times they came, which leaves no chance, and once at their rate, over drawn runs. The difference is relative.
Exit code 1 if the first is more than 10 % off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollkeel.cluster.chaos import events
from rollkeel.cluster.goodput import (
    DAY_S,
    CostsConfig,
    GoodputScenario,
    MechanismsConfig,
    RatesConfig,
    _Job,
    simulate,
)
from rollkeel.record.runfolder import METRICS

WITHIN = 0.10
SHOWN = ("every", "save", "crash_noticed", "all_start", "engine_start")
WORDS = (
    "cluster.trainers=2", "cluster.engines=1", "cluster.restarts=1000", "cluster.peer_copies=false", "data.options.digits=2", "sft.steps=0",
    "rollout.prompts=32", "rollout.samples=8", "train.updates_per_step=2", "train.lr=1e-4", "train.kl_coefficient=0", "eval.every=0",
    "eval.items=4", "report.rollouts=false", "alarms.on_alarm=off",
)  # fmt: skip


NODES = ("trainer", "trainer", "engine")
NOTICED = ("engine_lost", "restarted", "actor_lost")


@dataclass
class Kill:
    """SIGKILL to an actor."""

    part: str
    """`trainer` or `engine`."""
    time: float


def disturbed(words: Sequence[str], run: Path, every: float, seed: int) -> list[Kill]:
    """Do the run, and kill a rank or an engine `every` seconds on average from its first step on, as chance has it."""
    draw, kills = random.Random(seed), list[Kill]()
    with subprocess.Popen(
        [sys.executable, "-m", "rollkeel", "train", *words, f"run.dir={run}"],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            due = math.inf
            while process.poll() is None:
                time.sleep(0.05)
                log = events(run) if time.time() >= due or due == math.inf else []
                if due == math.inf and begins(log):
                    due = begins(log)[0][1] + draw.expovariate(1 / every)
                elif time.time() >= due:
                    due += draw.expovariate(1 / every)
                    part = draw.choice(NODES)
                    pids = [e["pid"] for e in log if e["event"] == "actor" and e["name"].startswith(part)]
                    if struck(pids[-1]):
                        kills.append(Kill(part, time.time()))
                        print(f"killed {part}, process {pids[-1]}", flush=True)
        except BaseException:
            process.send_signal(signal.SIGINT)
            raise
        if process.returncode:
            raise SystemExit(f"the run ended with exit code {process.returncode}")
    return kills


def struck(pid: int) -> bool:
    """Kill an actor of Ray's; False if it is gone."""
    try:
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            os.kill(pid, signal.SIGKILL)
            return True
    except OSError:
        pass
    return False


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run's log says, seconds."""

    first: float
    """When the first step began."""
    clock: float
    step: float
    """Mean of steps without a fault or a checkpoint."""
    rollout: float
    """Of it, sampling."""
    save: float
    useful: float
    """Share of the clock that undisturbed steps would have taken."""


def begins(log: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """(step, time) for each time that a step began, those that were done again among them."""
    out, last = list[tuple[int, float]](), 0
    for e in log:
        if e["event"] == "restarted":
            last = 0
        elif e["event"] == "stage" and e["stage"] == "rollout" and e["step"] != last and e["step"] > 0:
            last = e["step"]
            out.append((last, e["time"]))
    return out


def again(log: Sequence[dict[str, Any]], since: float, until: float) -> bool:
    """Whether the run restarted between two times."""
    return any(e["event"] == "restarted" and since < e["time"] < until for e in log)


def read(run: Path, kills: Sequence[Kill]) -> Measured:
    """The run's numbers."""
    log = events(run)
    found = begins(log)
    ended = next(e["time"] for e in log if e["event"] == "run_end")
    saved = {e["step"] for e in log if e["event"] == "checkpoint_saved"}
    plain, saving = list[float](), list[float]()
    for (step, since), (then, until) in itertools.pairwise(found):
        if (
            then == step + 1
            and not any(since - 1 < kill.time < until for kill in kills)
            and not again(log, since, until)
        ):
            (saving if step in saved else plain).append(until - since)
    rows = [json.loads(text) for text in (run / METRICS).read_text().splitlines()]
    step, clock = statistics.mean(plain), ended - found[0][1]
    return Measured(
        first=found[0][1],
        clock=clock,
        step=step,
        rollout=min(statistics.mean(row["time/rollout_s"] for row in rows if "time/rollout_s" in row), 0.99 * step),
        save=max(statistics.mean(saving) - step, 0.0) if saving else 0.0,
        useful=rows[-1]["step"] * step / clock,
    )


def costs(run: Path, kills: Sequence[Kill], found: Measured, every: int) -> CostsConfig:
    """Means of what kills took: until noticed, and from there until steps went on, those of a rank with its step begun anew."""
    log, steps = events(run), begins(events(run))
    noticed, starts = list[float](), dict[str, list[float]]({"trainer": [], "engine": []})
    for kill in kills:
        told = next((e["time"] for e in log if e["event"] in NOTICED and e["time"] > kill.time), None)
        then = next((time for _, time in steps if time > kill.time), None)
        if told is None or then is None:
            continue
        noticed.append(told - kill.time)
        since = max(time for _, time in steps if time <= kill.time)
        if again(log, since, then):
            starts["trainer"].append(then - told)
        elif kill.part == "engine":
            starts["engine"].append(max(then - since - found.step - noticed[-1], 0.0))
    mean = {part: statistics.mean(values) if values else 0.0 for part, values in starts.items()}
    return CostsConfig(
        every=every * found.step,
        save=found.save,
        crash_noticed=statistics.mean(noticed) if noticed else 0.0,
        all_start=mean["trainer"],
        engine_start=mean["engine"],
    )


def scenario(found: Measured, spent: CostsConfig, faults: int) -> GoodputScenario:
    """The job as the simulator takes it: every actor a node, with its share of the faults."""
    return GoodputScenario(
        gpus=len(NODES),
        node_gpus=1,
        trainer_share=NODES.count("trainer") / len(NODES),
        overlap=False,
        rollout_s=found.rollout,
        train_s=found.step - found.rollout,
        days=found.clock / DAY_S,
        repeats=200,
        rates=RatesConfig(crash=0.0, hang=0.0, slow=0.0, process=faults / len(NODES) / (found.clock / DAY_S)),
        mechanisms=MechanismsConfig(trainer_alone=False, peer_memory=False),
        costs=spent,
    )


def replayed(job: GoodputScenario, faults: Sequence[tuple[float, str]]) -> float:
    """Goodput with faults (seconds, part) at their own times."""
    one = _Job(job, 0)
    for when, part in (*faults, (found := job.days * DAY_S, "")):
        while one._events and one._events[0][0] <= when:
            one._advance(one._events[0][0])
            one._happen(*one._events.pop(0)[2:])
        one._advance(min(when, found))
        if part:
            one._fault("process", part)
    return one.month.kept / found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--every", type=float, default=60.0, help="seconds between kills, on average")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        words = ["default", *WORDS, f"run.steps={args.steps}", f"checkpoint.every={args.save}"]
        kills = disturbed(words, run, args.every, args.seed)
        found = read(run, kills)
        spent = costs(run, kills, found, args.save)
    faults = [(kill.time - found.first, kill.part) for kill in kills]
    job = scenario(found, spent, len(kills))
    drawn, same = simulate(job), replayed(job, faults)
    off, chance = same / found.useful - 1, drawn["goodput_se"] * job.repeats**0.5
    ranks = sum(kill.part == "trainer" for kill in kills)
    print(f"clock {found.clock:.0f} s, {args.steps} steps of {found.step:.2f} s, {len(kills)} kills, {ranks} of ranks")
    print(", ".join(f"{name} {value:.2f} s" for name, value in spent.model_dump().items() if name in SHOWN))
    print(
        f"goodput measured {found.useful:.3f}, simulated with the same kills {same:.3f}: {off:+.1%} (target {WITHIN:.0%})"
    )
    print(f"simulated at the same rate {drawn['goodput']:.3f}, one run ± {chance:.3f}")
    return int(abs(off) > WITHIN)


if __name__ == "__main__":
    sys.exit(main())
