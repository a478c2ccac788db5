"""Data parallelism on one machine: helper processes that run forward and backward on weights they share with the trainer.

    trainer process                                 helper process (weights in shared memory, read only)
    own micro-batches: forward, loss, backward      its micro-batches, one after the other:
    thread per helper:  log-probs ◀──────────────── forward
                        objective's gradient ─────▶ backward, into its own gradient buffer
    gradients summed in the order of the helpers, one optimizer step in place

The objective stays in the trainer: a helper knows log-probs and their gradient, nothing else. Who runs which micro-batch is a
function of their sizes, so runs repeat bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from multiprocessing import connection
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from transformers.modeling_utils import PreTrainedModel

from rollkeel.batch.packing import MicroBatch
from rollkeel.errors import RunStopped
from rollkeel.host import keep_freed_memory
from rollkeel.train.logprobs import PolicyForward

DEADLINE_S = 600.0
LogprobGradient = Callable[[MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""`(micro, logprobs [t], entropy [t])` → gradient of the loss by each; None for an entropy that is not differentiated."""


def shares(micros: Sequence[MicroBatch], count: int) -> list[list[MicroBatch]]:
    """Micro-batches for each of `count` processes: largest first to the least loaded, ties to the first."""
    out: list[list[MicroBatch]] = [[] for _ in range(count)]
    load = [0] * count
    for micro in sorted(micros, key=lambda m: -m.input_ids.numel()):
        least = load.index(min(load))
        out[least].append(micro)
        load[least] += micro.input_ids.numel()
    return out


class Helper:
    """One helper process, seen from the trainer."""

    def __init__(self, index: int, model: PreTrainedModel, chunk: int, threads: int) -> None:
        """Start it. `model`'s parameters must be in shared memory on the CPU."""
        self.index = index
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._flat = torch.zeros(sum(p.numel() for p in self._parameters)).share_memory_()
        context = torch.multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = str(threads)  # read when the helper imports torch
        try:
            args = (theirs, model, self._flat, chunk, threads)
            self._process = context.Process(target=_serve, args=args, daemon=True, name=f"rollkeel-trainer-{index}")
            self._process.start()
        finally:
            os.environ.pop("OMP_NUM_THREADS") if before is None else os.environ.update(OMP_NUM_THREADS=before)
        theirs.close()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(
        self, micros: Sequence[MicroBatch], temperature: float, gradient: LogprobGradient | None, sink: Any
    ) -> None:
        """Begin a pass over `micros`. With `gradient`, forward and backward; without, log-probs go to `sink(micro, p, h)`."""
        self._error = None
        self._thread = threading.Thread(target=self._follow, args=(list(micros), temperature, gradient, sink))
        self._thread.start()

    def finish(self) -> None:
        """Wait for the pass. Raises what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def add_gradients(self) -> None:
        """Add the pass's gradients to those of the trainer's parameters."""
        start = 0
        for p in self._parameters:
            part = self._flat[start : start + p.numel()].view_as(p)
            start += p.numel()
            if p.grad is None:
                p.grad = part.clone()
            else:
                p.grad += part

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):  # gone already is what was wanted
            self._pipe.send(None)
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()

    def _follow(
        self, micros: list[MicroBatch], temperature: float, gradient: LogprobGradient | None, sink: Any
    ) -> None:
        try:
            self._send(([_plain(m) for m in micros], temperature, gradient is not None))
            for micro in micros:
                p, h = (torch.from_numpy(a) for a in self._receive())
                if gradient is None:
                    sink(micro, p, h)
                    continue
                try:
                    by_p, by_h = gradient(micro, p, h)
                except BaseException:
                    self._send(None)  # the helper drops the pass
                    raise
                self._send((by_p.numpy(), None if by_h is None else by_h.numpy()))
            if gradient is not None:
                self._receive()
        except BaseException as error:
            self._error = error

    def _send(self, message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError:
            raise self._died() from None

    def _receive(self) -> Any:
        try:
            if not self._pipe.poll(DEADLINE_S):
                self._process.kill()
                raise RunStopped(f"trainer helper {self.index}: nothing for {DEADLINE_S:g} s during a pass")
            return self._pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> RunStopped:
        self._process.join(1)
        return RunStopped(f"trainer helper {self.index}: died with exit code {self._process.exitcode}; resume the run")


def _plain(micro: MicroBatch) -> MicroBatch:
    """Tensors as arrays: a pipe copies those, where tensors would each open a file."""
    arrays = {f.name: getattr(micro, f.name).numpy() for f in fields(micro) if f.name != "sequences"}
    return replace(micro, **arrays)


def _tensors(micro: MicroBatch) -> MicroBatch:
    return replace(
        micro, **{f.name: torch.from_numpy(getattr(micro, f.name)) for f in fields(micro) if f.name != "sequences"}
    )


def _serve(pipe: connection.Connection, model: PreTrainedModel, flat: torch.Tensor, chunk: int, threads: int) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides when to stop
    keep_freed_memory()
    torch.set_num_threads(threads)
    model.eval()
    forward = PolicyForward(model, chunk=chunk)
    try:
        while (job := pipe.recv()) is not None:
            _pass(pipe, model, forward, flat, *job)
    except EOFError:
        return  # the trainer is gone


def _pass(
    pipe: connection.Connection,
    model: PreTrainedModel,
    forward: PolicyForward,
    flat: torch.Tensor,
    micros: Sequence[MicroBatch],
    temperature: float,
    differentiate: bool,
) -> None:
    for p in model.parameters():
        p.grad = None
    with torch.set_grad_enabled(differentiate):
        for micro in map(_tensors, micros):
            p, h = forward.score(micro, temperature=temperature)
            pipe.send((p.detach().numpy(), h.detach().numpy()))
            if not differentiate:
                continue
            answer = pipe.recv()
            if answer is None:
                return
            by_p, by_h = (None if a is None else torch.from_numpy(np.ascontiguousarray(a)) for a in answer)
            torch.autograd.backward([p] if by_h is None else [p, h], [by_p] if by_h is None else [by_p, by_h])
    if differentiate:
        parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters() if p.requires_grad]
        torch.cat([g.reshape(-1).float() for g in parts], out=flat)
        pipe.send(True)
