"""The embedded engine in worker processes, behind the same protocol.

    caller ── submit, interrupt, close ──▶ pipe ──▶ worker: LocalEngine, one decode step at a time
       │                                             │
       └── weights: one shared-memory buffer ──▶ copy, prove ──▶ segments and proofs back through the pipe
             in parts: one is written while another is copied and proven

What is said, and when a worker decodes, stands in `parts`.
"""

from __future__ import annotations

import mmap
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import connection, reduction
from typing import Any

import torch

from rollkeel import warm
from rollkeel.config import EngineConfig
from rollkeel.engines.intake import Intake
from rollkeel.engines.part import Part, serve, unknown
from rollkeel.engines.parts import PartedEngine
from rollkeel.engines.shared_memory import aligned, allocated, buckets, places, write
from rollkeel.errors import EngineFailure, RollkeelError
from rollkeel.host import keep_freed_memory
from rollkeel.types import Proof, WeightSlice, WeightUpdate

_PART = 2**20
"""Fewest bytes that are told of at once; a large update is cut into about sixteen parts, so that workers copy while the caller writes."""


@dataclass(kw_only=True)
class _Worker(Part):
    process: Any
    pipe: connection.Connection

    def send(self, message: tuple[Any, ...]) -> None:
        self.pipe.send(message)

    def ready(self, timeout_s: float) -> bool:
        return self.pipe.poll(timeout_s)

    def receive(self) -> tuple[str, Any, int]:
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()

    def fate(self) -> str:
        self.process.join(1)
        return f"died with exit code {self.process.exitcode}"


