"""The sandbox as a service: `broker.py` decides, threads carry it out, a ledger keeps what was promised.

    with Service([Partition(name="default", workers=2)]) as service:
        result = service.run(Job(source=b"print(1)"), priority=1)

A job has an id, its own or one that it is given. Sending an id again attaches to the job that has it, or to its result, for as
long as that is kept; so whoever lost an answer may ask again without the job running twice.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from rollkeel.errors import BadInput, RollkeelError, RunStopped
from rollkeel.sandbox.broker import Abandon, Action, Broker, End, Fate, Interrupt, Open, Partition, Start, Worker
from rollkeel.sandbox.client import CageFailure
from rollkeel.sandbox.codec import digest
from rollkeel.sandbox.job import Job, Level, Limits, Result, Status
from rollkeel.sandbox.metrics import Timings
from rollkeel.sandbox.records import Conflict, Record, Records, State, View
from rollkeel.sandbox.sandbox import Handle, Sandbox

GRACE_S = 20.0
"""Seconds beyond its wall limit after which a job's worker counts as hung: building a cage, reading results."""
TICK_S = 0.1
SLACK = 8
"""Threads of workers that were given up and have not come back; with more of them the whole sandbox is replaced."""
QUEUE_S = 600.0
MAX_QUEUE_S = 86400.0
PRIORITIES = range(-1000, 1001)
ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Closing(RollkeelError):
    """The service is about to end: it takes no more jobs, and this one has surely no result yet."""

    exit_code = 3


