"""Goodput of a month that has faults: the share of time in which a job makes progress that it keeps.

    work ─ save ─ work ─ save ─ work ✗ noticed ─ a place is found ─ started again ─ work …
                              └─ lost ─┘

Faults come at given rates to trainer and engine nodes; what each costs depends on which mechanisms there are. Nothing is measured
here: every number is the scenario's. Imports neither torch nor Ray.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import Field

from rollkeel.config import Node

DAY_S = 86400.0
ENGINE, TRAINER = "engine", "trainer"
LOSSES = ("saving", "lost work", "noticing", "places", "starting", "slower")
"""What takes the time that is no progress. `slower`: fewer engines than asked, or a slow node."""


class RatesConfig(Node):
    """Faults per node and day. The default of `crash` is that of Llama 3's pre-training: 419 unexpected ends in 54 days on 2,048 nodes
    (arXiv:2407.21783, section 3.3.4), the others are assumed."""

    crash: float = Field(default=0.0038, ge=0, description="A node is lost and must be replaced.")
    process: float = Field(default=0.002, ge=0, description="A process ends, its node is well.")
    hang: float = Field(default=0.0005, ge=0, description="A process stands still and does not end.")
    slow: float = Field(default=0.0005, ge=0, description="A node goes on at `slow_factor` of its speed.")


class MechanismsConfig(Node):
    """What a system does about faults."""

    deadlines: bool = Field(default=True, description="A hang is noticed by a deadline; else by a person.")
    engines_apart: bool = Field(
        default=True, description="A lost engine is replaced while the others go on; else all start again."
    )
    trainer_alone: bool = Field(
        default=True, description="A lost rank restarts the trainer's ranks; else all start again."
    )
    peer_memory: bool = Field(
        default=True, description="Ranks begin again from a copy in memory of other nodes, of the last step."
    )
    spares: bool = Field(default=True, description="Nodes stand ready for lost ones.")
    slow_found: bool = Field(
        default=True, description="A slow node is found and replaced; else it stays until its part starts again."
    )


class CostsConfig(Node):
    """Seconds."""

    save: float = Field(default=10.0, ge=0, description="Pause of training for a checkpoint.")
    every: float = Field(default=0.0, ge=0, description="Work between checkpoints; 0 chooses it, see `interval`.")
    crash_noticed: float = Field(default=10.0, ge=0, description="Until the end of a process is noticed.")
    deadline: float = Field(default=300.0, ge=0, description="Until a deadline notices a hang.")
    person: float = Field(default=3600.0, ge=0, description="Until a person notices what no deadline does.")
    slow_noticed: float = Field(default=1800.0, ge=0, description="Until a slow node is found.")
    all_start: float = Field(default=900.0, ge=0, description="Start of all processes, with loading.")
    trainer_start: float = Field(default=120.0, ge=0, description="Start of the trainer's ranks alone.")
    engine_start: float = Field(default=180.0, ge=0, description="Start of an engine, with its weights.")
    spare: float = Field(default=30.0, ge=0, description="Until a spare node is in place.")
    replaced: float = Field(default=1800.0, ge=0, description="Until a node is found where there is no spare.")


class GoodputScenario(Node):
    """A job of trainer and engine nodes, its steps, and what befalls it."""

    gpus: int = Field(default=1024, ge=2)
    node_gpus: int = Field(default=8, ge=1, description="GPUs of a node, which is lost as a whole.")
    trainer_share: float = Field(default=0.5, gt=0, lt=1, description="Share of nodes that train; the others sample.")
    engine_nodes: int = Field(default=1, ge=1, description="Nodes of an engine.")
    rollout_s: float = Field(default=60.0, gt=0, description="Seconds in which all engines sample a step.")
    train_s: float = Field(default=60.0, gt=0, description="Seconds in which a step is trained.")
    overlap: bool = True
    """Whether sampling and training overlap (`run.loop=async`)."""
    slow_factor: float = Field(default=0.7, gt=0, le=1, description="Speed of a slow node.")
    days: float = Field(default=30.0, gt=0)
    repeats: int = Field(default=20, ge=1, description="Months that are drawn; the standard error is over them.")
    seed: int = Field(default=0, ge=0)
    rates: RatesConfig = RatesConfig()
    mechanisms: MechanismsConfig = MechanismsConfig()
    costs: CostsConfig = CostsConfig()

    @property
    def nodes(self) -> tuple[int, int]:
        """Of the trainer, and engines × their nodes."""
        nodes = max(2, self.gpus // self.node_gpus)
        trainer = min(nodes - 1, max(1, round(nodes * self.trainer_share)))
        engines = max(1, (nodes - trainer) // self.engine_nodes)
        return trainer, engines

    def step_s(self, engines: float = 1.0, trainer: float = 1.0) -> float:
        """Seconds of a step with this share of the engines' and this speed of the trainer's."""
        rollout, train = self.rollout_s / engines if engines else math.inf, self.train_s / trainer
        return max(rollout, train) if self.overlap else rollout + train


def interval(scenario: GoodputScenario) -> float:
    """Seconds of work between checkpoints: the given ones, or √(2 · save · time between faults that cost work), Young's first-order
    optimum (CACM 17(9), 1974), at least a step and at most the whole time."""
    costs = scenario.costs
    rates = scenario.rates
    mechanisms = scenario.mechanisms
    if costs.every:
        return costs.every
    trainer, engines = scenario.nodes
    exposed = trainer + (0 if mechanisms.engines_apart else engines * scenario.engine_nodes)
    rate = exposed * (rates.crash + rates.process + rates.hang) / DAY_S
    most = scenario.days * DAY_S
    best = math.sqrt(2 * costs.save / rate) if rate else most
    return min(max(best, scenario.step_s()), most)


@dataclass
class Month:
    """What came of one."""

    kept: float = 0.0
    """Seconds of work at full speed that were kept."""
    losses: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LOSSES, 0.0))
    faults: int = 0


class _Job:
    """One drawn month. `_advance` moves time; faults and returns are events in between."""

    def __init__(self, scenario: GoodputScenario, seed: int) -> None:
        self._of, self._draw = scenario, np.random.default_rng([scenario.seed, seed])
        self._trainers, self._engines = scenario.nodes
        self._every = interval(scenario)
        self._now, self._end = 0.0, scenario.days * DAY_S
        self._work, self._saving = self._every, 0.0
        """Left until the next checkpoint, and of the one under way."""
        self._down: list[tuple[float, str]] = []
        """Phases of a restart that are left: seconds and name."""
        self._out = 0
        self._slow_engines = 0
        self._slow_trainer = False
        self._order = itertools.count()
        self._events: list[tuple[float, int, str, int]] = []
        self._whole = 0
        """Starts of all parts so far: events of before are void."""
        self._trainer_starts = 0
        self.month = Month()

    def run(self) -> Month:
        rates = self._of.rates.model_dump()
        nodes = self._trainers + self._engines * self._of.engine_nodes
        total = nodes * sum(rates.values()) / DAY_S
        kinds, weights = list(rates), np.array(list(rates.values()))
        fault = self._now + (self._draw.exponential(1 / total) if total else math.inf)
        while self._now < self._end:
            until = min(fault, self._events[0][0] if self._events else math.inf, self._end)
            self._advance(until)
            if until == fault and until < self._end:
                kind = kinds[int(self._draw.choice(len(kinds), p=weights / weights.sum()))]
                where = TRAINER if self._draw.random() < self._trainers / nodes else ENGINE
                self._fault(kind, where)
                fault = self._now + self._draw.exponential(1 / total)
            elif self._events and until == self._events[0][0]:
                self._happen(*heapq.heappop(self._events)[2:])
        return self.month

    def _speed(self) -> float:
        engines = (self._engines - self._out - self._slow_engines * (1 - self._of.slow_factor)) / self._engines
        trainer = self._of.slow_factor if self._slow_trainer else 1.0
        return self._of.step_s() / self._of.step_s(engines, trainer)

    def _advance(self, until: float) -> None:
        losses = self.month.losses
        while self._now < until:
            left = until - self._now
            if self._down:
                seconds, name = self._down[0]
                used = min(left, seconds)
                losses[name] += used
                self._down = [(seconds - used, name), *self._down[1:]] if used < seconds else self._down[1:]
            elif self._saving > 0:
                used = min(left, self._saving)
                losses["saving"] += used
                self._saving -= used
                if self._saving <= 0:
                    self._work = self._every
            else:
                speed = self._speed()
                used = min(left, self._work / speed) if speed else left
                self.month.kept += used * speed
                losses["slower"] += used * (1 - speed)
                self._work -= used * speed
                if self._work <= 1e-9:
                    self._work, self._saving = 0.0, self._of.costs.save
                    if not self._saving:
                        self._work = self._every
            self._now += used

    def _fault(self, kind: str, where: str) -> None:
        costs, has = self._of.costs, self._of.mechanisms
        self.month.faults += 1
        if kind == "slow":
            if where == TRAINER:
                self._slow_trainer = True
            elif self._out + self._slow_engines < self._engines:
                self._slow_engines += 1
            if has.slow_found:
                self._later(costs.slow_noticed, f"slow {where}")
            return
        noticed = costs.crash_noticed if kind != "hang" else costs.deadline if has.deadlines else costs.person
        place = 0.0 if kind != "crash" else costs.spare if has.spares else costs.replaced
        if where == ENGINE and has.engines_apart:
            if self._out < self._engines:
                self._out += 1
                self._later(noticed + place + costs.engine_start, "engine back")
            return
        self._stop(
            noticed, place, alone=where == TRAINER and has.trainer_alone, near=where == TRAINER and has.peer_memory
        )

    def _stop(self, noticed: float, place: float, *, alone: bool, near: bool) -> None:
        """Training stands, and begins again from the last step (`near`) or the last checkpoint. In a restart, the restart begins again."""
        if not self._down:
            since = self._every - self._work
            lost = min(since, since % self._of.step_s()) if near else since
            self.month.kept -= lost
            self.month.losses["lost work"] += lost
            self._work, self._saving = (self._work + lost, self._saving) if near else (self._every, 0.0)
        self._down = [(noticed, "noticing"), (place, "places")]
        self._down.append((self._of.costs.trainer_start if alone else self._of.costs.all_start, "starting"))
        self._slow_trainer = False
        self._trainer_starts += 1
        if not alone:
            self._out = 0
            self._slow_engines = 0
            self._whole = self._whole + 1

    def _later(self, seconds: float, what: str) -> None:
        stamp = self._trainer_starts if what == "slow trainer" else self._whole
        heapq.heappush(self._events, (self._now + seconds, next(self._order), what, stamp))

    def _happen(self, what: str, stamp: int) -> None:
        costs, has = self._of.costs, self._of.mechanisms
        if stamp != (self._trainer_starts if what == "slow trainer" else self._whole):
            return
        if what == "engine back":
            self._out -= 1
        elif what == "slow engine" and self._slow_engines:
            self._slow_engines -= 1
            self._out += 1
            self._later((costs.spare if has.spares else costs.replaced) + costs.engine_start, "engine back")
        elif what == "slow trainer" and self._slow_trainer:
            self._stop(
                0.0, costs.spare if has.spares else costs.replaced, alone=has.trainer_alone, near=has.peer_memory
            )


def simulate(scenario: GoodputScenario) -> dict[str, Any]:
    """Goodput with its standard error over the drawn months, hours of a month by what took them, faults, the checkpoint interval."""
    months = [_Job(scenario, i).run() for i in range(scenario.repeats)]
    time_s = scenario.days * DAY_S
    shares = np.array([month.kept / time_s for month in months])
    error = shares.std(ddof=1) / math.sqrt(len(shares)) if len(shares) > 1 else 0.0
    return {
        "gpus": scenario.gpus,
        "goodput": float(shares.mean()),
        "goodput_se": float(error),
        "faults": float(np.mean([month.faults for month in months])),
        "every_s": interval(scenario),
        "hours": {name: float(np.mean([m.losses[name] for m in months])) / 3600 for name in LOSSES},
    }


def compared(scenario: GoodputScenario, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """`simulate` of each number of GPUs: with the mechanisms that the scenario has, without any one of them, and without all."""
    on = [name for name, value in scenario.mechanisms.model_dump().items() if value]
    cases = [("all of these", on), *((f"without {name}", [n for n in on if n != name]) for name in on), ("none", [])]
    rows = []
    for gpus in sizes:
        for label, kept in cases:
            mechanisms = MechanismsConfig(**{name: name in kept for name in MechanismsConfig.model_fields})
            found = simulate(scenario.model_copy(update={"gpus": gpus, "mechanisms": mechanisms}))
            rows.append({"mechanisms": label, **found})
    return rows


def lines(scenario: GoodputScenario, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table for people, with what is assumed."""
    out = [
        f"{'GPUs':>6}  {'mechanisms':24} {'goodput':>15}  {'faults':>6}  {'saved every':>11}  hours of {scenario.days:g} days"
    ]
    for row in rows:
        hours = ", ".join(f"{name} {value:.1f}" for name, value in row["hours"].items() if value >= 0.05)
        share = f"{row['goodput']:.1%} ± {row['goodput_se']:.1%}"
        out.append(
            f"{row['gpus']:6}  {row['mechanisms']:24} {share:>15}  {row['faults']:6.0f}  {row['every_s']:9.0f} s  {hours}"
        )
    rates = ", ".join(f"{name} {value:g}" for name, value in scenario.rates.model_dump().items())
    costs = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in scenario.costs.model_dump().items())
    return [*out, f"assumed: faults per node and day: {rates}; seconds: {costs}; faults strike alone"]