class WorkerEngine(PartedEngine[_Worker]):
    """`processes` copies of `LocalEngine`. Requests of a dead worker come back as `Status.ENGINE_FAILURE`."""

    noun = "worker process"

    def __init__(self, hf_config: Any, config: EngineConfig, **options: Any) -> None:
        """Start the workers; they load in parallel and are waited for at the first use. `options`: of every `LocalEngine`."""
        super().__init__(int(hf_config.get_text_config().vocab_size), config.deadline_s)
        self._memory: mmap.mmap | None = None
        context = warm.context("rollkeel.engines.local", forks=torch.device(options.get("device", "cpu")).type == "cpu")
        threads = max(1, torch.get_num_threads() // config.processes)
        for index in range(config.processes):
            ours, theirs = context.Pipe()
            args = (theirs, hf_config, config, options)
            process = warm.started(context, _serve, args, threads=threads, name=f"rollkeel-engine-{index}")
            theirs.close()
            self.parts.append(_Worker(index, f"worker {index}", process=process, pipe=ours))

    def update_weights(self, update: WeightUpdate) -> Proof:
        """Copy the update into shared memory once; every worker applies it and proves it."""
        _ = self.capabilities
        size = sum(aligned(piece.tensor.nbytes) for piece in update.slices)
        asked = self._living()
        if self._memory is None or len(self._memory) < size:
            self._memory = self._share_memory(max(size, 1), asked)
        self._version = -1
        self._tell(asked, ("begin", replace(update, slices=(), checksum=0)))
        memory, start = torch.frombuffer(self._memory, dtype=torch.uint8), 0
        for part in buckets(update.slices, max(_PART, size // 16)):
            write(part, memory[start:])
            told = [(p.tensor.dtype, tuple(p.tensor.shape), p.name, p.checksum, p.offset) for p in part]
            self._tell(asked, ("take", start, told))
            start += sum(aligned(piece.tensor.nbytes) for piece in part)
        self._tell(asked, ("update", update.checksum))
        return self._proven(asked, update.version, "to apply weights")

    def _tell(self, asked: Sequence[_Worker], message: tuple[Any, ...]) -> None:
        for worker in asked:
            self._send(worker, message)

    def close(self) -> None:
        for worker in self.parts:
            if not worker.dead:
                try:
                    worker.send(("close",))
                except OSError:
                    worker.dead = "closed"
        for worker in self.parts:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()
            worker.dead = worker.dead or "closed"
        self._memory = None

    def _wait(self, parts: Sequence[_Worker], timeout_s: float) -> Sequence[_Worker]:
        ready = connection.wait([w.pipe for w in parts], timeout_s)
        return [w for w in parts if w.pipe in ready]

    def _share_memory(self, size: int, workers: Sequence[_Worker]) -> mmap.mmap:
        """Memory of `size` bytes without a name, for these workers too; a process that is killed leaves none behind."""
        file = _allocated(size)
        try:
            for worker in workers:
                try:
                    worker.send(("memory",))
                    reduction.send_handle(worker.pipe, file, worker.process.pid)
                except OSError:
                    self._bury(worker)
            return mmap.mmap(file, size)
        finally:
            os.close(file)


def _allocated(size: int) -> int:
    """`shared_memory.allocated`. Raises `EngineFailure`."""
    try:
        return allocated(size)
    except OSError as error:
        raise EngineFailure(
            f"engine.processes: no {size / 1e6:.0f} MB of memory for weights on their way ({error.strerror or error});"
            " set engine.processes=0, or take a smaller model"
        ) from None


@dataclass
class _Channel:
    """A worker's end of its pipe, the memory that came through it, and the update that is on its way."""

    pipe: connection.Connection
    engine: Any
    memory: torch.Tensor | None = None
    """Bytes. The caller writes the next update there once this one is proven; one that gave up on us is found out by the proof."""
    head: WeightUpdate | None = None
    intake: Intake | None = None
    kept: list[WeightSlice] = field(default_factory=list)
    """Of a delta, which is applied whole."""
    refusal: RollkeelError | None = None

    def poll(self, timeout: float, /) -> bool:
        return self.pipe.poll(timeout)

    def send(self, message: Any, /) -> None:
        self.pipe.send(message)

    def recv(self) -> Any:
        message = self.pipe.recv()
        if message[0] == "memory":
            with open(reduction.recv_handle(self.pipe), "rb") as file:
                shared = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.memory = torch.frombuffer(shared, dtype=torch.uint8)
        elif message[0] == "begin":
            self._tried(self._begin, *message[1:])
        elif message[0] == "take":
            self._tried(self._take, *message[1:])
        else:
            return message
        return None

    def act(self, engine: Any, message: tuple[Any, ...]) -> Proof:
        if message[0] != "update":
            raise unknown(message)
        assert self.head is not None
        if self.refusal is not None:
            raise self.refusal
        if self.intake is None:
            return engine.update_weights(replace(self.head, slices=self.kept, checksum=message[1]))
        return engine.serve(self.head.version, *self.intake.finish(message[1]))

    def _tried(self, step: Callable[..., None], *given: Any) -> None:
        """What is refused is said when all has come."""
        try:
            step(*given)
        except RollkeelError as error:
            self.refusal = error

    def _begin(self, head: WeightUpdate) -> None:
        self.head, self.intake, self.kept, self.refusal = head, None, [], None
        if head.kind != "delta":
            base = self.engine.retire()
            self.intake = Intake(head, self.engine.memory, self.engine.capabilities.dtype, base)

    def _take(self, start: int, told: Sequence[Any]) -> None:
        assert self.memory is not None  # it comes before the first update
        tensors = places([(dtype, shape) for dtype, shape, *_ in told], self.memory[start:])
        slices = [
            WeightSlice(name=name, tensor=tensor, checksum=checksum, offset=offset)
            for (_, _, name, checksum, offset), tensor in zip(told, tensors, strict=True)
        ]
        if self.intake is None:
            self.kept += slices
        elif self.refusal is None:
            self.intake.take(slices)


def _serve(pipe: connection.Connection, hf_config: Any, config: EngineConfig, options: dict[str, Any]) -> None:
    """A worker's process."""
    from rollkeel.engines.local import LocalEngine

    warnings.filterwarnings("ignore", "The given buffer is not writable")  # weights are only read from there
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle; it tells us
    keep_freed_memory()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        channel = _Channel(pipe, LocalEngine(hf_config, config, **options))
        serve(channel.engine, channel, channel.act)
    except (EOFError, ConnectionError):
        return  # the caller is gone
    except RollkeelError as error:
        pipe.send(("error", error, 0))
