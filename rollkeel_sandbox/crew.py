"""The threads of a service that run its jobs, each one life of a worker, all in one `Sandbox`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollkeel_sandbox.broker import Worker
from rollkeel_sandbox.client import CageFailure
from rollkeel_sandbox.errors import SandboxError
from rollkeel_sandbox.job import Job, Level, Result, Status
from rollkeel_sandbox.sandbox import Handle, Sandbox

IDLE_S = 1.0
"""How often an idle worker says that it is there."""
SLACK = 8
"""Threads of workers that were given up and have not come back; with more of them the whole sandbox is replaced."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one run: a result, or why there is none."""

    result: Result | None = None
    lost: str = ""
    broken: str = ""
    """The same as `lost` if that says nothing about the program."""


@dataclass(frozen=True)
class Order:
    """A job for a worker."""

    id: str
    job: Job
    handle: Handle
    attempt: int


class Crew:
    """`beat(worker)` and `finish(worker, order, outcome)` are called from its threads. Its own methods never wait for a job."""

    def __init__(
        self,
        workers: int,
        minimum: Level,
        backend: str,
        image: Path | None = None,
        *,
        beat: Callable[[Worker], None],
        finish: Callable[[Worker, Order, Outcome], None],
    ) -> None:
        self._permits = workers + SLACK
        self._minimum = minimum
        self._backend = backend
        self._image = image
        self._beat, self._finish = beat, finish
        self._lock = threading.Lock()
        self._boxes: dict[Worker, queue.SimpleQueue[Order | None]] = {}
        self._threads: set[threading.Thread] = set()
        self._stuck: set[Worker] = set()
        self._closed = False
        self.sandbox = self._new_sandbox()

    def open(self, worker: Worker) -> None:
        box: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        with self._lock:
            self._boxes[worker] = box
        self._spawn(self._work, worker, box)

    def start(self, worker: Worker, order: Order) -> None:
        self._boxes[worker].put(order)

    def abandon(self, worker: Worker) -> None:
        """It is told to go, and counts as stuck until it has. Ending its job is the caller's business."""
        old = None
        with self._lock:
            self._boxes.pop(worker).put(None)
            self._stuck.add(worker)
            if len(self._stuck) > SLACK and not self._closed:
                self._stuck.clear()
                old, self.sandbox = self.sandbox, self._new_sandbox()
        if old:
            self._spawn(old.close)

    def close(self) -> None:
        """End all jobs and threads."""
        with self._lock:
            self._closed = True
            for box in self._boxes.values():
                box.put(None)
        self.sandbox.close()
        for thread in list(self._threads):
            thread.join(timeout=10)

    def _work(self, worker: Worker, box: queue.SimpleQueue[Order | None]) -> None:
        try:
            while not self._closed:
                self._beat(worker)
                try:
                    order = box.get(timeout=IDLE_S)
                except queue.Empty:
                    continue
                if order is None:
                    return
                outcome = self._attempt(order)
                if self._closed:
                    return  # what ends now was ended by the end of the service, and is no result
                self._finish(worker, order, outcome)
        finally:
            with self._lock:
                self._stuck.discard(worker)
                self._threads.discard(threading.current_thread())

    def _attempt(self, order: Order) -> Outcome:
        try:
            result = self.sandbox.run(order.job, order.handle)
        except (SandboxError, OSError) as error:
            why = str(error)
            ended = bool(order.handle.reason) and not isinstance(error, CageFailure)
            return Outcome(lost=why, broken="" if ended else why)
        if result.status is Status.KILLED:
            return Outcome(lost=result.reason)
        return Outcome(result=replace(result, attempts=order.attempt))

    def _new_sandbox(self) -> Sandbox:
        return Sandbox(
            workers=self._permits, minimum=self._minimum, backend=self._backend, attempts=1, image=self._image
        )

    def _spawn(self, target: Callable[..., None], *args: Any) -> None:
        name = "-".join(("sandbox", *map(str, args[0] if args else ())))
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()
