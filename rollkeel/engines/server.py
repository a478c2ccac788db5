"""One inference server as a process: started with a guard, waited for, killed as a whole group.

rollkeel ──stdin──▶ guard (leads the group) ──▶ server ──▶ its workers
    └── dies in any way: stdin ends ──▶ guard kills the group
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollkeel.engines import guard
from rollkeel.errors import EngineFailure

TAIL_LINES, TAIL_BYTES = 3, 20_000
_END_S = guard.GRACE_S + 5.0

RESTARTS = 3
"""Restarts in a row without a finished request before giving up: what three do not cure lasts."""
START_SHARE, SILENCE_SHARE = 0.5, 0.2
"""Of `engine.deadline_s`: time from start to ready, and time without a token of any request in flight until the server counts as
hung. A new server still has time to answer before the engine counts as hung."""


class ServerProcess:
    """A started server. Its output goes to `log`, appended."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path) -> None:
        """Start `command` with `environment` added to ours. `folder` is removed should we die without closing."""
        self._log, self._swept = log, False
        log.parent.mkdir(parents=True, exist_ok=True)
        self._start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as out:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", guard.__file__, str(folder), *command],
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment},
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineFailure(f"engine server: cannot start {command[0]}: {error.strerror or error}") from None

    @property
    def alive(self) -> bool:
        if self._process.poll() is None:
            return True
        self._sweep()
        return False

    @property
    def pid(self) -> int:
        """The guard's, and so the id of the whole process group."""
        return self._process.pid

    def tail(self) -> str:
        """The last lines this server wrote, on one line."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._start, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"no log: {error.strerror}"
        said = [" ".join(line.split()) for line in lines if line.strip()]
        telling = [line for line in said if "Error" in line and not line.startswith("rollkeel:")]
        last = " | ".join((telling or said)[-TAIL_LINES:])
        return f"{last[-400:]} (log: {self._log})"

    def kill(self) -> None:
        """End the group at once; also one that hangs or is stopped. Returns when it is gone."""
        if self.alive:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reap()

    def close(self) -> None:
        """Let the server end in order, then kill what is left of its group."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reap()

    def _reap(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        self._sweep()

    def _sweep(self) -> None:
        """Kill the rest of a group whose guard was killed. Once: later its id may belong to another process."""
        if not self._swept:
            self._swept = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
