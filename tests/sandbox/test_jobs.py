"""A grader believes what comes out of a job: bytes, codes, limits and files must be exactly what the program did.

Every program runs for real, as root and as an ordinary user. Not covered: escapes (test_escapes.py), servers that die
(test_servers.py), languages other than Python and shell (test_kinds.py).
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time

import pytest
from sandbox_driver import Here, There

from rollkeel_sandbox import Job, Level, Limits, Result, Sandbox, Status, display, enclosure, probe
from rollkeel_sandbox.errors import BadInput

pytestmark = pytest.mark.skipif(probe().plan().level < Level.NAMESPACES, reason="namespaces do not hold here")
SECOND = Limits(wall_s=1, cpu_s=1, memory_mb=128)
GRACE_S = 0.5


class Pickled:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple:
        return (eval, ("print('unpickled as', __import__('os').getpid())",))


def python(source: str, **fields: object) -> Job:
    return Job(source=source.encode(), **fields)  # type: ignore[arg-type]


PROGRAMS: dict[str, tuple[Job, dict]] = {
    "hello": (python("print('hello')"), {"status": "ok", "exit_code": 0, "stdout": b"hello\n", "stderr": b""}),
    "stdin": (python("print(sum(map(int, open(0))))", stdin=b"1\n2\n3\n"), {"stdout": b"6\n"}),
    "stdin-lines": (python("print(input()[::-1], input())", stdin=b"abc\nx\n"), {"stdout": b"cba x\n"}),
    "large-stdin": (
        python("import sys; print(len(sys.stdin.buffer.read()))", stdin=b"x" * (5 << 20)),
        {"stdout": b"5242880\n"},
    ),
    "unread-stdin": (python("print(1)", stdin=b"x" * (5 << 20)), {"status": "ok", "stdout": b"1\n"}),
    "arguments": (
        python("import sys; print(sys.argv[1:])", args=("a b", "ü", "")),
        {"stdout": "['a b', 'ü', '']\n".encode()},
    ),
    "files-in": (
        python("print(open('d/e/f.txt').read(), open('g').read())", files={"d/e/f.txt": b"1", "g": b"2"}),
        {"stdout": b"1 2\n"},
    ),
    "files-out": (
        python("open('a.bin', 'wb').write(bytes(range(256)))", collect=("a.bin", "missing")),
        {"files": {"a.bin": bytes(range(256))}},
    ),
    "module-beside": (python("import helper; print(helper.x)", files={"helper.py": b"x = 7"}), {"stdout": b"7\n"}),
    "exit-code": (python("import sys; sys.exit(7)"), {"status": "error", "exit_code": 7, "signal": None}),
    "exit-text": (python("raise SystemExit('why')"), {"status": "error", "exit_code": 1, "stderr": b"why\n"}),
    "exit-at-exit": (python("import atexit; atexit.register(print, 'bye')"), {"stdout": b"bye\n"}),
    "thread-outlives": (
        python("import threading, time; threading.Thread(target=lambda: (time.sleep(.1), print('late'))).start()"),
        {"stdout": b"late\n"},
    ),
    "main-name": (python("print(__name__, __file__[-8:])"), {"stdout": b"__main__ /main.py\n"}),
    "signal": (python("import os; os.kill(os.getpid(), 15)"), {"status": "error", "exit_code": None, "signal": 15}),
    "abort": (python("import os; os.abort()"), {"status": "error", "signal": signal.SIGABRT}),
    "nul-and-ansi": (
        python(r"import sys; sys.stdout.buffer.write(b'\0\x1b[31m\xff\xfe\r\n')"),
        {"stdout": b"\0\x1b[31m\xff\xfe\r\n"},
    ),
    "unicode": (python("print('naïve ☃ 𝕏')"), {"stdout": "naïve ☃ 𝕏\n".encode()}),
    "lone-surrogate": (python(r"print('\ud800')"), {"status": "error", "exit_code": 1}),
    "bad-encoding": (Job(source=b"print('\xff')"), {"status": "error", "exit_code": 1}),
    "nul-in-source": (Job(source=b"print(1)\0"), {"status": "error", "exit_code": 1}),
    "wall": (python("import time; time.sleep(9)", limits=SECOND), {"status": "timeout", "exit_code": None}),
    "wall-ignoring-signals": (
        python(
            "import signal, time\nfor n in range(1, 32):\n    if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\ntime.sleep(9)",
            limits=SECOND,
        ),
        {"status": "timeout"},
    ),
    "cpu": (python("while True: pass", limits=Limits(wall_s=9, cpu_s=0.5)), {"status": "cpu"}),
    "one-huge-allocation": (python("bytearray(1 << 40)"), {"status": "memory", "exit_code": 1}),
    "growing": (
        python("x = []\nwhile True: x.append(bytearray(b'a' * (1 << 20)))", limits=Limits(wall_s=9, memory_mb=64)),
        {"status": "memory"},
    ),
    "endless-output": (
        python("while True: print('x' * 1000)", limits=Limits(output_bytes=10_000)),
        {"status": "output", "stdout_truncated": True},
    ),
    "endless-errors": (
        python("import sys\nwhile True: sys.stderr.write('x' * 1000)", limits=Limits(output_bytes=10_000)),
        {"status": "output", "stderr_truncated": True, "stdout_truncated": False},
    ),
    "output-at-the-limit": (
        python("print('x' * 999)", limits=Limits(output_bytes=1000)),
        {"status": "ok", "stdout": b"x" * 999 + b"\n", "stdout_truncated": False},
    ),
    "closed-output": (
        python("import os, time; os.close(1); os.close(2); time.sleep(9)", limits=SECOND),
        {"status": "timeout"},
    ),
    "deep-recursion": (python("def f(n): return f(n + 1)\nf(0)"), {"status": "error", "exit_code": 1}),
    "deep-recursion-in-c": (
        python("import sys; sys.setrecursionlimit(10**9)\ndef f(x): return sorted([x], key=f)\nf(0)", limits=SECOND),
        {"stdout": b""},
    ),
    "pickled-payload": (
        python("import pickle; pickle.load(open('p', 'rb'))", files={"p": pickle.dumps(Pickled())}),
        {"stdout": b"unpickled as 2\n"},
    ),
    "environment": (
        python("import os; print(sorted(os.environ))"),
        {"stdout": b"['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'TMPDIR', 'USER']\n"},
    ),
    "descriptors": (
        python("import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"),
        {"stdout": b"[0, 1, 2]\n"},
    ),
    "no-slow-forks": (  # both do work in every forked child, and come in with an import that looks harmless
        python("import sys; print({'random', 'threading'} & set(sys.modules))"),
        {"stdout": b"set()\n"},
    ),
    "subprocess": (
        python("import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', 'print(5)']))"),
        {"stdout": b"b'5\\n'\n"},
    ),
    "multiprocessing": (
        python(
            "import multiprocessing as m\n"
            "if __name__ == '__main__':\n    with m.Pool(2) as p: print(p.map(abs, [-1, -2]))",
            limits=Limits(wall_s=30),
        ),
        {"stdout": b"[1, 2]\n"},
    ),
    "asyncio": (python("import asyncio; asyncio.run(asyncio.sleep(0)); print('ran')"), {"stdout": b"ran\n"}),
    "temporary-file": (
        python("import tempfile; f = tempfile.NamedTemporaryFile(); f.write(b'x'); print('ok')"),
        {"stdout": b"ok\n"},
    ),
    "threads-and-locks": (
        python("from concurrent.futures import ThreadPoolExecutor as T; print(list(T(4).map(abs, [-1, 2])))"),
        {"stdout": b"[1, 2]\n"},
    ),
    "kill-everything": (python("import os; os.kill(-1, 9)"), {}),
    "kill-process-one": (
        python("import os\ntry: os.kill(1, 9)\nexcept OSError: pass\nprint('still here')"),
        {"status": "ok", "stdout": b"still here\n"},
    ),
    "shell": (
        Job(source=b'read x; echo "$x $1"; exit 3', kind="shell", stdin=b"in\n", args=("arg",)),
        {"stdout": b"in arg\n", "exit_code": 3},
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, driver: Here | There) -> None:
    job, expected = PROGRAMS[name]
    result = driver.run(job)
    got = {key: getattr(result, key) for key in expected}
    assert got == expected, result
    assert result.attempts == 1
    assert result.wall_s <= job.limits.wall_s + GRACE_S
    assert len(result.stdout) <= job.limits.output_bytes


def test_collected_files_follow_no_link(driver: Here | There) -> None:
    source = (
        "import os\n"
        "os.symlink('/etc/ld.so.cache', 'link'); os.symlink('/etc', 'folder'); os.mkfifo('fifo'); os.mkdir('d')\n"
        "open('plain', 'w').write('x'); os.link('plain', 'hard'); open('big', 'wb').write(bytes(5000)); open('ok', 'w').write('y')"
    )
    names = ("link", "folder/ld.so.cache", "fifo", "d", "hard", "big", "ok")
    result = driver.run(python(source, collect=names, limits=Limits(output_bytes=4000)))
    assert result.status is Status.OK
    assert result.files == {"ok": b"y"}


def test_a_folder_that_became_a_link_is_not_followed(driver: Here | There) -> None:
    source = (
        "import os; os.rename(os.getcwd(), os.environ['TMPDIR'] + '/moved'); os.symlink('/etc', os.environ['HOME'])"
    )
    result = driver.run(python(source, collect=("ld.so.cache", "main.py")))
    assert (result.status, result.files) == (Status.OK, {}), result.stderr


def marked_processes(mark: str) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if mark.encode() in file.read():
                    found.append(pid)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("without", [(), ("pid", "mount")], ids=["namespaces", "without"])
def test_daemons_die_with_their_job(driver: Here | There, without: tuple[str, ...]) -> None:
    mark = f"daemon-{time.monotonic_ns()}"
    source = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv('/bin/sh', ['sh', '-c', 'sleep 300; : {mark}'])
    os._exit(0)
time.sleep(0.3)
print('done')
"""
    result = driver.run(python(source), without)
    assert (result.status, result.stdout) == (Status.OK, b"done\n")
    assert result.wall_s < 5
    assert marked_processes(mark) == []


