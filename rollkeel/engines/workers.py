"""The embedded engine in worker processes, behind the same protocol.

    caller ── submit, interrupt, close ──▶ pipe ──▶ worker: LocalEngine, one decode step at a time
       │                                             │
       └── weights: one shared-memory buffer ──▶ copy, prove ──▶ segments and proofs back through the pipe

A call to `submit` is cut into contiguous shares, one per worker, which even out what is in flight. A worker starts when it is
first polled and then decodes on its own until it is empty; under `advance` it decodes the steps it is told and waits. So what
runs beside what, and with it every bit of the result, does not depend on process timing.
"""

from __future__ import annotations

import mmap
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, reduction
from typing import Any

import numpy as np
import torch

from rollkeel.config import EngineConfig
from rollkeel.engines.requests import check_requests
from rollkeel.errors import BadInput, EngineFailure, RollkeelError
from rollkeel.host import keep_freed_memory, signals_blocked
from rollkeel.models.checksum import MASK
from rollkeel.types import Capabilities, Proof, Request, Segment, Status, TokenSpan, WeightSlice, WeightUpdate

START_S = 180.0
_ALIGN = 64


@dataclass
class _Worker:
    index: int
    process: Any
    pipe: connection.Connection
    flying: dict[int, Request] = field(default_factory=dict)
    free: bool = False
    """Decodes on its own: from a poll until nothing is left in flight. Otherwise it waits for `advance`."""
    steps: int = 0
    """Its decode steps when it last sent anything."""
    dead: str = ""
    """Why it is gone; empty while it lives."""


