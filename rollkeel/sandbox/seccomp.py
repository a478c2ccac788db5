"""The system calls a job may make: an allow list, as a filter the kernel runs before each of them."""

from __future__ import annotations

import ctypes
import errno
import socket

from rollkeel.sandbox import bpf, libc
from rollkeel.sandbox.syscalls import ABSENT, ALLOWED, CONDITIONAL, FORBIDDEN, NUMBERS

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_FROM = 0x40000000
NAMESPACE_FLAGS = (
    libc.CLONE_NEWNS
    | libc.CLONE_NEWCGROUP
    | libc.CLONE_NEWUTS
    | libc.CLONE_NEWIPC
    | libc.CLONE_NEWUSER
    | libc.CLONE_NEWPID
    | libc.CLONE_NEWNET
)
TIOCSTI, TIOCLINUX, TIOCSETD = 0x5412, 0x541C, 0x5423
PERSONALITIES = (0x0, 0x8, 0xFFFFFFFF)
"""Linux, 32-bit reporting, and the question which one it is. Others switch address randomisation off."""
SECCOMP_MODE_FILTER = 2

_EPERM, _ENOSYS = bpf.errno_action(errno.EPERM), bpf.errno_action(errno.ENOSYS)


def conditions() -> dict[str, bpf.Condition]:
    """What the arguments of the conditional calls may be.

    Sockets are local ones (`AF_UNIX`): multiprocessing and asyncio need them, and they end in the job's own namespaces.
    """
    # The namespace flag for time shares its bit with the exit signal in clone, and so cannot be asked for there.
    local = bpf.Equals(argument=0, values=(socket.AF_UNIX,), otherwise=bpf.errno_action(errno.EAFNOSUPPORT))
    return {
        "clone": bpf.NoBits(argument=0, bits=NAMESPACE_FLAGS, otherwise=_EPERM),
        "socket": local,
        "socketpair": local,
        "ioctl": bpf.NoneOf(argument=1, values=(TIOCSTI, TIOCLINUX, TIOCSETD), otherwise=_EPERM),
        # Its own limits; where init and program share a uid, those of init would be in reach as well.
        "prlimit64": bpf.Equals(argument=0, values=(0,), otherwise=_EPERM),
        "personality": bpf.Equals(argument=0, values=PERSONALITIES, otherwise=_EPERM),
    }


def policy(machine: str) -> dict[int, bpf.Rule]:
    """System call number → what happens, for the numbers that do not get the default (ENOSYS)."""
    column = libc.MACHINES[machine]
    by_name: dict[str, bpf.Rule] = dict.fromkeys(ALLOWED, bpf.ALLOW)
    by_name |= dict.fromkeys(FORBIDDEN, _EPERM) | dict.fromkeys(ABSENT, _ENOSYS)
    by_name |= {name: conditions()[name] for name in CONDITIONAL}
    return {NUMBERS[name][column]: rule for name, rule in by_name.items() if NUMBERS[name][column] >= 0}


def program(machine: str) -> list[bpf.Instruction]:
    """The whole filter for `x86_64` or `aarch64`."""
    foreign = X32_FROM if machine == "x86_64" else None
    return bpf.assemble(AUDIT_ARCH[machine], policy(machine), default=_ENOSYS, foreign_from=foreign)


class _SockFprog(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


class Filter:
    """A filter in memory, ready to be installed in a child; built once, as assembling takes a millisecond."""

    def __init__(self, machine: str) -> None:
        instructions = program(machine)
        encoded = bpf.encode(instructions)
        self._memory = ctypes.create_string_buffer(encoded, len(encoded))
        self._prog = _SockFprog(len(instructions), ctypes.addressof(self._memory))

    def install(self) -> None:
        """Bind this thread and its future children for good. Needs no_new_privs."""
        libc.prctl(libc.PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(self._prog))