def test_a_process_that_forks_and_ends_faster_than_one_can_look_is_killed(driver: Here | There, user: str) -> None:
    mark = f"comet-{time.monotonic_ns()}"
    source = f"""
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    for fd in (0, 1, 2):
        os.close(fd)
    end = time.monotonic() + 0.6
    while time.monotonic() < end:  # at any time one process, and never the same one
        try:
            if os.fork() > 0:
                os._exit(0)
        except OSError:
            pass
    os.execv('/bin/sh', ['sh', '-c', 'sleep 30; : {mark}'])
time.sleep(0.2)
print('done')
"""
    without = ("pid", "mount", "net", "ipc", "uts") if user == "root" else ("user",)
    result = driver.run(python(source), without)
    assert (result.status, result.stdout, result.attempts) == (Status.OK, b"done\n", 1)
    time.sleep(0.7)
    assert marked_processes(mark) == []


def test_locked_and_deep_folders_are_removed_without_mounts(driver: Here | There, user: str) -> None:
    source = """
import os
print(os.getcwd(), flush=True)
os.makedirs('a/b/c'); os.symlink('/etc', 'a/l'); os.chmod('a/b', 0); os.chmod('a', 0)
for _ in range(1100):  # past the recursion limit
    os.mkdir('d'); os.chdir('d')
"""
    without = ("pid", "mount", "net", "ipc", "uts") if user == "root" else ("user",)
    result = driver.run(python(source), without)
    assert result.status is Status.OK, result
    scratch = os.path.dirname(result.stdout.decode().strip())
    assert os.path.isdir(os.path.dirname(scratch))
    assert not os.path.exists(scratch)
    assert os.stat("/etc").st_mode & 0o777 == 0o755


