"""Per-slot state of running sequences as tensors, so that a decode step costs no Python loop over sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from rollkeel.engines.requests import Running
from rollkeel.engines.rng import request_keys
from rollkeel.engines.sampling import Sampled, SamplingRows
from rollkeel.errors import EngineFailure
from rollkeel.types import Request, TokenSpan

LOOK = 16
"""Decode steps between two looks at what has ended, on a device that one should not wait for."""


class Slots:
    """State of `count` places, each empty or holding one running sequence. `[S]` tensors on the engine's device."""

    def __init__(self, count: int, max_length: int, max_blocks: int, device: torch.device) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        self.device, self.max_length = device, max_length
        self.table = ints(count, max_blocks)
        self.token, self.position = ints(count), ints(count)
        """Last token, whose KV is not computed yet, and its absolute position."""
        self.made, self.limit = ints(count), ints(count)
        """Tokens sampled since admission or the last `take`, and how many may be."""
        self.drawn = ints(count)
        """Response index of the next token: the counter of the random draws."""
        self.key = ints(count)
        self.temperature, self.top_p = floats(count), floats(count)
        self.top_k, self.min_p = ints(count), floats(count)
        self.stop = torch.full((count, 1), -1, dtype=torch.int64, device=device)
        self.ids, self.logprobs, self.kept = (
            ints(count, max_length),
            floats(count, max_length),
            floats(count, max_length),
        )
        self.experts: torch.Tensor | None = None
        self.topk: tuple[torch.Tensor, torch.Tensor] | None = None
        self.most = 0
        """Longest `limit` so far: what only some requests ask for has places for no more tokens."""
        self.ended = None if device.type == "cpu" else torch.zeros((3, count), dtype=torch.bool, device=device)
        """On a device that one should not wait for: whether what was placed last has stopped, is out of room, is not finite."""

    def place(self, slots: Sequence[int], running: Sequence[Running], steps: int, padding: int) -> None:
        """Put `running` into `slots`, after so many decode steps of the engine; `padding` is the block behind their own."""
        at, asked = torch.tensor(slots, device=self.device), [r.request.sampling for r in running]
        limit = [r.enter(steps, self.max_length) for r in running]
        columns = torch.tensor(
            [
                [r.first, len(r.request.prefix) + len(r.span), int(r.tokens()[-1]), m, p.top_k, p.seed, r.request.id]
                for r, p, m in zip(running, asked, limit, strict=True)
            ]
        ).T
        self.key[at] = request_keys(columns[5], columns[6]).to(self.device)
        position, already, token, most, top_k = columns[:5].to(self.device)
        self.position[at], self.drawn[at], self.token[at] = position, already, token
        self.limit[at], self.top_k[at], self.made[at] = most, top_k, 0
        self.most = max(self.most, *limit)
        if self.ended is not None:
            self.ended[:, at] = False
        shape = torch.tensor([[p.temperature, p.top_p, p.min_p] for p in asked], device=self.device).T
        self.temperature[at], self.top_p[at], self.min_p[at] = shape
        most_stops = max(len(p.stop_token_ids) for p in asked)
        if most_stops > self.stop.shape[1]:
            grown = torch.full((len(self.stop), most_stops), -1, dtype=torch.int64, device=self.device)
            grown[:, : self.stop.shape[1]] = self.stop
            self.stop = grown
        width = self.stop.shape[1]
        self.stop[at] = torch.tensor([[*p.stop_token_ids, *[-1] * width][:width] for p in asked], device=self.device)
        width = self.table.shape[1]
        self.table[at] = torch.tensor(
            [[*b, *[padding] * (width - len(b))] for b in (r.blocks for r in running)], device=self.device
        )

    def rows(self, active: torch.Tensor, requests: Sequence[Request]) -> SamplingRows:
        """Sampling parameters of the active slots."""
        return SamplingRows(
            temperature=self.temperature[active],
            top_p=self.top_p[active],
            top_k=self.top_k[active],
            min_p=self.min_p[active],
            truncated=any(r.sampling.truncated for r in requests),
            tempered=any(r.sampling.temperature != 1 for r in requests),
        )

    def record_extras(
        self, active: torch.Tensor, drawn: Sampled | None, topk: int, experts: list[torch.Tensor] | None
    ) -> None:
        """Store what only some requests ask for, the `topk` best of `drawn` and the experts; call before `record`."""
        if not topk and not experts:
            return
        at = self.made[active]
        if topk and drawn is not None:
            values, ids = drawn.scores.log_softmax(-1).topk(topk, -1)
            old = self.topk or (None, None)
            self.topk = (self._room(old[0], topk, dtype=ids.dtype), self._room(old[1], topk, dtype=values.dtype))
            self.topk[0][active, at, :topk], self.topk[1][active, at, :topk] = ids, values
        if experts:
            chosen = torch.stack(experts, 1).to(torch.int16)
            self.experts = self._room(self.experts, *chosen.shape[1:], dtype=chosen.dtype)
            self.experts[active, at] = chosen

    def _room(self, old: torch.Tensor | None, *width: int, dtype: torch.dtype) -> torch.Tensor:
        """`[S, tokens, *width]` with places for every token that may come; sequences on their way keep what they have."""
        if old is not None and old.shape[1] > self.most and old.shape[-1] >= width[-1]:
            return old
        tokens = self.most + 1 if old is None else max(self.most + 1, min(2 * old.shape[1], self.max_length))
        new = torch.zeros((len(self.made), tokens, *width), dtype=dtype, device=self.device)
        if old is not None:
            new[:, : old.shape[1], ..., : old.shape[-1]] = old
        return new

    def record(self, active: torch.Tensor, drawn: Sampled) -> torch.Tensor:
        """Store one sampled token per active slot and advance; returns `[3, B]` bool: stopped, out of room, not finite.

        With `ended`, a slot that ended in an earlier step stays where it is: its token falls on the place behind its last.
        """
        at = self.made[active]
        self.ids[active, at] = drawn.ids
        self.logprobs[active, at] = drawn.logprobs
        self.kept[active, at] = drawn.kept_mass
        self.token[active] = drawn.ids
        stopped = (drawn.ids[:, None] == self.stop[active]).any(-1)
        ends = torch.stack((stopped, at + 1 >= self.limit[active], ~drawn.logprobs.isfinite()))
        step: torch.Tensor | int = 1
        if self.ended is not None:
            before = self.ended[:, active]
            goes_on = ~before.any(0)
            self.ended[:, active] = ends = before | (ends & goes_on)
            step = goes_on.long()
        self.position[active] += step
        self.made[active] = at + step
        self.drawn[active] += step
        return ends

    def take(
        self, slots: Sequence[int], running: Sequence[Running], version: int, steps: int
    ) -> Iterator[tuple[Running, TokenSpan]]:
        """What was sampled in each of `slots`, which hold `running`, since admission or the last call, where that is anything.

        `version`: of the weights; `steps`: the engine's so far. A device is asked once.
        """
        topk_ids, topk = self.topk or (None, None)
        # By size of an element, so that each begins where its type may.
        held = (self.made, self.ids, topk_ids, self.logprobs, self.kept, topk, self.experts)
        places = slots
        if self.ended is not None and slots:
            tokens = max(r.position(steps) - r.first for r in running)
            held, places = _brought(held, torch.tensor(slots, device=self.device), tokens), range(len(slots))
        made, *others = held
        assert made is not None
        for slot, place, owner in zip(slots, places, running, strict=True):
            if n := int(made[place]):
                rows = [None if t is None else t[place, :n].numpy().copy() for t in others]
                self.made[slot] = 0
                self.limit[slot] -= n
                yield owner, _span(rows, owner, version)


