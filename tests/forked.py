"""Processes of tests that begin with rollkeel imported: half of what a tiny run costs in a new interpreter is imports.

They are forks of a server that has imported it and done nothing else, so no state of a test comes with them, and they die, stop and
are interrupted as any process. What only `python -m rollkeel` shows is for tests/test_cli_pipes.py and tests/test_chat.py.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["rollkeel.cli", "rollkeel.loop.job"])


def _enter(words: list[str], err: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # blocked where `rollkeel.warm` started the server
    for number, path in ((0, os.devnull), (1, os.devnull), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    sys.argv[0] = "rollkeel"
    from rollkeel.cli import main

    main(words)


class Command:
    """`rollkeel WORDS` in a process of its own; what tests use of a `subprocess.Popen`."""

    def __init__(self, *words: str | Path) -> None:
        self._err = tempfile.NamedTemporaryFile()  # noqa: SIM115 - lives as long as the process is of interest
        self._process = CONTEXT.Process(target=_enter, args=([*map(str, words)], self._err.name, dict(os.environ)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self.returncode is not None, f"still running after {timeout} s"
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        """Nothing and the whole of standard error, once it has ended."""
        self.wait(timeout)
        return None, Path(self._err.name).read_text()
