"""Per-slot state of running sequences as tensors, so that a decode step costs no Python loop over sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rollkeel.engines.requests import Running
from rollkeel.engines.rng import request_keys
from rollkeel.engines.sampling import Sampled
from rollkeel.errors import EngineFailure
from rollkeel.types import TokenSpan

LOOK = 16
"""Decode steps between two looks at what has ended, on a device that one should not wait for."""


class Now(NamedTuple):
    """`[B]` tensors: what some slots hold before a step."""

    token: torch.Tensor
    """Last token, whose KV is not computed yet."""
    position: torch.Tensor
    """Its absolute position."""
    made: torch.Tensor
    """Tokens sampled since admission or the last `take`."""
    drawn: torch.Tensor
    """Response index of the next token: the counter of the random draws."""
    limit: torch.Tensor
    """How many tokens may be made."""
    key: torch.Tensor
    top_k: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


class Slots:
    """State of `count` places, each empty or holding one running sequence. `[S]` tensors on the engine's device; see `Now`."""

    def __init__(self, count: int, max_length: int, max_blocks: int, device: torch.device) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.device = device
        self.max_length = max_length
        self.spare = count
        waited = device.type == "cpu"
        count += not waited
        self.table = ints(count, max_blocks)
        self._ints, self._floats = ints(7, count), torch.zeros(3, count, device=device)
        self.token, self.position, self.made, self.drawn, self.limit, self.key, self.top_k = self._ints
        self.temperature, self.top_p, self.min_p = self._floats
        self.stop = torch.full((count, 1), -1, dtype=torch.int64, device=device)
        self.ids, self._exact = ints(count, max_length), torch.zeros(2, count, max_length, device=device)
        self.logprobs, self.kept = self._exact
        self.experts: torch.Tensor | None = None
        self.topk: tuple[torch.Tensor, torch.Tensor] | None = None
        self.most = 0
        """Longest `limit` so far: what only some requests ask for has places for no more tokens."""
        self.moves = 0
        """How often one of these tensors was replaced by a larger one."""
        self.ended = None if waited else torch.zeros((3, count), dtype=torch.bool, device=device)
        """On a device that one should not wait for: whether what was placed last has stopped, is out of room, is not finite.
        There the place `spare` behind the others pads batches: it has ended, so nothing in it moves."""
        if self.ended is not None:
            self.ended[:, self.spare] = True

    def place(self, slots: Sequence[int], running: Sequence[Running], steps: int, padding: int) -> None:
        """Put `running` into `slots`, after so many decode steps of the engine; `padding` is the block behind their own."""
        at, asked = torch.tensor(slots, device=self.device), [r.request.sampling for r in running]
        limit = [r.enter(steps, self.max_length) for r in running]
        columns = torch.tensor(
            [
                [int(r.tokens()[-1]), r.first, 0, len(r.request.prefix) + len(r.span), m, r.request.id, p.top_k, p.seed]
                for r, p, m in zip(running, asked, limit, strict=True)
            ]
        ).T
        columns[5] = request_keys(columns[7], columns[5])
        self._ints[:, at] = columns[:7].to(self.device)
        self._floats[:, at] = torch.tensor([[p.temperature, p.top_p, p.min_p] for p in asked], device=self.device).T
        self.most = max(self.most, *limit)
        if self.ended is not None:
            self.ended[:, at] = False
        most_stops = max(len(p.stop_token_ids) for p in asked)
        if most_stops > self.stop.shape[1]:
            grown = torch.full((len(self.stop), most_stops), -1, dtype=torch.int64, device=self.device)
            grown[:, : self.stop.shape[1]] = self.stop
            self.stop, self.moves = grown, self.moves + 1
        width = self.stop.shape[1]
        self.stop[at] = torch.tensor([[*p.stop_token_ids, *[-1] * width][:width] for p in asked], device=self.device)
        width = self.table.shape[1]
        self.table[at] = torch.tensor(
            [[*b, *[padding] * (width - len(b))] for b in (r.blocks for r in running)], device=self.device
        )

    def grow(self, blocks: Sequence[tuple[int, int, int]]) -> None:
        """Note more blocks of sequences: slot, place in its table and block of each."""
        if blocks:
            width = self.table.shape[1]
            lines = [[slot * width + at for slot, at, _ in blocks], [block for *_, block in blocks]]
            at, new = torch.tensor(lines).to(self.device, non_blocking=True)
            self.table.view(-1).index_copy_(0, at, new)

    def now(self, active: torch.Tensor) -> Now:
        """What the slots `active` hold."""
        return Now(*self._ints.index_select(1, active), *self._floats.index_select(1, active))

    def make_room(self, topk: int, experts: Sequence[int]) -> None:
        """Places for the `topk` best and for `experts` (layers, of each) of every token that may come, where any are asked for."""
        if topk:
            old = self.topk or (None, None)
            self.topk = self._room(old[0], torch.int64, topk), self._room(old[1], torch.float32, topk)
        if experts:
            self.experts = self._room(self.experts, torch.int16, *experts)

    def _room(self, old: torch.Tensor | None, dtype: torch.dtype, *width: int) -> torch.Tensor:
        """`[S, tokens, *width]`; sequences on their way keep what they have."""
        if old is not None and old.shape[1] > self.most and old.shape[-1] >= width[-1]:
            return old
        tokens = self.most + 1 if old is None else max(self.most + 1, min(2 * old.shape[1], self.max_length))
        new = torch.zeros((len(self.made), tokens, *width), dtype=dtype, device=self.device)
        if old is not None:
            new[:, : old.shape[1], ..., : old.shape[-1]] = old
        self.moves += 1
        return new

    def record_extras(
        self,
        active: torch.Tensor,
        at: torch.Tensor,
        best: tuple[torch.Tensor, torch.Tensor] | None,
        experts: list[torch.Tensor] | None,
    ) -> None:
        """Store what only some requests ask for at their places `at`: values and ids of the `best` tokens, and the experts."""
        chosen = torch.stack(experts, 1).to(torch.int16) if experts else None
        self.make_room(0 if best is None else best[0].shape[1], () if chosen is None else chosen.shape[1:])
        if best is not None and self.topk is not None:
            for held, new in zip(self.topk, reversed(best), strict=True):
                held[active, at, : new.shape[1]] = new
        if chosen is not None and self.experts is not None:
            self.experts[active, at] = chosen

    def record(self, active: torch.Tensor, now: Now, drawn: Sampled) -> torch.Tensor:
        """Store one sampled token per active slot and advance; returns `[3, B]` bool: stopped, out of room, not finite.

        With `ended`, a slot that ended in an earlier step stays where it is: its token falls on the place behind its last.
        """
        place = active * self.max_length + now.made
        self.ids.view(-1).index_copy_(0, place, drawn.ids)
        self._exact.view(2, -1).index_copy_(1, place, torch.stack((drawn.logprobs, drawn.kept_mass)))
        stopped = (drawn.ids[:, None] == self.stop.index_select(0, active)).any(-1)
        # A log-prob is at most 0, or NaN.
        ends = torch.stack((stopped, now.made + 1 >= now.limit, ~(drawn.logprobs > -torch.inf)))
        step, token = 1, drawn.ids
        if self.ended is not None:
            before = self.ended.index_select(1, active)
            goes_on = ~before.any(0)
            ends = before | (ends & goes_on)
            self.ended.index_copy_(1, active, ends)
            step, token = goes_on.long(), torch.where(goes_on, token, now.token)
        moved = torch.stack((token, now.position + step, now.made + step, now.drawn + step))
        self._ints[:4].index_copy_(1, active, moved)
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
