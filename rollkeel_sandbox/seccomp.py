"""The system calls a job may make: an allow list, as a filter the kernel runs before each of them."""

from __future__ import annotations

import ctypes
import errno
import resource
import socket

from rollkeel_sandbox import bpf, libc
from rollkeel_sandbox.plan import OWN, Plan
from rollkeel_sandbox.syscalls import ABSENT, ALLOWED, ATTRIBUTES, CONDITIONAL, FORBIDDEN, NUMBERS, SENDING

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_FROM = 0x40000000
NAMESPACE_FLAGS = sum(libc.NAMESPACES.values()) | libc.CLONE_NEWCGROUP | libc.CLONE_NEWUSER
TIOCSTI, TIOCLINUX, TIOCSETD = 0x5412, 0x541C, 0x5423
PERSONALITIES = (0x0, 0x8, 0xFFFFFFFF)
"""Linux, 32-bit reporting, and the question which one it is. Others switch address randomisation off."""
SECCOMP_MODE_FILTER = 2
SHARED_ANONYMOUS = 0x21
"""MAP_SHARED | MAP_ANONYMOUS."""
MADV_COLD, MADV_PAGEOUT = 20, 21
SO_ATTACH = (26, 50, 51, 52)
"""Socket filters, classic and extended, of one socket and of a group."""
F_SETOWN, F_SETSIG, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP = 8, 10, 15, 0x8901, 0x8902
PRIO_PROCESS = 0
DEVICE = 0x2000
"""Of the four bits of a file's type, the one that character and block devices have and no other kind has."""
SCOPED_SINCE = 6
"""Landlock ABI from which signals cannot leave a job."""

_EPERM, _ENOSYS = bpf.errno_action(errno.EPERM), bpf.errno_action(errno.ENOSYS)
_NO_FAMILY = bpf.errno_action(errno.EAFNOSUPPORT)
_WITHOUT_EFFECT = bpf.errno_action(0)
"""The caller is told of success and nothing happens."""


def conditions() -> dict[str, bpf.Condition]:
    """What the arguments of the conditional calls may be.

    Sockets are local ones (`AF_UNIX`): multiprocessing and asyncio need them, and they end in the job's own namespaces.
    """
    local = bpf.Equals(argument=0, values=(socket.AF_UNIX,), otherwise=_NO_FAMILY)
    # A core limit of 0 does not keep a crash from the host's dump handler, a program that runs as root; only 1 does.
    own_core = bpf.When(
        argument=1,
        value=resource.RLIMIT_CORE,
        then=bpf.Null(argument=2, otherwise=_WITHOUT_EFFECT),
        otherwise=bpf.ALLOW,
    )
    return {
        # The namespace flag for time shares its bit with the exit signal in clone, and so cannot be asked for there.
        "clone": bpf.NoBits(argument=0, bits=NAMESPACE_FLAGS, otherwise=_EPERM),
        "socket": local,
        "socketpair": local,
        "ioctl": bpf.NoneOf(argument=1, values=(TIOCSTI, TIOCLINUX, TIOCSETD), otherwise=_EPERM),
        # Its own limits; where init and program share a uid, those of init would be in reach as well.
        "prlimit64": bpf.When(argument=0, value=0, then=own_core, otherwise=_EPERM),
        "setrlimit": bpf.NoneOf(argument=0, values=(resource.RLIMIT_CORE,), otherwise=_WITHOUT_EFFECT),
        # Such memory stays when all but a page of it is unmapped, and then no count of the job's pages finds it.
        "mmap": bpf.NotAllBits(argument=3, bits=SHARED_ANONYMOUS, otherwise=_EPERM),
        "mknod": bpf.NoBits(argument=1, bits=DEVICE, otherwise=_EPERM),
        "mknodat": bpf.NoBits(argument=2, bits=DEVICE, otherwise=_EPERM),
        "madvise": bpf.NoneOf(argument=2, values=(MADV_COLD, MADV_PAGEOUT), otherwise=_WITHOUT_EFFECT),
        "prctl": bpf.NoneOf(argument=0, values=(libc.PR_SET_SECCOMP,), otherwise=_EPERM),
        "setsockopt": bpf.NoneOf(argument=2, values=SO_ATTACH, otherwise=_EPERM),
        "personality": bpf.Equals(argument=0, values=PERSONALITIES, otherwise=_EPERM),
    }


