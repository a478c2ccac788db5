"""Process 1 inside a sandbox that another program built: run one job, hold it to its limits, answer.

Speaks with the caller over standard input and output. What the other program isolates is its business; limits, uid, filter
and the reading of results are done here, as everywhere. Written for kernels that are no Linux, too: nothing it cannot do
without is newer than Linux 3, and limits that such a kernel does not know are named in the answer.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import time
from typing import Any, NoReturn

from rollkeel_sandbox import cage, group, identity, kinds, libc, payload, rlimits, root, seccomp, tree, watch, wire
from rollkeel_sandbox.job import MAX_JOB_BYTES, SOURCE_NAMES, Job, Limits, Status

SETUP_FD = 3
NEEDED = ("AS", "CPU", "FSIZE", "NOFILE")
"""Limits without which no job is run."""
HIDDEN_S = 0.1


def main(config_text: str) -> NoReturn:
    """`config_text`: JSON with `uid` (of the job, null for this process's) and `mount_mb` (see `_mount_scratch`)."""
    libc.default_signals()
    config = json.loads(config_text)
    channel = wire.Pipes(0, 1)
    try:
        with contextlib.suppress(OSError):  # a kernel without it lets nobody look either
            libc.prctl(libc.PR_SET_DUMPABLE, 0)
        if config["mount_mb"] is not None:
            _mount_scratch(config["mount_mb"], config["uid"])
        identity.forswear()
        header, blobs = wire.receive(channel, timeout_s=None, limit=MAX_JOB_BYTES)
        job = cage.decode_job(header, blobs)
        limited = config["mount_mb"] is not None
        answer, contents = _run(job, config["uid"], None if limited else root.most_files(job.limits.scratch_mb))
        wire.send(channel, answer, contents)
    except wire.Closed:
        pass
    except Exception as error:
        wire.send(channel, {"failed": f"{type(error).__name__}: {error}"})
    os._exit(0)


def _mount_scratch(size_mb: int, uid: int | None) -> None:
    """The scratch folder of a job, limited in size and number of files, and without the right to mount afterwards."""
    libc.unshare(libc.CLONE_NEWNS)
    libc.mount("none", "/", flags=libc.MS_REC | libc.MS_PRIVATE)
    root.mount_scratch(size_mb, uid)
    libc.set_capabilities(() if uid is None else libc.AGENT_CAPABILITIES.values())


def _run(job: Job, uid: int | None, most_files: int | None) -> tuple[dict[str, Any], list[bytes]]:
    payload.make_folders(uid, root.SCRATCH)
    payload.write_files(job, uid, root.SCRATCH)
    pipes = [os.pipe() for _ in range(4)]
    pid = os.fork()
    if pid == 0:
        _program(job, uid, [pipes[0][0], pipes[1][1], pipes[2][1], pipes[3][1]])
    for descriptor in (pipes[0][0], *(write for _, write in pipes[1:])):
        os.close(descriptor)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    missing = json.loads(watch.await_setup(pipes[3][0]))
    os.close(pipes[3][0])
    start = time.monotonic()
    ends = (pipes[0][1], pipes[1][0], pipes[2][0])
    pumps = watch.Pumps(*ends, memoryview(job.stdin), job.limits.output_bytes)
    verdict, how, usage = _watch(pid, job, pumps, _Eyes(proc, most_files), start)
    met = _kill_all(pid)
    how = met if how is None else how
    wall = time.monotonic() - start
    pumps.drain()
    used = os.times()
    spent = watch.Spent(max(used.children_user + used.children_system, usage.cpu_s), 0, how)
    outcome = watch.outcome(job, pumps, verdict, wall, spent, usage.memory_bytes)
    files = tree.collect(job, _open)
    contents = [outcome.stdout, outcome.stderr, *files.values()]
    return outcome.header | {"files": list(files), "missing": missing}, contents


def _program(job: Job, uid: int | None, descriptors: list[int]) -> NoReturn:
    try:
        # Above all numbers that are about to be overwritten first, as any of them may be one of the targets.
        high = [os.dup(d) for d in descriptors]
        high = [os.dup(d) if d <= SETUP_FD else d for d in high]
        for target, descriptor in enumerate(high):
            os.dup2(descriptor, target, inheritable=target != SETUP_FD)
        os.closerange(SETUP_FD + 1, 1024)
        try:
            missing = _confine(job, uid)
        except OSError as error:
            os.write(SETUP_FD, str(error).encode()[:4096])
            os._exit(1)
        os.write(SETUP_FD, watch.READY + json.dumps(missing).encode())
        os.close(SETUP_FD)
        env = payload.environment(root.SCRATCH, os.environ.get("PATH", kinds.STANDARD_PATH))
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if job.kind == "python":
            os.execve(sys.executable, [sys.executable, "-X", "utf8", SOURCE_NAMES["python"], *job.args], env)
        os.execve("/bin/sh", ["sh", "-c", kinds.KINDS[job.kind].command, "sh", *job.args], env)
    except OSError as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode()[:4096])
    finally:
        os._exit(127)


