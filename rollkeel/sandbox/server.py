"""The fork server: a small process, started before torch is imported, from which every cage is forked.

Two processes. The launcher waits for the end of its caller or of the server, and takes the server with it. The server is
process 1 of a process namespace of its own and lives in the private root, so its end is the end of every cage. It reads
no job: it passes each cage the socket on which its job will come.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from rollkeel.sandbox import identity, kinds, libc, root
from rollkeel.sandbox.cage import supervise
from rollkeel.sandbox.payload import Cage
from rollkeel.sandbox.plan import MAPPED, Plan
from rollkeel.sandbox.seccomp import Filter

MODULES = {"code": (), "math": ("sympy",), "stem": ("numpy", "scipy")}
CHANNEL_FD = 3
MAX_MESSAGE = 1 << 16


def main(control_fd: int, package_root: str) -> NoReturn:
    """Entry point of the launcher; the first message on the control socket says what to be."""
    control = socket.socket(fileno=control_fd)
    config = json.loads(control.recv(MAX_MESSAGE))
    caller = os.pidfd_open(config["caller"])
    if os.getppid() != config["caller"]:
        os._exit(1)
    plan = Plan.from_json(config["plan"])
    try:
        _unshare(plan)
    except OSError as error:
        control.send(json.dumps({"failed": str(error)}).encode())
        os._exit(1)
    alive, alive_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(alive_end)
        if select.select([alive], [], [], 0)[0]:  # end of file: the launcher died before the line above took hold
            os._exit(1)
        os.close(alive)
        os.close(caller)
        _serve(control, plan, config, package_root)
    control.close()
    server = os.pidfd_open(pid)
    select.select([caller, server], [], [])
    signal.pidfd_send_signal(server, signal.SIGKILL)
    os.waitpid(pid, 0)
    os._exit(0)


def _unshare(plan: Plan) -> None:
    """Namespaces of the server itself: the cages' stay apart from them, but none of the host's is left in reach."""
    if not plan.namespaces:
        return
    flags = libc.CLONE_NEWPID | libc.CLONE_NEWNS | libc.CLONE_NEWIPC | libc.CLONE_NEWUTS
    if "pid" not in plan.namespaces:
        flags = 0
    if plan.identity == MAPPED:
        uid, gid = os.getuid(), os.getgid()
        libc.unshare(libc.CLONE_NEWUSER | flags)
        identity.map_user(identity.INSIDE_UID, uid, gid)
    elif flags:
        libc.unshare(flags)


def _serve(control: socket.socket, plan: Plan, config: dict[str, Any], package_root: str) -> NoReturn:
    code = 1
    try:
        cage = _prepare(plan, config, package_root)
        control.send(json.dumps({"ready": os.getpid()}).encode())
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors at once
        gc.collect()
        gc.freeze()  # pages that a collector would write to stay shared with the cages; programs switch it on again
        gc.disable()
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE, 1)
            if not message:
                break
            for descriptor in descriptors:  # none where this process had no number left for it: the caller sees its end
                _fork_cage(control, descriptor, cage, int(message))
                os.close(descriptor)
        code = 0
    except (OSError, ImportError) as error:
        control.send(json.dumps({"failed": str(error)}).encode())
    finally:
        os._exit(code)


def _prepare(plan: Plan, config: dict[str, Any], package_root: str) -> Cage:
    """Everything that is the same for all jobs: modules, the root, the filter, what can be given up for good."""
    for name in MODULES[config["preload"]]:
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    paths = readable_paths()
    if "mount" in plan.namespaces:
        root.enter(paths)
    if plan.capabilities:
        identity.forswear()
    seccomp = Filter(libc.machine(), plan) if plan.seccomp else None
    with open("/proc/self/statm", encoding="ascii") as file:
        base = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return Cage(
        plan=plan,
        paths=paths,
        seccomp=seccomp,
        base_bytes=base,
        sys_path=tuple(p for p in without_own(sys.path, package_root) if os.path.isdir(p)),
        scratch_base=config["scratch_base"],
    )


def without_own(sys_path: list[str], package_root: str) -> list[str]:
    """`sys_path` without the entry that was put there for this package; one that an installation has besides stays."""
    at = sys_path.index(package_root)
    return sys_path[:at] + sys_path[at + 1 :]


def readable_paths(search_path: str = "") -> tuple[str, ...]:
    """The host's folders and files that jobs may read: the system's programs and libraries, this Python, other tools."""
    tools = [path for prefix in kinds.prefixes(search_path or os.environ["PATH"]) for path in root.installation(prefix)]
    return tuple(p for p in (*root.SYSTEM, *root.settings(), *root.interpreter_paths(), *tools) if os.path.exists(p))


def _fork_cage(control: socket.socket, channel_fd: int, cage: Cage, uid: int) -> None:
    parent = os.getpid()
    try:
        if os.fork() > 0:
            return
    except OSError:
        return  # no memory or no process left now: the socket closes, and the caller tries again
    try:
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        control.detach()
        if channel_fd != CHANNEL_FD:
            os.dup2(channel_fd, CHANNEL_FD, inheritable=False)
        libc.close_range(CHANNEL_FD + 1)
        supervise(socket.socket(fileno=CHANNEL_FD), cage, uid)
    finally:
        os._exit(1)
