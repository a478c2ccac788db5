"""Which job runs where, and what becomes of it: a decision without threads, clocks or programs; `service.py` carries it out.

Jobs wait in named partitions, highest priority first and first come first served within one. What comes in is an event
with its time (`submit`, `cancel`, `beat`, `finish`, `tick`); what goes out is a list of actions. A job that was accepted ends
exactly once. A worker that is not heard of by its deadline is given up: another takes its place and its job is run once more.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rollkeel_sandbox.errors import BadInput, nearest
from rollkeel_sandbox.partition import Full, Partition

MAX_LOSSES = 2
"""A job that lost its worker this often is given up."""
OPEN_S, BEAT_S = 120.0, 10.0
"""Seconds within which a new worker, and an idle one, must be heard of."""
SHORTEST_RETRY_S, LONGEST_RETRY_S = 0.05, 60.0
MEMORY = 0.9
"""Weight of the past in the mean running time of a partition."""


class Fate(enum.StrEnum):
    """How a job left the broker."""

    DONE = "done"
    """A worker reported its end."""
    LOST = "lost"
    """It lost its worker `MAX_LOSSES` times."""
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """It was not started by its deadline."""


class Worker(NamedTuple):
    """One place where jobs run, and which of its lives this is."""

    partition: str
    number: int
    life: int


@dataclass(frozen=True)
class Open:
    """Bring up this worker; it reports with `beat`."""

    worker: Worker


@dataclass(frozen=True)
class Start:
    """Run this job on this worker."""

    worker: Worker
    job: str
    attempt: int


@dataclass(frozen=True)
class Interrupt:
    """End this job; nobody wants its result. The worker reports when it is free."""

    worker: Worker
    job: str


@dataclass(frozen=True)
class Abandon:
    """This worker is dead or hung: end what it does (`job`, if any); nothing it says counts any more."""

    worker: Worker
    job: str | None


@dataclass(frozen=True)
class End:
    """The job has left the broker."""

    job: str
    partition: str
    fate: Fate
    attempts: int
    waited_s: float
    """From its submission to its last start, or to its end if it was never started."""
    ran_s: float
    reason: str = ""


Action = Open | Start | Interrupt | Abandon | End


@dataclass
class Counts:
    """Since the start, of one partition."""

    accepted: int = 0
    refused: int = 0
    retried: int = 0
    replaced: int = 0
    """Workers that were given up for another."""
    ended: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(Fate, 0))


@dataclass
class _Entry:
    id: str
    partition: str
    order: tuple[int, int]
    """Minus the priority, then the turn: least first."""
    submitted: float
    start_by: float
    allowed_s: float
    attempts: int = 0
    losses: int = 0
    started: float | None = None
    on: Worker | None = None


@dataclass
class _Place:
    """The present life of a worker."""

    worker: Worker
    due: float
    """When it counts as hung if nothing is heard of it."""
    ready: bool = False
    busy: bool = False
    job: str | None = None
    """What it runs; None while busy with a job that was cancelled."""


class _Line:
    """One partition's queue, workers and counts."""

    def __init__(self, config: Partition) -> None:
        self.config = config
        self.heap: list[tuple[tuple[int, int], str]] = []
        self.idle: deque[Worker] = deque()
        self.waiting = 0
        self.mean_s = 0.0
        self.counts = Counts()