def among_others(plan: Plan) -> dict[str, bpf.Rule]:
    """More rules, for jobs that live among the host's processes and files: what Landlock does not look at.

    With the server's uid these are the modes, owners and times of its files, the priority of its processes and, before
    ABI 6, signals. Local sockets lead to the host's services.
    """
    streams = tuple(kind | flags for kind in (1, 5) for flags in (0, 0x800, 0x80000, 0x80800))
    pair = bpf.Equals(argument=1, values=streams, otherwise=_NO_FAMILY)  # datagram sockets can be sent from anywhere
    rules: dict[str, bpf.Rule] = {
        "socket": _NO_FAMILY,
        "socketpair": bpf.When(argument=0, value=socket.AF_UNIX, then=pair, otherwise=_NO_FAMILY),
    }
    if plan.identity == OWN:
        return rules
    own = bpf.Equals(argument=0, values=(0,), otherwise=_EPERM)
    rules |= dict.fromkeys(ATTRIBUTES, _WITHOUT_EFFECT)
    rules |= dict.fromkeys(("sched_setaffinity", "sched_setparam", "sched_setscheduler"), own)
    myself = bpf.Equals(argument=1, values=(0,), otherwise=_EPERM)
    rules["setpriority"] = bpf.When(argument=0, value=PRIO_PROCESS, then=myself, otherwise=_EPERM)
    if plan.landlock < SCOPED_SINCE:
        rules |= dict.fromkeys(SENDING, _EPERM)
        rules["fcntl"] = bpf.NoneOf(argument=1, values=(F_SETOWN, F_SETSIG, F_SETOWN_EX), otherwise=_EPERM)
        terminal = (TIOCSTI, TIOCLINUX, TIOCSETD, FIOSETOWN, SIOCSPGRP)
        rules["ioctl"] = bpf.NoneOf(argument=1, values=terminal, otherwise=_EPERM)
    return rules


def policy(machine: str, plan: Plan | None = None) -> dict[int, bpf.Rule]:
    """System call number → what happens, for the numbers that do not get the default (ENOSYS)."""
    column = libc.MACHINES[machine]
    by_name: dict[str, bpf.Rule] = dict.fromkeys(ALLOWED, bpf.ALLOW)
    by_name |= dict.fromkeys(FORBIDDEN, _EPERM) | dict.fromkeys(ABSENT, _ENOSYS)
    by_name |= {name: conditions()[name] for name in CONDITIONAL}
    if plan is not None and "pid" not in plan.namespaces:
        by_name |= among_others(plan)
    return {NUMBERS[name][column]: rule for name, rule in by_name.items() if NUMBERS[name][column] >= 0}


def program(machine: str, plan: Plan | None = None) -> list[bpf.Instruction]:
    """The whole filter for `x86_64` or `aarch64`; without a plan that of a job in namespaces of its own."""
    foreign = X32_FROM if machine == "x86_64" else None
    return bpf.assemble(AUDIT_ARCH[machine], policy(machine, plan), default=_ENOSYS, foreign_from=foreign)


class _SockFprog(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


class Filter:
    """A filter in memory, ready to be installed in a child; built once, as assembling takes a millisecond."""

    def __init__(self, machine: str, plan: Plan | None = None) -> None:
        instructions = program(machine, plan)
        encoded = bpf.encode(instructions)
        self._memory = ctypes.create_string_buffer(encoded, len(encoded))
        self._prog = _SockFprog(len(instructions), ctypes.addressof(self._memory))

    def install(self) -> None:
        """Bind this thread and its future children for good. Needs no_new_privs."""
        libc.prctl(libc.PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(self._prog))