def _confine(job: Job, uid: int | None) -> list[str]:
    """Everything but what the sandbox around does. Returns the limits that this kernel does not know."""
    os.umask(0o022)
    os.setsid()
    os.chdir(f"{root.SCRATCH}/box")
    missing = []
    reserve = kinds.KINDS[job.kind].address_mb * rlimits.MB + (256 << 20)
    for name, values in rlimits.plan(job.limits, base_bytes=reserve).items():
        try:
            rlimits.apply({name: values})
        except (OSError, ValueError) as error:
            if name in NEEDED:
                raise OSError(f"limit {name}: {error}") from None
            missing.append(name)
    identity.become(uid)
    libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    libc.set_capabilities()
    seccomp.Filter(libc.machine()).install()
    return missing


class _Eyes:
    """What this process sees of the job."""

    def __init__(self, proc: int, most_files: int | None) -> None:
        """`most_files`: of its scratch folder, None where the kernel keeps to a limit."""
        self._proc = proc
        self._most_files = most_files
        self._ledger = group.Ledger()
        self._hidden: dict[tuple[int, int], float] = {}

    def usage(self, now: float, limit_bytes: int) -> group.Usage:
        """What the job uses; the memory of a process that hides it is taken to be beyond every limit."""
        members = [p for p in group.processes(self._proc) if p.pid != os.getpid()]
        usage = group.usage(self._proc, members, limit_bytes // 2, self._ledger)
        hidden = {(p.pid, p.started) for p in members if group.hidden(self._proc, p)}
        self._hidden = {who: self._hidden.get(who, now) for who in hidden}
        # One that ends with all its threads looks like that for a moment.
        if any(now - since > HIDDEN_S for since in self._hidden.values()) or self._too_many_files():
            return group.Usage(limit_bytes + 1, usage.cpu_s)
        return usage

    def _too_many_files(self) -> bool:
        if self._most_files is None:
            return False
        seen = (len(folders) + len(files) for _, folders, files in os.walk(root.SCRATCH))
        return any(total > self._most_files for total in itertools.accumulate(seen))


def _watch(
    pid: int, job: Job, pumps: watch.Pumps, eyes: _Eyes, start: float
) -> tuple[Status | None, int | None, group.Usage]:
    """Why the job has to be killed (None: it ended by itself), its wait status then, and the most that it used."""
    limits = job.limits
    most = group.Usage(0, 0.0)
    while True:
        now = time.monotonic()
        usage = eyes.usage(now, limits.memory_mb * watch.MB)
        most = group.Usage(max(most.memory_bytes, usage.memory_bytes), usage.cpu_s)
        verdict = _over(limits, now - start, usage)
        how = None
        while how is None and verdict is None:
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if ended == 0:
                break
            how = status if ended == pid else None
        if verdict or how is not None:
            return verdict, how, most
        pumps.move(min(watch.POLL_S, max(0.0, start + limits.wall_s - now)))
        if any(pumps.overflowed):
            return Status.OUTPUT, None, most


def _over(limits: Limits, wall_s: float, usage: group.Usage) -> Status | None:
    if wall_s >= limits.wall_s:
        return Status.TIMEOUT
    if usage.memory_bytes > limits.memory_mb * watch.MB:
        return Status.MEMORY
    return Status.CPU if usage.cpu_s >= limits.cpu_s else None


def _kill_all(pid: int) -> int | None:
    """Kill and reap all others: one call reaches everybody whom process 1 sees. Wait status of `pid` if it is met."""
    how = None
    until = time.monotonic() + group.KILL_DEADLINE_S
    while time.monotonic() < until:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            ended, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return how
        how = status if ended == pid else how
    raise OSError("some processes of the job could not be killed")


def _open(name: str) -> int:
    """As `libc.open_beneath`, by steps that every kernel knows; nobody is left to change anything between them."""
    *folders, last = name.split("/")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    opened = [os.open(root.BOX, flags | os.O_DIRECTORY)]
    try:
        for folder in folders:
            opened.append(os.open(folder, flags | os.O_DIRECTORY, dir_fd=opened[-1]))
        return os.open(last, flags | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=opened[-1])
    finally:
        for descriptor in opened:
            os.close(descriptor)
