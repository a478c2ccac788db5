"""A grader that hangs or crashes must cost one grading, not the run: workers are killed, replaced, and leave nothing behind.

Real processes and real faults. Not covered: what `math` makes of answers (test_mathematics.py), the order of results (test_grading.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from grader_fakes import AT

from rollkeel.errors import BadInput
from rollkeel.rewards.workers import Broken, Workers

FAKE = "grader_fakes:by_command"


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(deadline_s=1.0, memory_mb=256) as pool:
        yield pool


def said(workers: Workers, text: str) -> Any:
    """The value, or the reason why there is none."""
    try:
        return workers.run(FAKE, text, "", {})[0]
    except Broken as error:
        return str(error)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.usually("hang in C-*", "crash-*", "greedy-*", "raise-*")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hang", "no answer in 1 s"),
        ("hang in C", "no answer in 1 s"),
        ("exit", "worker died by exit code 3"),
        ("crash", "worker died by signal 11"),
        ("greedy", "worker out of memory"),
        ("raise", f"ValueError: two lines {AT}"),
    ],
)
def test_a_fault_is_a_reason_and_the_next_grading_is_served(workers: Workers, text: str, reason: str) -> None:
    assert said(workers, text) == reason
    assert said(workers, "four") == 4


def test_values_come_as_they_are_and_what_is_printed_goes_nowhere(workers: Workers) -> None:
    assert workers.run("grader_fakes:length", "ab", "cd", {}) == (1.0, "2 characters")
    assert workers.run("grader_fakes:length", "\ud800\x00é", "xyz", {}) == (1.0, "3 characters")
    assert said(workers, "nan") != said(workers, "nan")
    assert said(workers, "print") == 1.0
    assert said(workers, "torch") == 0.0


def test_a_grader_that_is_not_there_is_a_reason(workers: Workers) -> None:
    with pytest.raises(Broken, match="no module nowhere in "):
        workers.run("nowhere:f", "", "", {})
    with pytest.raises(Broken, match=r"no 'nobody' in .*grader_fakes.py"):
        workers.run("grader_fakes:nobody", "", "", {})


def test_a_hanging_one_holds_nobody_up_and_is_killed() -> None:
    with Workers(deadline_s=3.0, memory_mb=256) as workers, ThreadPoolExecutor(2) as threads:
        slow = threads.submit(said, workers, "hang")
        quick = [threads.submit(said, workers, "x" * n).result(timeout=30) for n in range(20)]
        assert (quick, slow.done()) == (list(range(20)), False)
        before = set(workers.pids())
        assert slow.result(timeout=30) == "no answer in 3 s"
        gone = before - set(workers.pids())
        assert len(gone) == 1
        assert not alive(gone.pop())


def test_what_earlier_gradings_leaked_does_not_decide_later_ones() -> None:
    with Workers(deadline_s=20.0, memory_mb=128) as workers:
        first = workers.run(FAKE, "pid", "", {})[1]
        assert [said(workers, "leak") for _ in range(12)] == [1.0] * 12  # 24 MB each: replaced before the limit
        assert workers.run(FAKE, "pid", "", {})[1] != first
        assert said(workers, "fill") == "worker out of memory"  # by itself more than the limit
        assert said(workers, "four") == 4


def test_a_worker_is_used_again_however_large_its_parent_is() -> None:
    """Linux counts the parent's memory in what a child has used at most."""
    ballast = bytearray(b"x") * (300 << 20)
    with Workers(deadline_s=20.0, memory_mb=256) as workers:
        assert len({workers.run(FAKE, "pid", "", {})[1] for _ in range(3)}) == 1
    assert len(ballast) == 300 << 20


def test_a_worker_that_died_between_gradings_is_replaced() -> None:
    with Workers(deadline_s=5.0, memory_mb=256) as workers:
        assert said(workers, "four") == 4
        os.kill(workers.pids()[0], signal.SIGKILL)
        assert said(workers, "four") == 4


def test_nothing_is_left_after_close() -> None:
    files = len(os.listdir("/proc/self/fd"))
    workers = Workers(deadline_s=60.0, memory_mb=256)
    assert said(workers, "four") == 4
    thread = ThreadPoolExecutor(1)
    held = thread.submit(said, workers, "hang")
    while len(workers.pids()) < 1 or not held.running():
        time.sleep(0.01)
    time.sleep(0.2)
    pids = workers.pids()
    workers.close()
    assert held.result(timeout=30).startswith("worker died by signal 9") or "closed" in held.result()
    thread.shutdown()
    assert [pid for pid in pids if alive(pid)] == []
    assert len(os.listdir("/proc/self/fd")) == files
    with pytest.raises(Broken, match="closed"):
        workers.run(FAKE, "four", "", {})


ORPHANS = """
import os, signal, sys, threading, time
from rollkeel.rewards.workers import Workers
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
workers = Workers(deadline_s=60.0)
workers.run("grader_fakes:by_command", "four", "", {})
threading.Thread(target=workers.run, args=("grader_fakes:by_command", "hang in C", "", {}), daemon=True).start()
workers.run("grader_fakes:by_command", "four", "", {})
time.sleep(0.3)
print(*workers.pids(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_die_with_their_parent_even_in_the_middle_of_c_code(number: int) -> None:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent.parent)])
    process = subprocess.Popen(
        [sys.executable, "-c", ORPHANS],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) >= 1
    process.send_signal(number)
    assert process.wait(timeout=30) != 0
    until = time.monotonic() + 10
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    assert left == []


def running(pid: int) -> bool:
    """Neither gone nor a zombie that its new parent has not reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_many_threads_share_a_pool_and_each_gets_its_own_answer(workers: Workers) -> None:
    barrier = threading.Barrier(3)

    def ask(n: int) -> Any:
        if n < 3:
            barrier.wait(timeout=30)
        return said(workers, "x" * n)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(ask, range(60))) == list(range(60))


def test_limits_must_be_positive() -> None:
    with pytest.raises(BadInput, match="positive deadline and memory"):
        Workers(deadline_s=0)
