"""Sandboxes under one user, in a process of their own where that is not the present one; jobs and results as messages.

Run as a program it is the other end: it opens a sandbox for every set of switched-off layers it is asked for.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from typing import Any

from rollkeel_sandbox import Job, Level, Result, Sandbox, Terminal, TerminalLimits, enclosure, launch


class Here:
    """Sandboxes of this process, one per set of layers left out."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, ...], Sandbox] = {}

    def run(self, job: Job, without: tuple[str, ...] = (), backend: str = "native") -> Result:
        return self._sandbox(without, backend).run(job)

    def converse(
        self,
        commands: list[tuple[str, float]],
        limits: TerminalLimits,
        files: dict[str, bytes],
        without: tuple[str, ...],
    ) -> list[Result]:
        """Commands with their times, in one terminal session."""
        with Terminal(self._sandbox(without), limits, files=files) as terminal:
            return [terminal.run(*command) for command in commands]

    def level(self, backend: str) -> Level:
        return enclosure.probe(backend).level

    def _sandbox(self, without: tuple[str, ...], backend: str = "native") -> Sandbox:
        key = (backend, *without)
        if key not in self._open:
            self._open[key] = Sandbox(workers=1, minimum=Level.NONE, without=without, warm=False, backend=backend)
        return self._open[key]

    def close(self) -> None:
        for sandbox in self._open.values():
            sandbox.close()


class There:
    """The same in a process of another user, from a copy: that user may have no way into the folder of this one."""

    def __init__(self, python: str, uid: int, environment: dict[str, str]) -> None:
        self._folder = tempfile.mkdtemp(prefix="driver-", dir="/tmp")
        driver = shutil.copy(__file__, self._folder)
        for inside, source in launch.agent_files(self._folder).items():
            (shutil.copytree if os.path.isdir(source) else shutil.copy)(source, inside)
        subprocess.run(["chmod", "-R", "a+rX", self._folder], check=True)
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [python, driver, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                cwd="/",
                env=environment | {"PYTHONDONTWRITEBYTECODE": "1"},
                user=uid,
                group=uid,
                extra_groups=[],
            )
        self._pipe = ours.makefile("rwb")
        ours.close()

    def run(self, job: Job, without: tuple[str, ...] = (), backend: str = "native") -> Result:
        return self._ask("run", job, without, backend)

    def level(self, backend: str) -> Level:
        return self._ask("level", backend)

    def converse(
        self,
        commands: list[tuple[str, float]],
        limits: TerminalLimits,
        files: dict[str, bytes],
        without: tuple[str, ...],
    ) -> list[Result]:
        return self._ask("converse", commands, limits, files, without)

    def _ask(self, *message: object) -> Any:
        pickle.dump(message, self._pipe)
        self._pipe.flush()
        result = pickle.load(self._pipe)
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        self._pipe.close()
        self._process.wait(timeout=30)
        shutil.rmtree(self._folder)


def serve(descriptor: int) -> None:
    here = Here()
    with socket.socket(fileno=descriptor) as sock, sock.makefile("rwb") as pipe:
        while True:
            try:
                what, *arguments = pickle.load(pipe)
            except EOFError:
                break
            try:
                answer: object = getattr(here, what)(*arguments)
            except Exception as error:
                answer = error
            pickle.dump(answer, pipe)
            pipe.flush()
    here.close()


if __name__ == "__main__":
    os.umask(0o022)
    serve(int(sys.argv[1]))
