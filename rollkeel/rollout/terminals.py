"""Terminals of the sandbox as tools of environments: text in, text out, and a clear word on who broke what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import final

from rollkeel.errors import BadInput, RunStopped
from rollkeel.tasks.base import LIMITS as LIMITS_ALONE
from rollkeel.tasks.environment import ToolEnded, ToolLost
from rollkeel_sandbox.client import CageFailure
from rollkeel_sandbox.errors import SandboxError
from rollkeel_sandbox.job import Job, Limits, Result, Status, display
from rollkeel_sandbox.sandbox import Sandbox
from rollkeel_sandbox.terminal import SessionEnded, Terminal, TerminalLimits

DAY_S = 86400.0
LIMITS = TerminalLimits(
    memory_mb=256, processes=32, scratch_mb=32, cpu_s=60.0, output_bytes=1 << 16, wall_s=DAY_S, idle_s=DAY_S
)
"""What a policy may use. Time is none of it: between two commands the engine decodes, for as long as that takes."""
EACH = 128
"""Open terminals of one sandbox, whose uids are limited."""
SHOWN = 1000
"""Bytes of a command's output, and of its errors, that the model reads."""


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except SandboxError as error:
        kind = ToolLost if isinstance(error, CageFailure) else RunStopped if error.exit_code == 3 else BadInput
        raise kind(str(error)) from None


@final
class TerminalTools:
    """Opens terminals in sandboxes of its own, which start with the first. Thread-safe."""

    def __init__(self, *, timeout_s: float = 10.0, limits: TerminalLimits = LIMITS) -> None:
        """`timeout_s`: of one command; `limits`: of one terminal."""
        self._timeout_s, self._limits = timeout_s, limits
        self._lock = threading.Lock()
        self._open: dict[Sandbox, int] = {}

    def __call__(self) -> TerminalTool:
        """A new terminal. Raises `ToolLost` where none can be had, and `RunStopped` below isolation level `namespaces`."""
        with _told():
            sandbox = self._taken()
            try:
                return TerminalTool(Terminal(sandbox, self._limits), self._timeout_s, lambda: self._closed(sandbox))
            except BaseException:
                self._closed(sandbox)
                raise

    def alone(self, source: bytes, files: Mapping[str, bytes], stdin: bytes) -> bytes:
        """Implements `rollkeel.tasks.environment.Tools`, in a cage that no terminal has seen."""
        try:
            job = Job(source=source, files=files, stdin=stdin, limits=Limits(**LIMITS_ALONE))
        except SandboxError as error:
            raise ToolEnded(str(error)) from None
        with _told():
            sandbox = self._taken()
            try:
                result = sandbox.run(job)
            finally:
                self._closed(sandbox)
        if result.status in (Status.KILLED, Status.REFUSED):
            raise ToolLost(result.reason)
        return result.stdout

    def close(self) -> None:
        """End the sandboxes with every terminal in them."""
        with self._lock:
            for sandbox in self._open:
                sandbox.close()
            self._open.clear()

    def _taken(self) -> Sandbox:
        with self._lock:
            sandbox = next((s for s, count in self._open.items() if count < EACH), None) or Sandbox()
            self._open[sandbox] = self._open.get(sandbox, 0) + 1
            return sandbox

    def _closed(self, sandbox: Sandbox) -> None:
        with self._lock:
            if sandbox in self._open:
                self._open[sandbox] -= 1


@final
class TerminalTool:
    """Implements `rollkeel.tasks.environment.Tool`."""

    def __init__(self, terminal: Terminal, timeout_s: float, closed: Callable[[], None]) -> None:
        """`closed` is called once, at the end."""
        self._terminal = terminal
        self._timeout_s = timeout_s
        self._closed = [closed]

    def run(self, command: str) -> str:
        result = self._run(command)
        output = display(result.stdout, SHOWN) + display(result.stderr, SHOWN)
        if result.status is Status.TIMEOUT:
            return f"{output}[stopped after {self._timeout_s:g} s]\n"
        return f"{output}[exit code {result.exit_code}]\n" if result.exit_code else output

    def inspect(self, command: str) -> str:
        for _ in range(2):  # a shell with stopped jobs asks once more
            if "shell ended" in self._run("exit").reason:
                return self._run(command).stdout.decode(errors="replace")
        raise ToolEnded("terminal: its shell does not end, so that nothing can look at the files behind its back")

    def close(self) -> None:
        self._terminal.close()
        while self._closed:
            self._closed.pop()()

    def _run(self, command: str) -> Result:
        try:
            result = self._terminal.run(command.replace("\0", ""), self._timeout_s)
        except SessionEnded as error:
            raise ToolEnded(str(error)) from None
        if result.status is Status.KILLED:
            raise ToolLost(result.reason)
        if not self._terminal.alive:
            raise ToolEnded(result.reason)
        return result
