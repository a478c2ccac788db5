"""Control groups, version 2: the kernel's own limits on a job as a whole, on machines where a hierarchy may be written to.

The caller makes one group for a sandbox, below or beside its own; each cage makes one in there for its job. Memory that no
process maps counts as well: buffers of sockets and pipes, files in the scratch folder.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass

from rollkeel_sandbox.job import Limits

CONTROLLERS = ("memory", "pids")
"""What has to be there. A controller that version 1 still holds is missing from version 2."""
SLACK_MB = 16
"""Kernel memory of a job: page tables, descriptors, buffers."""
MB = 1 << 20
REMOVE_DEADLINE_S = 2.0


def candidates(mountinfo: str, membership: str) -> list[str]:
    """Folders to make a group in: the present group, and the one above, whose other children have no processes of ours.

    `mountinfo` and `membership` are the texts of `/proc/self/mountinfo` and `/proc/self/cgroup`.
    """
    path = next((line[3:] for line in membership.splitlines() if line.startswith("0::")), None)
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        if path is None or after.split()[:1] != ["cgroup2"]:
            continue
        top, mount = before.split()[3:5]
        # `top` is the part of the hierarchy that is mounted there, as in a container.
        own = f"{mount.rstrip('/')}/{os.path.relpath(path, top)}" if path.startswith(top) else mount
        own = os.path.normpath(own)
        return [own] if own == mount else [own, os.path.dirname(own)]
    return []


def make() -> str:
    """A new, empty group whose children can be limited; its path. OSError says why there is none."""
    with open("/proc/self/mountinfo", encoding="utf-8") as mounts, open("/proc/self/cgroup", encoding="utf-8") as own:
        places = candidates(mounts.read(), own.read())
    reason = "no control groups of version 2 are mounted"
    for place in places:
        try:
            return make_in(place)
        except OSError as error:
            reason = f"{place}: {error.strerror or error}"
    raise OSError(reason)


def make_in(place: str) -> str:
    """A new group in that one, with the controllers handed down to its children."""
    missing = [name for name in CONTROLLERS if name not in _words(f"{place}/cgroup.controllers")]
    if missing:
        raise OSError(f"without controller {' and '.join(missing)}, which version 1 may hold")
    path = f"{place}/rollkeel-{os.getpid()}-{os.urandom(4).hex()}"
    os.mkdir(path)
    wanted = " ".join(f"+{name}" for name in CONTROLLERS)
    try:
        if not set(CONTROLLERS) <= set(_words(f"{place}/cgroup.subtree_control")):
            _set(f"{place}/cgroup.subtree_control", wanted)  # refused where `place` itself holds processes
        _set(f"{path}/cgroup.subtree_control", wanted)
    except OSError:
        os.rmdir(path)
        raise
    return path


def remove(path: str) -> None:
    """Delete the group and what cages that died left in it. Groups that still hold processes stay."""
    until = time.monotonic() + REMOVE_DEADLINE_S
    for group in (*(entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)), path):
        while True:
            try:
                os.rmdir(group)
            except OSError as error:
                if error.errno == errno.EBUSY and time.monotonic() < until:  # its processes are dying
                    time.sleep(0.01)
                    continue
            break


def limits_of(limits: Limits) -> dict[str, str]:
    """File → text. Files of the scratch folder are memory of the group, so that both limits add up here."""
    return {
        "memory.max": str((limits.memory_mb + limits.scratch_mb + SLACK_MB) * MB),
        "memory.oom.group": "1",
        "pids.max": str(limits.processes),
    }


@dataclass(frozen=True)
class Group:
    """A job's group, by descriptors of the folder it is in and of its own."""

    parent: int
    name: str
    folder: int

    @classmethod
    def make(cls, parent: int, name: str) -> Group:
        os.mkdir(name, dir_fd=parent)
        return cls(parent, name, os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent))

    def limit(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            self._write(name, text)
        try:
            self._write("memory.swap.max", "0")
        except FileNotFoundError:
            return  # no swap on this machine

    def join(self) -> None:
        """Move this process there; its future children are born there."""
        self._write("cgroup.procs", "0")

    def cpu_s(self) -> float:
        """CPU seconds of all processes that ever were in the group."""
        return int(_field(self._read("cpu.stat"), "usage_usec")) / 1e6

    def ran_out_of_memory(self) -> bool:
        return _field(self._read("memory.events"), "oom_kill") != "0"

    def close(self) -> None:
        """Delete it; no process may be left in it."""
        os.close(self.folder)
        os.rmdir(self.name, dir_fd=self.parent)

    def _write(self, name: str, text: str) -> None:
        descriptor = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.folder)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def _read(self, name: str) -> str:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.folder)
        try:
            return os.read(descriptor, 4096).decode()
        finally:
            os.close(descriptor)


def _field(text: str, name: str) -> str:
    """Value in a file of lines `name value`; "0" where it is missing."""
    return next((line.split()[1] for line in text.splitlines() if line.startswith(f"{name} ")), "0")


def _words(path: str) -> list[str]:
    with open(path, encoding="ascii") as file:
        return file.read().split()


def _set(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
