"""One job, one cage: a supervisor that watches, and the program in namespaces of its own.

Forked from the fork server for each job, and built up to the last layer before the job comes. Where the job has a uid of its
own, the supervisor is process 1 of the job's process namespace. Elsewhere it stays outside, and an init, forked from it, is
process 1 or at least the one to which the job's orphans fall. Either way: when process 1 dies, the kernel kills everything in
there, at once and without a race. The fork server itself never sees a job's data.
"""

from __future__ import annotations

import _socket
import contextlib
import marshal
import os
import signal
import struct
import time
from typing import NoReturn

from rollkeel_sandbox import identity, libc, payload, rlimits, root, session, tree, wire
from rollkeel_sandbox.cgroup import Group, limits_of
from rollkeel_sandbox.group import Reaper
from rollkeel_sandbox.job import MAX_JOB_BYTES, Job, Limits, check_name
from rollkeel_sandbox.kinds import KINDS
from rollkeel_sandbox.payload import Cage
from rollkeel_sandbox.plan import MAPPED, OWN
from rollkeel_sandbox.watch import READY, Child, watch

CHANNEL_FD, SETUP_FD, ORDER_FD = 3, 3, 4
"""Of the supervisor; of the program's process until the program starts."""
CAGE_PROCESSES = 2
"""Supervisor and init, which share the job's user namespace and so its count of processes."""
PIPES = ("stdin", "stdout", "stderr", "setup", "order", "status", "go")
STATUS = struct.Struct("=i")
Pipes = dict[str, tuple[int, int]]
"""Name → (read end, write end)."""


def supervise(cage: Cage, uid: int) -> NoReturn:
    """Build a cage, run the one job that comes over the channel, answer, and go. Runs in a process of its own.

    `_socket` does what `socket` does, without enumerations and wrappers: every page that those touch is copied in each cage.
    """
    code = 1
    channel = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, CHANNEL_FD)
    try:
        libc.on_signal(signal.SIGCHLD, libc.DEFAULT)
        if not cage.plan.leads:
            libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)
        own = os.pidfd_open(os.getpid())
        channel.sendmsg([b"c"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, STATUS.pack(own))])
        os.close(own)
        _unshare(cage)
        _serve(channel, cage, uid)
        code = 0
    except (wire.Closed, wire.Late, wire.Mangled):
        code = 0  # the caller is gone or wants no job
    except Exception as error:
        wire.send(channel, {"failed": f"{type(error).__name__}: {error}"}, codec=wire.TRUSTED)
    finally:
        os._exit(code)


def _unshare(cage: Cage) -> None:
    flags = sum(libc.NAMESPACES[name] for name in cage.plan.namespaces)
    if cage.plan.leads:
        flags &= ~libc.CLONE_NEWPID  # it was born in there
    # In a user namespace of its own the kernel counts a job's processes apart from those of other jobs.
    identity.unshare(flags, mapped=cage.plan.identity == MAPPED)


def _serve(channel: _socket.socket, cage: Cage, uid: int) -> None:
    child = None
    scratch, owner = root.SCRATCH, uid if cage.plan.identity == OWN else None
    if "mount" in cage.plan.namespaces:  # elsewhere a cage without a job would leave its folder behind
        root.mount_scratch(Limits.scratch_mb, owner)
        payload.make_folders(owner, scratch)
        child = _start(cage, uid, scratch)
    header, blobs = wire.receive(channel, timeout_s=None, limit=MAX_JOB_BYTES, codec=wire.TRUSTED)
    job = decode_job(header, blobs)
    try:
        if child is None:
            scratch = _temporary_folder(cage.scratch_base, owner)
            child = _start(cage, uid, scratch)
        elif job.limits.scratch_mb != Limits.scratch_mb:
            root.resize_scratch(job.limits.scratch_mb)
        payload.write_files(job, owner, scratch)
        if child.group:
            child.group.limit(limits_of(job.limits))
        if "session" in header:
            said = session.make_status_pipe(scratch, owner)
            _tell(child, _order(cage, job))
            idle_s = header["session"]["idle_s"]
            session.converse(child, job, channel, idle_s=idle_s, said=said, active=cage.plan.watch)
            return
        _tell(child, _order(cage, job))
        outcome = watch(child, job, active=cage.plan.watch)
        files = collect(job, f"{scratch}/box") if job.collect else {}
    finally:
        if scratch != root.SCRATCH:
            tree.remove(scratch)
    # The last thing to do: whoever has the answer may end this process.
    contents = [outcome.stdout, outcome.stderr, *files.values()]
    wire.send(channel, outcome.header | {"files": list(files)}, contents, codec=wire.TRUSTED)


def decode_job(header: dict, blobs: list[bytes]) -> Job:
    """The job of a message. What was checked when it was made holds still, but names are checked again: they become paths."""
    job = object.__new__(Job)
    limits = object.__new__(Limits)
    limits.__dict__.update(header["limits"])
    job.__dict__.update(
        source=blobs[0],
        kind=header["kind"],
        preload="",
        stdin=blobs[1],
        files=dict(zip(header["files"], blobs[2:], strict=True)),
        args=tuple(header["args"]),
        collect=tuple(header["collect"]),
        limits=limits,
        untrusted=True,
    )
    for name in (*job.files, *job.collect):
        check_name(name)
    return job


def _temporary_folder(base: str, owner: int | None) -> str:
    """The job's folder where mounts cannot be had."""
    import tempfile  # not in every fork server: it brings `random`, which draws a seed in each forked child

    folder = tempfile.mkdtemp(dir=base)
    if owner is not None:
        os.chown(folder, owner, owner)
    payload.make_folders(owner, folder)
    return folder


