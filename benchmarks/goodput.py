"""Does `rollkeel simulate-goodput` tell what a real cluster does? One run over a local Ray whose actors are killed, against the simulator.

    nice python -m benchmarks.goodput                                    # ten kills: about ten minutes on two cores
    nice python -m benchmarks.goodput --count 2 --steps 30 --every 10    # does it run

`measured`: useful steps × median undisturbed step / clock, from the first step's begin to the last one's end. `simulated`: the same job
in `rollkeel.cluster.goodput` with the medians of this run as costs (step, checkpoint, noticing, restart of all, an engine's start): once
with the kills at the times they came, which leaves no chance, and once at their rate, over drawn runs. The difference is relative.
Exit code 1 if the first is more than 10 % off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollkeel.cluster.chaos import Chaos, Incident, events, line, parsed
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
WORDS = (
    "cluster.trainers=2", "cluster.engines=1", "cluster.restarts=1000", "data.options.digits=2", "sft.steps=60", "sft.lr=1e-2",
    "rollout.prompts=32", "rollout.samples=8", "train.updates_per_step=2", "train.lr=1e-4", "train.kl_coefficient=0", "eval.every=0",
    "eval.items=4", "report.rollouts=false", "alarms.on_alarm=off",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run's log says, seconds."""

    clock: float
    step: float
    """Median of steps without a fault or a checkpoint."""
    rollout: float
    """Of it, sampling."""
    save: float
    useful: float
    """Share of the clock that undisturbed steps would have taken."""


def begins(log: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """(step, time) for each time that a step began, those that were done again among them."""
    stages = [e for e in log if e["event"] == "stage" and e["stage"] == "rollout" and e["step"] > 0]
    return [
        (e["step"], e["time"])
        for i, e in enumerate(stages)
        if not i or stages[i - 1]["step"] != e["step"] or again(log, stages[i - 1], e)
    ]


def again(log: Sequence[dict[str, Any]], one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the run restarted between two events."""
    return any(e["event"] == "restarted" and one["time"] < e["time"] < other["time"] for e in log)


def read(run: Path, incidents: Sequence[Incident]) -> tuple[Measured, list[float]]:
    """The run's numbers, and its incidents as seconds since its first step."""
    log = events(run)
    found = begins(log)
    ended = next(e["time"] for e in reversed(log) if e["event"] == "stage" and e["step"] == found[-1][0])
    saved = {e["step"] for e in log if e["event"] == "checkpoint_saved"}
    plain, saving = list[float](), list[float]()
    for (step, since), (then, until) in itertools.pairwise(found):
        if then == step + 1 and not any(since - 1 < i.time < until for i in incidents):
            (saving if step in saved else plain).append(until - since)
    rows = [json.loads(text) for text in (run / METRICS).read_text().splitlines()]
    usual = statistics.median(plain)
    sampling = statistics.median(row["time/rollout_s"] for row in rows if "time/rollout_s" in row)
    first, clock = found[0][1], ended - found[0][1]
    measured = Measured(
        clock=clock,
        step=usual,
        rollout=min(sampling, 0.99 * usual),
        save=max(statistics.median(saving) - usual, 0.0) if saving else 0.0,
        useful=rows[-1]["step"] * usual / clock,
    )
    return measured, [i.time - first for i in incidents]


def costs(run: Path, incidents: Sequence[Incident], found: Measured, every: int) -> CostsConfig:
    """Medians of what the incidents took: until noticed, and from there until the step went on that they struck."""
    log, steps = events(run), begins(events(run))
    noticed, starts = list[float](), dict[str, list[float]]({"trainer": [], "engine": []})
    for one in (i for i in incidents if i.noticed_s is not None):
        assert one.noticed_s is not None
        noticed.append(one.noticed_s)
        part = one.actor.partition("-")[0]
        if part == "trainer":
            back = next((time for _, time in steps if time > one.time + one.noticed_s), None)
            starts[part] += [back - one.time - one.noticed_s] if back else []
            continue
        since = max(time for _, time in steps if time <= one.time)
        until = next((time for _, time in steps if time > one.time), None)
        if until and not again(log, {"time": since}, {"time": until}):
            starts[part].append(max(until - since - found.step - one.noticed_s, 0.0))
    middle = {part: statistics.median(values) if values else 0.0 for part, values in starts.items()}
    return CostsConfig(
        every=every * found.step,
        save=found.save,
        crash_noticed=statistics.median(noticed) if noticed else 0.0,
        all_start=middle["trainer"],
        engine_start=middle["engine"],
    )


def scenario(found: Measured, spent: CostsConfig, faults: int) -> GoodputScenario:
    """The job as the simulator takes it: a node of two ranks and an engine's, each with half of the faults."""
    return GoodputScenario(
        gpus=2,
        node_gpus=1,
        overlap=False,
        rollout_s=found.rollout,
        train_s=found.step - found.rollout,
        days=found.clock / DAY_S,
        repeats=200,
        rates=RatesConfig(crash=0.0, hang=0.0, slow=0.0, process=faults / 2 / (found.clock / DAY_S)),
        mechanisms=MechanismsConfig(trainer_alone=False, peer_memory=False),
        costs=spent,
    )


def replayed(job: GoodputScenario, faults: Sequence[tuple[float, str]]) -> float:
    """Goodput with faults (seconds, part) at their own times."""
    one = _Job(job, 0)
    for time, part in (*faults, (found := job.days * DAY_S, "")):
        while one._events and one._events[0][0] <= time:
            one._advance(one._events[0][0])
            one._happen(*one._events.pop(0)[2:])
        one._advance(min(time, found))
        if part:
            one._fault("process", part)
    return one.month.kept / found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=10, help="kills")
    parser.add_argument("--every", type=float, default=30.0, help="seconds of work between them, on average")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default="kill:rank,kill:engine")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        words = ["default", *WORDS, f"run.steps={args.steps}", f"checkpoint.every={args.save}"]
        chaos = Chaos(words, run, parsed(args.faults), args.seed)
        code = chaos(args.count, args.every, lambda text: print(text, flush=True))
        if code or not chaos.incidents:
            print(f"the run ended with exit code {code} and {len(chaos.incidents)} kills", file=sys.stderr)
            return 2
        print(line(chaos.incidents[-1]))
        found, times = read(run, chaos.incidents)
        spent = costs(run, chaos.incidents, found, args.save)
    parts = ["trainer" if i.actor.startswith("trainer") else "engine" for i in chaos.incidents]
    job = scenario(found, spent, len(parts))
    drawn = simulate(job)
    same = replayed(job, list(zip(times, parts, strict=True)))
    off = same / found.useful - 1
    print(
        f"clock {found.clock:.0f} s, {args.steps} steps of {found.step:.2f} s, {len(parts)} kills ({parts.count('trainer')} of ranks)"
    )
    print(", ".join(f"{name} {value:.2f} s" for name, value in spent.model_dump().items() if name in _SHOWN))
    print(
        f"goodput measured {found.useful:.3f}; simulated with the same kills {same:.3f} ({off:+.1%} off, target {WITHIN:.0%})"
    )
    print(
        f"simulated at the same rate {drawn['goodput']:.3f} ± {drawn['goodput_se'] * job.repeats**0.5:.3f} (one drawn run)"
    )
    return int(abs(off) > WITHIN)


_SHOWN = ("every", "save", "crash_noticed", "all_start", "engine_start")

if __name__ == "__main__":
    sys.exit(main())