def test_a_job_leaves_nothing_for_the_next(driver: Here | There) -> None:
    leave = "import os\nfor d in ('.', os.environ['TMPDIR'], '/dev/shm'): open(f'{d}/left', 'w').write('x')"
    look = "import os; print([d for d in ('.', os.environ['TMPDIR'], '/dev/shm') if os.path.exists(f'{d}/left')])"
    assert driver.run(python(leave)).status is Status.OK
    assert driver.run(python(look)).stdout == b"[]\n"


def test_random_numbers_differ_from_job_to_job(driver: Here | There) -> None:
    drawn = {driver.run(python("import random; print(random.random())")).stdout for _ in range(3)}
    assert len(drawn) == 3


def test_a_bomb_does_not_reach_its_neighbour() -> None:
    with Sandbox(workers=2) as sandbox:
        results: list[Result] = []
        bomb = python(
            "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
            limits=Limits(wall_s=2, cpu_s=9, processes=16),
        )
        thread = threading.Thread(target=lambda: results.append(sandbox.run(bomb)))
        thread.start()
        time.sleep(0.3)
        beside = sandbox.run(python("import os; print(len([os.fork() for _ in range(3)]))"))
        thread.join()
    assert beside.status is Status.OK
    assert results[0].status in (Status.TIMEOUT, Status.MEMORY)


def test_math_is_preloaded() -> None:
    pytest.importorskip("sympy")
    with Sandbox(workers=1) as sandbox:
        job = python(
            "import sys; early = 'sympy' in sys.modules; import sympy; print(early, sympy.factorint(91))",
            preload="math",
        )
        result = sandbox.run(job)
        assert result.stdout == b"True {7: 1, 13: 1}\n", result
        assert set(sandbox.server_pids()) == {"math"}


def test_stem_runs_numpy() -> None:
    with Sandbox(workers=1) as sandbox:
        job = python("import numpy as n; print(n.linalg.inv(n.eye(3) * 2).trace(), n.random.rand())", preload="stem")
        first, second = sandbox.run(job), sandbox.run(job)
    assert first.stdout.startswith(b"1.5 "), first
    assert first.stdout != second.stdout


