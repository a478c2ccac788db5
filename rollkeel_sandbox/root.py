"""The private root: a read-only tree of what Python and compilers need, a scratch folder, and nothing else of the host.

It is built once, in the fork server, which then lives in it itself: no job is forked from a process that can still see the
host's files. A job adds its own `/proc` and its own scratch folder of limited size.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rollkeel_sandbox import landlock, libc

SCRATCH = "/scratch"
BOX = f"{SCRATCH}/box"
DEVICES = {"null": "null", "zero": "full", "full": "full", "random": "random", "urandom": "urandom"}
"""Name → whose node it is. `full` reads as zeros too, but cannot be mapped: memory shared through `zero` stays out of every count."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/alternatives")
LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/shm": f"{SCRATCH}/shm",
    "/tmp": f"{SCRATCH}/tmp",
}
SCRATCH_FOLDERS = ("box", "tmp", "shm")
_NEVER = ("/", "/home", "/root", "/etc", "/var", "/proc", "/sys", "/dev", "/tmp", "/run")
_INSTALLED = ("bin", "lib", "lib64", "libexec", "include", "share", "jmods", "conf", "pyvenv.cfg")
_OURS = {"dev", "proc", "sys", "tmp", SCRATCH[1:]}
"""Folders of an image that are not used."""
_MOUNT_POINTS = ("/mnt", "/media", "/srv", "/opt", "/run", "/var")
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _ATTR_NOEXEC = 1, 2, 4, 8


@dataclass(frozen=True)
class Bind:
    """`source` of the host appears at the same path (or `at`), read-only, with everything mounted below it."""

    source: str
    device: bool = False
    at: str = ""

    @property
    def target(self) -> str:
        return self.at or self.source


def interpreter_paths(executable: str = sys.executable) -> tuple[str, ...]:
    """What this Python needs of its prefix, and of that of the Python under a virtual environment.

    Only what an installation consists of: a virtual environment may well be made in somebody's project or home folder.
    """
    real = os.path.dirname(os.path.dirname(os.path.realpath(executable)))
    prefixes = {sys.prefix, sys.base_prefix, real}
    return tuple(sorted(path for prefix in prefixes for path in installation(prefix)))


def installation(prefix: str) -> list[str]:
    """The folders below a prefix that hold what is installed there."""
    return [os.path.join(prefix, name) for name in _INSTALLED] if prefix not in _NEVER else []


def settings() -> list[str]:
    """Folders of `/etc` without which an installed runtime does not start: Debian keeps Java's settings there."""
    return [f"/etc/{name}" for name in os.listdir("/etc") if name.startswith("java-")]


def links_and_binds(paths: Sequence[str]) -> tuple[dict[str, str], list[Bind]]:
    """What the tree holds: symlinks of the host's top level kept as such, folders bound; none inside another one.

    Where what is bound lies below `/tmp` (a Python installed there), `/tmp` is a folder that cannot be written; `TMPDIR` is.
    """
    links, binds = dict(LINKS), [Bind(f"/dev/{node}", device=True, at=f"/dev/{name}") for name, node in DEVICES.items()]
    for path in sorted(paths):
        if any(path.startswith(f"{b.source}/") or path == b.source for b in binds):
            continue
        if os.path.islink(path):
            links[path] = os.readlink(path)
        elif os.path.exists(path):
            binds.append(Bind(path))
    return {link: to for link, to in links.items() if not any(b.target.startswith(f"{link}/") for b in binds)}, binds


def image_tree(image: str, own: Sequence[str]) -> tuple[dict[str, str], list[Bind]]:
    """The same for the root of a container image: all of it but what is the sandbox's own, and this Python at its place.

    Raises `OSError` where both want the same folder.
    """
    links, binds = links_and_binds(own)
    for name in sorted(set(os.listdir(image)) - _OURS):
        path, source = f"/{name}", os.path.join(image, name)
        if any(bind.target.startswith(f"{path}/") for bind in binds):
            if path in SYSTEM:
                raise OSError(
                    f"this Python is installed below {path}, where the image has its own; use one from elsewhere"
                )
        elif os.path.islink(source):
            links[path] = os.readlink(source)
        else:
            binds.append(Bind(source, at=path))
    return links, binds


