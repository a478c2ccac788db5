"""Terminal sessions of a service: limited in number, closed when nobody uses them."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from rollkeel_sandbox.errors import BadInput
from rollkeel_sandbox.job import Result
from rollkeel_sandbox.partition import Full
from rollkeel_sandbox.records import Conflict, Unknown
from rollkeel_sandbox.service import Service
from rollkeel_sandbox.terminal import SessionEnded, Terminal, TerminalLimits

MAX_OPEN, IDLE_S = 8, 600.0
SWEEP_S = 1.0
MAX_COMMAND_S = 600.0


class Session(Protocol):
    """A shell with a file system that is thrown away at `close`: a `Terminal`."""

    @property
    def alive(self) -> bool: ...

    def run(self, command: str, timeout: float) -> Result: ...

    def close(self) -> None: ...


@dataclass
class _Open:
    session: Session
    used: float
    busy: bool = False


class Sessions:
    """By id; thread-safe. `factory` opens one under the limits it is given; None where there are no sessions."""

    def __init__(
        self, factory: Callable[[Mapping[str, int]], Session] | None, *, most: int = MAX_OPEN, idle_s: float = IDLE_S
    ) -> None:
        self._factory = factory
        self._most = most
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._opening = 0
        self._ended = threading.Event()
        self._sweeper: threading.Thread | None = None

    @property
    def available(self) -> bool:
        return self._factory is not None and self._most > 0

    def count(self) -> int:
        return len(self._open) + self._opening

    def open(self, limits: Mapping[str, int]) -> str:
        """`limits`: those that are not the usual ones. Raises `Full` when as many are open as may be, `Unknown` where there are none at all."""
        if self._factory is None or self._most < 1:
            raise Unknown("sandbox: this service has no terminal sessions")
        with self._lock:
            if self._ended.is_set():
                raise Full("sandbox: the service is shutting down", 1.0)
            if self.count() >= self._most:
                raise Full(f"sandbox: {self._most} terminal sessions are open; close one", min(self._idle_s, 60.0))
            self._opening += 1
            if self._sweeper is None:
                self._sweeper = threading.Thread(target=self._sweep, name="sandbox-sessions", daemon=True)
                self._sweeper.start()
        try:
            session = self._factory(limits)
        finally:
            with self._lock:
                self._opening -= 1
        id = uuid.uuid4().hex
        with self._lock:
            self._open[id] = _Open(session, time.monotonic())
        return id

    def exec(self, id: str, command: str, timeout_s: float) -> tuple[Result, bool]:
        """What came of one command, and whether the session takes further ones.

        Raises `Unknown` for a session that is not open, `Conflict` while it is at another command.
        """
        if not 0 < timeout_s <= MAX_COMMAND_S:
            raise BadInput(f"sandbox: timeout_s: expected seconds up to {MAX_COMMAND_S:g}, got {timeout_s}")
        with self._using(id) as entry:
            try:
                result, alive = entry.session.run(command, timeout_s), entry.session.alive
            except SessionEnded as error:
                raise Unknown(f"sandbox: {error}") from None
        if not alive:
            with contextlib.suppress(Unknown, Conflict):
                self.close(id)
        return result, alive

    def close(self, id: str) -> None:
        """Raises `Unknown` for a session that is not open, `Conflict` while it is at a command."""
        with self._lock:
            entry = self._idle(id)
            del self._open[id]
        entry.session.close()

    def close_all(self) -> None:
        self._ended.set()
        for id in list(self._open):
            with contextlib.suppress(Unknown, Conflict):  # one at work ends with the sandbox
                self.close(id)

    def _idle(self, id: str) -> _Open:
        """Lock held."""
        entry = self._open.get(id)
        if entry is None:
            raise Unknown(f"sandbox: no terminal session {id[:64]!r}; it never was open or is closed")
        if entry.busy:
            raise Conflict("sandbox: the session is at another command; wait for its end")
        return entry

    @contextlib.contextmanager
    def _using(self, id: str) -> Iterator[_Open]:
        with self._lock:
            entry = self._idle(id)
            entry.busy = True
        try:
            yield entry
        finally:
            entry.busy, entry.used = False, time.monotonic()

    def _sweep(self) -> None:
        while not self._ended.wait(min(SWEEP_S, self._idle_s / 4)):
            until = time.monotonic() - self._idle_s
            with self._lock:
                old = [id for id, entry in self._open.items() if not entry.busy and entry.used < until]
            for id in old:
                with contextlib.suppress(Unknown, Conflict):
                    self.close(id)


def factory(service: Service) -> Callable[[Mapping[str, int]], Session]:
    """How a service opens terminal sessions: shells in cages of its sandbox, beside its workers."""
    return lambda limits: Terminal(service.sandbox, TerminalLimits(idle_s=2 * IDLE_S, **limits))