def test_untrusted_work_is_refused_below_the_minimum() -> None:
    with Sandbox(workers=1, minimum=Level.RESTRICTED, without=("seccomp",)) as sandbox:
        refused = sandbox.run(python("print(1)"))
        assert (refused.status, refused.stdout, refused.attempts) == (Status.REFUSED, b"", 0)
        assert refused.reason.count("\n") == 0
        assert "needs isolation level restricted" in refused.reason
        trusted = sandbox.run(python("print(1)", untrusted=False))
        assert (trusted.status, "seccomp" in trusted.isolation) == (Status.OK, False)


def test_the_hosts_control_groups_are_out_of_sight(driver: Here | There) -> None:
    source = "import os; print(os.readlink('/proc/self/ns/cgroup'), *(line.split(':', 2)[2] for line in open('/proc/self/cgroup')))"
    link, *paths = driver.run(python(source)).stdout.decode().split()
    assert link != os.readlink("/proc/self/ns/cgroup")
    assert set(paths) == {"/"}


def test_isolation_names_every_layer(driver: Here | There, user: str) -> None:
    result = driver.run(python("import os; print(os.getuid())"))
    assert set(result.isolation) >= {"user", "pid", "mount", "net", "ipc", "uts", "capabilities", "rlimits", "seccomp"}
    if user == "root":
        assert result.isolation["user"] == f"own uid {int(result.stdout)}"
        assert result.level is Level.FULL
    else:
        assert (result.stdout, result.level) == (b"1000\n", Level.NAMESPACES)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "pyhton"}, "did you mean python"),
        ({"preload": "maths"}, "did you mean math"),
        ({"files": {"../x": b""}}, "relative path"),
        ({"files": {"/x": b""}}, "relative path"),
        ({"files": {"a\0": b""}}, "relative path"),
        ({"files": {"main.py": b""}}, "source itself"),
        ({"collect": ("a/../b",)}, "relative path"),
        ({"stdin": "text"}, "must be bytes"),
        ({"args": ("a\0b",)}, "NUL"),
        ({"args": ("\ud800",)}, "lone surrogate"),
        ({"files": {"\ud800": b""}}, "relative path"),
        ({"files": {"a": b"", "a/b": b""}}, "'a' is a file and a folder"),
        ({"files": {"main.py/b": b""}}, "'main.py' is a file and a folder"),
        ({"files": {"a": bytes(1 << 20)}, "limits": Limits(scratch_mb=1)}, "do not fit into scratch_mb=1"),
    ],
)
def test_a_bad_job_gets_one_line(fields: dict, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        Job(**({"source": b""} | fields))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", [{"wall_s": 0}, {"wall_s": float("nan")}, {"processes": 1.5}, {"memory_mb": True}])
def test_a_bad_limit_gets_one_line(field: dict) -> None:
    with pytest.raises(BadInput, match=f"sandbox limit {next(iter(field))}: expected"):
        Limits(**field)


def test_display_escapes_what_a_terminal_would_obey() -> None:
    assert display(b"a\x1b[31m\0\xff\tb\n") == "a\\x1b[31m\\x00\\xff\tb\n"
    assert display("x\u202ey\x9b".encode()) == "x\\u202ey\\x9b"
    assert display(b"abcdef", 3) == "abc… (6 bytes)"


SIGNALS = r"""
import signal
ignored = {s.name for s in map(signal.Signals, range(1, 32)) if signal.getsignal(s) is signal.SIG_IGN}
print(sorted(ignored - {"SIGPIPE", "SIGXFSZ"}), signal.getsignal(signal.SIGINT) is signal.default_int_handler, end=" ")
print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


@pytest.mark.parametrize("backend", ["native", "bubblewrap", "gvisor"])
def test_what_the_caller_ignores_or_blocks_a_job_does_not(backend: str) -> None:
    """A script's `&` starts a server with SIGINT ignored, `nohup` with SIGHUP."""
    if backend != "native" and enclosure.probe(backend).level < Level.RESTRICTED:
        pytest.skip(f"{backend} does not hold here")
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    try:
        with Sandbox(workers=1, minimum=Level.RESTRICTED, backend=backend) as sandbox:
            python = sandbox.run(Job(source=SIGNALS.encode()))
            shell = sandbox.run(Job(source=b"grep -E 'Sig(Blk|Ign)' /proc/self/status", kind="shell"))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert python.stdout == b"[] True set()\n", python
    if backend != "gvisor":  # its /proc does not tell
        reserved = 1 << 31  # the C library's own first signal, which make leaves ignored and nobody can set
        assert [int(line.split()[1], 16) & ~reserved for line in shell.stdout.splitlines()] == [0, 0], shell