def _brought(held: Sequence[torch.Tensor | None], slots: torch.Tensor, tokens: int) -> list[torch.Tensor | None]:
    """The first `tokens` places of `slots` in each `[S, …]` tensor, on the CPU, in one copy."""
    # Cut first: a row may have room for a whole context.
    cut = (t if t is None or t.dim() < 2 else t[:, :tokens] for t in held)
    parts = [None if t is None else t.index_select(0, slots) for t in cut]
    given = [p.contiguous() for p in parts if p is not None]
    flat = torch.cat([p.view(torch.uint8).flatten() for p in given]).cpu()
    pieces = iter(flat.split([p.numel() * p.element_size() for p in given]))
    return [None if p is None else next(pieces).view(p.dtype).view(p.shape) for p in parts]


def _span(rows: Sequence[np.ndarray | None], owner: Running, version: int) -> TokenSpan:
    ids, topk_ids, logprobs, kept, topk, experts = rows
    assert ids is not None
    assert logprobs is not None
    assert kept is not None
    asked = owner.request.sampling
    k = asked.return_topk
    try:
        return TokenSpan(
            token_ids=ids,
            logprobs=logprobs,
            kept_mass=kept,
            versions=np.full(len(ids), version, np.int64),
            kv_versions=np.full(len(ids), owner.kv_version, np.int64),
            experts=experts if asked.return_experts else None,
            topk_ids=topk_ids[:, :k] if k and topk_ids is not None else None,
            topk_logprobs=topk[:, :k] if k and topk is not None else None,
        )
    except ValueError as error:
        raise EngineFailure(f"engine local: request {owner.request.id}: {error}") from error
