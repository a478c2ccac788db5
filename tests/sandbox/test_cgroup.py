"""Control groups are the one layer that counts memory which no process maps; a wrong path would limit somebody else's processes.

Parsing and writing run over a made-up hierarchy of ordinary files. Against the kernel: the probe, which sees its limits bite, and
the last test, both where a hierarchy of version 2 can be written to. Not covered: hierarchies that a service manager hands down.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollkeel_sandbox import Job, Level, Limits, Sandbox, Status, cgroup, probe

V2 = "35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
HYBRID = "36 24 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n37 24 0:32 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids"
CONTAINER = "40 30 0:30 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw"
V1 = "37 24 0:32 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids"


@pytest.mark.parametrize(
    ("mountinfo", "membership", "expected"),
    [
        (V2, "0::/user.slice/a.scope", ["/sys/fs/cgroup/user.slice/a.scope", "/sys/fs/cgroup/user.slice"]),
        (V2, "0::/a", ["/sys/fs/cgroup/a", "/sys/fs/cgroup"]),
        (V2, "0::/", ["/sys/fs/cgroup"]),
        (HYBRID, "8:pids:/x\n0::/a", ["/sys/fs/cgroup/unified/a", "/sys/fs/cgroup/unified"]),
        (CONTAINER, "0::/docker/abc", ["/sys/fs/cgroup"]),
        (CONTAINER, "0::/docker/abc/job", ["/sys/fs/cgroup/job", "/sys/fs/cgroup"]),
        (CONTAINER, "0::/", ["/sys/fs/cgroup"]),
        (V1, "8:pids:/x", []),
        (V1, "8:pids:/x\n0::/", []),
        ("", "0::/", []),
    ],
)
def test_where_groups_may_be_made(mountinfo: str, membership: str, expected: list[str]) -> None:
    assert cgroup.candidates(mountinfo, membership) == expected


def hierarchy(folder: Path, controllers: str, handed: str) -> str:
    (folder / "cgroup.controllers").write_text(controllers)
    (folder / "cgroup.subtree_control").write_text(handed)
    return str(folder)


def test_controllers_are_handed_down(tmp_path: Path) -> None:
    place = hierarchy(tmp_path, "cpu io memory pids\n", "memory pids\n")
    made = Path(cgroup.make_in(place))
    assert made.parent == tmp_path
    assert (made / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "memory pids\n"  # as it was: others live there
    assert made != Path(cgroup.make_in(place))


def test_a_place_that_hands_nothing_down_is_told_to(tmp_path: Path) -> None:
    cgroup.make_in(hierarchy(tmp_path, "memory pids", "pids"))
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +pids"


def test_missing_controllers_are_named_and_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"without controller memory, which version 1 may hold"):
        cgroup.make_in(hierarchy(tmp_path, "hugetlb pids", ""))
    assert [p for p in tmp_path.iterdir() if p.is_dir()] == []


@pytest.fixture
def group(tmp_path: Path) -> cgroup.Group:
    """A group in ordinary files: the kernel's are there before anybody writes to them."""
    made = cgroup.Group.make(os.open(tmp_path, os.O_PATH), "job")
    for name in (*cgroup.limits_of(Limits()), "memory.swap.max", "cgroup.procs", "cpu.stat", "memory.events"):
        (tmp_path / "job" / name).write_text("")
    return made


def test_limits_in_bytes(group: cgroup.Group, tmp_path: Path) -> None:
    group.limit(cgroup.limits_of(Limits(memory_mb=100, scratch_mb=28, processes=7)))
    folder = tmp_path / "job"
    assert int((folder / "memory.max").read_text()) == (128 + cgroup.SLACK_MB) * 2**20
    assert (folder / "pids.max").read_text() == "7"
    assert (folder / "memory.oom.group").read_text() == "1"
    assert (folder / "memory.swap.max").read_text() == "0"
    group.join()
    assert (folder / "cgroup.procs").read_text() == "0"


def test_what_the_kernel_counted(group: cgroup.Group, tmp_path: Path) -> None:
    (tmp_path / "job" / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\nsystem_usec 2\n")
    assert group.cpu_s() == 2.5
    events = tmp_path / "job" / "memory.events"
    for killed in (0, 3):
        events.write_text(f"low 0\nmax 9\noom 1\noom_kill {killed}\noom_group_kill 7\n")
        assert group.ran_out_of_memory() == bool(killed)


def test_removal_takes_what_dead_cages_left(tmp_path: Path) -> None:
    (tmp_path / "all" / "1").mkdir(parents=True)
    (tmp_path / "all" / "2").mkdir()
    cgroup.remove(str(tmp_path / "all"))
    assert not (tmp_path / "all").exists()


@pytest.mark.skipif(not probe().plan().cgroup, reason="no control groups of version 2 that can be written to")
def test_the_kernel_holds_a_job_to_its_memory_and_processes() -> None:
    buffers = (
        "import socket\nkept = []\nwhile True:\n    a, b = socket.socketpair(); a.setblocking(False); kept.append((a, b))\n"
        "    try:\n        while True: a.send(bytes(60000))\n    except BlockingIOError: pass\n"
    )
    forks = "import os, time\ntry:\n    while True:\n        if os.fork() == 0: time.sleep(60)\nexcept OSError: print('refused')"
    with Sandbox(workers=1, minimum=Level.NONE, without=("watch", "rlimits")) as sandbox:
        limits = Limits(memory_mb=64, scratch_mb=4, processes=8)
        assert sandbox.run(Job(source=buffers.encode(), limits=limits)).status is Status.MEMORY
        result = sandbox.run(Job(source=forks.encode(), limits=limits))
        assert (result.status, result.stdout) == (Status.OK, b"refused\n")
        assert "cgroup" in result.isolation
