"""Bubblewrap and gVisor must give the same results under the same limits, and be reported for what they were seen to do.

The programs of the corpus run in bubblewrap where it is installed, as root and as an ordinary user, and in gVisor as root.
A stand-in for runsc records what it was asked for. Not covered: gVisor as an ordinary user, and other versions than those installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import sandbox_escapes
import test_jobs
from sandbox_driver import Here, There
from sandbox_host import Host

from rollkeel_sandbox import Job, Level, Limits, Refused, Result, Sandbox, Status, Terminal, boxes, enclosure, probe
from rollkeel_sandbox.errors import BadInput
from rollkeel_sandbox.plan import NAMESPACES

ESCAPES = {e.name: e for e in sandbox_escapes.CORPUS}
QUICK_ESCAPES = (
    "read-host-file", "server-environment", "signal-host-process", "tcp-to-host", "abstract-socket-of-host", "mount",
    "nested-user-namespace", "memory-that-stays-when-unmapped", "memory-bomb-of-many", "file-bomb", "many-files",
)  # fmt: skip
QUICK_JOBS = ("stdin", "files-out", "signal", "endless-output", "growing", "shell")
LATE_IN_GVISOR = {"many-files"}
"""It does not limit the number of files; the agent looks, and what is made between two looks may reach the program's mark."""
ROOT_IN_GVISOR = {"be-root"}
"""Without a uid of its own to give, it shows an ordinary user's job as uid 0 of its kernel, which may do nothing there."""
DIFFERENT = {
    "bad-encoding": "Python is started and not forked, so that its own words differ",
    "nul-in-source": "as above",
    "kill-process-one": "as above",
}
GRACE_S = 0.5


def some(names: object, quick: tuple[str, ...]) -> list:
    return [pytest.param(n, marks=[] if n in quick else [pytest.mark.slow]) for n in names]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def bubblewrap(driver: Here | There) -> Here | There:
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    if driver.level("bubblewrap") < Level.NAMESPACES:
        pytest.skip("bubblewrap does not hold here")
    return driver


def unmoved(host: Host, result: Result, wait_s: float) -> None:
    """Nothing of the host is otherwise than before."""
    assert not host.victim_dead(b"", wait_s=wait_s)
    for check in ("secret_printed", "mark_written", "file_deleted", "mode_changed", "time_changed", "victim_slowed"):
        assert not getattr(host, check)(result.stdout + result.stderr), check
    for check in ("tcp_reached", "udp_reached", "unix_reached", "abstract_reached"):
        assert not getattr(host, check)(b""), check


@pytest.mark.parametrize("name", some(ESCAPES, QUICK_ESCAPES))
def test_nothing_gets_out_of_bubblewrap(name: str, bubblewrap: Here | There, host: Host, user: str) -> None:
    escape = ESCAPES[name]
    host.reset()
    job = Job(source=escape.program(host.words()), limits=escape.limits, files=escape.files)
    result = bubblewrap.run(job, (), "bubblewrap")
    assert result.level is (Level.FULL if user == "root" else Level.NAMESPACES)
    assert b"ESCAPED" not in result.stdout, (result.stdout, result.stderr[-300:])
    assert result.status is not Status.KILLED
    assert result.wall_s <= escape.limits.wall_s + GRACE_S
    unmoved(host, result, 0.5 if escape.canary == "victim_dead" else 0)


@pytest.mark.parametrize("name", some([n for n in test_jobs.PROGRAMS if n not in DIFFERENT], QUICK_JOBS))
def test_results_are_the_same_in_bubblewrap(name: str, bubblewrap: Here | There) -> None:
    job, expected = test_jobs.PROGRAMS[name]
    result = bubblewrap.run(job, (), "bubblewrap")
    assert {key: getattr(result, key) for key in expected} == expected, result
    assert result.wall_s <= job.limits.wall_s + GRACE_S
    assert result.attempts == 1


def test_collected_files_follow_no_link_in_bubblewrap(bubblewrap: Here | There) -> None:
    source = (
        b"import os\nos.symlink('/etc/ld.so.cache', 'link'); os.symlink('/etc', 'folder'); os.mkfifo('fifo'); os.mkdir('d')\n"
        b"open('plain', 'w').write('x'); os.link('plain', 'hard'); open('d/ok', 'w').write('y')"
    )
    names = ("link", "folder/ld.so.cache", "fifo", "d", "hard", "d/ok")
    result = bubblewrap.run(Job(source=source, collect=names), (), "bubblewrap")
    assert (result.status, result.files) == (Status.OK, {"d/ok": b"y"})


