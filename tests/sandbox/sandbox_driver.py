"""Sandboxes under one user, in a process of their own where that is not the present one; jobs and results as messages.

Run as a program it is the other end: it opens a sandbox for every set of switched-off layers it is asked for.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from rollkeel.sandbox import Job, Level, Result, Sandbox

REPOSITORY = Path(__file__).resolve().parent.parent.parent


class Here:
    """Sandboxes of this process, one per set of layers left out."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, ...], Sandbox] = {}

    def run(self, job: Job, without: tuple[str, ...] = ()) -> Result:
        if without not in self._open:
            self._open[without] = Sandbox(workers=1, minimum=Level.NONE, without=without, warm=False)
        return self._open[without].run(job)

    def close(self) -> None:
        for sandbox in self._open.values():
            sandbox.close()


class There:
    """The same in a process of another user."""

    def __init__(self, python: str, uid: int, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [python, __file__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                cwd="/",
                env=environment | {"PYTHONDONTWRITEBYTECODE": "1"},
                user=uid,
                group=uid,
                extra_groups=[],
            )
        self._pipe = ours.makefile("rwb")
        ours.close()

    def run(self, job: Job, without: tuple[str, ...] = ()) -> Result:
        pickle.dump((job, without), self._pipe)
        self._pipe.flush()
        result = pickle.load(self._pipe)
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        self._pipe.close()
        self._process.wait(timeout=30)


def serve(descriptor: int) -> None:
    here = Here()
    with socket.socket(fileno=descriptor) as sock, sock.makefile("rwb") as pipe:
        while True:
            try:
                job, without = pickle.load(pipe)
            except EOFError:
                break
            try:
                answer: Result | Exception = here.run(job, without)
            except Exception as error:
                answer = error
            pickle.dump(answer, pipe)
            pipe.flush()
    here.close()


if __name__ == "__main__":
    os.umask(0o022)
    serve(int(sys.argv[1]))
