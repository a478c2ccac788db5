"""`Graders`: complete rollouts in, rewards out. A grader that breaks is a failure with a reason, never a reward of 0; an answer that
it cannot decide, or that breaks it where the gold answer does not, is undecided: reward 0 under a count of its own.

    begin(ended) ── math ─▶ workers (processes)      ─┐
                 ── code, judge ─▶ sandbox (threads) ─┤ results, in any order
    grade(all)   ── the cheap ones, in place         ─┤
                 ── reward models, in batches        ─┴─▶ wait for what is left ─▶ the same rollouts, in order

What a rollout is given depends on it alone, so that grading beside sampling gives the same bits as grading afterwards.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol, final

import numpy as np

from rollkeel.config import GradersConfig
from rollkeel.errors import BadInput, GraderFailure
from rollkeel.rewards import graders
from rollkeel.rewards.graders import Lane
from rollkeel.rewards.here import Elsewhere, Here, Outcome, Part, movable, part_of, reason
from rollkeel.rewards.mix import combined, parts_of
from rollkeel.rewards.workers import Broken
from rollkeel.tasks.base import hash_fraction
from rollkeel.types import Rollout, Status

APART = 1e-4
"""How far two scores of a reward model may lie apart, absolutely and relatively, before it counts as nondeterministic."""
REGRADE = 0.02
"""Share of rollouts that are graded twice: two of a hundred find a grader at odds with itself within a few steps."""
WAITS = 90
"""Deadlines of a grading that a step waits for any one: queues are long where workers are few."""
SLOW = 0.5
"""Share of a grading's deadline above which it is reported as slow."""


class Scorer(Protocol):
    """A reward model: one score for each text."""

    def score(self, texts: list[str]) -> list[float]: ...


@dataclass(frozen=True, kw_only=True)
class Item:
    """All gradings of one rollout: several parts for a `mix`; `again`: the same once more, where the sample takes it."""

    rollout: Rollout
    parts: Sequence[Part]
    again: Sequence[Part]

    @property
    def all(self) -> list[Part]:
        return [*self.parts, *self.again]


