"""The few system calls that Python 3.11 has no name for, by ctypes. Every failure is an OSError that names the call."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

from rollkeel.sandbox.syscalls import NUMBERS

CLONE_NEWTIME = 0x80
CLONE_NEWNS = 0x20000
CLONE_NEWCGROUP = 0x2000000
CLONE_NEWUTS = 0x4000000
CLONE_NEWIPC = 0x8000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 1, 2, 4, 8

MACHINES = {"x86_64": 0, "aarch64": 1}
"""Column of `NUMBERS` by `platform.machine()`."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
if sys.platform.startswith("linux"):
    _libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4


def machine() -> str:
    return platform.machine()


def supported() -> bool:
    """True on the systems whose kernel interface this package knows: Linux on x86-64 or aarch64, 64 bits."""
    return sys.platform.startswith("linux") and machine() in MACHINES and sys.maxsize > 2**32


def _failed(name: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{name}: {os.strerror(number)}")


def call(name: str, *arguments: int | bytes | ctypes.Array | ctypes.Structure | None) -> int:
    """System call `name`; integers pass as 64 bits, bytes and structures by address."""
    passed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    passed = [ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in passed]
    result = _libc.syscall(ctypes.c_long(NUMBERS[name][MACHINES[machine()]]), *passed)
    if result < 0:
        raise _failed(name)
    return result


def prctl(option: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> int:
    result = _libc.prctl(option, a, b, c, d)
    if result < 0:
        raise _failed(f"prctl {option}")
    return result


def unshare(flags: int) -> None:
    call("unshare", flags)


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    try:
        call("mount", source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None)
    except OSError as error:
        raise OSError(error.errno, f"mount {kind or source} on {target}: {os.strerror(error.errno or 0)}") from None


def pivot_root(new: str, old: str) -> None:
    call("pivot_root", new.encode(), old.encode())


def umount(target: str, flags: int = 0) -> None:
    call("umount2", target.encode(), flags)


def set_mount_attributes(target: str, attributes: int) -> None:
    """Add attributes to a mount and to all mounts below it (mount_setattr, Linux 5.12)."""
    attr = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    call("mount_setattr", -100, target.encode(), 0x8000, attr, ctypes.sizeof(attr))


def close_range(first: int) -> None:
    """Close every descriptor from `first` on, known to Python or not."""
    call("close_range", first, 0x7FFFFFFF, 0)


def open_beneath(folder: int, name: str, flags: int) -> int:
    """Open `name` below the folder descriptor, following no symlink, magic link, `..` or mount on the way (openat2)."""
    how = (ctypes.c_uint64 * 3)(
        flags | os.O_CLOEXEC, 0, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV
    )
    return call("openat2", folder, name.encode(), how, ctypes.sizeof(how))


def clear_capabilities() -> None:
    """Empty the permitted, effective and inheritable sets of this thread."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    call("capset", header, (ctypes.c_uint32 * 6)())
