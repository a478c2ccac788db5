"""The fork server: a small process, started before torch is imported, from which every cage is forked.

Two processes. The launcher waits for the end of its caller or of the server, and takes the server with it. The server is
process 1 of a process namespace of its own and lives in the private root, so its end is the end of every cage. It reads
no job: it passes each cage the socket on which its job will come.
"""

from __future__ import annotations

import _socket
import errno
import fcntl
import gc
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

from rollkeel_sandbox import identity, kinds, landlock, libc, payload, root
from rollkeel_sandbox.cage import CHANNEL_FD, supervise
from rollkeel_sandbox.payload import Cage
from rollkeel_sandbox.plan import MAPPED, Plan
from rollkeel_sandbox.seccomp import Filter

KEPT_FD = 64
"""What cages need is open from this number on: a control group and the paths that Landlock is to allow."""
MODULES = {"code": (), "math": ("sympy",), "stem": ("numpy", "scipy")}
MAX_MESSAGE = 1 << 16
DESCRIPTOR = struct.Struct("=i")


def main(control_fd: int, package_root: str) -> NoReturn:
    """Entry point of the launcher; the first message on the control socket says what to be."""
    libc.default_signals()
    control = socket.socket(fileno=os.dup(control_fd))  # a busy caller's number may lie among those from KEPT_FD on
    os.close(control_fd)
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
    identity.unshare(flags, mapped=plan.identity == MAPPED)
    try:
        libc.unshare(libc.CLONE_NEWCGROUP)  # names of the host's control groups are nobody's business in here
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without them
            raise


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
            message, ancillary, _, _ = control.recvmsg(MAX_MESSAGE, _socket.CMSG_LEN(DESCRIPTOR.size))
            if not message:
                break
            for _, _, data in ancillary:  # none where this process had no number left for it: the caller sees its end
                (descriptor,) = DESCRIPTOR.unpack(data)
                _fork_cage(descriptor, cage, int(message))
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
    image = config["image"]
    paths = root.interpreter_paths() if image else readable_paths()
    group = -1
    if plan.cgroup:  # before it is out of sight
        group = fcntl.fcntl(os.open(config["group"], os.O_PATH | os.O_DIRECTORY), fcntl.F_DUPFD_CLOEXEC, KEPT_FD)
    if "mount" in plan.namespaces:
        root.enter(paths, image)
        paths = (*paths, *(f"/{name}" for name in os.listdir("/") if image)) if image else paths
    if plan.capabilities:
        identity.forswear()
    seccomp = Filter(libc.machine(), plan) if plan.seccomp else None
    with open("/proc/self/statm", encoding="ascii") as file:
        base = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    private = "mount" in plan.namespaces
    rules = None
    if plan.landlock:
        allowed = root.rules(paths, private=private)
        rules = landlock.prepare(allowed, plan.landlock, KEPT_FD, root.JOB_FOLDERS)
    path = os.environ["PATH"]
    if private:
        os.environ.clear()
        os.environ.update(payload.environment(root.SCRATCH, path))
    return Cage(
        plan=plan,
        rules=rules,
        seccomp=seccomp,
        base_bytes=base,
        sys_path=tuple(p for p in without_own(sys.path, package_root) if os.path.isdir(p)),
        own_modules=tuple(name for name in sys.modules if name.split(".")[0] == "rollkeel_sandbox"),
        path=path,
        group=group,
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


def _fork_cage(channel_fd: int, cage: Cage, uid: int) -> None:
    parent, home = os.getpid(), -1
    try:
        if cage.plan.leads:
            home = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
            libc.unshare(libc.CLONE_NEWPID)  # where the next child is process 1
        child = os.fork()
    except OSError:
        child = -1  # no memory or no process left now: the socket closes, and the caller tries again
    if child:
        if home >= 0:
            libc.set_namespace(home, libc.CLONE_NEWPID)
            os.close(home)
        return
    try:
        if not cage.plan.leads:  # whose process namespace ends with this server's
            libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
        if channel_fd != CHANNEL_FD:
            os.dup2(channel_fd, CHANNEL_FD, inheritable=False)
        libc.close_range(CHANNEL_FD + 1, KEPT_FD - 1)
        libc.close_range(KEPT_FD + (cage.group >= 0) + (len(cage.rules.encoded) if cage.rules else 0))
        supervise(cage, uid)
    finally:
        os._exit(1)
