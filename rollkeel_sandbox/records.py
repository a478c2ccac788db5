"""The jobs that a service knows: those that wait or run, and for a while those that have ended. Its memory and its ledger."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollkeel_sandbox.client import CageFailure
from rollkeel_sandbox.codec import decode_job, decode_result, encode_job, encode_result
from rollkeel_sandbox.errors import BadInput, RunStopped, SandboxError
from rollkeel_sandbox.job import Job, Result, Status
from rollkeel_sandbox.ledger import Ledger
from rollkeel_sandbox.sandbox import Handle

MAX_RESUMES = 5
"""A job that was running at the end of this many servers is not run again: it may be what ended them."""
MAX_KEPT, MAX_KEPT_BYTES = 50_000, 256 << 20
"""Results, and what programs printed and left in them; beyond that the oldest are forgotten."""


class Conflict(SandboxError):
    """An id that belongs to another job."""


class Unknown(BadInput):
    """An id of nothing that is here."""


class State(enum.StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    """It has a result."""
    FAILED = "failed"
    """No cage could be built for it, twice. Never a verdict about the program."""
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """It was not started in time."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A job as it was at one moment."""

    id: str
    state: State
    result: Result | None
    """Of a job that is done."""
    error: str
    """Of one that ended without a result: one line."""

    def require(self) -> Result:
        """Raises `CageFailure` or `RunStopped` if there is no result."""
        if self.result is None:
            kind = CageFailure if self.state is State.FAILED else RunStopped
            raise kind(self.error or f"sandbox: job {self.id} is {self.state.value}")
        return self.result


@dataclass(eq=False)
class Record:
    """One job of the service."""

    id: str
    digest: str
    job: Job | None
    """None once it has ended."""
    partition: str
    priority: int
    queue_s: float
    kept: bool
    state: State = State.QUEUED
    result: Result | None = None
    error: str = ""
    former: int = 0
    """How often it was started by servers that ended before it did."""
    broken: str = ""
    """Why its last run has no result, if that says nothing about the program."""
    handle: Handle | None = None
    ended_at: float = 0.0
    waiters: set[Future[View]] = field(default_factory=set)

    @property
    def ended(self) -> bool:
        return self.state not in (State.QUEUED, State.RUNNING)

    @property
    def answers(self) -> bool:
        """Who asks for this id again is answered by this job; one without a result may as well run anew."""
        return not self.ended or self.state is State.DONE

    def view(self) -> View:
        return View(id=self.id, state=self.state, result=self.result, error=self.error)


class Records:
    """By id. Not thread-safe: the caller locks."""

    def __init__(self, folder: Path | None, *, keep_s: float) -> None:
        self._ledger = Ledger(folder) if folder else None
        self._all: dict[str, Record] = {}
        self._order: dict[str, int] = {}
        """Ended ones, oldest first, with the bytes of their results."""
        self._bytes = 0
        self._keep_s = keep_s
        self.fault = ""
        """Why the last line could not be written, or empty."""

    def get(self, id: str) -> Record | None:
        return self._all.get(id)

    def running(self) -> list[Record]:
        return [r for r in self._all.values() if not r.ended]

    @property
    def ended(self) -> int:
        return len(self._order)

    def add(self, record: Record) -> None:
        """Raises `RunStopped` if that cannot be promised."""
        job = encode_job(record.job) if record.kept and record.job else None
        fields = {name: getattr(record, name) for name in ("digest", "partition", "priority", "queue_s")}
        self._append(record.id, "accept", **fields, job=job)
        self.enter(record)

    def enter(self, record: Record) -> None:
        """One that the ledger has already; in place of one of the same id that ended without a result."""
        self._drop(record.id)
        self._all[record.id] = record

    def end(self, record: Record, now: float, state: State, *, result: Result | None = None, error: str = "") -> None:
        """Written down before anybody is told."""
        if result:
            self.note(record.id, "done", result=encode_result(result))
        else:
            self.note(record.id, state.value, error=error)
        self._keep(record, now, state, result, error)

    def note(self, id: str, event: str, **fields: Any) -> None:
        """A line that cannot be written is a fault, shown by `health`, and not the end of the job."""
        try:
            self._append(id, event, **fields)
        except RunStopped:
            return  # kept in `fault`

    def recover(self, now: float) -> list[Record]:
        """What the ledger holds of former lives. Returns kept jobs that must run now; others that had not ended are forgotten."""
        if not self._ledger:
            return []
        rows: dict[str, dict[str, Any]] = {}
        for row in self._ledger.load():
            known = rows.get(row["id"], {})
            if row["event"] == "accept":
                rows[row["id"]] = row | {"started": False, "resumes": 0, "starts": 0}
            elif known and row["event"] in ("start", "resume"):
                known["started"] = row["event"] == "start"
                known[f"{row['event']}s"] += 1
            elif known:
                known["end"] = row
        return [record for row in rows.values() if (record := self._recovered(row, now))]

    def forget(self, now: float) -> None:
        """Ended jobs beyond their time or beyond what can be kept."""
        while self._order:
            oldest = next(iter(self._order))
            small = self._bytes <= MAX_KEPT_BYTES and len(self._order) <= MAX_KEPT
            if small and self._all[oldest].ended_at + self._keep_s > now:
                break
            self._drop(oldest)
            self._forget(oldest)

    def close(self) -> None:
        if self._ledger:
            self._ledger.close()

    def _append(self, id: str, event: str, **fields: Any) -> None:
        if not self._ledger:
            return
        try:
            self._ledger.append(id, event, **fields)
        except RunStopped as error:
            self.fault = str(error)
            raise
        self.fault = ""

    def _forget(self, id: str) -> None:
        if self._ledger:
            self._ledger.forget(id)

    def _keep(self, record: Record, now: float, state: State, result: Result | None, error: str) -> None:
        self._all[record.id] = record
        record.state = state
        record.result = result
        record.error = error
        record.job = None
        record.handle = None
        record.ended_at = now
        size = 0
        if result:
            size = len(result.stdout) + len(result.stderr) + sum(map(len, result.files.values()))
        self._order[record.id] = size
        self._bytes += size

    def _drop(self, id: str) -> None:
        self._all.pop(id, None)
        self._bytes -= self._order.pop(id, 0)

    def _recovered(self, row: dict[str, Any], now: float) -> Record | None:
        """A record that must run, or None: it ended, or nobody was promised anything."""
        id, end = row["id"], row.get("end")
        record = Record(
            id, row["digest"], None, row["partition"], row["priority"], row["queue_s"], row["job"] is not None
        )
        if end and "result" in end:
            self._keep(record, now, State.DONE, decode_result(end["result"]), "")
        elif end and record.kept:
            self._keep(record, now, State(end["event"]), None, end.get("error", ""))
        elif end or not record.kept:
            self._forget(id)
        elif row["resumes"] >= MAX_RESUMES:
            why = f"it was running at the end of {MAX_RESUMES} servers"
            self.end(record, now, State.DONE, result=Result(status=Status.KILLED, reason=why, attempts=MAX_RESUMES))
        else:
            record.job, record.former = decode_job(row["job"]), row["starts"]
            if row["started"]:
                self.note(id, "resume")
            return record
        return None


def tell(future: Future[View], view: View) -> None:
    """Nothing if nobody waits there any more."""
    if future.set_running_or_notify_cancel():
        future.set_result(view)


def fail(future: Future[View], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
