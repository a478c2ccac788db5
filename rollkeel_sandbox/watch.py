"""From the program's start to its end: feed it, take what it prints up to the limit, hold it to its limits, kill all of it."""

from __future__ import annotations

import os
import resource
import select
import signal
import struct
import time
from dataclasses import dataclass, field, replace
from typing import Any

from rollkeel_sandbox import cgroup, group
from rollkeel_sandbox.job import Job, Status

SETUP_DEADLINE_S = 20.0
READY = b"+"
"""What the program's process says when its last layer stands; anything else is the reason why one does not."""
POLL_S = 0.01
CHUNK = 1 << 16
MB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Child:
    """The process on which a job hangs, and the supervisor's ends of its pipes."""

    pid: int
    """Of the init, or of the program itself where the supervisor is process 1."""
    pidfd: int
    stdin: int
    stdout: int
    stderr: int
    setup: int
    order: int
    status: int | None
    """Where the init says how the program ended; None without an init."""
    reaper: group.Reaper | None = None
    """Reaps the job where the supervisor is process 1."""
    group: cgroup.Group | None = None
    alone: bool
    """The job has a process namespace, so that `/proc` shows the job and nobody else."""


@dataclass(frozen=True)
class Outcome:
    """Fields of a `Result`, and what was printed."""

    header: dict[str, Any]
    stdout: bytes
    stderr: bytes


