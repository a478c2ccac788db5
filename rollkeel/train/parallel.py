"""Data parallelism on one machine: helper processes that run forward and backward on weights they share with the trainer.

    trainer process                                 helper process (weights in shared memory, read only)
    own micro-batches: forward, loss, backward      its micro-batches, one after the other:
    thread per helper:  log-probs ◀──────────────── forward
                        objective's gradient ─────▶ backward, into its own gradient buffer
    gradients summed in the order of the helpers, one optimizer step in place

The objective stays in the trainer: a helper knows log-probs and their gradient, nothing else. Who runs which micro-batch is a
function of what they cost, so runs repeat bit for bit.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from multiprocessing import connection
from typing import Any

import numpy as np
import torch
from transformers.modeling_utils import PreTrainedModel

from rollkeel import warm
from rollkeel.batch.packing import MicroBatch
from rollkeel.errors import RunStopped
from rollkeel.host import keep_freed_memory
from rollkeel.train.adamw import sum_in_float32
from rollkeel.train.logprobs import PolicyForward
from rollkeel.train.scores import Scores

DEADLINE_S, LEAST_S, TIMES = 600.0, 60.0, 20.0
"""Longest wait for a helper's first answer; for later ones, at least so long, and so many times the slowest answer so far."""
LogprobGradient = Callable[[MicroBatch, Scores], tuple[torch.Tensor, torch.Tensor | None]]
"""`(micro, scores)` → gradient of the loss by log-probs and entropies; None for an entropy that is not differentiated."""
Sink = Callable[[MicroBatch, Scores], None]
LossOf = Callable[[MicroBatch, Scores], torch.Tensor]


def by_logprobs(loss_of: LossOf, entropy: bool) -> LogprobGradient:
    """The loss's gradient by log-probs (and entropies) that another process computed."""

    def gradient(micro: MicroBatch, scores: Scores) -> tuple[torch.Tensor, torch.Tensor | None]:
        leaves = [scores.logprobs.requires_grad_()]
        if entropy:
            leaves.append(scores.entropy.requires_grad_())
        by = torch.autograd.grad(loss_of(micro, scores), leaves)
        return by[0], by[1] if entropy else None

    return gradient


class Helper:
    """One helper process, seen from the trainer."""

    def __init__(self, index: int, model: PreTrainedModel, threads: int, how: Mapping[str, Any]) -> None:
        """Start it. `model`'s parameters must be in shared memory on the CPU; `how`: options of `PolicyForward`."""
        self.index = index
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._flat = torch.zeros(sum(p.numel() for p in self._parameters)).share_memory_()
        context = warm.context(forks=len(model.state_dict(keep_vars=True)) < warm.MOST_SHARED)
        self._pipe, theirs = context.Pipe()
        args = (theirs, model, self._flat, threads, dict(how))
        self._process = warm.started(context, _serve, args, threads=threads, name=f"rollkeel-trainer-{index}")
        theirs.close()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._patience = DEADLINE_S
        self._slowest = 0.0

    def start(
        self,
        micros: Sequence[MicroBatch],
        temperature: float,
        gradient: LogprobGradient | None = None,
        sink: Sink | None = None,
        *,
        experts: bool = False,
    ) -> None:
        """Begin a pass over `micros`. With `gradient`, forward and backward; without, scores go to `sink`.

        `experts`: see `PolicyForward.score`.
        """
        self._error = None
        job = ([_plain(m) for m in micros], temperature, gradient is not None, experts)
        self._thread = threading.Thread(target=self._follow, args=(list(micros), job, gradient, sink))
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

    def _follow(self, micros: list[MicroBatch], job: Any, gradient: LogprobGradient | None, sink: Sink | None) -> None:
        try:
            self._send(job)
            for micro in micros:
                p, h, *more = self._receive()
                rest = (None if a is None else torch.from_numpy(a) for a in more)
                scores = Scores(torch.from_numpy(p), torch.from_numpy(h), *rest)
                if gradient is None:
                    assert sink is not None  # a pass has one of the two
                    sink(micro, scores)
                    continue
                try:
                    by_p, by_h = gradient(micro, scores)
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
            asked = time.monotonic()
            if not self._pipe.poll(self._patience):
                self._process.kill()
                raise RunStopped(
                    f"trainer helper {self.index}: no answer for {self._patience:.0f} s during a pass; resume the run"
                )
            self._slowest = max(self._slowest, time.monotonic() - asked)
            self._patience = min(DEADLINE_S, max(LEAST_S, TIMES * self._slowest))
            return self._pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> RunStopped:
        self._process.join(1)
        return RunStopped(f"trainer helper {self.index}: died with exit code {self._process.exitcode}; resume the run")


def _plain(micro: MicroBatch) -> MicroBatch:
    """Tensors as arrays: a pipe copies those, where tensors would each open a file."""
    return replace(micro, **{name: value.numpy() for name, value in _held(micro).items()})


def _tensors(micro: MicroBatch) -> MicroBatch:
    return replace(micro, **{name: torch.from_numpy(value) for name, value in _held(micro).items()})


def _held(micro: MicroBatch) -> dict[str, Any]:
    values = {f.name: getattr(micro, f.name) for f in fields(micro) if f.name != "sequences"}
    return {name: value for name, value in values.items() if value is not None}


def _serve(
    pipe: connection.Connection, model: PreTrainedModel, flat: torch.Tensor, threads: int, how: dict[str, Any]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides when to stop
    keep_freed_memory()
    torch.set_num_threads(threads)
    sum_in_float32(model.eval().parameters())
    forward = PolicyForward(model, **how)
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
    experts: bool,
) -> None:
    for p in model.parameters():
        p.grad = None
    with torch.set_grad_enabled(differentiate):
        for micro in map(_tensors, micros):
            scores = forward.score(micro, temperature=temperature, experts=experts)
            pipe.send(tuple(None if s is None else s.detach().numpy() for s in scores))
            if not differentiate:
                continue
            answer = pipe.recv()
            if answer is None:
                return
            by_p, by_h = (None if a is None else torch.from_numpy(np.ascontiguousarray(a)) for a in answer)
            if by_h is None:
                torch.autograd.backward([scores.logprobs], [by_p])
            else:
                torch.autograd.backward([scores.logprobs, scores.entropy], [by_p, by_h])
    if differentiate:
        parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters() if p.requires_grad]
        torch.cat([g.reshape(-1).float() for g in parts], out=flat)
        pipe.send(True)
