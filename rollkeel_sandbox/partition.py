"""A queue with workers of its own, and which jobs it takes at all."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rollkeel_sandbox.errors import BadInput, SandboxError
from rollkeel_sandbox.job import Job, Limits

QUEUE_S, MAX_QUEUE_S = 600.0, 86400.0
"""Seconds within which a job must have started, if it does not say, and at most."""
PRIORITIES = range(-1000, 1001)
ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
CEILING = Limits(
    wall_s=600.0, cpu_s=1200.0, memory_mb=8192, processes=512, file_mb=1024, scratch_mb=2048, output_bytes=1 << 25
)


class Full(SandboxError):
    """The partition's queue is at its bound; the job was not taken."""

    exit_code = 3

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Closing(SandboxError):
    """The service is about to end: it takes no more jobs, and this one has surely no result yet."""

    exit_code = 3


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A queue with workers of its own."""

    name: str
    workers: int = 2
    queue: int = 1000
    """Jobs that wait at most."""
    limits: Limits = field(default_factory=Limits)
    """Of jobs that name none of their own."""
    ceiling: Limits = CEILING
    """The most that a job may ask for."""

    def __post_init__(self) -> None:
        if not ID.fullmatch(self.name):
            raise BadInput(f"sandbox partition {self.name[:80]!r}: expected up to 64 of a-z, A-Z, 0-9, '-', '_', '.'")
        if self.workers < 1 or self.queue < 1:
            raise BadInput(f"sandbox partition {self.name}: expected at least 1 worker and 1 place in the queue")

    def check(self, job: Job, id: str = "job", priority: int = 0, queue_s: float = QUEUE_S) -> None:
        """Raises `BadInput` for what this partition would never run."""
        if not ID.fullmatch(id):
            raise BadInput("sandbox: id: expected up to 64 of a-z, A-Z, 0-9, '-', '_', '.'")
        if priority not in PRIORITIES:
            raise BadInput(f"sandbox: priority: expected {PRIORITIES[0]} to {PRIORITIES[-1]}, got {priority}")
        if not 0 < queue_s <= MAX_QUEUE_S:
            raise BadInput(f"sandbox: queue_s: expected seconds up to {MAX_QUEUE_S:g}, got {queue_s}")
        most = vars(self.ceiling)
        for limit, value in vars(job.limits).items():
            if value > most[limit]:
                raise BadInput(
                    f"sandbox: {limit}={value:g} is over the {most[limit]:g} of partition {self.name}; ask for less"
                )