@dataclass
class Pumps:
    """Standard streams of the job. Reading stops at the limit; one byte more is the proof that there was more."""

    stdin: int
    stdout: int
    stderr: int
    """The other ends of the program's."""
    left: memoryview
    """What it is still to be fed."""
    limit: int
    taken: dict[int, bytearray] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.taken = {self.stdout: bytearray(), self.stderr: bytearray()}
        self.open = {self.stdin, self.stdout, self.stderr}
        for descriptor in self.open:
            os.set_blocking(descriptor, False)
        if not self.left:
            self.close(self.stdin)

    def close(self, descriptor: int) -> None:
        if descriptor in self.open:
            self.open.remove(descriptor)
            os.close(descriptor)

    def move(self, wait_s: float, *others: int) -> list[int]:
        """Wait for any stream or other descriptor; returns those that can be read, which is done already with streams."""
        # Only what is ready is touched: a job that never reads or never stops writing must not hold the clock.
        reading = [*others, *(d for d in self.taken if d in self.open)]
        ready, room, _ = select.select(reading, [self.stdin] if self.stdin in self.open else [], [], wait_s)
        for descriptor in (*ready, *room):
            if descriptor not in others:
                self.step(descriptor)
        return ready

    def step(self, descriptor: int) -> None:
        if descriptor == self.stdin:
            self._feed()
            return
        taken = self.taken[descriptor]
        try:
            data = os.read(descriptor, min(CHUNK, self.limit + 1 - len(taken)) or 1)
        except BlockingIOError:
            return
        taken += data
        if not data or len(taken) > self.limit:
            self.close(descriptor)

    def _feed(self) -> None:
        try:
            self.left = self.left[os.write(self.stdin, self.left[:CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.left = self.left[:0]
        if not self.left:
            self.close(self.stdin)

    @property
    def overflowed(self) -> list[bool]:
        """Of standard output and standard error."""
        return [len(taken) > self.limit for taken in self.taken.values()]

    def drain(self) -> None:
        """What is still in the pipes of a job that is dead."""
        for descriptor in self.taken:
            while descriptor in self.open and select.select([descriptor], [], [], 0)[0]:
                self.step(descriptor)
        for descriptor in list(self.open):
            self.close(descriptor)


def watch(child: Child, job: Job, *, active: bool) -> Outcome:
    """See a job through; when this returns or raises, all its processes are dead. OSError: a layer failed, nothing ran."""
    proc, ledger = -1, group.Ledger()
    try:
        await_setup(child.setup)
        start = time.monotonic()
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        pumps = Pumps(child.stdin, child.stdout, child.stderr, memoryview(job.stdin), job.limits.output_bytes)
        verdict, peak = _until_end(child, job, pumps, proc if active else -1, start, ledger)
    finally:
        spent = _end(child)
        if proc >= 0:
            os.close(proc)
    wall = time.monotonic() - start
    pumps.drain()
    if verdict is None and spent.out_of_memory:
        verdict = Status.MEMORY
    spent = replace(spent, cpu_s=max(spent.cpu_s, ledger.seen_s))
    return outcome(job, pumps, verdict, wall, spent, peak)


def await_setup(descriptor: int) -> bytes:
    """Wait until the last layer stands; what is said of it then."""
    if not select.select([descriptor], [], [], SETUP_DEADLINE_S)[0]:
        raise OSError(f"cage not ready after {SETUP_DEADLINE_S:g} s")
    said = os.read(descriptor, 4096)
    if not said.startswith(READY):
        raise OSError(said.decode("utf-8", "replace") or "the program's process died before its last layer stood")
    return said[len(READY) :]


def _until_end(
    child: Child, job: Job, pumps: Pumps, proc: int, start: float, ledger: group.Ledger
) -> tuple[Status | None, int]:
    """Why the job has to be killed (None: it ended by itself), and the most memory seen."""
    limits = job.limits
    peak = 0
    seen_at = start
    while True:
        now = time.monotonic()
        if now - start >= limits.wall_s:
            return Status.TIMEOUT, peak
        if proc >= 0 and now - seen_at >= POLL_S:
            seen_at = now
            usage = _usage(child, proc, limits.memory_mb * MB, ledger)
            peak = max(peak, usage.memory_bytes)
            if usage.memory_bytes > limits.memory_mb * MB:
                return Status.MEMORY, peak
            if max(usage.cpu_s, child.group.cpu_s() if child.group else 0.0) >= limits.cpu_s:
                return Status.CPU, peak
        ready = pumps.move(min(POLL_S, max(0.0, start + limits.wall_s - now)), child.pidfd)
        if any(pumps.overflowed):
            return Status.OUTPUT, peak
        if child.pidfd in ready:
            return None, peak


def _usage(child: Child, proc: int, limit: int, ledger: group.Ledger) -> group.Usage:
    members = group.processes(proc)
    if child.reaper:
        members = [p for p in members if p.pid != os.getpid()]
    elif not child.alone:
        members = group.below(child.pid, members)
    return group.usage(proc, members, limit // 2, ledger, group.reaped_cpu_s())


@dataclass(frozen=True)
class Spent:
    cpu_s: float
    peak_bytes: int
    how: int | None
    """Wait status of the program, None when the init died before it could say."""
    out_of_memory: bool = False
    """The kernel killed a process of its control group for memory."""


def _end(child: Child) -> Spent:
    """Kill what is left of the job and reap it. In a process namespace the init's death is everybody's."""
    if child.reaper:
        child.reaper.kill_all()
        used, how = resource.getrusage(resource.RUSAGE_CHILDREN), child.reaper.how
    else:
        used, how = _end_init(child)
    os.close(child.pidfd)
    os.close(child.setup)
    cpu_s, out_of_memory = used.ru_utime + used.ru_stime, False
    if child.group:
        cpu_s, out_of_memory = child.group.cpu_s(), child.group.ran_out_of_memory()
        child.group.close()
    return Spent(cpu_s, used.ru_maxrss * 1024, how, out_of_memory)


def _end_init(child: Child) -> tuple[resource.struct_rusage, int | None]:
    assert child.status is not None
    signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
    if not child.alone:
        # What stayed in the group dies at once. It has the number of the init, which nobody else gets before it is reaped in the next line.
        group.kill_all(child.pid)
    _, _, used = os.wait4(child.pid, 0)
    if not child.alone and not group.kill_descendants():
        raise OSError("some processes of the job could not be killed")
    said = os.read(child.status, 4)
    os.close(child.status)
    return used, struct.unpack("=i", said)[0] if said else None


def outcome(job: Job, pumps: Pumps, verdict: Status | None, wall_s: float, spent: Spent, peak: int) -> Outcome:
    """What is told of a job that is dead; `verdict`: why it was killed, None if it ended by itself."""
    code = number = None
    reason = ""
    if verdict is None and spent.how is None:
        verdict, reason = Status.KILLED, "the cage's first process was killed from outside"
    elif verdict is None and spent.how is not None:
        if os.WIFSIGNALED(spent.how):
            number = os.WTERMSIG(spent.how)
        else:
            code = os.WEXITSTATUS(spent.how)
        verdict = Status.OK if code == 0 else Status.ERROR
        out_of_memory = code == 1 and pumps.taken[pumps.stderr].rstrip().rsplit(b"\n", 1)[-1].startswith(b"MemoryError")
        if number == signal.SIGXCPU:
            verdict = Status.CPU
        elif out_of_memory and job.kind == "python":
            verdict = Status.MEMORY
        elif any(pumps.overflowed):
            verdict = Status.OUTPUT
    assert verdict is not None
    header = {
        "status": verdict.value,
        "exit_code": code,
        "signal": number,
        "wall_s": wall_s,
        "cpu_s": spent.cpu_s,
        "peak_memory_mb": max(peak, spent.peak_bytes) / MB,
        "reason": reason,
    }
    header |= zip(("stdout_truncated", "stderr_truncated"), pumps.overflowed, strict=True)
    return Outcome(header, *(bytes(taken[: pumps.limit]) for taken in pumps.taken.values()))