class WorkerEngine:
    """`processes` copies of `LocalEngine`. Requests of a dead worker come back as `Status.ENGINE_FAILURE`."""

    def __init__(self, hf_config: Any, config: EngineConfig, **options: Any) -> None:
        """Start the workers; they load in parallel and are waited for at the first use. `options`: of every `LocalEngine`."""
        self._config = config
        self._version = -1
        self._vocab_size = int(hf_config.get_text_config().vocab_size)
        self._ready: Capabilities | None = None
        self._memory: mmap.mmap | None = None
        self._done: list[Segment] = []
        self.shares: list[int] = []
        """Requests that each worker got in the last call to `submit`."""
        context = get_context("spawn")
        # torch reads these when it is imported, which in a worker is before any of our code runs.
        threads = max(1, torch.get_num_threads() // config.processes)
        env = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        before = {k: os.environ.get(k) for k in env}
        os.environ.update(env)
        self._workers: list[_Worker] = []
        try:
            for index in range(config.processes):
                ours, theirs = context.Pipe()
                args = (theirs, hf_config, config, options)
                process = context.Process(target=_serve, args=args, daemon=True, name=f"rollkeel-engine-{index}")
                with signals_blocked(signal.SIGINT):
                    process.start()
                theirs.close()
                self._workers.append(_Worker(index, process, ours))
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)

    @property
    def version(self) -> int:
        return self._version

    @property
    def capabilities(self) -> Capabilities:
        if self._ready is None:
            self._ready = self._answers(self._workers, START_S, "to start")[0]
        assert self._ready is not None
        return self._ready

    @property
    def steps(self) -> list[int | None]:
        """Decode steps of each worker when it last sent anything, exact for those that the last call reached; None of a
        dead one."""
        return [None if w.dead else w.steps for w in self._workers]

    def submit(self, requests: Sequence[Request], shares: Sequence[int] | None = None) -> None:
        """See `Engine.submit`. `shares`: how many each worker gets; by default as loads even out."""
        flying = [i for worker in self._workers for i in worker.flying]
        check_requests(requests, flying, self.capabilities, self._vocab_size)
        living = self._living()
        if shares is None:
            even = iter(even_shares([len(w.flying) for w in living], len(requests)))
            shares = [0 if w.dead else next(even) for w in self._workers]
        self.shares = list(shares)
        ends = np.cumsum(self.shares)
        asked = []
        for worker, start, end in zip(self._workers, [0, *ends], ends, strict=False):
            if start == end:
                continue
            mine = list(requests[start:end])
            worker.flying.update({r.id: r for r in mine})
            self._send(worker, ("submit", mine, worker.free))
            asked.append(worker)
        # Requests of a worker that died come back as failures, so its silence is no error here.
        self._answers(asked, self._config.deadline_s, "to take requests", may_die=True)

    def poll(self, timeout_s: float) -> list[Segment]:
        deadline = time.monotonic() + timeout_s
        while not self._done:
            busy = self._busy()
            if not busy:
                break
            paused = [w for w in busy if not w.free]
            for worker in paused:
                worker.free = True
                self._send(worker, ("run",))
            self._answers(paused, self._config.deadline_s, "to start decoding", may_die=True)
            ready = connection.wait([w.pipe for w in busy], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for worker in busy:
                if worker.pipe in ready:
                    self._receive(worker)
        done, self._done = self._done, []
        return done

    def advance(self, steps: int) -> list[Segment]:
        """Exactly `steps` decode steps in every worker, fewer in one that has nothing left; then what ended, by request id."""
        return self.advance_each([steps] * len(self._workers))

    def advance_each(self, steps: Sequence[int]) -> list[Segment]:
        """The same with a number of its own for each worker."""
        asked = self._busy()
        for worker in asked:
            worker.free = False
            self._send(worker, ("advance", steps[worker.index]))
        what = f"to decode {max(steps)} steps"
        for segments in self._answers(asked, self._config.deadline_s, what, may_die=True):
            self._done += segments
            ended = {segment.request_id for segment in segments}
            for worker in asked:
                worker.flying = {i: r for i, r in worker.flying.items() if i not in ended}
        done, self._done = sorted(self._done, key=lambda segment: segment.request_id), []
        return done

    def progress(self) -> dict[int, int]:
        """Response tokens that each request in flight has so far, its prefix included, by id."""
        asked = self._busy()
        for worker in asked:
            self._send(worker, ("progress",))
        told = self._answers(asked, self._config.deadline_s, "to tell its progress", may_die=True)
        return {request: tokens for part in told for request, tokens in part.items()}

    def _busy(self) -> list[_Worker]:
        """Living workers with something in flight. Raises `EngineFailure` when they have no weights to serve it with."""
        busy = [w for w in self._workers if w.flying and not w.dead]
        if busy and self._version < 0:
            raise EngineFailure("engine local: no proven weights to serve; publish weights before polling")
        return busy

    def interrupt(self, ids: Sequence[int] | None = None) -> None:
        asked = [w for w in self._workers if w.flying and not w.dead]
        for worker in asked:
            self._send(worker, ("interrupt", ids))
        self._answers(asked, self._config.deadline_s, "to interrupt", may_die=True)

    def update_weights(self, update: WeightUpdate) -> Proof:
        """Copy the update into shared memory once; every worker applies it and proves it."""
        _ = self.capabilities
        layout, size = [], 0
        for piece in update.slices:
            layout.append(
                (piece.name, piece.tensor.dtype, tuple(piece.tensor.shape), size, piece.checksum, piece.offset)
            )
            size += -(-piece.tensor.numel() * piece.tensor.element_size() // _ALIGN) * _ALIGN
        asked = self._living()
        if self._memory is None or len(self._memory) < size:
            self._memory = self._share_memory(max(size, 1), asked)
        _write_update(self._memory, layout, update.slices)
        self._version = -1
        head = (update.kind, update.base_version, update.version, update.checksum, update.mode)
        for worker in asked:
            self._send(worker, ("update", layout, head))
        proofs: list[Proof] = self._answers(asked, self._config.deadline_s, "to apply weights")
        if len({(p.version, p.checksum) for p in proofs}) != 1:
            raise EngineFailure(f"engine local: workers disagree about the weights they serve: {proofs}")
        self._version = update.version
        return Proof(version=proofs[0].version, checksum=proofs[0].checksum & MASK)

    def close(self) -> None:
        for worker in self._workers:
            if not worker.dead:
                try:
                    worker.pipe.send(("close",))
                except OSError:
                    worker.dead = "closed"
        for worker in self._workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()
            worker.dead = worker.dead or "closed"
        self._memory = None

    # -- one worker ----------------------------------------------------------------------------------------------------

    def _living(self) -> list[_Worker]:
        living = [w for w in self._workers if not w.dead]
        if not living:
            raise EngineFailure(f"engine local: no worker process is left ({'; '.join(w.dead for w in self._workers)})")
        return living

    def _share_memory(self, size: int, workers: Sequence[_Worker]) -> mmap.mmap:
        """Memory of `size` bytes without a name, for these workers too; a process that is killed leaves none behind."""
        with tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
            file.truncate(size)
            for worker in workers:
                self._send(worker, ("memory",), file.fileno())
            return mmap.mmap(file.fileno(), size)

    def _send(self, worker: _Worker, message: tuple[Any, ...], descriptor: int | None = None) -> None:
        try:
            worker.pipe.send(message)
            if descriptor is not None:
                reduction.send_handle(worker.pipe, descriptor, worker.process.pid)
        except OSError:
            self._bury(worker)

    def _answers(self, workers: Sequence[_Worker], deadline_s: float, what: str, may_die: bool = False) -> list[Any]:
        """Every worker's answer to the last message, all of them read before the first error is raised: an answer left
        in a pipe would be taken for that to the next message."""
        answers, errors = [], []
        for worker in workers:
            try:
                answers.append(self._answer(worker, deadline_s, what))
            except RollkeelError as error:
                if not (may_die and worker.dead):
                    errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def _answer(self, worker: _Worker, deadline_s: float, what: str) -> Any:
        """The worker's answer to the last message; segments that arrive before it are kept."""
        end = time.monotonic() + deadline_s
        while not worker.dead:
            if not worker.pipe.poll(max(0.0, end - time.monotonic())):
                worker.process.kill()
                self._bury(worker)
                raise EngineFailure(f"engine worker {worker.index}: waited {deadline_s:g} s for it {what}")
            answer = self._receive(worker)
            if answer is not None:
                return answer[0]
        raise EngineFailure(f"engine worker {worker.index}: {worker.dead} while waiting for it {what}")

    def _receive(self, worker: _Worker) -> tuple[Any] | None:
        """Take one message: segments are filed, an answer is returned, an error raised here."""
        try:
            kind, value, worker.steps = worker.pipe.recv()
        except (EOFError, OSError):
            self._bury(worker)
            return None
        if kind == "segments":
            for segment in value:
                worker.flying.pop(segment.request_id, None)
            worker.free = worker.free and bool(worker.flying)
            self._done += value
            return None
        if kind == "error":
            raise value
        return (value,)

    def _bury(self, worker: _Worker) -> None:
        worker.process.join(1)
        worker.dead = f"worker {worker.index} died with exit code {worker.process.exitcode}"
        for request in worker.flying.values():
            self._done.append(
                Segment(request_id=request.id, span=TokenSpan.empty(), status=Status.ENGINE_FAILURE, detail=worker.dead)
            )
        worker.flying.clear()


def even_shares(loads: Sequence[int], count: int) -> list[int]:
    """How many of `count` new requests each worker gets, so that loads end as even as they can; the first get the odd ones."""
    shares = [0] * len(loads)
    for _ in range(count):
        least = min(range(len(loads)), key=lambda i: (loads[i] + shares[i], i))
        shares[least] += 1
    return shares


def _write_update(memory: mmap.mmap, layout: Sequence[Any], slices: Sequence[WeightSlice]) -> None:
    """Copy slices to their places."""
    buffer = torch.from_numpy(np.frombuffer(memory, np.uint8))
    for piece, entry in zip(slices, layout, strict=True):
        view = buffer[entry[3] :][: piece.tensor.numel() * piece.tensor.element_size()]
        view.view(piece.tensor.dtype).view(piece.tensor.shape).copy_(piece.tensor)


def _serve(pipe: connection.Connection, hf_config: Any, config: EngineConfig, options: dict[str, Any]) -> None:
    """A worker's life: answer messages, and decode one step whenever there is none."""
    from rollkeel.engines.local import LocalEngine

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle; it tells us
    keep_freed_memory()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        engine = LocalEngine(hf_config, config, **options)
        pipe.send(("answer", engine.capabilities, 0))
        free, memory = False, None
        while True:
            # Without weights nothing can be sampled; the caller's poll says so.
            if not (free and engine.busy and engine.version >= 0) or pipe.poll(0):
                message = pipe.recv()
                if message[0] == "close":
                    return
                if message[0] == "memory":
                    with open(reduction.recv_handle(pipe), "rb") as file:
                        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                    continue
                free = _stays_free(message, free)
                try:
                    pipe.send(("answer", _act(engine, message, memory), engine.steps))
                except RollkeelError as error:
                    pipe.send(("error", error, engine.steps))  # the message was refused; the engine lives on
                continue
            segments = engine.poll(0)
            free = engine.busy
            if segments:
                pipe.send(("segments", segments, engine.steps))
    except (EOFError, ConnectionError):
        return  # the caller is gone
    except RollkeelError as error:
        pipe.send(("error", error, 0))


def _stays_free(message: tuple[Any, ...], free: bool) -> bool:
    """Whether the worker decodes on its own after `message`. The caller decides: it may not know yet that all has ended."""
    return {"run": True, "advance": False}.get(message[0], message[2] if message[0] == "submit" else free)


def _act(engine: Any, message: tuple[Any, ...], memory: mmap.mmap | None) -> Any:
    if message[0] == "submit":
        engine.submit(message[1])
    elif message[0] == "advance":
        return engine.advance(message[1])
    elif message[0] == "progress":
        return engine.progress()
    elif message[0] == "run":
        return True
    elif message[0] == "interrupt":
        engine.interrupt(message[1])
    elif message[0] == "update":
        _, layout, head = message
        assert memory is not None  # it comes before the first update
        return engine.update_weights(_read_update(memory, layout, *head))
    else:
        raise BadInput(f"engine worker: unknown message {message[0]!r}")
    return True


def _read_update(
    memory: mmap.mmap,
    layout: Sequence[Any],
    kind: str,
    base: int | None,
    version: int,
    checksum: int,
    mode: str | None,
) -> WeightUpdate:
    slices, data = [], memoryview(memory)
    for name, dtype, shape, start, part, offset in layout:
        size = int(np.prod(shape)) * dtype.itemsize
        # A copy: the caller writes the next update into the same memory.
        tensor = torch.frombuffer(bytearray(data[start : start + size]), dtype=dtype).view(shape)
        slices.append(WeightSlice(name=name, tensor=tensor, checksum=part, offset=offset))
    return WeightUpdate(kind=kind, base_version=base, version=version, slices=slices, checksum=checksum, mode=mode)