@dataclass(kw_only=True)
class Watch:
    """What happened since it was last asked for."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    hidden: float = 0.0
    differing: int = 0
    undecided: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    slowest: dict[str, tuple[float, int]] = field(default_factory=dict)


@final
class Graders:
    """The `Grader` of the loop: every rollout is graded by the grader its prompt names. Owns workers and sandbox: close it."""

    def __init__(
        self,
        settings: GradersConfig | None = None,
        *,
        seed: int = 0,
        load_model: Callable[[str], Scorer] | None = None,
        regrade: float | None = None,
        memory_mb: int = 1024,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """Nothing is started before it is needed. `seed`: of the share `regrade` (`REGRADE`) that is graded twice; `load_model`: opens
        a reward model; `memory_mb`: see `Here`; `elsewhere`: does what can be done in other processes."""
        self.settings = settings or GradersConfig()
        self._seed, self._load_model = seed, load_model
        self._regrade = REGRADE if regrade is None else regrade
        self._lock = threading.RLock()
        self._begun: dict[int, Item] = {}
        self._here, self._elsewhere = Here(self.settings, memory_mb), elsewhere
        self._models: dict[str, Scorer] = {}
        self._watch = Watch()

    def __enter__(self) -> Graders:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End workers and sandbox, whatever they are at."""
        self._here.close()

    def begin(self, rollouts: Sequence[Rollout]) -> None:
        """Start what runs in workers and sandbox, and return at once. Hand the same objects to `grade` later. Raises like it."""
        for item in [self._item(r) for r in rollouts]:
            self._start(item)
            if any(part.future for part in item.all):
                with self._lock:
                    self._begun[id(item.rollout)] = item  # the item keeps the rollout, so that its id stays its own

    def ready(self, rollout: Rollout) -> bool:
        """True if `grade` would not wait for this rollout."""
        item = self._begun.get(id(rollout))
        return item is None or all(part.future is None or part.future.done() for part in item.all)

    def grade(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The same rollouts in the same order with `reward` and `detail` filled.

        Where a grader raises, hangs, dies or returns anything but a finite number: `Status.GRADER_FAILURE`, reward None, one
        line of detail. Where it is a built-in one that does so, or any that hangs or dies, and has a result for the gold answer in
        place of the response, the response is to blame: it is undecided, with reward 0. Responses cut at the length limit are graded as they are. Raises `BadInput` for an incomplete rollout or an
        unknown grader, before anything is graded: those are faults of the caller or the config, not of a grader. Raises
        `GraderFailure` after `WAITS` deadlines without a result, naming the first that is missing.
        """
        items = [self._taken(r) for r in rollouts]
        called = time.perf_counter()
        for item in items:
            self._start(item)
        parts = [part for item in items for part in item.all]
        self._here.inline([part for part in parts if part.entry.lane is Lane.INLINE and part.future is None])
        self._score([part for item in items for part in item.parts])
        self._score([part for item in items for part in item.again])
        self._wait(parts)
        with self._lock:
            return [self._finished(item, called) for item in items]

    def report(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Metrics and events since the last call.

        `reward/undecided`: rollouts that scored 0 because a grader could not decide. `failures/grader_nondeterministic`: rollouts of the sample whose second grading differed. `time/reward_overlapped_seconds`: grader
        seconds that were over before anybody waited for them. `time/grader_<name>_{p50,p99,max}_seconds`. Events: `grader_nondeterministic`
        and `grader_slow` name the grader and the rollout and give the detail.
        """
        with self._lock:
            watch, self._watch = self._watch, Watch()
        metrics = {
            "reward/undecided": float(watch.undecided),
            "failures/grader_nondeterministic": float(watch.differing),
            "time/reward_overlapped_seconds": watch.hidden,
        }
        for name, seconds in watch.seconds.items():
            for key, value in zip(("p50", "p99", "max"), np.quantile(seconds, (0.5, 0.99, 1.0)), strict=True):
                metrics[f"time/grader_{name}_{key}_seconds"] = float(value)
        slow = [
            {"event": "grader_slow", "grader": name, "rollout": rollout, "seconds": round(seconds, 3)}
            for name, (seconds, rollout) in watch.slowest.items()
        ]
        return metrics, watch.events + slow

    # -- one rollout ---------------------------------------------------------------------------------------------------

    def _taken(self, rollout: Rollout) -> Item:
        with self._lock:
            return self._begun.pop(id(rollout), None) or self._item(rollout)

    def _item(self, rollout: Rollout) -> Item:
        if not rollout.status.complete:
            raise BadInput(
                f"rollout {rollout.id}: expected status finished or length to grade, got {rollout.status.value}"
            )
        twice = hash_fraction("regrade", self._seed, rollout.id, rollout.prompt.id) < self._regrade
        return Item(rollout=rollout, parts=_parts(rollout), again=_parts(rollout) if twice else ())

    def _start(self, item: Item) -> None:
        for part in item.all:
            if part.future is None:
                moved = movable(part) if self._elsewhere is not None else None
                if moved is not None and self._elsewhere is not None:
                    part.future = self._elsewhere.grade(moved)
                elif part.apart:
                    part.future = self._here.start(part)

    def _score(self, parts: Sequence[Part]) -> None:
        """Reward models, each on all of its texts in order."""
        by_model: dict[tuple[str, int], list[Part]] = {}
        for part in parts:
            if part.entry.lane is Lane.MODEL:
                options = {"path": "", "batch_size": 1, **part.rollout.prompt.grader.options}
                by_model.setdefault((str(options["path"]), int(options["batch_size"])), []).append(part)
        for (path, size), group in by_model.items():
            for start in range(0, len(group), size):
                self._score_batch(path, group[start : start + size])

    def _score_batch(self, path: str, some: Sequence[Part]) -> None:
        began = time.perf_counter()
        try:
            scores = self._model(path).score([p.rollout.prompt.text + p.rollout.text for p in some])
            outcomes = [self._here.outcome(p, lambda _, s=s: s) for p, s in zip(some, scores, strict=True)]
        except Exception as error:  # as in `_outcome`
            if len(some) > 1:  # one text, such as one that is too long, must not take the others along
                for part in some:
                    self._score_batch(path, [part])
                return
            outcomes = [Outcome(reward=None, detail=reason(some[0], error))]
        each = (time.perf_counter() - began) / len(some)
        for i, (part, outcome) in enumerate(zip(some, outcomes, strict=True)):
            part.outcome = replace(outcome, began=began + i * each, ended=began + (i + 1) * each)

    def _model(self, path: str) -> Scorer:
        if path not in self._models:
            if self._load_model is None or not path:
                raise Broken("expected the option path and a run that can load reward models")
            self._models[path] = self._load_model(path)
        return self._models[path]

    def _wait(self, parts: Sequence[Part]) -> None:
        limit = WAITS * self.settings.deadline_s
        for part in parts:
            if part.future is not None:
                try:
                    part.outcome = part.future.result(timeout=limit)
                except TimeoutError:
                    left = sum(p.future is not None and not p.future.done() for p in parts)
                    raise GraderFailure(
                        f"graders: waited {limit:g} s for {left} of {len(parts)} gradings, the first is {part.name} of"
                        f" rollout {part.rollout.id} ({WAITS} times reward.graders.deadline_s)"
                    ) from None

    def _finished(self, item: Item, called: float) -> Rollout:
        for part in item.all:
            outcome = _of(part)
            spent = outcome.ended - outcome.began
            self._watch.seconds.setdefault(part.name, []).append(spent)
            self._watch.hidden += max(min(outcome.ended, called) - outcome.began, 0.0)
            if spent > max(SLOW * self.settings.deadline_s, self._watch.slowest.get(part.name, (0.0, 0))[0]):
                self._watch.slowest[part.name] = (spent, item.rollout.id)
        for first, second in zip(item.parts, item.again, strict=False):
            self._compare(first, second)
        self._watch.undecided += any(_of(part).undecided for part in item.parts)
        rollout = item.rollout
        if rollout.prompt.grader.name == "mix":
            reward, detail = combined(rollout, [(_of(p).reward, _of(p).detail) for p in item.parts])
        else:
            reward, detail = _of(item.parts[0]).reward, _of(item.parts[0]).detail
        if reward is None:
            return replace(rollout, status=Status.GRADER_FAILURE, reward=None, detail=detail[:300])
        return replace(rollout, reward=reward, detail=detail)

    def _compare(self, first: Part, second: Part) -> None:
        a, b = _of(first).reward, _of(second).reward
        apart = APART if first.entry.lane is Lane.MODEL else 0.0
        if a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=apart, abs_tol=apart)):
            return
        self._watch.differing += 1
        values = [v if v is not None else _of(p).detail for v, p in ((a, first), (b, second))]
        about: Mapping[str, Any] = {"grader": first.name, "rollout": first.rollout.id, "values": values}
        self._watch.events.append({"event": "grader_nondeterministic", **about})


def _parts(rollout: Rollout) -> list[Part]:
    """Raises `BadInput` for an unknown grader."""
    own = rollout.prompt.grader
    specs = [own] if graders.get(own.name).lane is not Lane.MIX else parts_of(own)
    return [part_of(replace(rollout, prompt=replace(rollout.prompt, grader=spec))) for spec in specs]


def _of(part: Part) -> Outcome:
    assert part.outcome is not None  # `grade` waited for it
    return part.outcome
