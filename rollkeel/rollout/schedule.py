"""When the calls to an engine took effect, in decode steps of each of its workers: recorded, and replayed bit for bit.

What an engine of free-running workers samples depends on timing alone through the moments at which it is told something: at
which decode step a worker took new requests, new weights or an interruption, and how requests were shared over workers. A
line of `schedule.jsonl` holds those of one step:

    {"step": 7, "calls": [{"call": "submit", "at": [412, 407], "shares": [64, 64]}, {"call": "publish", "at": [455, 451]}]}

`at` counts from `begin`, when nothing was in flight. A replay advances each worker to exactly these counts before each call.
A call `turns` is a submission of the next turns of the episodes `ids`: in a replay they wait for it, however early their
environments have answered.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, final

from rollkeel.errors import BadInput
from rollkeel.protocols import CountedEngine, Engine
from rollkeel.types import Request, Segment

CHUNK = 16
"""Decode steps a replay makes in one poll, so that other calls need not wait long."""


class ScheduledEngine(ABC):
    """The calls of an asynchronous loop to an engine. Between `interrupt` and `begin` others may use the engine directly."""

    @abstractmethod
    def begin(self) -> None:
        """Nothing is in flight; decode steps count from here."""

    @abstractmethod
    def submit(self, requests: Sequence[Request], *, turns: bool = False) -> None:
        """`turns`: of episodes that are played already, those that `going_on` named."""

    def going_on(self, answered: Collection[int]) -> list[int]:
        """Which of the episodes whose next turn could begin are to be submitted now, in order."""
        return sorted(answered)

    @abstractmethod
    def poll(self, timeout_s: float) -> list[Segment]: ...

    @abstractmethod
    def interrupt(self) -> None:
        """Stop everything in flight; `poll` returns it."""

    @abstractmethod
    def publishing(self) -> Any:
        """Context in which new weights are handed to the engine."""

    @abstractmethod
    def commit(self, step: int) -> None:
        """The calls since the last commit belong to `step`: a checkpoint saved now is from behind them."""

    @abstractmethod
    def discard(self) -> None:
        """The calls since the last commit are not part of the run, which resumes from the checkpoint before them."""

    @property
    def due(self) -> str | None:
        """What the replayed run did next; None where nothing is replayed."""
        return None

    @property
    def stalled(self) -> bool:
        """True if nothing can end before the next call."""
        return False


@final
class Recorded(ScheduledEngine):
    """Every call at once, as the caller likes. An engine that does not count its decode steps leaves no record."""

    def __init__(self, engine: Engine, write: Callable[[Mapping[str, Any]], None]) -> None:
        """`write` keeps a line of the schedule."""
        self._engine, self._write = engine, write
        self._counted = engine if isinstance(engine, CountedEngine) else None
        self._base: list[int] | None = None
        self._seen = list[int]()
        self._calls: list[dict[str, Any]] = []

    def begin(self) -> None:
        if self._counted is not None:
            self._base = self._seen = [n or 0 for n in self._counted.steps]

    def submit(self, requests: Sequence[Request], *, turns: bool = False) -> None:
        self._engine.submit(requests)
        if self._counted is not None:
            shares = list(self._counted.shares)
            if turns:
                self._note("turns", shares=shares, ids=[r.id for r in requests])
            else:
                self._note("submit", shares=shares)

    def poll(self, timeout_s: float) -> list[Segment]:
        return self._engine.poll(timeout_s)

    def interrupt(self) -> None:
        self._engine.interrupt()
        self._note("interrupt")
        self._base = None

    @contextmanager
    def publishing(self) -> Iterator[None]:
        yield
        self._note("publish")

    def commit(self, step: int) -> None:
        if self._calls:
            self._write({"step": step, "calls": self._calls})
        self._calls = []

    def discard(self) -> None:
        self._calls = []

    def _note(self, call: str, **more: Any) -> None:
        if self._counted is None or self._base is None:
            return
        steps, at = self._counted.steps, list[int | None]()
        for n, start, seen in zip_longest(
            steps, self._base, self._seen
        ):  # one that joined has no start, or counts anew
            at.append(None if n is None or start is None or n < seen else n - start)
        self._seen = [n or 0 for n in steps]
        self._calls.append({"call": call, "at": at, **more})


@final
class Replayed(ScheduledEngine):
    """Every call at the decode steps at which another run made it. Raises `BadInput` when this run makes other calls."""

    def __init__(self, engine: Engine, path: str | Path, after: int = 0) -> None:
        """Replay the schedule at `path` behind step `after`. Raises `BadInput` when this engine cannot."""
        if not isinstance(engine, CountedEngine):
            raise BadInput(
                f"experiment.schedule={path}: this engine does not count decode steps; use engine.kind=local"
            )
        self._engine, self._path = engine, path
        self._calls = deque(call for row in read_schedule(path) if row["step"] > after for call in row["calls"])
        workers = len(engine.steps)
        for call in self._calls:
            if len(call["at"]) != workers:
                raise BadInput(
                    f"experiment.schedule={path}: recorded with engine.processes={len(call['at'])}, got {workers}; set it so"
                )
        self._base: list[int] | None = None
        self._kept: list[Segment] = []

    def begin(self) -> None:
        self._base = self._steps()

    def going_on(self, answered: Collection[int]) -> list[int]:
        ids = self._calls[0]["ids"] if self.due == "turns" else []
        return ids if set(ids) <= set(answered) else []

    def submit(self, requests: Sequence[Request], *, turns: bool = False) -> None:
        call = self._take("turns" if turns else "submit")
        if sum(call["shares"]) != len(requests):
            raise self._other(f"{sum(call['shares'])} requests", f"{len(requests)}")
        self._engine.submit(requests, call["shares"])

    def poll(self, timeout_s: float) -> list[Segment]:
        """Never waits: decodes towards the next call, and returns what ended."""
        if self._base is None:
            self._kept += self._engine.advance_each([0] * len(self._steps()))
        elif self._calls and not self.stalled:
            left = self._left(self._calls[0])
            self._kept += self._engine.advance_each([min(CHUNK, n) for n in left])
        out, self._kept = self._kept, []
        return out

    def interrupt(self) -> None:
        self._take("interrupt")
        self._engine.interrupt()
        self._base = None

    @contextmanager
    def publishing(self) -> Iterator[None]:
        if self._base is not None:
            self._take("publish")
        yield

    def commit(self, step: int) -> None:
        """Nothing is recorded."""

    def discard(self) -> None:
        """Nothing is recorded."""

    @property
    def due(self) -> str | None:
        return self._calls[0]["call"] if self._calls else "end"

    @property
    def stalled(self) -> bool:
        return self._base is not None and (not self._calls or not any(self._left(self._calls[0])))

    def _take(self, name: str) -> dict[str, Any]:
        """The next call of the schedule, which must be `name`, once every worker has reached its decode step."""
        if self.due != name:
            raise self._other(f"the call {self.due}", name)
        call = self._calls.popleft()
        left = self._left(call)
        if any(left):
            self._kept += self._engine.advance_each(left)
        if any(self._left(call)):  # a worker ran out of work before it came there
            raise self._other(f"decode steps {call['at']}", f"{self._now()}")
        return call

    def _left(self, call: Mapping[str, Any]) -> list[int]:
        left = [at - now for at, now in zip(call["at"], self._now(), strict=True)]
        if min(left) < 0:
            raise self._other(f"decode steps {call['at']}", f"{self._now()}")
        return left

    def _now(self) -> list[int]:
        assert self._base is not None  # calls are replayed between begin and interrupt alone
        return [n - start for n, start in zip(self._steps(), self._base, strict=True)]

    def _steps(self) -> list[int]:
        steps = [n for n in self._engine.steps if n is not None]
        if len(steps) != len(self._engine.steps):
            raise BadInput(f"experiment.schedule={self._path}: an engine worker died; start the replay again")
        return steps

    def _other(self, recorded: str, got: str) -> BadInput:
        return BadInput(
            f"experiment.schedule={self._path}: expected {recorded}, got {got}; replay with the config of that run"
        )


def read_schedule(path: str | Path) -> list[dict[str, Any]]:
    """Lines of a `schedule.jsonl`. Raises `BadInput` for one that is missing, damaged, empty or cannot be replayed."""
    try:
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise BadInput(f"experiment.schedule={path}: cannot be read ({' '.join(str(error).split())})") from None
    if not rows:
        raise BadInput(f"experiment.schedule={path}: is empty; expected the schedule.jsonl of an asynchronous run")
    for number, row in enumerate(rows, 1):
        if not _is_row(row):
            raise BadInput(f"experiment.schedule={path}: line {number} is not a step of a schedule")
        if any(at is None for call in row["calls"] for at in call["at"]):
            raise BadInput(
                f"experiment.schedule={path}: that run lost or got an engine worker before the end of step {row['step']}; it cannot be replayed"
            )
    return rows


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("step"), int) or not isinstance(row.get("calls"), list):
        return False
    return all(
        isinstance(c, dict)
        and c.get("call") in ("submit", "turns", "publish", "interrupt")
        and isinstance(c.get("at"), list)
        and (c["call"] not in ("submit", "turns") or isinstance(c.get("shares"), list))
        and (c["call"] != "turns" or isinstance(c.get("ids"), list))
        for c in row["calls"]
    )
