"""Per-slot state of running sequences as tensors, so that a decode step costs no Python loop over sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollkeel.engines.rng import request_keys
from rollkeel.engines.sampling import Sampled, SamplingRows
from rollkeel.types import Request, TokenSpan


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

    def place(
        self,
        slots: Sequence[int],
        requests: Sequence[Request],
        *,
        last: Sequence[int],
        drawn: Sequence[int],
        limit: Sequence[int],
        blocks: Sequence[Sequence[int]],
        padding: int,
    ) -> None:
        """Put requests into `slots`: `last` is the final token of each, `drawn` of them were sampled, `limit` more may be.

        Their keys and values lie in `blocks`; `padding` is the block behind those.
        """
        at, asked = torch.tensor(slots, device=self.device), [r.sampling for r in requests]
        columns = torch.tensor(
            [
                [len(r.prompt_ids) + n - 1, n, t, m, p.top_k, p.seed, r.id]
                for r, p, n, t, m in zip(requests, asked, drawn, last, limit, strict=True)
            ]
        ).T
        self.key[at] = request_keys(columns[5], columns[6]).to(self.device)
        position, already, token, most, top_k = columns[:5].to(self.device)
        self.position[at], self.drawn[at], self.token[at] = position, already, token
        self.limit[at], self.top_k[at], self.made[at] = most, top_k, 0
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
        self.table[at] = torch.tensor([[*b, *[padding] * (width - len(b))] for b in blocks], device=self.device)

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
            old = self.topk
            if old is None or old[0].shape[-1] < topk:
                shape = (*self.ids.shape, topk)
                self.topk = (torch.zeros(shape, dtype=torch.int64), torch.zeros(shape))
                if old is not None:  # sequences on their way keep what they have
                    self.topk[0][..., : old[0].shape[-1]], self.topk[1][..., : old[1].shape[-1]] = old
            assert self.topk is not None
            self.topk[0][active.cpu(), at.cpu(), :topk] = ids.cpu()
            self.topk[1][active.cpu(), at.cpu(), :topk] = values.cpu()
        if experts:
            chosen = torch.stack(experts, 1).to(torch.int16)
            if self.experts is None:
                shape = (*self.ids.shape, *chosen.shape[1:])
                self.experts = torch.zeros(shape, dtype=torch.int16, device=self.device)
            self.experts[active, at] = chosen

    def record(self, active: torch.Tensor, drawn: Sampled) -> torch.Tensor:
        """Store one sampled token per active slot and advance; returns `[3, B]` bool: stopped, out of room, not finite."""
        at = self.made[active]
        self.ids[active, at] = drawn.ids
        self.logprobs[active, at] = drawn.logprobs
        self.kept[active, at] = drawn.kept_mass
        self.token[active] = drawn.ids
        self.position[active] += 1
        self.made[active] = at + 1
        self.drawn[active] += 1
        stopped = (drawn.ids[:, None] == self.stop[active]).any(-1)
        return torch.stack((stopped, at + 1 >= self.limit[active], ~drawn.logprobs.isfinite()))

    def take(self, slot: int, request: Request, version: int, kv_version: int) -> TokenSpan:
        """The tokens sampled in `slot` since admission or the last call, under weights `version` behind KV of `kv_version`."""
        n = int(self.made[slot])

        def copy(t: torch.Tensor) -> np.ndarray:
            return t[slot, :n].cpu().numpy().copy()

        wanted = request.sampling
        topk = (copy(self.topk[0]), copy(self.topk[1])) if wanted.return_topk and self.topk is not None and n else None
        span = TokenSpan(
            token_ids=copy(self.ids),
            logprobs=copy(self.logprobs),
            kept_mass=copy(self.kept),
            versions=np.full(n, version, np.int64),
            kv_versions=np.full(n, kv_version, np.int64),
            experts=copy(self.experts) if wanted.return_experts and self.experts is not None and n else None,
            topk_ids=topk[0][:, : wanted.return_topk] if topk else None,
            topk_logprobs=topk[1][:, : wanted.return_topk] if topk else None,
        )
        self.made[slot] = 0
        self.limit[slot] -= n
        return span
