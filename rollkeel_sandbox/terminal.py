"""Terminal sessions: a shell in a cage of its own, whose files, variables and processes last from command to command.

with Terminal(sandbox) as terminal:
    terminal.run("cd /tmp && x=1")
    print(terminal.run("pwd; echo $x").stdout)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from rollkeel_sandbox import client
from rollkeel_sandbox.enclosure import Enclosure
from rollkeel_sandbox.errors import BadInput, RunStopped
from rollkeel_sandbox.job import Closes, Job, Limits, Result, Status
from rollkeel_sandbox.sandbox import ATTEMPTS, Sandbox
from rollkeel_sandbox.session import GIVE_UP_S, MAX_COMMAND, SHELL


@dataclass(frozen=True, kw_only=True)
class TerminalLimits(Limits):
    """Of a whole session with all its processes; output is that of one command."""

    wall_s: float = 3600.0
    """Seconds from the session's start to its end."""
    idle_s: float = 600.0
    """Seconds between two commands until the session ends."""
    cpu_s: float = 600.0
    memory_mb: int = 1024
    processes: int = 64
    scratch_mb: int = 256


class SessionEnded(RunStopped):
    """The session is over: it reached a limit, was closed or was lost. Nothing of it is left."""


class Terminal(Closes):
    """A stateful shell session: bash where it is installed, sh elsewhere.

    It takes a cage of `sandbox`, beside its workers, for as long as it lives. `files` (relative path → content) are in its
    working folder at the start; nothing of its file system is left at the end. `run` takes one command at a time.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        limits: TerminalLimits | None = None,
        *,
        files: Mapping[str, bytes] | None = None,
        untrusted: bool = True,
    ) -> None:
        if isinstance(sandbox.plan, Enclosure):
            raise BadInput(f"terminal: sessions need backend native, not {sandbox.plan.backend}")
        if untrusted:
            sandbox.require()
        self.limits = limits or TerminalLimits()
        self._sandbox, self._lock = sandbox, threading.Lock()
        self._ended = ""
        job = Job(source=SHELL, kind="shell", files=files or {}, limits=self.limits)
        for attempt in range(1, ATTEMPTS + 1):
            slot = sandbox._take("code")
            assert isinstance(slot, client.Slot)
            self._slot = slot
            try:
                slot.start_session(job, idle_s=self.limits.idle_s)
                break
            except client.Broken as error:
                sandbox._discard(slot, "code")
                if attempt == ATTEMPTS:
                    raise client.CageFailure(f"sandbox: no cage for a terminal session: {error}") from None
            except BaseException:
                sandbox._discard(slot, "code")
                raise

    @property
    def alive(self) -> bool:
        """It takes further commands, as far as is known: a limit reached between commands is met by the next one."""
        return not self._ended

    def run(self, command: str, timeout: float = 10.0) -> Result:
        """Run one command line or script, and wait for its end, at most `timeout` seconds.

        Status `ok` or `error` by its exit code; `timeout` when its time was over: what it started is dead then, while the
        session goes on (`reason` says if the shell had to be replaced). Any other status, or `alive` False, is the end of
        the session. Output beyond `output_bytes` is left out and the command goes on. What background processes
        printed since the last command is part of this one's output. Raises `SessionEnded`, and `BadInput`.
        """
        encoded = _encoded(command)
        if not (math.isfinite(timeout) and timeout > 0):
            raise BadInput(f"terminal: expected a timeout of some seconds, got {timeout!r}")
        with self._lock:
            if self._ended:
                raise SessionEnded(self._ended)
            wait = timeout + GIVE_UP_S + client.GRACE_S
            limit = 4 * self.limits.output_bytes + (1 << 20)
            try:
                header, (stdout, stderr) = self._slot.exchange(
                    {"timeout_s": timeout}, [encoded], timeout_s=wait, limit=limit
                )
            except client.Broken as error:
                return self._lost(str(error))
            if not header.pop("alive"):
                self._end(header["reason"])
            status = Status(header.pop("status"))
            isolation = self._sandbox.plan.isolation(self._slot.uid)
            return Result(
                **header, status=status, stdout=stdout, stderr=stderr, level=self._sandbox.level, isolation=isolation
            )

    def close(self) -> None:
        """End the session, everything that runs in it, and its files."""
        with self._lock:
            if not self._ended:
                self._end("the session was closed")

    def _lost(self, why: str) -> Result:
        self._ended = f"terminal: the session was lost: {why}"
        self._sandbox._discard(self._slot, "code")
        return Result(status=Status.KILLED, level=self._sandbox.level, reason=self._ended)

    def _end(self, reason: str) -> None:
        """The supervisor ends when its channel does, and by then everything in the cage is dead."""
        self._ended = f"terminal: {reason}"
        if self._slot.hang_up(client.CLOSE_DEADLINE_S + GIVE_UP_S):
            with self._sandbox._lock:
                self._sandbox._let_go(self._slot)
        else:
            self._sandbox._discard(self._slot, "code")


def _encoded(command: str) -> bytes:
    try:
        encoded = command.encode()
    except UnicodeEncodeError:
        raise BadInput("terminal: the command holds a lone surrogate, which no shell can be given") from None
    if "\0" in command:
        raise BadInput("terminal: the command holds NUL, which no shell can be given")
    if len(encoded) > MAX_COMMAND:
        raise BadInput(
            f"terminal: expected a command of up to {MAX_COMMAND} bytes, got {len(encoded)}; put it in a file"
        )
    return encoded
