"""Processes for graders that cannot be trusted to return: each grading has a deadline, and who exceeds it is killed.

A worker is a Python of its own without torch, in a session of its own (Ctrl-C does not reach it), and dies with its parent. One
that hangs, dies or runs out of memory is replaced; a fresh one repeats its grading, and the others work on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, final

from rollkeel.errors import BadInput

START_S = 120.0
"""Longest time for an interpreter to start and import a grader; not part of a grading's deadline."""
MAX_MESSAGE = 1 << 24
_PROGRAM = str(Path(__file__).with_name("worker.py"))


class Broken(Exception):
    """A grading that has no result, with one line that says why. Never a verdict about the response."""


class NoVerdict(Broken):
    """What graded hung, died, ran out of memory or broke off: the grader's fault or the response's, see `Graders.grade`."""


@final
class _Worker:
    """One process and the channel to it."""

    def __init__(self, memory_mb: int) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-X", "utf8", _PROGRAM, str(theirs.fileno()), str(os.getpid())],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.rss_mb = 0.0
        self._loaded: set[str] = set()
        self._send({"path": sys.path, "memory_mb": memory_mb}, time.monotonic() + START_S)

    def ask(
        self, function: str, text: str, answer: str, options: Mapping[str, Any], deadline_s: float
    ) -> tuple[Any, str]:
        """Value and detail. Raises `Broken`."""
        if function not in self._loaded:
            self._talk({"function": function}, START_S)
            self._loaded.add(function)
        said = self._talk({"function": function, "text": text, "answer": answer, "options": dict(options)}, deadline_s)
        self.rss_mb = said["rss_mb"]
        return said["value"], said["detail"]

    def _talk(self, asked: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        until = time.monotonic() + within_s
        try:
            self._send(asked, until)
            said = json.loads(self._line(until))
        except TimeoutError:
            raise NoVerdict(f"no answer in {within_s:g} s") from None
        except (ConnectionError, EOFError):
            raise NoVerdict(f"worker died by {self._end()}") from None
        if "memory" in said:
            raise NoVerdict("worker out of memory")
        if "error" in said:
            raise Broken(said["error"])
        return said

    def _send(self, asked: Mapping[str, Any], until: float) -> None:
        self._channel.settimeout(max(until - time.monotonic(), 0.001))
        self._channel.sendall(json.dumps(asked).encode() + b"\n")

    def _line(self, until: float) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            self._channel.settimeout(max(until - time.monotonic(), 0.001))
            if not (piece := self._channel.recv(1 << 16)):
                raise EOFError
            line += piece
            if len(line) > MAX_MESSAGE:
                raise NoVerdict(f"answered with more than {MAX_MESSAGE >> 20} MB")
        return line

    def _end(self) -> str:
        try:
            code = self.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "closing its channel"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """End it and its children that stayed in its session, and wait for it: no zombie, no descriptor is left."""
        if self.process.poll() is None:  # not reaped, so that its number is still its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._channel.close()


@final
class Workers:
    """`run` may be called from any number of threads; each call has a process for itself, idle ones are used again.

    A process dies with the thread that started it: call from threads that live as long as this object.
    """

    def __init__(self, *, deadline_s: float = 10.0, memory_mb: int = 1024) -> None:
        """`deadline_s`: of one grading. `memory_mb`: address space beyond what the grader takes when it is imported."""
        if not (deadline_s > 0 and memory_mb > 0):
            raise BadInput(f"workers: expected a positive deadline and memory, got {deadline_s} s and {memory_mb} MB")
        self.deadline_s, self._memory_mb = deadline_s, memory_mb
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._closed = False

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def run(self, function: str, text: str, answer: str, options: Mapping[str, Any]) -> tuple[Any, str]:
        """`function` is `module:name`, called as `name(text, answer, options)`; what it returns, and its detail.

        Raises `Broken` when it raises, and `NoVerdict` when it hangs, dies or runs out of memory twice: the second time in a fresh
        process, since a result must not depend on what an earlier grading leaked.
        """
        try:
            return self._kept(self._take(), (function, text, answer, options))
        except NoVerdict:
            return self._kept(self._take(fresh=True), (function, text, answer, options))

    def pids(self) -> list[int]:
        """Of the processes that are alive now."""
        with self._lock:
            return [worker.process.pid for worker in (*self._idle, *self._busy)]

    def close(self) -> None:
        """Kill all processes; calls that wait for one raise `Broken`."""
        with self._lock:
            self._closed = True
            workers, self._idle = [*self._idle, *self._busy], []
            for worker in self._busy:
                worker.process.kill()  # its own thread closes the rest
        for worker in workers:
            if worker not in self._busy:
                worker.kill()

    def _kept(self, worker: _Worker, asked: tuple[str, str, str, Mapping[str, Any]]) -> tuple[Any, str]:
        """What the worker answers; it goes back to the idle ones unless it is lost, hangs or has grown too much."""
        keep = False
        try:
            result = worker.ask(*asked, deadline_s=self.deadline_s)
            keep = worker.rss_mb < self._memory_mb / 2
            return result
        except Broken as error:
            keep = type(error) is Broken
            raise
        finally:
            with self._lock:
                self._busy.discard(worker)
                if keep := keep and not self._closed:
                    self._idle.append(worker)
            if not keep:
                worker.kill()

    def _take(self, fresh: bool = False) -> _Worker:
        with self._lock:
            if self._closed:
                raise Broken("the graders are closed")
            worker = self._idle.pop() if self._idle and not fresh else None
        worker = worker or _Worker(self._memory_mb)
        with self._lock:
            if not self._closed:
                self._busy.add(worker)
                return worker
        worker.kill()
        raise Broken("the graders are closed")
