"""The few system calls that Python 3.11 has no name for, by ctypes. Every failure is an OSError that names the call."""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]
import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterable

from rollkeel_sandbox.syscalls import NUMBERS

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = {"pid": CLONE_NEWPID, "mount": CLONE_NEWNS, "net": CLONE_NEWNET, "ipc": CLONE_NEWIPC, "uts": CLONE_NEWUTS}
"""Those of a job, by the names of the plan."""

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

_CAPABILITY_VERSION_3 = struct.pack("=Ii", 0x20080522, 0)
AGENT_CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8}
"""Name → number of what process 1 of a job needs to give it a uid of its own and to end it."""
RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 1, 2, 4, 8

MACHINES = {"x86_64": 0, "aarch64": 1}
"""Column of `NUMBERS` by `platform.machine()`."""

_MOST_ARGUMENTS = 6
# One function for all calls, and no bookkeeping of errno by ctypes: each costs page faults in every process of every cage.
_libc = ctypes.CDLL(None)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = [ctypes.c_long] + [ctypes.c_void_p] * _MOST_ARGUMENTS  # as wide as a register, each
if sys.platform.startswith("linux"):
    _libc.__errno_location.restype = ctypes.POINTER(ctypes.c_int)
_wait_status = ctypes.c_int()
on_signal, DEFAULT = _signal.signal, _signal.SIG_DFL
"""`signal.signal`, which takes and gives plain integers here, and what restores the default."""


def machine() -> str:
    return platform.machine()


def supported() -> bool:
    """True on the systems whose kernel interface this package knows: Linux on x86-64 or aarch64, 64 bits."""
    return sys.platform.startswith("linux") and machine() in MACHINES and sys.maxsize > 2**32


_COLUMN = MACHINES.get(machine(), 0)


def call(name: str, *arguments: int | bytes | ctypes.Array | None) -> int:
    """System call `name`; integers pass as 64 bits, bytes and arrays by address."""
    result = _libc.syscall(NUMBERS[name][_COLUMN], *arguments, *(0,) * (_MOST_ARGUMENTS - len(arguments)))
    if result < 0:
        number = _libc.__errno_location().contents.value  # the next thing this thread does after the call
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prctl(option: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> int:
    return call("prctl", option, a, b, c, d)


def kill_others(number: int) -> bool:
    """Signal every process of this namespace but the caller and process 1; False when there is none.

    This and `reap` raise nothing: an exception alone costs fifty page faults in a process that has just been forked.
    """
    return _libc.syscall(NUMBERS["kill"][_COLUMN], -1, number, 0, 0, 0, 0) == 0


def reap(options: int) -> tuple[int, int]:
    """`os.waitpid(-1, options)`, with -1 in place of a process id where there is no child, or a signal came in between."""
    pid = _libc.syscall(NUMBERS["wait4"][_COLUMN], -1, ctypes.addressof(_wait_status), options, 0, 0, 0)
    return pid, _wait_status.value


def unshare(flags: int) -> None:
    call("unshare", flags)


def default_signals() -> None:
    """Undo what this process was started with: a script's `&` has SIGINT ignored and `nohup` SIGHUP, and every job would inherit
    that and could not be interrupted."""
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    for number in _signal.valid_signals():
        # Two that Python itself ignores, and needs to.
        if number not in (_signal.SIGPIPE, _signal.SIGXFSZ) and _signal.getsignal(number) == _signal.SIG_IGN:
            on_signal(number, DEFAULT)


def set_namespace(descriptor: int, kind: int) -> None:
    """Enter a namespace; for `CLONE_NEWPID` it is the one that children are born in."""
    call("setns", descriptor, kind)


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


def close_range(first: int, last: int = 0x7FFFFFFF) -> None:
    """Close every descriptor from `first` to `last`, known to Python or not."""
    call("close_range", first, last, 0)


def open_beneath(folder: int, name: str, flags: int) -> int:
    """Open `name` below the folder descriptor, following no symlink, magic link, `..` or mount on the way (openat2)."""
    how = (ctypes.c_uint64 * 3)(
        flags | os.O_CLOEXEC, 0, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV
    )
    return call("openat2", folder, name.encode(), how, ctypes.sizeof(how))


def set_capabilities(numbers: Iterable[int] = ()) -> None:
    """Permitted and effective set of this thread, all numbers below 32; the inheritable one becomes empty."""
    mask = sum(1 << number for number in numbers)
    call("capset", _CAPABILITY_VERSION_3, struct.pack("=6I", mask, mask, 0, 0, 0, 0))