class Service:
    """Runs jobs of several partitions; thread-safe. `close` (or `with`) ends it.

    `state`: folder in which promises outlive this process; without one they end with it. `grace_s`: seconds beyond a job's
    wall limit after which its worker is given up and the job run once more.
    """

    def __init__(
        self,
        partitions: Sequence[Partition] = (Partition(name="default"),),
        *,
        minimum: Level = Level.NAMESPACES,
        state: Path | None = None,
        grace_s: float = GRACE_S,
        keep_s: float = 900.0,
    ) -> None:
        self._broker = Broker(partitions)
        self._grace_s = grace_s
        self._permits = sum(p.workers for p in partitions) + SLACK
        self._minimum = minimum
        self._lock = threading.Lock()
        self._after: list[Callable[[], object]] = []
        self._records = Records(state, keep_s=keep_s)
        self._timings = Timings(p.name for p in partitions)
        self._boxes: dict[Worker, queue.SimpleQueue[tuple[Record, Handle, int] | None]] = {}
        self._threads: set[threading.Thread] = set()
        self._stuck: set[Worker] = set()
        self._draining = self._closed = False
        self._ended = threading.Event()
        self.gauges: dict[str, Callable[[], int]] = {}
        """Further figures for `metrics`, by name."""
        self._sandbox = self._new_sandbox()
        with self._step() as now:
            self._apply(self._broker.open(now), now)
            for record in self._records.recover(now):
                self._resume(record, now)
        self._spawn(self._watch, "watch")

    def __enter__(self) -> Service:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def level(self) -> Level:
        """Isolation of every job."""
        return self._sandbox.level

    @property
    def sandbox(self) -> Sandbox:
        return self._sandbox

    @property
    def partitions(self) -> list[Partition]:
        """The first one takes jobs that name none."""
        return self._broker.partitions

    @property
    def draining(self) -> bool:
        return self._draining

    def defaults(self, partition: str | None = None) -> Limits:
        """Limits of jobs that name none. Raises `BadInput` for an unknown partition."""
        return self._config(partition).limits

    def run(
        self, job: Job, *, partition: str | None = None, priority: int = 0, queue_s: float = QUEUE_S, id: str | None = None
    ) -> Result:
        """Submit and wait. Raises what `submit` raises, and `RunStopped` for a job that has no result."""
        name = self.submit(job, partition=partition, priority=priority, queue_s=queue_s, id=id, kept=False)
        return self.watch(name).result().require()

    def submit(
        self,
        job: Job,
        *,
        partition: str | None = None,
        priority: int = 0,
        queue_s: float = QUEUE_S,
        id: str | None = None,
        kept: bool = True,
    ) -> str:
        """Take a job and return its id. `priority`: higher first; `queue_s`: seconds until it must have started.

        `kept`: it runs though nobody waits for it, and after a restart too; otherwise it ends with the last who waits. Raises `Refused`
        below the minimum level, `Full`, `Closing`, `Conflict` for an id of another job, `BadInput` for what can never run.
        """
        return self.submit_all([job], partition=partition, priority=priority, queue_s=queue_s, ids=[id], kept=kept)[0]

    def submit_all(
        self,
        jobs: Sequence[Job],
        *,
        partition: str | None = None,
        priority: int = 0,
        queue_s: float = QUEUE_S,
        ids: Sequence[str | None] | None = None,
        kept: bool = True,
    ) -> list[str]:
        """All of them or none; see `submit`."""
        config = self._config(partition)
        names = [uuid.uuid4().hex if name is None else name for name in ids or [None] * len(jobs)]
        for job, name in zip(jobs, names, strict=True):
            _check(job, name, config, priority, queue_s)
        if len(set(names)) < len(names):
            raise BadInput("sandbox: two jobs of one request have the same id; give each its own")
        marks = [digest(job, config.name) for job in jobs]
        if any(job.untrusted for job in jobs):
            self._sandbox.require()
        with self._step() as now:
            if self._draining:
                raise Closing("sandbox: the service is shutting down; ask again when it is back")
            new = []
            for job, name, mark in zip(jobs, names, marks, strict=True):
                known = self._records.get(name)
                if known and known.digest != mark:
                    raise Conflict(f"sandbox: id {name} belongs to another job; choose a new one")
                if known and known.answers:
                    self._adopt(known, kept)
                else:
                    new.append(Record(name, mark, job, config.name, priority, queue_s, kept))
            if len(new) > self._broker.room(config.name):
                raise self._broker.refuse(config.name, len(new))
            for record in new:
                self._enter(record, now)
        return names

    def watch(self, id: str) -> Future[View]:
        """How the job ends, when it does. Raises `BadInput` for an unknown id; the future raises `Closing`."""
        future: Future[View] = Future()
        with self._step():
            record = self._record(id)
            if record.ended:
                future.set_result(record.view())
            else:
                record.waiters.add(future)
        return future

    def unwatch(self, id: str, future: Future[View]) -> None:
        """Nobody waits at `future` any more; a job that is not kept ends with the last who does."""
        with self._step() as now:
            record = self._records.get(id)
            if record is None or future not in record.waiters:
                return
            record.waiters.discard(future)
            if not record.waiters and not record.kept:
                self._apply(self._broker.cancel(now, id), now)

    def view(self, id: str) -> View:
        """The job now. Raises `BadInput` for an unknown id."""
        with self._step():
            return self._record(id).view()

    def cancel(self, id: str) -> View:
        """End a job that waits or runs; one that has ended stays as it is. Raises `BadInput` for an unknown id."""
        with self._step() as now:
            record = self._record(id)
            self._apply(self._broker.cancel(now, id), now)
            return record.view()

    def health(self) -> dict[str, Any]:
        """`ok`; `draining`; `fault`: one line or empty; `level`; `workers`: see `Broker.workers`."""
        with self._lock:
            workers = self._broker.workers(time.monotonic())
            fault = self._records.fault
            ok = not (self._draining or fault)
            return {"ok": ok, "draining": self._draining, "fault": fault, "level": _name(self.level), "workers": workers}

    def metrics(self) -> dict[str, Any]:
        """By partition: gauges `queued`, `running`, `workers`; counts since the start; `latency` in seconds by stage."""
        with self._lock:
            rows = {}
            for config in self.partitions:
                counts = self._broker.counts(config.name)
                gone = {fate.value: counts.ended[fate] for fate in (Fate.CANCELLED, Fate.EXPIRED)}
                rows[config.name] = {
                    "queued": self._broker.queued(config.name),
                    "running": self._broker.running(config.name),
                    "workers": config.workers,
                    "accepted": counts.accepted,
                    "refused": counts.refused,
                    "retried": counts.retried,
                    "replaced": counts.replaced,
                    "ended": dict(self._timings.statuses[config.name]) | gone,
                    "latency": self._timings.summary(config.name),
                }
            kept = self._records.ended
        further = {name: gauge() for name, gauge in self.gauges.items()}
        common = {"kept_results": kept, "level": int(self.level), "started": self._timings.started, "terminals": 0}
        return {"partitions": rows} | common | further

    def drain(self) -> None:
        """Take no more jobs from now on."""
        self._draining = True

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more jobs, wait up to `drain_s` for those that are here, end everything. Kept jobs resume from the ledger."""
        self.drain()
        until = time.monotonic() + drain_s
        while time.monotonic() < until and self._broker.busy:
            time.sleep(0.02)
        with self._step():
            if self._closed:
                return
            self._closed = True
            self._ended.set()
            for record in self._records.running():
                for future in record.waiters:
                    self._after.append(lambda f=future: _fail(f, Closing("sandbox: the service ended before the job did")))
            for box in self._boxes.values():
                box.put(None)
        self._sandbox.close()
        for thread in list(self._threads):
            thread.join(timeout=10)
        self._records.close()

    @contextlib.contextmanager
    def _step(self) -> Iterator[float]:
        """The lock, with the time; what others are told is told after it is free again."""
        with self._lock:
            try:
                yield time.monotonic()
            finally:
                after, self._after = self._after, []
        for call in after:
            call()

    def _adopt(self, record: Record, kept: bool) -> None:
        """A job that is here is asked for again, perhaps with more of a promise; lock held."""
        if kept and not record.kept:
            record.kept = True
            if not record.ended:
                self._records.add(record)

    def _config(self, partition: str | None) -> Partition:
        return self._broker.config(self.partitions[0].name if partition is None else partition)

    def _record(self, id: str) -> Record:
        record = self._records.get(id)
        if record is None:
            raise BadInput(f"sandbox: no job with id {id[:64]!r}; it never was here or is forgotten")
        return record

    def _enter(self, record: Record, now: float) -> None:
        """Lock held."""
        actions = self._submit(record, now)
        try:
            self._records.add(record)
        except RunStopped:
            self._broker.cancel(now, record.id)
            raise
        self._apply(actions, now)

    def _resume(self, record: Record, now: float) -> None:
        """A job of a former life; lock held."""
        self._records.enter(record)
        try:
            actions = self._submit(record, now, forced=True)
        except BadInput as error:  # the partitions were others then
            self._records.end(record, now, State.FAILED, error=str(error))
            return
        self._apply(actions, now)

    def _submit(self, record: Record, now: float, *, forced: bool = False) -> list[Action]:
        assert record.job is not None
        return self._broker.submit(
            now,
            record.id,
            partition=record.partition,
            priority=record.priority,
            start_by=now + record.queue_s,
            allowed_s=record.job.limits.wall_s + self._grace_s,
            forced=forced,
        )

    def _apply(self, actions: Sequence[Action], now: float, result: Result | None = None) -> None:
        """Lock held. `result`: of the job that just ended."""
        for action in actions:
            match action:
                case Open(worker):
                    self._boxes[worker] = queue.SimpleQueue()
                    self._spawn(self._work, "-".join(map(str, worker)), worker, self._boxes[worker])
                case Start(worker, job, attempt):
                    record = self._record(job)
                    record.state, record.handle, record.broken = State.RUNNING, Handle(), ""
                    self._records.note(job, "start", attempt=attempt)
                    self._boxes[worker].put((record, record.handle, attempt))
                case Interrupt(_, job):
                    self._interrupt(job, "cancelled")
                case Abandon(worker, job):
                    self._boxes.pop(worker).put(None)
                    self._stuck.add(worker)
                    if job is not None:
                        self._interrupt(job, "its worker hung")
                case End():
                    self._end(action, now, result)
        if len(self._stuck) > SLACK:
            self._stuck.clear()
            old, self._sandbox = self._sandbox, self._new_sandbox()
            self._spawn(old.close, "close")

    def _interrupt(self, job: str, why: str) -> None:
        handle = self._record(job).handle
        if handle:
            self._after.append(lambda: handle.end(why))

    def _end(self, end: End, now: float, result: Result | None) -> None:
        record = self._record(end.job)
        if end.fate is Fate.LOST and not record.broken:
            result = Result(status=Status.KILLED, level=self.level, reason=end.reason, attempts=end.attempts)
        if end.fate is Fate.LOST and record.broken:
            self._records.end(record, now, State.FAILED, error=record.broken)
        elif end.fate in (Fate.DONE, Fate.LOST):
            assert result is not None
            self._records.end(record, now, State.DONE, result=result)
        else:
            self._records.end(record, now, State(end.fate.value), error=end.reason)
        if record.state in (State.DONE, State.FAILED):
            status = record.result.status.value if record.result else State.FAILED.value
            self._timings.add(end.partition, status, end.waited_s, end.ran_s)
        view = record.view()
        waiters, record.waiters = record.waiters, set()
        self._after.extend(lambda f=future: _tell(f, view) for future in waiters)

    def _work(self, worker: Worker, box: queue.SimpleQueue[tuple[Record, Handle, int] | None]) -> None:
        """One life of a worker: a thread, for as long as its reports count."""
        try:
            while True:
                with self._step() as now:
                    self._apply(self._broker.beat(now, worker), now)
                try:
                    order = box.get(timeout=1.0)
                except queue.Empty:
                    continue
                if order is None:
                    return
                record, handle, attempt = order
                result, lost, broken = self._attempt(record, handle, attempt)
                with self._step() as now:
                    if self._closed:
                        return  # what ends now was ended by the end of the service, and is no result
                    if worker in self._boxes:
                        record.broken = broken
                    self._apply(self._broker.finish(now, worker, lost=lost), now, result)
        finally:
            with self._lock:
                self._stuck.discard(worker)
                self._threads.discard(threading.current_thread())

    def _attempt(self, record: Record, handle: Handle, attempt: int) -> tuple[Result | None, str, str]:
        """Result; why there is none; and the same if that says nothing about the program."""
        assert record.job is not None
        try:
            result = self._sandbox.run(record.job, handle)
        except (RollkeelError, OSError) as error:
            why = str(error)
            return None, why, why if isinstance(error, CageFailure) or not handle.reason else ""
        if result.status is Status.KILLED:
            return None, result.reason, ""
        return replace(result, attempts=attempt), "", ""

    def _watch(self) -> None:
        while not self._ended.wait(TICK_S):
            with self._step() as now:
                if not self._closed:
                    self._apply(self._broker.tick(now), now)
                    self._records.forget(now)

    def _new_sandbox(self) -> Sandbox:
        return Sandbox(workers=self._permits, minimum=self._minimum, attempts=1)

    def _spawn(self, target: Callable[..., None], name: str, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=f"sandbox-{name}", daemon=True)
        self._threads.add(thread)
        thread.start()


def _check(job: Job, name: str, config: Partition, priority: int, queue_s: float) -> None:
    if not ID.fullmatch(name):
        raise BadInput("sandbox: id: expected up to 64 of a-z, A-Z, 0-9, '-', '_', '.'")
    if priority not in PRIORITIES:
        raise BadInput(f"sandbox: priority: expected {PRIORITIES[0]} to {PRIORITIES[-1]}, got {priority}")
    if not 0 < queue_s <= MAX_QUEUE_S:
        raise BadInput(f"sandbox: queue_s: expected seconds up to {MAX_QUEUE_S:g}, got {queue_s}")
    ceiling = asdict(config.ceiling)
    for limit, value in asdict(job.limits).items():
        if value > ceiling[limit]:
            raise BadInput(f"sandbox: {limit}={value:g} is over the {ceiling[limit]:g} of partition {config.name}; ask for less")


def _name(level: Level) -> str:
    return level.name.lower()


def _tell(future: Future[View], view: View) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(view)


def _fail(future: Future[View], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
