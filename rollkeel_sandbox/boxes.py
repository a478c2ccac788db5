"""Sandboxes built by bubblewrap or gVisor, one for each job: the caller's side, in the place of fork servers and cages."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from rollkeel_sandbox import client, wire
from rollkeel_sandbox.job import Job, Limits
from rollkeel_sandbox.launch import BUILDERS, PROGRAMS, Launch, environment

CLOSE_DEADLINE_S = 5.0


class Box:
    """One started sandbox, which will run one job. Takes the place of a `Slot`."""

    def __init__(self, owner: Boxes, uid: int) -> None:
        self.server = owner
        self.uid = uid
        self._scratch_mb = Limits.scratch_mb
        self._launch, self._process = owner.start(uid, self._scratch_mb)
        self._lock = threading.Lock()
        self._closed = False
        self.missing: list[str] = []

    @property
    def built(self) -> bool:
        return True

    def run(self, job: Job, meanwhile: Callable[[], None] | None = None) -> tuple[dict[str, Any], list[bytes]]:
        """Header and byte strings of the result. `meanwhile` is called once the sandbox has its job."""
        if job.limits.scratch_mb != self._scratch_mb:  # the size is given when it is built
            self._take_down()
            self._scratch_mb = job.limits.scratch_mb
            self._launch, self._process = self.server.start(self.uid, self._scratch_mb)
        assert self._process.stdin
        assert self._process.stdout
        channel = wire.Pipes(self._process.stdout.fileno(), self._process.stdin.fileno())
        try:
            wire.send(channel, client.header(job), [job.source, job.stdin, *job.files.values()])
            if meanwhile:
                meanwhile()
            limit = 4 * job.limits.output_bytes + (1 << 20)
            wait = job.limits.wall_s + 2 * client.GRACE_S
            answer, blobs = wire.receive(channel, timeout_s=wait, limit=limit)
        except wire.Closed:
            raise client.Broken(f"the sandbox ended: {self._complaint()}") from None
        except (wire.Late, wire.Mangled, ValueError) as error:
            raise client.Broken(f"the sandbox hung or spoke nonsense ({error})") from None
        if "failed" in answer:
            raise client.CageFailure(f"sandbox: {self.server.backend} could not run a job: {answer['failed']}")
        self.missing = answer.pop("missing")
        return answer, blobs

    def interrupt(self) -> None:
        """From another thread: `run` raises `Broken` soon."""
        self._kill()

    def close(self) -> None:
        """End it, whatever it does, and what is kept of it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._take_down()

    def _take_down(self) -> None:
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._launch.end:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(self._launch.end, capture_output=True, timeout=CLOSE_DEADLINE_S)
        if self._launch.folder:
            shutil.rmtree(self._launch.folder, ignore_errors=True)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            # All of its group: one that is killed while it sets up leaves a child behind that waits for it.
            os.killpg(self._process.pid, signal.SIGKILL)

    def _complaint(self) -> str:
        """The last line that the program printed about itself."""
        self._kill()
        self._process.wait()
        assert self._process.stderr
        lines = self._process.stderr.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:200] if lines else f"exit code {self._process.returncode}"


class Boxes:
    """Starts one sandbox for each job. Takes the place of a `ForkServer`.

    A thread of its own starts them: they are to die with the thread that started them, which must outlast every job.
    """

    surely_dead = True

    def __init__(self, backend: str, *, own_uids: bool) -> None:
        program = shutil.which(PROGRAMS[backend])
        if program is None:
            raise client.CageFailure(f"sandbox: backend {backend} needs {PROGRAMS[backend]}, which is not installed")
        self.backend = backend
        self._program = program
        self._own_uids = own_uids
        self._orders: queue.SimpleQueue[tuple[Launch, queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._open = True
        self._thread = threading.Thread(target=self._start_all, name=f"sandbox-{backend}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return os.getpid()

    def alive(self) -> bool:
        return self._open

    def order(self, uid: int) -> Box:
        return Box(self, uid)

    def start(self, uid: int, scratch_mb: int) -> tuple[Launch, subprocess.Popen[bytes]]:
        """A new sandbox, with a scratch folder of this size."""
        launch = BUILDERS[self.backend](self._program, uid if self._own_uids else None, scratch_mb)
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._orders.put((launch, answer))
        process = answer.get()
        if isinstance(process, OSError):
            raise client.Broken(f"{self.backend} could not be started: {process}")
        return launch, process

    def kill(self) -> None:
        """No more sandboxes, and the end of those that run."""
        if self._open:
            self._open = False
            self._orders.put(None)
            self._thread.join()

    def _start_all(self) -> None:
        while order := self._orders.get():
            launch, answer = order
            try:
                pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
                about = {"env": environment(), "cwd": "/", "umask": 0o022, "start_new_session": True}
                answer.put(subprocess.Popen(launch.command, **pipes | about))
            except OSError as error:
                answer.put(error)