def test_many_threads_share_it_and_nothing_stays() -> None:
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    enclosure.probe("bubblewrap")
    before = alive()
    with Sandbox(workers=2, backend="bubblewrap") as sandbox:
        # One of another size is built anew, and the first killed while it still sets itself up.
        assert sandbox.run(Job(source=b"print(1)", limits=Limits(scratch_mb=4))).stdout == b"1\n"
        answers: list[bytes] = []

        def worker(i: int) -> None:
            answers.append(sandbox.run(Job(source=b"print(int(input()) * 3)", stdin=b"%d" % i)).stdout)

        threads = [threading.Thread(target=worker, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answers) == [b"0\n", b"3\n", b"6\n", b"9\n"]
        with pytest.raises(BadInput, match="sessions need backend native"):
            Terminal(sandbox)
    until = time.monotonic() + 5
    while alive() - before and time.monotonic() < until:
        time.sleep(0.01)  # the kernel ends them one after the other
    assert alive() - before == set()


def alive() -> set[str]:
    """Processes of bubblewrap that this one started, or that nobody waits for."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{name}/stat").read_text()
            if "(bwrap)" in text and text.split()[3] in ("1", str(os.getpid())):
                found.add(name)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("runsc"), reason="runsc is not installed")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_gvisor_runs_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = enclosure.probe("gvisor")
    if found.level is Level.NONE:
        pytest.skip(found.why_not)
    assert found.level is Level.NAMESPACES  # never more: whose uid it has on the host is gVisor's to choose
    assert found.layers["kernel"].startswith("not the host's")
    with Sandbox(workers=1, backend="gvisor", warm=False) as sandbox:
        for name in (
            "stdin",
            "files-in",
            "files-out",
            "exit-code",
            "signal",
            "endless-output",
            "wall",
            "growing",
            "shell",
        ):
            job, expected = test_jobs.PROGRAMS[name]
            result = sandbox.run(job)
            assert {key: getattr(result, key) for key in expected} == expected, (name, result)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def gvisor(driver: Here | There) -> Here | There:
    if not shutil.which("runsc"):
        pytest.skip("runsc is not installed")
    if driver.level("gvisor") is Level.NONE:
        pytest.skip("gVisor does not hold here")
    return driver


@pytest.mark.slow
@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_gets_out_of_gvisor(name: str, gvisor: Here | There, host: Host, user: str) -> None:
    escape, shown = ESCAPES[name], LATE_IN_GVISOR | (ROOT_IN_GVISOR if user == "ordinary" else set())
    host.reset()
    result = gvisor.run(
        Job(source=escape.program(host.words()), limits=escape.limits, files=escape.files), (), "gvisor"
    )
    assert b"ESCAPED" not in result.stdout or name in shown, (result.stdout, result.stderr[-300:])
    assert result.status is not Status.KILLED
    assert result.wall_s <= escape.limits.wall_s + GRACE_S
    unmoved(host, result, 0.5 if escape.canary == "victim_dead" else 0)


FAKE = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import json, os, sys
folder = sys.argv[sys.argv.index("--bundle") + 1] if "--bundle" in sys.argv else None
config = json.load(open(f"{{folder}}/config.json")) if folder else None
with open({log!r}, "a") as file:
    file.write(json.dumps([sys.argv[1:], config]) + "\\n")
"""


def test_what_runsc_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    fake = tmp_path / "runsc"
    fake.write_text(FAKE.format(python=sys.executable, log=str(log)))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    backend = boxes.Boxes("gvisor", own_uids=True)
    box = backend.order(70000)
    with pytest.raises(Exception, match="the sandbox ended"):
        box.run(Job(source=b"", limits=Limits(wall_s=1)))
    box.close()
    backend.kill()
    (run, config), (delete, _) = map(json.loads, log.read_text().splitlines())
    assert {"--network=none", "run", "--bundle"} <= set(run)
    assert delete[-3:] == ["delete", "--force", run[-1]]
    assert config["root"] == {"path": "root", "readonly": True}
    assert {n["type"] for n in config["linux"]["namespaces"]} == {"pid", "network", "ipc", "uts", "mount"}
    for mount in config["mounts"]:
        assert mount["type"] in ("proc", "tmpfs") or "ro" in mount["options"]
        assert not mount.get("source", "").startswith(("/home", "/root/.ssh"))
    (scratch,) = [m for m in config["mounts"] if m["destination"] == "/scratch"]
    assert "size=128m" in scratch["options"]
    assert json.loads(config["process"]["args"][-1]) == {"uid": 70000, "mount_mb": None}
    assert not os.path.exists(run[run.index("--bundle") + 1])


HERE = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net", "ipc", "uts")}
GOOD = {
    "uid": 70000, "map": ["0", "0", "4294967295"], "canary": "", "passwd": False, "pids": 2, "reached": False,
    "interfaces": ["lo"], "ns": dict.fromkeys(HERE, "other"), "release": os.uname().release, "caps": "0000000000000000",
    "nnp": "1", "seccomp": "2",
}  # fmt: skip
MAPPED = {"map": ["1000", "0", "1"], "uid": 1000}


@pytest.mark.parametrize(
    ("seen", "own", "level", "lacking"),
    [
        ({}, True, Level.FULL, ""),
        (MAPPED, False, Level.NAMESPACES, ""),
        ({"uid": 0}, True, Level.NONE, "user"),
        ({"canary": "seen"}, True, Level.NONE, "mount"),
        ({"passwd": True}, True, Level.NONE, "mount"),
        ({"pids": 40}, True, Level.NONE, "pid"),
        ({"reached": True}, True, Level.NONE, "net"),
        ({"interfaces": ["lo", "eth0"]}, True, Level.NONE, "net"),
        ({"ns": dict.fromkeys(HERE, "other") | {"ipc": HERE["ipc"]}}, True, Level.NONE, "ipc"),
        ({"caps": "00000000000000c0"}, True, Level.NONE, "capabilities"),
        ({"nnp": "0"}, True, Level.NONE, "capabilities"),
        ({"seccomp": "0"}, True, Level.NONE, "seccomp"),
        ({"release": "4.4.0", "ns": dict.fromkeys(HERE, "")}, True, Level.NAMESPACES, ""),
        ({"release": "4.4.0", "ns": dict.fromkeys(HERE, ""), "reached": True}, True, Level.NONE, "net"),
    ],
)
def test_a_level_is_what_was_seen(seen: dict, own: bool, level: Level, lacking: str) -> None:
    found = enclosure.judge("bubblewrap", GOOD | seen, (), uid=70000, own=own)
    assert found.level is level
    assert found.why_not == (f"without {lacking}" if lacking else "")
    assert lacking not in found.layers
    assert "without NPROC" in enclosure.judge("gvisor", GOOD, ("NPROC",), uid=70000, own=True).layers["rlimits"]


def test_bad_choices_get_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="did you mean bubblewrap"):
        Sandbox(backend="bublewrap")
    with pytest.raises(BadInput, match="backend native only"):
        Sandbox(backend="bubblewrap", without=("net",))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    enclosure.probe.cache_clear()
    with pytest.raises(Refused, match="needs runsc, which is not installed"):
        Sandbox(backend="gvisor")
    enclosure.probe.cache_clear()


def test_auto_is_native_where_that_holds() -> None:
    if probe().plan().level < Level.NAMESPACES:
        pytest.skip("namespaces do not hold here")
    with Sandbox(workers=1) as sandbox:
        assert sandbox.plan == probe().plan()


def test_auto_looks_further_where_native_is_weak(monkeypatch: pytest.MonkeyPatch) -> None:
    weak = probe().plan(NAMESPACES)
    monkeypatch.setattr("rollkeel_sandbox.sandbox.probe", lambda: type("P", (), {"plan": lambda self, _: weak})())
    strong = enclosure.judge("bubblewrap", GOOD, (), uid=70000, own=True)
    none = enclosure.Enclosure(backend="gvisor", identity="own", level=Level.NONE)
    monkeypatch.setattr(enclosure, "probe", {"bubblewrap": strong, "gvisor": none}.__getitem__)
    with Sandbox(workers=1) as sandbox:
        assert sandbox.plan is strong
    monkeypatch.setattr(enclosure, "probe", {"bubblewrap": none, "gvisor": none}.__getitem__)
    with Sandbox(workers=1, minimum=Level.NONE) as sandbox:
        assert sandbox.plan is weak
