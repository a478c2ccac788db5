"""A job's processes seen as one: their memory and CPU by looking, their end by killing all of them."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from dataclasses import dataclass, field

from rollkeel_sandbox import libc

PAGE, TICK = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
KILL_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    started: int
    """Tells it from an earlier process of the same number."""
    own_s: float
    """CPU of its own threads, those that ended included."""
    waited_s: float
    """CPU of the children it waited for, and of theirs."""
    ended: bool = False
    """Only its entry is left, for its parent to read."""
    headless: bool = False
    """Its first thread ended while others go on; the kernel then shows no memory under its number."""


@dataclass(frozen=True)
class Usage:
    memory_bytes: int
    cpu_s: float


def parse_stat(pid: int, text: bytes) -> Process:
    """A line of `/proc/PID/stat`. The name in brackets is the job's to choose and may hold brackets and newlines."""
    rest = text[text.rindex(b")") + 2 :].split()
    own, waited = sum(map(int, rest[11:13])) / TICK, sum(map(int, rest[13:15])) / TICK
    zombie, threads = rest[0] in b"ZX", int(rest[17])
    return Process(
        pid, int(rest[1]), int(rest[19]), own, waited, ended=zombie and threads <= 1, headless=zombie and threads > 1
    )


def look(proc: int, pid: int) -> Process | None:
    """One process, None if it is gone."""
    text = _read(proc, f"{pid}/stat")
    return parse_stat(pid, text) if text else None


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


@dataclass
class Ledger:
    """CPU of a job over its whole life: children whose parent never asks for them leave their time to nobody."""

    seen_s: float = 0.0
    """The figure of the last look."""
    _alive: dict[tuple[int, int], float] = field(default_factory=dict)
    _gone_s: float = 0.0

    def cpu_s(self, members: list[Process], reaped_s: float = 0.0) -> float:
        """A lower bound: what the living and those they waited for used, with `reaped_s` of those that the caller waited
        for, or what was seen of everybody, if that is more."""
        alive = {(p.pid, p.started): p.own_s for p in members}
        self._gone_s += sum(spent for who, spent in self._alive.items() if who not in alive)
        self._alive = alive
        self.seen_s = max(reaped_s + sum(p.own_s + p.waited_s for p in members), self._gone_s + sum(alive.values()))
        return self.seen_s


def usage(proc: int, members: list[Process], threshold: int, ledger: Ledger, reaped_s: float = 0.0) -> Usage:
    """What the members use now. Pages that several share are counted once when the plain sum passes `threshold` bytes:
    the exact figure is dear to ask for."""
    memory = sum(_resident(proc, p) for p in members)
    if memory > threshold:
        memory = sum(_proportional(proc, p) for p in members)
    return Usage(memory, ledger.cpu_s(members, reaped_s))


def hidden(proc: int, process: Process) -> bool:
    """True where the kernel shows nobody the memory of what goes on without its first thread: Linux does, gVisor does not."""
    return process.headless and not _names(proc, process)


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

    For machines without process namespaces, after the job's process group was killed, which no fork can outrun; this is
    for what left the group. New children of a bomb are met again in the next round, and each round first stops what it
    sees, so that a round shrinks what is left.
    """
    until = time.monotonic() + deadline_s
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while time.monotonic() < until:
            mine = [p for p in below(os.getpid(), processes(proc)) if p.pid != os.getpid()]
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for process in mine:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, number)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return True
            time.sleep(0.002)
        return False
    finally:
        os.close(proc)


def kill_all(process_group: int) -> None:
    """Kill a whole process group, which may be empty."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process_group, signal.SIGKILL)


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


def _resident(proc: int, process: Process) -> int:
    return max((_pages(proc, name) for name in _names(proc, process)), default=0) * PAGE


def _pages(proc: int, name: str) -> int:
    fields = _read(proc, f"{name}/statm").split()
    return int(fields[1]) if len(fields) > 1 else 0


def _names(proc: int, process: Process) -> list[str]:
    """Where below `/proc` its memory is shown: under its number, or under those of the threads that are left."""
    if not process.headless:
        return [str(process.pid)]
    try:
        folder = os.open(f"{process.pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    except OSError:
        return []
    try:
        return [f"{process.pid}/task/{thread}" for thread in os.listdir(folder)]
    except OSError:
        return []
    finally:
        os.close(folder)


def _proportional(proc: int, process: Process) -> int:
    """Resident bytes with shared pages split among those who share; the plain figure where a process hides its own."""
    for name in _names(proc, process):
        for line in _read(proc, f"{name}/smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return _resident(proc, process)
