"""One grading at a time, made in this process and the workers and sandbox that it owns; and what grades elsewhere."""

from __future__ import annotations

import json
import math
import numbers
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, final

from rollkeel import plugins
from rollkeel.config import GradersConfig
from rollkeel.errors import GraderFailure
from rollkeel.host import within
from rollkeel.rewards import graders
from rollkeel.rewards.graders import Entry, Lane
from rollkeel.rewards.sandboxed import SharedSandbox
from rollkeel.rewards.workers import Broken, NoVerdict, Workers
from rollkeel.tasks.environment import GRADER
from rollkeel.types import Rollout, TokenSpan

HUNG = 2
"""Gradings in this process that may run into the deadline before a step stops; others would follow, one after the other."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One grader's verdict on one rollout."""

    reward: float | None
    """None: the grader failed, and `detail` says why."""
    detail: str
    undecided: bool = False
    """The reward is 0 because the response was not decided."""
    began: float = 0.0
    ended: float = 0.0
    """`time.perf_counter`, seconds."""


@dataclass(kw_only=True)
class Part:
    """One grading: a rollout (whose `prompt.grader` is the part's own) and the grader it names."""

    rollout: Rollout
    entry: Entry
    future: Future[Outcome] | None = None
    outcome: Outcome | None = None

    @property
    def name(self) -> str:
        return plugins.short(self.rollout.prompt.grader.name)

    @property
    def apart(self) -> bool:
        """Graded in another process, while this one works on."""
        return self.entry.lane in (Lane.WORKER, Lane.SANDBOX, Lane.SERVICE)


def part_of(rollout: Rollout) -> Part:
    """The grading that a rollout's grader, no `mix`, is to do. Raises `BadInput` for an unknown one."""
    return Part(rollout=rollout, entry=graders.entry_of(rollout.prompt.grader))


class Elsewhere(Protocol):
    """Grades in other processes than this one, and what may be started from any of its threads."""

    def grade(self, rollout: Rollout) -> Future[Outcome]:
        """Begin what `part_of(rollout)` says. Its outcome is that of this process."""
        ...


def movable(part: Part) -> Rollout | None:
    """What another process needs for this grading; None where it must be done in this one.

    That is so of reward models, which score whole batches, of services, whose calls are counted, of episodes, whose reward is there
    already, and of functions that only this process knows. Built-in graders look at no tokens."""
    name = part.rollout.prompt.grader.name
    built_in = graders.built_in(name)
    if part.entry.lane in (Lane.MODEL, Lane.SERVICE) or name == GRADER or not (built_in or plugins.is_own(name)):
        return None
    return replace(part.rollout, span=TokenSpan.empty()) if built_in else part.rollout


@final
class Here:
    """Owns workers and sandbox, none of which is started before it is needed: close it."""

    def __init__(self, settings: GradersConfig, memory_mb: int = 1024) -> None:
        """`memory_mb`: of a worker, beyond what the grader takes when it is imported."""
        self.settings = settings
        self._lock = threading.Lock()
        self._threads: dict[Lane, ThreadPoolExecutor] = {}
        self._workers = Workers(deadline_s=settings.deadline_s, memory_mb=memory_mb)
        self._sandbox = SharedSandbox(settings)
        self._gold_read: set[int] = set()

    def close(self) -> None:
        """End workers and sandbox, whatever they are at."""
        self._workers.close()
        self._sandbox.close()
        for threads in self._threads.values():
            threads.shutdown(wait=True, cancel_futures=True)

    def start(self, part: Part) -> Future[Outcome]:
        """Begin one that is graded apart from this process."""
        lane = part.entry.lane
        with self._lock:
            threads = self._threads.get(lane)
            if threads is None:
                threads = ThreadPoolExecutor(self.settings.workers, f"rollkeel-{lane.name.lower()}")
                self._threads[lane] = threads
        runs = {Lane.WORKER: self._in_worker, Lane.SANDBOX: self._in_sandbox, Lane.SERVICE: Entry.run_on}
        return threads.submit(self.outcome, part, partial(runs[lane], part.entry))

    def inline(self, parts: Sequence[Part]) -> None:
        """Grade those of this process, one after the other."""
        limit, hung = self.settings.deadline_s, 0
        for part in parts:

            def run(rollout: Rollout, entry: Entry = part.entry) -> Any:
                with within(limit, Broken(f"no answer for {limit:g} s (reward.graders.deadline_s)")):
                    return entry.run(rollout)

            part.outcome = self.outcome(part, run)
            hung += part.outcome.ended - part.outcome.began > limit
            if hung > HUNG:
                raise GraderFailure(
                    f"grader {part.name}: {hung} gradings took longer than {limit:g} s each, the last is rollout {part.rollout.id}"
                    " (reward.graders.deadline_s)"
                )

    def outcome(self, part: Part, run: Callable[[Rollout], Any]) -> Outcome:
        """What comes of `run`, whatever it raises."""
        began = time.perf_counter()
        try:
            outcome = _checked(run(part.rollout))
        except (Exception, SystemExit) as error:  # data here: counted, and never an end of the run by itself
            outcome = Outcome(reward=None, detail=reason(part, error))
            if (part.entry.sound or isinstance(error, NoVerdict)) and self._reads_gold(part, run):
                outcome = _undecided(outcome.detail)
        return replace(outcome, began=began, ended=time.perf_counter())

    def _in_worker(self, entry: Entry, rollout: Rollout) -> tuple[Any, str]:
        prompt = rollout.prompt
        return self._workers.run(entry.run, rollout.text, prompt.answer, prompt.grader.options)

    def _in_sandbox(self, entry: Entry, rollout: Rollout) -> tuple[Any, str]:
        return entry.run(self._sandbox.run, rollout)

    def _reads_gold(self, part: Part, run: Callable[[Rollout], Any]) -> bool:
        """Whether the grader has a result for the gold answer, so that what it threw was the response's doing."""
        prompt = part.rollout.prompt
        key = hash(json.dumps([prompt.grader.name, prompt.answer, prompt.grader.options], sort_keys=True, default=str))
        if key not in self._gold_read:
            try:
                _checked(run(replace(part.rollout, text=prompt.answer)))
            except (Exception, SystemExit):  # as above: the failure of the response is told
                return False
            self._gold_read.add(key)
        return True


def reason(part: Part, error: BaseException) -> str:
    """Why a grader has no verdict, in one line."""
    own = None if part.entry.sound else part.entry.run
    told = " ".join(str(error).split()) if isinstance(error, Broken) else plugins.trouble(error, own)
    return f"grader {part.name}: {told}"


def _undecided(reason: str) -> Outcome:
    return Outcome(reward=0.0, detail=f"undecided: {reason}", undecided=True)


def _checked(result: Any) -> Outcome:
    """Raises `TypeError` or `ValueError` for anything but a finite real number, or None with a reason."""
    value, detail = result if isinstance(result, tuple) and len(result) == 2 else (result, "")
    detail = " ".join(str(detail).split())
    if value is None and detail:
        return _undecided(detail)
    if not isinstance(value, numbers.Real):
        if isinstance(value, Coroutine):
            value.close()
        raise TypeError(f"expected a real number as reward, got {type(value).__name__}")
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"expected a finite reward, got {reward}")
    return Outcome(reward=reward, detail=detail)
