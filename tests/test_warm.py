"""Worker processes begin as forks of a server that has imported rollkeel; what they must not inherit is what the server saw when it began.

Not covered: that Ctrl-C at their birth is the caller's (tests/engines/test_workers.py, tests/train/test_parallel.py), and CUDA.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from rollkeel import warm

HEAVY = "rollkeel.engines.local"


def tell(pipe: Connection, name: str) -> None:
    began = HEAVY in sys.modules
    pipe.send((os.environ.get(name), os.environ["OMP_NUM_THREADS"], began, os.getpid(), os.getppid()))
    pipe.recv()


@pytest.fixture
def told() -> Iterator[Any]:
    started = []

    def begin(name: str = "ROLLKEEL_TEST", threads: int = 1, **how: Any) -> tuple[Any, Any, Connection]:
        context = warm.context(HEAVY, **how)
        ours, theirs = context.Pipe()
        process = warm.started(context, tell, (theirs, name), threads=threads, name="told")
        theirs.close()
        started.append(process)
        assert ours.poll(60)
        return ours.recv(), process, ours

    yield begin
    for process in started:
        process.kill()
        process.join()


@pytest.mark.slow
def test_each_has_the_environment_of_its_start_and_finds_everything_imported_by_one_thread(
    told: Any, no_fork_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one thread a fork of the server is whole."""
    for name in warm.SLOW:
        importlib.import_module(name)  # so that the server does, too
    monkeypatch.setenv("ROLLKEEL_TEST", "first")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    (value, threads, began, *_, parent), _, _ = told(threads=3)
    assert (value, threads, began) == ("first", "3", True)
    assert parent != os.getpid()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{parent}/status").read_text().splitlines())
    assert int(status["Threads"]) == 1
    assert os.environ["OMP_NUM_THREADS"] == "7"
    monkeypatch.setenv("ROLLKEEL_TEST", "second")
    (value, threads, *_), _, _ = told(threads=2)
    assert (value, threads) == ("second", "2")
    monkeypatch.delenv("ROLLKEEL_TEST")
    assert told()[0][0] is None


def test_a_killed_one_is_known_by_its_signal(told: Any) -> None:
    (*_, pid, _), process, _ = told()
    assert process.pid == pid
    os.kill(pid, 9)
    process.join(10)
    assert process.exitcode == -9


def test_one_that_is_to_use_a_gpu_is_a_new_interpreter(told: Any) -> None:
    (_, threads, began, _, parent), _, ours = told(forks=False, threads=2)
    assert (threads, began, parent) == ("2", False, os.getpid())
    ours.close()


def test_they_end_when_their_pipe_does(told: Any) -> None:
    (*_, pid, _), process, ours = told()
    ours.close()
    process.join(10)
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.05)
    raise AssertionError("still there")
