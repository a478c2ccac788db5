"""Per-process limits of the kernel: the last wall for numbers, and the first that a careless program meets."""

from __future__ import annotations

import math
import resource

from rollkeel_sandbox.job import Limits

OPEN_FILES = 256
MB = 1 << 20

Planned = dict[str, tuple[int, int]]
"""Name of a limit, without `RLIMIT_` → soft and hard value."""
_NUMBERS = {name[7:]: number for name, number in vars(resource).items() if name.startswith("RLIMIT_")}


def plan(limits: Limits, *, base_bytes: int, other_processes: int = 0) -> Planned:
    """Limits of each process of a job. `base_bytes` is the address space that the fork server had before the program,
    `other_processes` those that the kernel counts with the job's.

    Address space is twice the memory limit: a single huge allocation fails at once and cleanly, while ordinary growth is
    judged by resident memory of the whole group.
    """
    cpu = max(1, math.ceil(limits.cpu_s))
    file_bytes = limits.file_mb * MB
    space = base_bytes + 2 * limits.memory_mb * MB
    processes = limits.processes + other_processes
    return {
        "AS": (space, space),
        "CPU": (cpu, cpu + 1),
        "FSIZE": (file_bytes, file_bytes),
        "NOFILE": (OPEN_FILES, OPEN_FILES),
        "NPROC": (processes, processes),
        "CORE": (1, 1),  # 0 would still hand a crash to a dump handler behind a pipe, 1 is its word for no
        "MEMLOCK": (0, 0),
        "MSGQUEUE": (0, 0),
        "SIGPENDING": (256, 256),
        "NICE": (0, 0),
        "RTPRIO": (0, 0),
    }


def apply(planned: Planned) -> None:
    """Set them for this process; a lower hard limit that is in force already stays."""
    for name, (soft, hard) in planned.items():
        number = _NUMBERS[name]
        ceiling = resource.getrlimit(number)[1]
        hard = hard if ceiling == resource.RLIM_INFINITY else min(hard, ceiling)
        resource.setrlimit(number, (min(soft, hard), hard))
