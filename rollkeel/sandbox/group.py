"""A job's processes seen as one: their memory and CPU by looking, their end by killing all of them."""

from __future__ import annotations

import os
import resource
import signal
import time
from dataclasses import dataclass

from rollkeel.sandbox import libc

PAGE, TICK = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
KILL_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    cpu_s: float
    """Its own and that of children it waited for."""


@dataclass(frozen=True)
class Usage:
    memory_bytes: int
    cpu_s: float
    processes: int


def parse_stat(pid: int, text: bytes) -> Process:
    """A line of `/proc/PID/stat`. The name in brackets is the job's to choose and may hold brackets and newlines."""
    rest = text[text.rindex(b")") + 2 :].split()
    return Process(pid, int(rest[1]), sum(int(n) for n in rest[11:15]) / TICK)


def processes(proc: int) -> list[Process]:
    """All processes that this `/proc` (a descriptor of it) shows; those that end meanwhile are left out."""
    out = []
    for name in os.listdir(proc):
        if name.isdigit() and (text := _read(proc, f"{name}/stat")):
            out.append(parse_stat(int(name), text))
    return out


def below(top: int, everything: list[Process]) -> list[Process]:
    """`top` and its descendants."""
    children: dict[int, list[Process]] = {}
    for process in everything:
        children.setdefault(process.parent, []).append(process)
    found = [p for p in everything if p.pid == top]
    for process in found:  # grows while it is walked
        found += children.get(process.pid, [])
    return found


def usage(proc: int, members: list[Process], threshold: int, before_s: float = 0.0) -> Usage:
    """What the members use now; `before_s` is the CPU time of those that ended. Pages that several share are counted once
    when the plain sum passes `threshold` bytes: the exact figure is dear to ask for."""
    memory = sum(_resident(proc, p.pid) for p in members)
    if memory > threshold:
        memory = sum(_proportional(proc, p.pid) for p in members)
    return Usage(memory, before_s + sum(p.cpu_s for p in members), len(members))


class Reaper:
    """Reaps all children of process 1 as they end, and remembers how `pid` did."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.how: int | None = None
        """Wait status, None while it runs."""
        libc.on_signal(signal.SIGCHLD, self._reap_ended)
        self._reap_ended()

    def _reap_ended(self, *_signal_and_frame: object) -> None:
        while self._reap(os.WNOHANG) > 0:
            pass

    def _reap(self, options: int) -> int:
        pid, how = libc.reap(options)
        if pid == self.pid:
            self.how = how
        return pid

    def kill_all(self) -> None:
        """Kill and reap every other process of the namespace. One call reaches all of them: the kernel lets no fork by."""
        while libc.kill_others(signal.SIGKILL):
            self._reap(0)


def reaped_cpu_s() -> float:
    """CPU seconds of all children that this process has waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def kill_descendants(deadline_s: float = KILL_DEADLINE_S) -> bool:
    """Kill and reap everything below this process, which must be a subreaper; False when something is still there.

    For machines without process namespaces. New children of a bomb are met again in the next round, and each round first
    stops what it sees, so that a round shrinks what is left.
    """
    until = time.monotonic() + deadline_s
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while time.monotonic() < until:
            mine = [p for p in below(os.getpid(), processes(proc)) if p.pid != os.getpid()]
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for process in mine:
                    _send(process.pid, number)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return True
            time.sleep(0.002)
        return False
    finally:
        os.close(proc)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _read(proc: int, name: str) -> bytes:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _resident(proc: int, pid: int) -> int:
    fields = _read(proc, f"{pid}/statm").split()
    return int(fields[1]) * PAGE if len(fields) > 1 else 0


def _proportional(proc: int, pid: int) -> int:
    """Resident bytes with shared pages split among those who share; the plain figure where a process hides its own."""
    for line in _read(proc, f"{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return _resident(proc, pid)