class Broker:
    """All partitions. Times are seconds of any one clock that never goes back. Not thread-safe: the caller locks."""

    def __init__(self, partitions: Sequence[Partition], *, beat_s: float = BEAT_S, open_s: float = OPEN_S) -> None:
        self._lines = {p.name: _Line(p) for p in partitions}
        if not partitions or len(self._lines) != len(partitions):
            raise BadInput("sandbox: expected at least one partition, each with a name of its own")
        self._beat_s, self._open_s = beat_s, open_s
        self._entries: dict[str, _Entry] = {}
        self._places: dict[tuple[str, int], _Place] = {}
        self._turn = itertools.count()

    def open(self, now: float) -> list[Action]:
        """Once, at the start: all workers."""
        return [
            self._open(Worker(name, number, 0), now)
            for name, line in self._lines.items()
            for number in range(line.config.workers)
        ]

    def submit(
        self,
        now: float,
        job: str,
        *,
        partition: str,
        priority: int = 0,
        start_by: float = float("inf"),
        allowed_s: float,
        forced: bool = False,
    ) -> list[Action]:
        """Take a job. `allowed_s`: seconds from its start after which its worker counts as hung; `forced`: over the bound too.

        Raises `Full` when the queue is at its bound, `BadInput` for an unknown partition.
        """
        line = self._line(partition)
        if line.waiting >= line.config.queue and not forced:
            raise self.refuse(partition, 1)
        assert job not in self._entries, f"job {job} is here already"
        entry = _Entry(job, partition, (-priority, next(self._turn)), now, start_by, allowed_s)
        self._entries[job] = entry
        line.counts.accepted += 1
        self._enqueue(line, entry)
        return self._dispatch(line, now)

    def cancel(self, now: float, job: str) -> list[Action]:
        """Nothing if the job is not here (any more)."""
        entry = self._entries.get(job)
        if entry is None:
            return []
        actions: list[Action] = []
        if entry.on is not None:
            place = self._places[entry.on[:2]]
            place.job, place.due = None, min(place.due, now + self._beat_s)
            actions.append(Interrupt(entry.on, job))
        return [*actions, self._end(entry, now, Fate.CANCELLED)]

    def beat(self, now: float, worker: Worker) -> list[Action]:
        """A worker is up, or still there with nothing to do."""
        place = self._place(worker)
        if place is None or place.busy:
            return []
        place.due = now + self._beat_s
        if not place.ready:
            place.ready = True
            self._lines[worker.partition].idle.append(worker)
        return self._dispatch(self._lines[worker.partition], now)

    def finish(self, now: float, worker: Worker, *, lost: str = "") -> list[Action]:
        """A worker is through with its job and free; `lost`: why there is no result, in one line."""
        place = self._place(worker)
        if place is None or not place.busy:
            return []
        line = self._lines[worker.partition]
        entry = self._entries[place.job] if place.job is not None else None
        place.busy = False
        place.job = None
        place.due = now + self._beat_s
        line.idle.append(worker)
        return [*(self._settle(entry, now, lost) if entry else []), *self._dispatch(line, now)]

    def tick(self, now: float) -> list[Action]:
        """What only the passing of time brings about: workers past their deadline, jobs that waited too long."""
        actions: list[Action] = []
        for entry in [e for e in self._entries.values() if e.on is None and not e.attempts and e.start_by <= now]:
            actions.append(self._end(entry, now, Fate.EXPIRED, "it was not started by its deadline"))
        for place in [p for p in self._places.values() if p.due <= now]:
            actions += self.replace(now, place.worker, "its worker hung")
        return actions

    def replace(self, now: float, worker: Worker, why: str) -> list[Action]:
        """Give a worker up for another."""
        place = self._place(worker)
        if place is None:
            return []
        line = self._lines[worker.partition]
        if worker in line.idle:
            line.idle.remove(worker)
        line.counts.replaced += 1
        entry = self._entries[place.job] if place.job is not None else None
        actions: list[Action] = [Abandon(worker, place.job)]
        actions.append(self._open(worker._replace(life=worker.life + 1), now))
        if entry:
            actions += self._settle(entry, now, why)
        return [*actions, *self._dispatch(line, now)]

    def wait_s(self, partition: str) -> float:
        """Seconds until a quarter of the queue should be through: others were refused too, and will be back."""
        line = self._lines[partition]
        expected = line.mean_s * max(1.0, line.waiting / 4) / line.config.workers
        return min(max(expected, SHORTEST_RETRY_S), LONGEST_RETRY_S)

    def config(self, partition: str) -> Partition:
        """Raises `BadInput` for an unknown partition."""
        return self._line(partition).config

    @property
    def partitions(self) -> list[Partition]:
        return [line.config for line in self._lines.values()]

    @property
    def busy(self) -> int:
        """Jobs that have not ended."""
        return len(self._entries)

    def counts(self, partition: str) -> Counts:
        return self._lines[partition].counts

    def figures(self, partition: str) -> dict[str, int]:
        """Gauges and counts of one partition."""
        line = self._line(partition)
        counts = {name: getattr(line.counts, name) for name in ("accepted", "refused", "retried", "replaced")}
        gauges = {"queued": line.waiting, "running": self.running(partition), "workers": line.config.workers}
        return gauges | counts

    def running(self, partition: str) -> int:
        return sum(place.job is not None for place in self._places.values() if place.worker.partition == partition)

    def workers(self, now: float) -> list[dict[str, object]]:
        """Each worker's place, state (`opening`, `idle`, `busy`), lives, and seconds left until it counts as hung."""
        return [
            {
                "partition": p.worker.partition,
                "number": p.worker.number,
                "state": "busy" if p.busy else "idle" if p.ready else "opening",
                "lives": p.worker.life + 1,
                "due_s": round(p.due - now, 3),
            }
            for p in self._places.values()
        ]

    def room(self, partition: str) -> int:
        """Jobs that would be taken now. Raises `BadInput` for an unknown partition."""
        line = self._line(partition)
        return line.config.queue - line.waiting + len(line.idle)

    def refuse(self, partition: str, jobs: int) -> Full:
        """The error for jobs for which there is no room; counts them as refused."""
        line = self._line(partition)
        line.counts.refused += jobs
        said = f"sandbox: partition {partition} has no room for {jobs} more ({line.waiting} jobs wait); try again later"
        return Full(said, self.wait_s(partition))

    def _line(self, partition: str) -> _Line:
        if partition not in self._lines:
            raise BadInput(f"sandbox: partition {partition[:80]!r} is unknown{nearest(partition, list(self._lines))}")
        return self._lines[partition]

    def _place(self, worker: Worker) -> _Place | None:
        """None for a life that was given up."""
        place = self._places.get(worker[:2])
        return place if place and place.worker == worker else None

    def _open(self, worker: Worker, now: float) -> Action:
        self._places[worker[:2]] = _Place(worker, now + self._open_s)
        return Open(worker)

    def _enqueue(self, line: _Line, entry: _Entry) -> None:
        heapq.heappush(line.heap, (entry.order, entry.id))
        line.waiting += 1

    def _dispatch(self, line: _Line, now: float) -> list[Action]:
        actions: list[Action] = []
        while line.idle and line.heap:
            _, job = heapq.heappop(line.heap)
            entry = self._entries.get(job)
            if entry is None:  # it ended while it waited, and was counted out then
                continue
            worker = line.idle.popleft()
            place = self._places[worker[:2]]
            line.waiting -= 1
            entry.on = worker
            entry.started = now
            entry.attempts = entry.attempts + 1
            place.busy = True
            place.job = job
            place.due = now + entry.allowed_s
            actions.append(Start(worker, job, entry.attempts))
        return actions

    def _settle(self, entry: _Entry, now: float, lost: str) -> list[Action]:
        """A job whose worker is through with it, or gone."""
        entry.on = None
        line = self._lines[entry.partition]
        if not lost:
            ran = now - (entry.started or now)
            line.mean_s = MEMORY * line.mean_s + (1 - MEMORY) * ran if line.mean_s else ran
            return [self._end(entry, now, Fate.DONE, running=True)]
        entry.losses += 1
        if entry.losses >= MAX_LOSSES:
            return [self._end(entry, now, Fate.LOST, f"{lost}, {entry.losses} times", running=True)]
        line.counts.retried += 1
        self._enqueue(line, entry)
        return []

    def _end(self, entry: _Entry, now: float, fate: Fate, reason: str = "", *, running: bool = False) -> Action:
        line = self._lines[entry.partition]
        if entry.on is None and not running:
            line.waiting -= 1
        del self._entries[entry.id]
        if len(line.heap) > 2 * line.waiting + 64:
            line.heap = [(order, job) for order, job in line.heap if job in self._entries]
            heapq.heapify(line.heap)
        line.counts.ended[fate] += 1
        started = entry.started if entry.started is not None else now
        return End(entry.id, entry.partition, fate, entry.attempts, started - entry.submitted, now - started, reason)