def _order(cage: Cage, job: Job) -> bytes:
    """What the program's process is told: all that it did not know before there was a job."""
    planned: rlimits.Planned = {}
    if cage.plan.rlimits:
        beside = {OWN: 0, MAPPED: CAGE_PROCESSES}.get(cage.plan.identity)
        others = _tasks_of(os.getuid()) if beside is None else beside
        base = cage.base_bytes + KINDS[job.kind].address_mb * rlimits.MB
        planned = rlimits.plan(job.limits, base_bytes=base, other_processes=others)
    source = job.source if job.kind == "python" else b""
    return marshal.dumps((job.kind, source, job.args, planned))


def _tell(child: Child, order: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # the process died, and has said why on the other pipe
        wire.write_all(child.order, order)
    os.close(child.order)


def _tasks_of(uid: int) -> int:
    """Processes of this user now: where a uid is shared, the kernel's limit counts them as well."""
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


def _start(cage: Cage, uid: int, scratch: str) -> Child:
    """Fork the program's process, which puts up its layers and waits for its order. No process of a job has been here."""
    leads = cage.plan.leads
    pipes = {name: os.pipe2(os.O_CLOEXEC) for name in PIPES[: -2 if leads else None]}
    if leads:
        root.mount_proc()
        libc.prctl(libc.PR_SET_DUMPABLE, 0)
    group = Group.make(cage.group, f"{uid}-{time.monotonic_ns()}") if cage.group >= 0 else None
    pid = os.fork()
    if pid == 0:
        (_program if leads else _init)(cage, uid, scratch, pipes, group)
    for name, (read, write) in pipes.items():
        os.close(read if name in ("stdin", "order", "go") else write)
    child = Child(
        pid=pid,
        pidfd=os.pidfd_open(pid),
        stdin=pipes["stdin"][1],
        stdout=pipes["stdout"][0],
        stderr=pipes["stderr"][0],
        setup=pipes["setup"][0],
        order=pipes["order"][1],
        status=None if leads else pipes["status"][0],
        alone="pid" in cage.plan.namespaces,
        group=group,
        reaper=Reaper(pid) if leads else None,
    )
    if not leads:
        os.write(pipes["go"][1], b"g")
        os.close(pipes["go"][1])
    return child


def _init(cage: Cage, uid: int, scratch: str, pipes: Pipes, group: Group | None) -> NoReturn:
    """Process 1: dies with the supervisor, shows the job its own `/proc`, and tells how the program ended."""
    try:
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(pipes["go"][1])
        if os.read(pipes["go"][0], 1) != b"g":  # the supervisor died before the line above took hold
            os._exit(1)
        os.setsid()  # one process group, with the number of the init, for all that does not leave it
        libc.on_signal(signal.SIGINT, libc.DEFAULT)  # process 1 is spared the signals that it has no handler for
        _volunteer()
        libc.prctl(libc.PR_SET_DUMPABLE, 0)  # closed to the job even where they share a uid
        libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)
        if "mount" in cage.plan.namespaces:
            root.mount_proc()
        program = os.fork()
        if program == 0:
            _program(cage, uid, scratch, pipes, group)
        status = os.dup2(pipes["status"][1], 0)
        libc.close_range(1)
        while True:
            pid, how = os.wait()
            if pid == program:
                os.write(status, STATUS.pack(how))
                break
    except OSError as error:
        os.write(pipes["setup"][1], str(error).encode()[:4096])  # closed, and so without effect, once the program runs
    finally:
        os._exit(0)


def _volunteer() -> None:
    """Where the machine runs out of memory, a job goes before anything of its owner's."""
    descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    os.write(descriptor, b"1000")
    os.close(descriptor)


def _program(cage: Cage, uid: int, scratch: str, pipes: Pipes, group: Group | None) -> NoReturn:
    try:
        # Pipes were opened in this order after descriptor 3, so that none is overwritten before it has its new number.
        os.dup2(pipes["stdin"][0], 0)
        os.dup2(pipes["stdout"][1], 1)
        os.dup2(pipes["stderr"][1], 2)
        os.dup2(pipes["setup"][1], SETUP_FD, inheritable=False)
        os.dup2(pipes["order"][0], ORDER_FD, inheritable=False)
        if cage.plan.leads:
            os.setsid()
        try:
            if cage.plan.leads:
                _volunteer()
            if group:
                group.join()
                if cage.plan.namespaces:
                    libc.unshare(libc.CLONE_NEWCGROUP)
            payload.confine(cage, uid=uid, scratch=scratch)
            order = b"".join(iter(lambda: os.read(ORDER_FD, 1 << 20), b""))
            if not order:  # there will be no job
                os._exit(0)
            kind, source, args, limits = marshal.loads(order)
            payload.seal(cage, limits)
        except OSError as error:
            os.write(SETUP_FD, str(error).encode()[:4096])
            os._exit(1)
        os.close(ORDER_FD)
        os.write(SETUP_FD, READY)
        os.close(SETUP_FD)
        payload.run(cage, kind, source, args, scratch)
    except Exception as error:  # such as a module or a shell that the job's user may not read
        os.write(2, f"{type(error).__name__}: {error}\n".encode()[:4096])
    finally:
        os._exit(127)


def collect(job: Job, box: str) -> dict[str, bytes]:
    """See `tree.collect`; none where the job's folder itself is gone."""
    try:
        folder = os.open(box, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return {}
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
        return tree.collect(job, lambda name: libc.open_beneath(folder, name, flags))
    finally:
        os.close(folder)
