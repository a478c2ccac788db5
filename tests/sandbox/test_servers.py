"""A training run asks for thousands of jobs: what dies is replaced, nothing runs twice unnoticed, and nothing piles up.

Not covered: hundreds of thousands of jobs (benchmarks/sandbox.py counts leaks over as many as it is given).
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from rollkeel_sandbox import Job, Level, Limits, Sandbox, Status, client, identity, probe
from rollkeel_sandbox import sandbox as module
from rollkeel_sandbox.server import KEPT_FD

pytestmark = pytest.mark.skipif(probe().plan().level < Level.NAMESPACES, reason="namespaces do not hold here")
HELLO = Job(source=b"print('hello')")


def children(pid: int) -> list[int]:
    out = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = Path(f"/proc/{name}/stat").read_text(errors="replace")
        except OSError:
            continue
        if int(text[text.rindex(")") + 2 :].split()[1]) == pid:
            out.append(int(name))
    return out


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [d for c in found for d in descendants(c)]


def settled(pid: int) -> list[int]:
    """Children of `pid` once they have stayed the same for a while: the cage of the job before is gone by then."""
    seen, since, until = children(pid), time.monotonic(), time.monotonic() + 10
    while time.monotonic() - since < 0.5 and time.monotonic() < until:
        if (now := children(pid)) != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.02)
    return seen


def cages(launcher: int) -> list[int]:
    """Supervisors, the oldest first: that of a job, and behind it an idle one, which is made when the job is taken."""
    return [pid for server in children(launcher)[:1] for pid in children(server)]


def gone(pids: list[int], within_s: float = 5.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            return True
        time.sleep(0.01)
    return False


def test_a_killed_server_is_replaced() -> None:
    with Sandbox(workers=1) as sandbox:
        assert sandbox.run(HELLO).attempts == 1
        before = sandbox.server_pids()["code"]
        tree = descendants(before)
        os.kill(tree[0], signal.SIGKILL)
        assert gone(tree)
        result = sandbox.run(HELLO)
        assert (result.status, result.stdout) == (Status.OK, b"hello\n")
        assert sandbox.server_pids()["code"] != before


@pytest.mark.parametrize("victim", ["launcher", "server", "supervisor"])
def test_a_job_whose_cage_dies_is_run_once_more(victim: str) -> None:
    with Sandbox(workers=1) as sandbox:
        sandbox.run(HELLO)
        launcher = sandbox.server_pids()["code"]
        job = Job(source=b"import time; time.sleep(1.0); print('done')")
        results = []
        thread = threading.Thread(target=lambda: results.append(sandbox.run(job)))
        deadline = time.monotonic() + 30
        while len(cages(launcher)) != 1 and time.monotonic() < deadline:  # what is left of the first job
            time.sleep(0.01)
        thread.start()
        while len(cages(launcher)) != 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        inside = descendants(cages(launcher)[0])
        assert inside
        server = children(launcher)[0]
        target = {"launcher": launcher, "server": server, "supervisor": children(server)[0]}[victim]
        os.kill(target, signal.SIGKILL)
        thread.join()
        assert (results[0].status, results[0].stdout, results[0].attempts) == (Status.OK, b"done\n", 2)
        assert gone(inside)


def test_a_job_that_loses_its_cage_twice_is_reported() -> None:
    with Sandbox(workers=1) as sandbox:
        sandbox.run(HELLO)
        done = threading.Event()

        def kill_supervisors() -> None:
            while not done.is_set():
                for launcher in sandbox.server_pids().values():
                    for pid in descendants(launcher)[1:]:
                        if children(pid):
                            os.kill(pid, signal.SIGKILL)
                            break
                time.sleep(0.05)

        thread = threading.Thread(target=kill_supervisors)
        thread.start()
        result = sandbox.run(Job(source=b"import time; time.sleep(5)"))
        done.set()
        thread.join()
        assert (result.status, result.attempts) == (Status.KILLED, 2)
        assert "2 times" in result.reason


@pytest.mark.slow
def test_uids_of_lost_cages_come_back_with_a_new_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "BLOCK", 6)
    monkeypatch.setattr(module, "MAX_LOST", 2)
    with Sandbox(workers=1, warm=False) as sandbox:
        if sandbox.level < Level.FULL:
            pytest.skip("needs root")
        for _ in range(8):
            sandbox.run(HELLO)
            server = children(sandbox.server_pids()["code"])[0]
            while children(server):  # the first job's cage
                time.sleep(0.01)
            job = Job(source=b"import time; time.sleep(0.4)")
            thread = threading.Thread(target=sandbox.run, args=(job,))
            thread.start()
            while not (supervisors := children(server)):
                time.sleep(0.01)
            os.kill(supervisors[0], signal.SIGKILL)
            thread.join()
        assert sandbox.run(HELLO).status is Status.OK


def test_a_hung_server_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CAGE_DEADLINE_S", 1.0)
    monkeypatch.setattr(client, "CLOSE_DEADLINE_S", 0.2)
    with Sandbox(workers=1, warm=False) as sandbox:
        sandbox.run(HELLO)
        launcher = sandbox.server_pids()["code"]
        os.kill(children(launcher)[0], signal.SIGSTOP)
        result = sandbox.run(HELLO)
        assert (result.status, result.attempts) == (Status.OK, 2)
        assert sandbox.server_pids()["code"] != launcher


def test_a_hung_supervisor_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "GRACE_S", 0.5)
    with Sandbox(workers=1) as sandbox:
        sandbox.run(HELLO)
        server = children(sandbox.server_pids()["code"])[0]
        first = settled(server)
        assert len(first) == 1
        os.kill(first[0], signal.SIGSTOP)
        result = sandbox.run(Job(source=b"print('hello')", limits=Limits(wall_s=1)))
        assert (result.status, result.stdout, result.attempts) == (Status.OK, b"hello\n", 2)
        assert gone(first)


def test_closing_ends_every_process_and_descriptor() -> None:
    gc.collect()
    before = os.listdir("/proc/self/fd")
    sandbox = Sandbox(workers=2)
    sandbox.run(HELLO)
    (launcher,) = sandbox.server_pids().values()
    (server,) = children(launcher)
    cages = settled(server)
    assert cages, "the cage for the next job should wait here"
    pids = [launcher, *descendants(launcher)]
    assert set(cages) < set(pids)
    sandbox.close()
    assert gone(pids)
    assert len(os.listdir("/proc/self/fd")) <= len(before)  # other tests' may have been closed meanwhile


@pytest.mark.parametrize("without", [("mount", "landlock"), ("pid", "mount", "net", "ipc", "uts")])
def test_no_folder_stays_behind_without_mounts(without: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(tempfile.mkdtemp(prefix="test-"))  # not of `tmp_path`, which other users may not enter
    own.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    with Sandbox(workers=1, minimum=Level.NONE, without=without) as sandbox:
        source = b"import os\nos.makedirs('a/b')\nos.symlink('/etc', 'a/b/c')\nos.chmod('a', 0)\nprint(1)"
        assert sandbox.run(Job(source=source)).stdout == b"1\n"
        (mine,) = own.iterdir()
        assert list(mine.iterdir()) == []
    own.rmdir()
    assert Path("/etc/ld.so.cache").exists()


def test_the_end_of_the_caller_is_the_end_of_everything() -> None:
    script = (
        "import sys, time, threading; from rollkeel_sandbox import *\n"
        "s = Sandbox(workers=2); s.run(Job(source=b'1'))\n"
        "threading.Thread(target=s.run, args=(Job(source=b'import time; time.sleep(60)', limits=Limits(wall_s=60)),), daemon=True).start()\n"
        "time.sleep(0.5); print(s.server_pids()['code'], flush=True); time.sleep(60)"
    )
    root = str(Path(__file__).resolve().parent.parent.parent)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r})\n{script}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        launcher = int(caller.stdout.readline())
        pids = [launcher, *descendants(launcher)]
        assert len(pids) >= 4
        caller.kill()
    assert gone(pids)


def mounts() -> int:
    return len(Path("/proc/self/mounts").read_text().splitlines())


def test_two_hundred_jobs_from_four_threads_leave_nothing() -> None:
    with Sandbox(workers=2) as sandbox:
        for _ in range(4):
            sandbox.run(HELLO)
        (launcher,) = sandbox.server_pids().values()
        (server,) = children(launcher)
        before = mounts(), len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{server}/fd"))
        answers: list[tuple[int, bytes]] = []

        def worker(start: int) -> None:
            for i in range(start, start + 50):
                result = sandbox.run(Job(source=b"print(int(input()) * 3)", stdin=str(i).encode()))
                answers.append((i, result.stdout))

        threads = [threading.Thread(target=worker, args=(50 * t,)) for t in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answers) == [(i, b"%d\n" % (3 * i)) for i in range(200)]
        time.sleep(0.3)
        assert len(children(server)) <= 2
        assert all(len(descendants(supervisor)) <= 2 for supervisor in children(server))
        # Two workers keep up to two cages ready, each with one socket on this side.
        after = mounts(), len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{server}/fd"))
        assert after[0] == before[0]
        assert after[1] <= before[1] + 2
        assert after[2] <= before[2] + 1


def test_a_server_has_nothing_of_the_callers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLKEEL_SECRET_TOKEN", "x")
    with Sandbox(workers=1) as sandbox:
        text = sandbox.run(Job(source=b"print(open('/proc/self/environ').read())")).stdout
        assert b"LANG=C.UTF-8" in text
        assert b"SECRET" not in text


def test_a_caller_with_many_open_files_gets_its_cages() -> None:
    held = [os.open("/dev/null", os.O_RDONLY)]
    try:
        while held[-1] <= KEPT_FD:  # the next numbers, the channel's, are among those that the server keeps
            held.append(os.dup(held[0]))
        with Sandbox(workers=1) as sandbox:
            assert sandbox.run(HELLO).stdout == b"hello\n"
    finally:
        for number in held:
            os.close(number)
