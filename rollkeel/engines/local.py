"""The embedded engine: paged KV, continuous batching, prefill and decode in PyTorch, in the caller's process.

    submit ─▶ waiting ─▶ prefill all tokens but the last ─▶ slot ─▶ decode … ─▶ Segment
                 ▲                                            │
                 └────── weights changed, or no free block ◀──┘   (keeps its tokens, KV is recomputed)

With `engine.kv=keep` new weights leave sequences where they are, and an interrupted one takes its KV along.

Every token is sampled by the decode path, the first one too: a request's arithmetic does not depend on whether its
prompt's KV was computed for it or shared. A slot that becomes free is refilled before the next decode step; with compiled
kernels a few tokens of prompts are rows of that very step, since a pass over the weights costs more than their arithmetic.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rollkeel.config import EngineConfig, LoraConfig
from rollkeel.engines.decode import Batch, Decode, Graphs, graphs_for
from rollkeel.engines.forwards import Pieces, open_forward
from rollkeel.engines.kv import BlockPool, Layout, affordable_blocks
from rollkeel.engines.prefill import prefill_passes, prefill_step
from rollkeel.engines.prompts import Copy, Job, SharedPrompts, ordered
from rollkeel.engines.requests import Running, check_requests, longest, room
from rollkeel.engines.slots import LOOK, Slots
from rollkeel.engines.weights import take
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.models.compiled import compiled_decode, suits
from rollkeel.models.forward import FastForward, Zeros, said_forward
from rollkeel.models.numerics import is_quantised, weight_rounder
from rollkeel.types import Capabilities, KeptKV, Proof, Request, Segment, Status, TokenSpan, WeightUpdate

RIDERS = 256
"""Tokens of prompts that a decode step takes along, at most."""


class LocalEngine:
    """Implements `rollkeel.protocols.SteppedEngine` in this process. Not thread-safe."""

    def __init__(
        self,
        hf_config: Any,
        config: EngineConfig,
        *,
        device: torch.device | str = "cpu",
        max_length: int | None = None,
        name: str = "local",
        layout: Layout | None = None,
        lora: LoraConfig | None = None,
        graphs: Graphs | None = None,
        zeros: Zeros = torch.zeros,
    ) -> None:
        """Build from an architecture (`hf_config`); weights come with the first `update_weights`. `lora`: serve adapters
        beside the weights. `max_length` bounds prompt + response, tokens; the default is the model's context. `graphs` records
        decode steps instead of what the device has for it. `zeros` makes the weights."""
        self._device, self._zeros, text = torch.device(device), zeros, hf_config.get_text_config()
        self._max_length = longest(hf_config, config, max_length)
        self._forward, cache, draw = self._open(text, config, lora)
        if weight_rounder(config.dtype) and not any(is_quantised(n, w) for n, w in self._forward.destinations.items()):
            raise BadInput(f"engine.dtype={config.dtype}: would round no weight of {text.model_type}; use fp32 or bf16")
        self.weights = self._forward.destinations  # views of what it computes with, by checkpoint name
        self.memory = self._forward  # these and those of the adapters
        self._block, *self._limits, prefix_sharing = layout or Layout()
        self._config, self._keep = config, config.kv == "keep"
        least = self._max_length if config.max_length or max_length else 1  # nobody asked for all of a context
        room, fits = affordable_blocks(text, config, self._block, self._forward.dtype, least, self._device)
        self._max_length = min(self._max_length, fits)
        max_blocks = -(-self._max_length // self._block)
        self._pool = BlockPool(min(config.slots * (max_blocks + 1) + 2, room))
        self._cache = cache(self._pool.free, self._block, self._forward.dtype, self._device)
        wanted = config.forward == "compiled" or (config.forward == "auto" and suits(self._forward))
        self._compiled = compiled_decode(self._forward, self._cache, self._max_length) if wanted else None
        self._padding_block = self._pool.take()
        self._slots = Slots(config.slots, self._max_length, max_blocks, self._device)
        if self._slots.ended is not None:
            self._slots.table[self._slots.spare] = self._pool.take()
        fast = isinstance(self._forward, FastForward)
        recorder, recorded = graphs_for(self._forward, self._device)
        self._steps = Decode(self._forward, self._cache, self._slots, graphs or recorder, draw)
        self._waiting: deque[Running] = deque()
        self._active: dict[int, Running] = {}
        self._prompts = SharedPrompts(self._pool, self._block, prefix_sharing)
        self._done, self._riding = list[Segment](), list[Job]()
        self._batch: Batch | None = None
        self._version = self._base = -1
        self._looked, self._full, self._lead, self._until, self.steps = 0, 0, 0, 0, 0  # steps: the clock of budgets
        self._capabilities = Capabilities(
            name=name,
            dtype=config.dtype,
            max_length=self._max_length,
            returns_experts=getattr(self._forward, "num_moe_layers", 0) > 0,
            returns_topk=True,
            forward=said_forward(config.forward, text, fast, self._compiled is not None, bool(self._forward.adapters))
            + recorded,
            proves_memory=True,
            look=1 if self._slots.ended is None else LOOK,
        )

    def _open(self, text: Any, config: EngineConfig, lora: LoraConfig | None) -> Pieces:
        return open_forward(text, config, self._device, lora, self._zeros)

    @property
    def version(self) -> int:
        return self._version

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def busy(self) -> bool:
        """True while requests wait, run, or have ended without being polled."""
        return bool(self._waiting or self._active or self._done)

    def submit(self, requests: Sequence[Request]) -> None:
        flying = [r.request.id for r in (*self._waiting, *self._active.values())]
        check_requests(requests, flying, self._capabilities, self._forward.vocab_size)
        for request in requests:
            if room(request, 0, self._max_length) <= 0:
                self._done.append(Segment(request_id=request.id, span=TokenSpan.empty(), status=Status.LENGTH))
                continue
            self._waiting.append(Running(request, TokenSpan.empty(), kv=request.kv if self._keep else None))
            self._prompts.enter(request.prompt_ids)

    @torch.inference_mode()
    def poll(self, timeout_s: float) -> list[Segment]:
        """Decode until a request ends or `timeout_s` passed."""
        deadline = time.monotonic() + timeout_s
        while not self._done and (self._waiting or self._active):
            self._advance_once()
            if time.monotonic() >= deadline:
                break
        done, self._done = self._done, []
        return done

    @torch.inference_mode()
    def advance(self, steps: int) -> list[Segment]:
        """Exactly `steps` decode steps, fewer once nothing is in flight; then what ended, ordered by request id."""
        for _ in range(steps):
            if not (self._waiting or self._active):
                break
            self._advance_once()
        self._look()
        done, self._done = sorted(self._done, key=lambda segment: segment.request_id), []
        return done

    def progress(self) -> dict[int, int]:
        """Response tokens that each request in flight has so far, its prefix included, by id."""
        made = {r.request.id: len(r.request.prefix) + len(r.span) for r in (*self._waiting, *self._active.values())}
        for running in self._active.values():
            made[running.request.id] += running.position(self.steps) - running.first
        return made

    def _advance_once(self) -> None:
        if self._version < 0:
            raise EngineFailure("engine local: no proven weights to serve; publish weights before polling")
        self._admit()
        self._decode()

    def interrupt(self, ids: Sequence[int] | None = None) -> None:
        self._look()
        wanted = None if ids is None else set(ids)
        slots = [s for s, r in self._active.items() if wanted is None or r.request.id in wanted]
        kept: list[KeptKV | None] = [None] * len(slots)
        if self._keep and slots:
            leaving = [self._active[s] for s in slots]
            kept = self._cache.read([(r.blocks, r.position(self.steps), r.kv_version) for r in leaving])
        self._stamp(slots)
        for slot, kv in zip(slots, kept, strict=True):
            self._emit(self._leave(slot), Status.INTERRUPTED, kv)
        staying: deque[Running] = deque()
        for running in self._waiting:
            if wanted is None or running.request.id in wanted:
                self._emit(running, Status.INTERRUPTED, running.kv)
            else:
                staying.append(running)
        self._waiting = staying

    @torch.inference_mode()
    def update_weights(self, update: WeightUpdate) -> Proof:
        """Apply an update in place: of all weights, which leaves adapters at zero, or of the adapters beside them. Sequences in
        flight keep their tokens, and with `engine.kv=keep` their KV."""
        return self.serve(update.version, *take(update, self._forward, self._config.dtype, self.retire()))

    def serve(self, version: int, checksum: int, base: int) -> Proof:
        self._version, self._base = version, base
        return Proof(version=version, checksum=checksum)

    @torch.inference_mode()
    def retire(self) -> int:
        """Serve nothing until `serve`, for weights that come in parts (`Intake`). Returns the version of those that memory holds."""
        self._look()
        self._stamp(list(self._active))
        for slot in () if self._keep else sorted(self._active, reverse=True):
            self._waiting.appendleft(self._leave(slot))
        self._prompts.evict()
        base, self._base, self._version = self._base, -1, -1
        return base

    def close(self) -> None:
        """Drop everything in flight, without asking what it was: closing must work after a failure too."""
        for part in (self._waiting, self._active, self._prompts, self._done, self._riding):
            part.clear()

    # -- admission -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Fill free slots in order of arrival: prompts nobody computed yet, then what comes behind the prompts."""
        if not self._waiting:
            return
        free = [s for s in range(self._config.slots) if s not in self._active]
        prompts: list[Job] = []
        tails: list[Job] = []
        entered: list[tuple[int, Running]] = []
        copies: list[Copy] = []
        while free and self._waiting:
            running = self._waiting[0]
            tokens = running.tokens()
            if not self._reserve(len(tokens), [*self._active.values(), *(r for _, r in entered)]):
                break
            self._waiting.popleft()
            start = self._enter(running, prompts, copies)
            if start < len(tokens) - 1:
                tails.append((running.blocks, tokens[start:-1], start))
            entered.append((free.pop(0), running))
        few = self._compiled is not None and sum(len(ids) for _, ids, _ in (*prompts, *tails)) <= RIDERS
        if few:
            self._riding, copies = ordered(prompts, copies, tails)  # the next decode step does them on the way
        else:
            self._prefill(prompts)
        if brought := [(r.blocks, r.kv) for _, r in entered if r.kv is not None]:
            self._cache.write(brought)
        for _, running in entered:
            running.kv = None
        self._cache.copy_blocks([(copy.source, copy.target) for copy in copies])
        if not few:
            self._prefill(tails)
        if not entered:
            return
        self._slots.place([s for s, _ in entered], [r for _, r in entered], self.steps, self._padding_block)
        self._active |= dict(entered)
        self._batch = None

    def _reserve(self, tokens: int, others: Sequence[Running]) -> bool:
        """True if a sequence of `tokens` can start beside `others`; shared prompts none of them uses make room first."""
        needed = 2 * (-(-tokens // self._block) + 1)
        if self._pool.free >= needed:
            return True
        self._prompts.evict(r.request.prompt_ids for r in others)
        return self._pool.free >= needed or not others

    def _enter(self, running: Running, prompts: list[Job], copies: list[Copy]) -> int:
        """Give `running` its blocks; returns how many of its tokens will have KV without computing them for it alone."""
        request, size = running.request, self._block
        total = len(request.prompt_ids) + len(request.prefix) + len(running.span)
        running.kv_version = self._version
        if running.kv is not None:
            running.kv_version = min(running.kv.version, self._version)
            running.blocks, computed = [], total - 1
        else:
            placed = self._prompts.place(request.prompt_ids)
            running.blocks, computed = placed.blocks, placed.computed
            prompts += [placed.job] if placed.job else []
            copies += [placed.copy] if placed.copy else []
        while len(running.blocks) * size < total:
            running.blocks.append(self._pool.take())
        return computed

    def _prefill(self, jobs: list[Job]) -> None:
        """Compute and store KV of each job's tokens, which start at its offset; several jobs share a forward pass."""
        jobs = sorted((j for j in jobs if len(j[1])), key=lambda j: len(j[1]))
        if self._compiled is not None and jobs:
            self._compiled.prefill(jobs)
            return
        for part in prefill_passes(jobs, self._forward, *self._limits):
            ids, positions, step = prefill_step(part, self._block, self._padding_block, self._device)
            experts = list[torch.Tensor]()
            self._steps.hidden(ids, positions, step, experts)
            if experts:
                self._cache.note(step.slots, experts)

    # -- decoding ------------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """One token for every active slot."""
        self._grow_tables()
        if not self._active:
            return
        if self._batch is None:
            order = sorted(self._active)
            self._batch = self._steps.batch(order, [self._active[s].request for s in order])
        ended = self._step(self._batch)
        self.steps += 1
        if ended is None:
            if self.steps >= self._until or self.steps - self._looked >= LOOK:
                self._look()
        elif ended.any():
            self._end(self._batch.order.tolist(), ended)

    def _look(self) -> None:
        """See what has ended on a device since the last look."""
        if self._slots.ended is not None and self._looked < self.steps:
            self._looked, slots = self.steps, sorted(self._active)
            self._end(slots, self._slots.ended.cpu().numpy()[:, slots])

    def _end(self, slots: Sequence[int], ended: np.ndarray) -> None:
        """Let those go that `ended [3, slots]` says have stopped, are out of room, or are not finite."""
        over = {slot: flags for slot, flags in zip(slots, ended.T.tolist(), strict=True) if any(flags)}
        for slot, (_, _, bad) in over.items():
            if bad:
                raise EngineFailure(
                    f"engine local: a log-prob of request {self._active[slot].request.id} is not finite under version "
                    f"{self._version}; its weights have diverged"
                )
        self._stamp(list(over))
        for slot, (stop, _, _) in over.items():
            self._emit(self._leave(slot), Status.FINISHED if stop else Status.LENGTH)

    def _step(self, batch: Batch) -> np.ndarray | None:
        """Forward, draw, record; `[3, B]` bool per active slot: stopped, out of room, not finite. None where that is not waited for."""
        if self._compiled is None:
            return self._steps.step(batch, (self._lead + self.steps) // self._block + 1)
        slots, asked = self._slots, batch.asked
        active, experts = batch.active.numpy(), list[torch.Tensor]() if asked.experts else None
        riding, self._riding = self._riding, []
        states = self._compiled.hidden(active, slots, experts, riding)
        if asked.truncated or asked.topk:
            hidden, now = torch.from_numpy(states), slots.now(batch.active)
            return self._steps.draw(batch.active, now, hidden, asked, experts).numpy()
        slots.record_extras(batch.active, slots.made[batch.active], None, experts)
        return self._compiled.draw(active, states, slots)

    def _grow_tables(self) -> None:
        """A block for every sequence whose next token starts one; without free blocks the youngest sequence waits."""
        size = self._block
        if self._batch is not None and self.steps < self._full:  # the step at which the first of them has no room
            return
        grown: list[tuple[int, int, int]] = []
        for slot in list(self._active):
            running = self._active.get(slot)
            if running is None or running.position(self.steps) < len(running.blocks) * size:
                continue
            if self._pool.free == 0:
                self._look()
                self._prompts.evict(r.request.prompt_ids for r in self._active.values())
            while self._pool.free == 0 and slot in self._active:
                self._requeue(next(reversed(self._active)))
            if slot in self._active:
                running.blocks.append(self._pool.take())
                grown.append((slot, len(running.blocks) - 1, running.blocks[-1]))
        self._slots.grow(grown)
        self._full = min((r.since - r.first + len(r.blocks) * size for r in self._active.values()), default=0)
        self._lead = max((r.first - r.since for r in self._active.values()), default=0)
        self._until = max((r.since - r.first + r.last for r in self._active.values()), default=0)

    def _leave(self, slot: int) -> Running:
        if self._riding and self._compiled is not None:  # its blocks go to others: nothing may be written to them later
            self._compiled.prefill(self._riding)
            self._riding = []
        running = self._active.pop(slot)
        self._pool.release(running.blocks)
        running.blocks = []
        self._batch = None
        return running

    def _stamp(self, slots: Sequence[int]) -> None:
        """Move what slots have sampled under the weights it was sampled with to their sequences."""
        owners = [self._active[slot] for slot in slots]
        for running, part in self._slots.take(slots, owners, self._version, self.steps):
            running.span = running.span.append(self._with_read(running, part))
        for running in owners:
            running.first, running.since = running.position(self.steps), self.steps

    def _with_read(self, running: Running, part: TokenSpan) -> TokenSpan:
        """`part` of a sequence, the first of it here with the experts of what it read where that is asked for.

        A sequence that brought its KV along has told before.
        """
        brought = self._keep and running.request.kv is not None
        if not running.request.sampling.return_prompt_experts or len(running.span) or brought:
            return part
        assert part.experts is not None
        read = len(running.tokens()) - 1
        return replace(part, prompt_experts=self._cache.noted(running.blocks, read) if read else part.experts[:0])

    def _requeue(self, slot: int) -> None:
        self._stamp([slot])
        self._waiting.appendleft(self._leave(slot))

    def _emit(self, running: Running, status: Status, kv: KeptKV | None = None) -> None:
        self._prompts.leave(running.request.prompt_ids)
        self._done.append(Segment(request_id=running.request.id, span=running.span, status=status, kv=kv))