def rules(paths: Sequence[str], *, private: bool) -> list[landlock.Rule]:
    """Landlock's view of the same tree, as far as it is the same for all jobs."""
    out: list[landlock.Rule] = [(path, landlock.READ) for path in paths]
    out += [(f"/dev/{name}", landlock.DEVICE) for name, node in DEVICES.items() if private or name == node]
    # In a private root names are no secret, and programs list `/`.
    return [*out, ("/", ("read_dir",))] if private else out


JOB_FOLDERS = (landlock.WRITE, ("read_file", "read_dir", "write_file"))
"""Rights on what is a job's own: its scratch folder, and its `/proc`. On the host's own root that stays shut: it shows
everybody's processes."""


def enter(paths: Sequence[str], image: str = "") -> None:
    """Build the tree in this process's mount namespace and make it the root; the old root is gone afterwards."""
    links, binds = image_tree(image, paths) if image else links_and_binds(paths)
    libc.mount("none", "/", flags=libc.MS_REC | libc.MS_PRIVATE)
    base = _mount_point([b.source for b in binds])
    libc.mount("tmpfs", base, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV, "size=1m,mode=755")
    for bind in binds:
        _bind(bind, base)
    for path, target in links.items():
        os.makedirs(os.path.dirname(base + path), exist_ok=True)
        os.symlink(target, base + path)
    for name in ("/proc", SCRATCH):
        os.mkdir(base + name)
    # A fresh view of the fork server's own process namespace: without one, no user namespace may mount /proc later.
    libc.mount("proc", base + "/proc", "proc", libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC)
    libc.mount("none", base, flags=libc.MS_BIND | libc.MS_REMOUNT | libc.MS_RDONLY | libc.MS_NOSUID | libc.MS_NODEV)
    os.chdir(base)
    libc.pivot_root(".", ".")  # the old root now lies on top of the new one
    libc.umount(".", libc.MNT_DETACH)
    os.chdir("/")


def mount_proc() -> None:
    """`/proc` of the process namespace of the caller, over the fork server's."""
    libc.mount("proc", "/proc", "proc", libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC)


def mount_scratch(size_mb: int, owner: int | None) -> None:
    """An empty folder of limited size and number of files that goes with the job's mount namespace; of this process's without `owner`."""
    uid, gid = (os.getuid(), os.getgid()) if owner is None else (owner, owner)
    data = f"{_size(size_mb)},mode=0700,uid={uid},gid={gid}"
    libc.mount("tmpfs", SCRATCH, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV, data)


def resize_scratch(size_mb: int) -> None:
    libc.mount("tmpfs", SCRATCH, "", libc.MS_REMOUNT | libc.MS_NOSUID | libc.MS_NODEV, _size(size_mb))


def most_files(size_mb: int) -> int:
    """Files and folders that a scratch folder of this size may hold."""
    return 1024 + 64 * size_mb


def _size(size_mb: int) -> str:
    return f"size={size_mb}m,nr_inodes={most_files(size_mb)}"


def _mount_point(sources: Sequence[str]) -> str:
    """An existing folder that hides none of the sources when the tree is mounted over it."""
    for folder in _MOUNT_POINTS:
        hides = any(f"{source}/".startswith(f"{folder}/") for source in sources)
        if os.path.isdir(folder) and not os.path.islink(folder) and not hides:
            return folder
    raise OSError(f"no folder to mount the private root on: expected one of {', '.join(_MOUNT_POINTS)} to be free")


def _bind(bind: Bind, base: str) -> None:
    target = base + bind.target
    if os.path.isdir(bind.source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    libc.mount(bind.source, target, flags=libc.MS_BIND | libc.MS_REC)
    flags = _ATTR_RDONLY | _ATTR_NOSUID | (_ATTR_NOEXEC if bind.device else _ATTR_NODEV)
    libc.set_mount_attributes(target, flags)
