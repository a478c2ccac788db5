"""The sandbox as a service: `broker.py` decides, threads carry it out, a ledger keeps what was promised.

    with Service([Partition(name="default", workers=2)]) as service:
        result = service.run(Job(source=b"print(1)"), priority=1)

A job has an id, its own or one that it is given. Sending an id again attaches to the job that has it, or to its result, for as
long as that is kept; so whoever lost an answer may ask again without the job running twice.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from rollkeel_sandbox.broker import Abandon, Action, Broker, End, Fate, Interrupt, Open, Start, Worker
from rollkeel_sandbox.codec import digest
from rollkeel_sandbox.crew import Crew, Order, Outcome
from rollkeel_sandbox.errors import BadInput, RunStopped
from rollkeel_sandbox.job import Closes, Job, Level, Limits, Result, Status
from rollkeel_sandbox.metrics import Timings
from rollkeel_sandbox.partition import QUEUE_S, Closing, Partition
from rollkeel_sandbox.records import Conflict, Record, Records, State, Unknown, View, fail, tell
from rollkeel_sandbox.sandbox import Handle, Sandbox

GRACE_S = 20.0
"""Seconds beyond its wall limit after which a job's worker counts as hung: building a cage, reading results."""
TICK_S = 0.1


class Service(Closes):
    """Runs jobs of several partitions; thread-safe. `close` (or `with`) ends it.

    `state`: folder in which promises outlive this process; without one they end with it. `grace_s`: seconds beyond a job's
    wall limit after which its worker is given up and the job run once more.
    """

    def __init__(
        self,
        partitions: Sequence[Partition] = (Partition(name="default"),),
        *,
        minimum: Level = Level.NAMESPACES,
        backend: str = "auto",
        image: Path | None = None,
        state: Path | None = None,
        grace_s: float = GRACE_S,
        keep_s: float = 900.0,
    ) -> None:
        self._broker = Broker(partitions)
        self._grace_s = grace_s
        self.minimum = minimum
        """Below it untrusted jobs are refused."""
        self._lock = threading.Lock()
        self._after: list[Callable[[], object]] = []
        self._records = Records(state, keep_s=keep_s)
        self._timings = Timings(p.name for p in partitions)
        self.draining = self._closed = False
        self._ended = threading.Event()
        self.gauges: dict[str, Callable[[], int]] = {}
        """Further figures for `metrics`, by name."""
        workers = sum(p.workers for p in partitions)
        self._crew = Crew(workers, minimum, backend, image, beat=self._beat, finish=self._finish)
        with self._step() as now:
            self._apply(self._broker.open(now), now)
            for record in self._records.recover(now):
                self._resume(record, now)
        self._clock = threading.Thread(target=self._watch, name="sandbox-clock", daemon=True)
        self._clock.start()

    @property
    def level(self) -> Level:
        """Isolation of every job."""
        return self._crew.sandbox.level

    @property
    def sandbox(self) -> Sandbox:
        """In which everything runs; after too many hung workers it is another one."""
        return self._crew.sandbox

    @property
    def partitions(self) -> list[Partition]:
        """The first one takes jobs that name none."""
        return self._broker.partitions

    def defaults(self, partition: str | None = None) -> Limits:
        """Limits of jobs that name none. Raises `BadInput` for an unknown partition."""
        return self._config(partition).limits

    def run(self, job: Job, *, id: str | None = None, **placed: Any) -> Result:
        """Submit and wait. `placed`: as `submit_all`. Raises what that raises, and `RunStopped` for a job that has no result."""
        return self.watch(self.submit(job, id=id, kept=False, **placed)).result().require()

    def submit(self, job: Job, *, id: str | None = None, **placed: Any) -> str:
        """Take a job and return its id; see `submit_all`."""
        return self.submit_all([job], ids=[id], **placed)[0]

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
        """Take all of them or none; their ids. `priority`: higher first; `queue_s`: seconds until they must have started.

        `kept`: they run though nobody waits for them, and after a restart too; otherwise a job ends with the last who waits. Raises
        `Refused` below the minimum level, `Full`, `Closing`, `Conflict` for an id of another job, `BadInput` for what can never run.
        """
        config = self._config(partition)
        names = [uuid.uuid4().hex if name is None else name for name in ids or [None] * len(jobs)]
        for job, name in zip(jobs, names, strict=True):
            config.check(job, name, priority, queue_s)
            self._possible(job)
        if len(set(names)) < len(names):
            raise BadInput("sandbox: two jobs of one request have the same id; give each its own")
        marks = [digest(job, config.name) for job in jobs]
        with self._step() as now:
            if self.draining:
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

    def check(self, job: Job, partition: str | None = None) -> None:
        """Raises what `submit` would raise for this job whatever the queue holds."""
        self._config(partition).check(job)
        self._possible(job)
        if self.draining:
            raise Closing("sandbox: the service is shutting down; ask again when it is back")

    def watch(self, id: str) -> Future[View]:
        """How the job ends, when it does. Raises `Unknown` for an id that is not here; the future raises `Closing`."""
        future: Future[View] = Future()
        with self._step():
            record = self._record(id)
            if record.ended:
                future.set_result(record.view())
            elif self._closed:
                future.set_exception(Closing("sandbox: the service ended before the job did"))
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
        """The job now. Raises `Unknown` for an id that is not here."""
        with self._step():
            return self._record(id).view()

    def cancel(self, id: str) -> View:
        """End a job that waits or runs; one that has ended stays as it is. Raises `Unknown` for an id that is not here."""
        with self._step() as now:
            record = self._record(id)
            self._apply(self._broker.cancel(now, id), now)
            return record.view()

    def health(self) -> dict[str, Any]:
        """`ok`; `draining`; `fault`: one line or empty; `level`; `started`; `workers`, `partitions`: see `Broker`."""
        with self._lock:
            workers = self._broker.workers(time.monotonic())
            fault = self._records.fault
            ok = not (self.draining or fault)
            said = {"ok": ok, "draining": self.draining, "fault": fault, "level": self.level.name.lower()}
            rows = {p.name: self._broker.figures(p.name) for p in self.partitions}
            return said | {"workers": workers, "partitions": rows, "started": self._timings.started}

    def metrics(self) -> dict[str, Any]:
        """By partition: gauges `queued`, `running`, `workers`; counts since the start; `latency` in seconds by stage."""
        with self._lock:
            rows = {}
            for config in self.partitions:
                ended = self._broker.counts(config.name).ended
                gone = {fate.value: ended[fate] for fate in (Fate.CANCELLED, Fate.EXPIRED)}
                timed = {
                    "ended": self._timings.statuses[config.name] | gone,
                    "latency": self._timings.summary(config.name),
                }
                rows[config.name] = self._broker.figures(config.name) | timed
            kept = self._records.ended
        further = {name: gauge() for name, gauge in self.gauges.items()}
        common = {"kept_results": kept, "level": int(self.level), "started": self._timings.started, "terminals": 0}
        return {"partitions": rows} | common | further

    def drain(self) -> None:
        """Take no more jobs from now on."""
        self.draining = True

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
            error = Closing("sandbox: the service ended before the job did")
            for record in self._records.running():
                self._after.extend(partial(fail, future, error) for future in record.waiters)
        self._crew.close()
        self._clock.join(timeout=10)
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

    def _possible(self, job: Job) -> None:
        self._crew.sandbox.require_tools(job.kind)
        if job.untrusted:
            self._crew.sandbox.require()

    def _config(self, partition: str | None) -> Partition:
        return self._broker.config(self.partitions[0].name if partition is None else partition)

    def _record(self, id: str) -> Record:
        record = self._records.get(id)
        if record is None:
            raise Unknown(f"sandbox: no job with id {id[:64]!r}; it never was here or is forgotten")
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
                    self._crew.open(worker)
                case Start(worker, job, attempt):
                    self._start(worker, self._record(job), attempt)
                case Interrupt(_, job):
                    self._interrupt(job, "cancelled", hung=False)
                case Abandon(worker, job):
                    self._crew.abandon(worker)
                    if job is not None:
                        self._interrupt(job, "its worker hung", hung=True)
                case End():
                    self._end(action, now, result)

    def _start(self, worker: Worker, record: Record, attempt: int) -> None:
        assert record.job is not None
        record.state = State.RUNNING
        record.handle = Handle()
        record.broken = ""
        number = record.former + attempt
        self._records.note(record.id, "start", attempt=number)
        self._crew.start(worker, Order(record.id, record.job, record.handle, number))

    def _interrupt(self, job: str, why: str, *, hung: bool) -> None:
        if handle := self._record(job).handle:
            handle.end(why, hung=hung)

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
        self._after.extend(partial(tell, future, view) for future in waiters)

    def _beat(self, worker: Worker) -> None:
        with self._step() as now:
            self._apply(self._broker.beat(now, worker), now)

    def _finish(self, worker: Worker, order: Order, outcome: Outcome) -> None:
        with self._step() as now:
            if self._closed:
                return
            record = self._records.get(order.id)
            if record and record.handle is order.handle:
                record.broken = outcome.broken
            self._apply(self._broker.finish(now, worker, lost=outcome.lost), now, outcome.result)

    def _watch(self) -> None:
        while not self._ended.wait(TICK_S):
            with self._step() as now:
                if not self._closed:
                    self._apply(self._broker.tick(now), now)
                    self._records.forget(now)
