"""Per-process limits of the kernel: the last wall for numbers, and the first that a careless program meets."""

from __future__ import annotations

import math
import resource
from dataclasses import dataclass

from rollkeel.sandbox.job import Limits

OPEN_FILES = 256
MB = 1 << 20


@dataclass(frozen=True)
class Rlimit:
    name: str
    soft: int
    hard: int


def plan(limits: Limits, *, base_bytes: int) -> tuple[Rlimit, ...]:
    """Limits of each process of a job. `base_bytes` is the address space that the fork server had before the program.

    Address space is twice the memory limit: a single huge allocation fails at once and cleanly, while ordinary growth is
    judged by resident memory of the whole group.
    """
    cpu = max(1, math.ceil(limits.cpu_s))
    file_bytes = limits.file_mb * MB
    return (
        Rlimit("AS", base_bytes + 2 * limits.memory_mb * MB, base_bytes + 2 * limits.memory_mb * MB),
        Rlimit("CPU", cpu, cpu + 1),
        Rlimit("FSIZE", file_bytes, file_bytes),
        Rlimit("NOFILE", OPEN_FILES, OPEN_FILES),
        Rlimit("NPROC", limits.processes, limits.processes),
        Rlimit("CORE", 1, 1),  # 0 would still hand a crash to a dump handler behind a pipe, 1 is its word for no
        Rlimit("MEMLOCK", 0, 0),
        Rlimit("MSGQUEUE", 0, 0),
        Rlimit("SIGPENDING", 256, 256),
        Rlimit("NICE", 0, 0),
        Rlimit("RTPRIO", 0, 0),
    )


def apply(planned: tuple[Rlimit, ...]) -> None:
    """Set them for this process; a lower hard limit that is in force already stays."""
    for limit in planned:
        number = getattr(resource, f"RLIMIT_{limit.name}")
        ceiling = resource.getrlimit(number)[1]
        hard = limit.hard if ceiling == resource.RLIM_INFINITY else min(limit.hard, ceiling)
        resource.setrlimit(number, (min(limit.soft, hard), hard))
