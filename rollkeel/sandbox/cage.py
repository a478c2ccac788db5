"""One job, one cage: a supervisor outside, an init that holds the job's processes together, and the program inside.

Forked from the fork server for each job. The supervisor unshares the namespaces, waits for the job, then forks the init,
which is process 1 of the job's own process namespace: when it dies, the kernel kills everything in there, at once and
without a race. The program is a child of the init. The fork server itself never sees a job's data.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import struct
from typing import Any, NoReturn

from rollkeel.sandbox import identity, libc, payload, root, session, tree, wire
from rollkeel.sandbox.job import MAX_JOB_BYTES, SOURCE_NAMES, Job, Limits
from rollkeel.sandbox.payload import Cage
from rollkeel.sandbox.plan import MAPPED, OWN
from rollkeel.sandbox.watch import READY, Child, watch

NAMESPACE_FLAG = {
    "pid": libc.CLONE_NEWPID,
    "mount": libc.CLONE_NEWNS,
    "net": libc.CLONE_NEWNET,
    "ipc": libc.CLONE_NEWIPC,
    "uts": libc.CLONE_NEWUTS,
}
SETUP_FD = 3
STATUS = struct.Struct("=i")


def supervise(channel: socket.socket, cage: Cage, uid: int) -> NoReturn:
    """Build a cage, run the one job that comes over `channel`, answer, and go. Runs in a process of its own."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)
        own = os.pidfd_open(os.getpid())
        socket.send_fds(channel, [b"c"], [own])
        os.close(own)
        _unshare(cage)
        _serve(channel, cage, uid)
        code = 0
    except (wire.Closed, wire.Late, wire.Mangled):
        code = 0  # the caller is gone or wants no job
    except Exception as error:
        wire.send(channel, {"failed": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(code)


def _unshare(cage: Cage) -> None:
    flags = sum(NAMESPACE_FLAG[name] for name in cage.plan.namespaces)
    if cage.plan.identity == MAPPED:
        uid, gid = os.getuid(), os.getgid()
        # In a user namespace of its own the kernel counts a job's processes apart from those of other jobs.
        libc.unshare(libc.CLONE_NEWUSER | flags)
        identity.map_user(identity.INSIDE_UID, uid, gid)
    elif flags:
        libc.unshare(flags)


def _serve(channel: socket.socket, cage: Cage, uid: int) -> None:
    header, blobs = wire.receive(channel, timeout_s=None, limit=MAX_JOB_BYTES)
    channel.settimeout(None)
    job = decode_job(header, blobs)
    scratch = _scratch(cage, job, uid)
    try:
        _write_files(cage, job, uid, scratch)
        if "session" in header:
            _converse(channel, cage, job, uid, scratch, header["session"])
            return
        outcome = watch(_start(cage, job, uid, scratch), job, active=cage.plan.watch)
        files = collect(job, f"{scratch}/box") if job.collect else {}
    finally:
        if scratch != root.SCRATCH:
            tree.remove(scratch)
    # The last thing to do: whoever has the answer may end this process.
    wire.send(channel, outcome.header | {"files": list(files)}, [outcome.stdout, outcome.stderr, *files.values()])


def decode_job(header: dict, blobs: list[bytes]) -> Job:
    """The job of a message; it is checked again, as on the other side."""
    return Job(
        source=blobs[0],
        kind=header["kind"],
        stdin=blobs[1],
        files=dict(zip(header["files"], blobs[2:], strict=True)),
        args=tuple(header["args"]),
        collect=tuple(header["collect"]),
        limits=Limits(**header["limits"]),
    )


def _scratch(cage: Cage, job: Job, uid: int) -> str:
    """The job's folder: a file system of its own, or a temporary folder where mounts cannot be had."""
    owner = uid if cage.plan.identity == OWN else os.getuid()
    if "mount" in cage.plan.namespaces:
        gid = uid if cage.plan.identity == OWN else os.getgid()
        root.mount_scratch(job.limits.scratch_mb, owner, gid)
        return root.SCRATCH
    import tempfile  # not in every fork server: it brings `random`, which draws a seed in each forked child

    folder = tempfile.mkdtemp(dir=cage.scratch_base)
    if cage.plan.identity == OWN:
        os.chown(folder, uid, uid)
    return folder


def _write_files(cage: Cage, job: Job, uid: int, scratch: str) -> None:
    """Source and files, before any process of the job is there to put a symlink in the way."""
    made = [f"{scratch}/{name}" for name in root.SCRATCH_FOLDERS]
    for path in made:
        os.mkdir(path, 0o700)
    for name, data in {SOURCE_NAMES[job.kind]: job.source, **job.files}.items():
        folder = f"{scratch}/box"
        for part in name.split("/")[:-1]:
            folder = f"{folder}/{part}"
            if folder not in made:
                os.mkdir(folder, 0o755)
                made.append(folder)
        path = f"{scratch}/box/{name}"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644), "wb") as file:
            file.write(data)
        made.append(path)
    if cage.plan.identity == OWN:
        for path in made:
            os.chown(path, uid, uid, follow_symlinks=False)


