"""The sandbox that graders share, and what its results say about a program."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from rollkeel.config import GradersConfig
from rollkeel.rewards.workers import Broken

if TYPE_CHECKING:
    from rollkeel_sandbox.job import Job, Result
    from rollkeel_sandbox.remote import RemoteSandbox
    from rollkeel_sandbox.sandbox import Sandbox

Run = Callable[["Job"], "Result"]
"""Runs a job to its end, as `Sandbox.run`."""


PATIENCE = 30
"""Deadlines of a grading for which a server that is away is waited for; a step waits for three times as many."""


@final
class SharedSandbox:
    """Owns the sandbox of `reward.graders`, a local one or a server; it is opened when the first job comes. Close it."""

    def __init__(self, settings: GradersConfig) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._sandbox: Sandbox | RemoteSandbox | None = None

    def run(self, job: Job) -> Result:
        """Run a job, from any thread. Raises what the sandbox raises, and `Refused` below `reward.graders.sandbox_level`."""
        return self._open().run(job)

    def _open(self) -> Sandbox | RemoteSandbox:
        from rollkeel_sandbox.job import Level, Refused
        from rollkeel_sandbox.remote import RemoteSandbox
        from rollkeel_sandbox.sandbox import Sandbox

        with self._lock:
            if self._sandbox is None:
                s, minimum = self._settings, Level[self._settings.sandbox_level.upper()]
                if s.sandbox == "local":
                    self._sandbox = Sandbox(workers=s.workers, minimum=minimum)
                    return self._sandbox
                remote = RemoteSandbox(s.sandbox, patience_s=PATIENCE * s.deadline_s)
                if (level := remote.level) < minimum:
                    raise Refused(f"sandbox: {s.sandbox} gives {level.name.lower()}, below {s.sandbox_level}")
                self._sandbox = remote
            return self._sandbox

    def close(self) -> None:
        """End the local sandbox, or let go of the other one."""
        with self._lock:
            if self._sandbox is not None:
                self._sandbox.close()


def fault_of(result: Result) -> str:
    """Why the program has no result, empty if it may have one. Raises `Broken` when that is not its own doing."""
    from rollkeel_sandbox.job import Status, display

    if result.status in (Status.KILLED, Status.REFUSED):
        raise Broken(f"sandbox: {result.status.value}: {result.reason or 'no reason given'}")
    if result.status is Status.OK:
        return ""
    if result.status is not Status.ERROR:
        return f"{result.status.value} limit"
    last = display(result.stderr[-300:]).strip().split("\n")[-1]
    return (
        f"exit code {result.exit_code}" + (f": {last}" if last else "")
        if result.signal is None
        else f"signal {result.signal}"
    )