def _converse(channel: socket.socket, cage: Cage, job: Job, uid: int, scratch: str, how: dict[str, Any]) -> None:
    """A terminal session in place of a job that is watched to its end."""
    said = session.make_status_pipe(scratch, uid if cage.plan.identity == OWN else None)
    child = _start(cage, job, uid, scratch)
    session.converse(child, job, channel, idle_s=how["idle_s"], said=said, active=cage.plan.watch)


def _start(cage: Cage, job: Job, uid: int, scratch: str) -> Child:
    """Fork the init and have it start the program."""
    pipes = {name: os.pipe2(os.O_CLOEXEC) for name in ("stdin", "stdout", "stderr", "setup", "status", "go")}
    tasks = 0 if cage.plan.identity != "shared" else _tasks_of(os.getuid())
    pid = os.fork()
    if pid == 0:
        _init(cage, job, uid, scratch, tasks, pipes)
    for name in ("stdout", "stderr", "setup", "status"):
        os.close(pipes[name][1])
    for name in ("stdin", "go"):
        os.close(pipes[name][0])
    child = Child(
        pid=pid,
        pidfd=os.pidfd_open(pid),
        stdin=pipes["stdin"][1],
        stdout=pipes["stdout"][0],
        stderr=pipes["stderr"][0],
        setup=pipes["setup"][0],
        status=pipes["status"][0],
        alone="pid" in cage.plan.namespaces,
    )
    os.write(pipes["go"][1], b"g")
    os.close(pipes["go"][1])
    return child


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


def _init(cage: Cage, job: Job, uid: int, scratch: str, tasks: int, pipes: dict[str, tuple[int, int]]) -> NoReturn:
    """Process 1: dies with the supervisor, shows the job its own `/proc`, and tells how the program ended."""
    try:
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(pipes["go"][1])
        if os.read(pipes["go"][0], 1) != b"g":  # the supervisor died before the line above took hold
            os._exit(1)
        os.setsid()  # one process group, with the number of the init, for all that does not leave it
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 is spared the signals that it has no handler for
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # where the machine runs out of memory, a job goes before anything of its owner's
        libc.prctl(libc.PR_SET_DUMPABLE, 0)  # closed to the job even where they share a uid
        libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)
        if "mount" in cage.plan.namespaces:
            root.mount_proc()
        program = os.fork()
        if program == 0:
            _program(cage, job, uid, scratch, tasks, pipes)
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


def _program(cage: Cage, job: Job, uid: int, scratch: str, tasks: int, pipes: dict[str, tuple[int, int]]) -> NoReturn:
    try:
        # Above all numbers that are about to be overwritten first, as any of them may be one of the targets.
        order = [pipes["stdin"][0], pipes["stdout"][1], pipes["stderr"][1], pipes["setup"][1]]
        high = [_above(descriptor, SETUP_FD + 1) for descriptor in order]
        for target, descriptor in enumerate(high):
            os.dup2(descriptor, target, inheritable=True)
        libc.close_range(SETUP_FD + 1)
        os.set_inheritable(SETUP_FD, False)
        try:
            payload.confine(cage, job, uid=uid, scratch=scratch, tasks_of_uid=tasks)
        except OSError as error:
            os.write(SETUP_FD, str(error).encode()[:4096])
            os._exit(1)
        os.write(SETUP_FD, READY)
        os.close(SETUP_FD)
        payload.run(cage, job, scratch)
    finally:
        os._exit(127)


def _above(descriptor: int, lowest: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)


def collect(job: Job, box: str) -> dict[str, bytes]:
    """Files the job was asked for, read after its death: regular ones, found without following any link, within the limit.

    The job may have done anything to its folder, which is why nothing it did there is an error here.
    """
    out: dict[str, bytes] = {}
    left = job.limits.output_bytes
    try:
        folder = os.open(box, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return out
    try:
        for name in dict.fromkeys(job.collect):
            data = _read_regular(folder, name, left)
            if data is not None:
                out[name] = data
                left -= len(data)
    finally:
        os.close(folder)
    return out


def _read_regular(folder: int, name: str, limit: int) -> bytes | None:
    try:
        descriptor = libc.open_beneath(folder, name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit or found.st_nlink != 1:
            return None
        return b"".join(iter(lambda: os.read(descriptor, 1 << 20), b""))
    finally:
        os.close(descriptor)
