"""Where the parts of a packed row lie, and how attention takes them: in buckets of similar length, each behind what it continues."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

_BUCKET_RATIO, _BUCKET_SLACK = 1.25, 8


@dataclass(frozen=True)
class _Bucket:
    """`rows` parts padded to `length`; `gather [rows·length]` are flat token positions, `real` the places that are no padding."""

    rows: int
    length: int
    gather: torch.Tensor | None
    real: torch.Tensor | None
    start: int = 0
    prefix: slice | None = None
    """Flat positions of the part that all of them continue."""
    mask: torch.Tensor | None = None
    """`[length, prefix + length]` bool: which keys a query sees, where there is a prefix."""

    def to(self, device: torch.device) -> _Bucket:
        return replace(self, gather=_to(self.gather, device), real=_to(self.real, device), mask=_to(self.mask, device))

    def keys(self, flat: torch.Tensor) -> torch.Tensor:
        """`[N, KV, d]` → `[rows, KV, prefix + length, d]`."""
        own = self.take(flat)
        if self.prefix is None:
            return own
        shared = flat[self.prefix].transpose(0, 1)
        return torch.cat([shared.expand(self.rows, -1, -1, -1), own], 2)

    def take(self, flat: torch.Tensor) -> torch.Tensor:
        """`[N, H, d]` → `[rows, H, length, d]`."""
        if self.gather is None:
            part = flat[self.start : self.start + self.rows * self.length]
        else:
            part = flat.flatten(1).index_select(0, self.gather).view(-1, *flat.shape[1:])
        return part.view(self.rows, self.length, *flat.shape[1:]).transpose(1, 2)


class Shared(Protocol):
    """Ranks that have some of a row's tokens each, and in attention some of the heads."""

    def part(self, tokens: int) -> slice:
        """Which of a row's tokens are here."""
        ...

    def attend(
        self, attend: Callable[..., torch.Tensor], tokens: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """`attend` over the whole row with some of the heads → its result at the tokens here, `[n, H · d_v]`."""
        ...


def gathers(device: torch.device) -> bool:
    """Whether attention is given the keys of each part one after the other; elsewhere buckets take them."""
    return device.type == "cuda"


@dataclass(frozen=True)
class Layout:
    """Where the parts of a packed row lie. Built once per micro-batch."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    """The part that each continues, −1 for none."""
    cu_seqlens: torch.Tensor
    """`[S + 1]` int32 on the model's device."""
    spans: torch.Tensor
    """`[S, 4]` int64 on the host: first token of each part and of what follows it, and the same of the part that it continues (0, 0)."""
    keys: torch.Tensor | None = None
    """Flat position of every key that a part's queries see, part after part; None if those are its own."""
    cu_keys: torch.Tensor | None = None
    """`[S + 1]` int32: first of them for each part."""
    furthest: int = 0
    """Most keys of a part."""
    shared: Shared | None = None
    """Who has which of its tokens; None if all are here."""

    def attend(
        self, attend: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """`attend(q, k, v)`, which looks at the whole row, for the tokens that are here."""
        if self.shared is None:
            return attend(q, k, v)
        return self.shared.attend(attend, sum(self.lengths), q, k, v)

    @staticmethod
    def build(lengths: Sequence[int], device: torch.device, parents: Sequence[int] | None = None) -> Layout:
        """Parts of `lengths ≥ 1` that lie end to end; `parents`: the part that each continues, −1 for none."""
        starts = list(itertools.accumulate(lengths, initial=0))
        parents = parents or [-1] * len(lengths)
        seen_first = [(starts[p], starts[p + 1]) if p >= 0 else (0, 0) for p in parents]
        spans = torch.tensor(
            [(*own, *first) for own, first in zip(itertools.pairwise(starts), seen_first, strict=True)]
        )
        cu = torch.tensor(starts, dtype=torch.int32, device=device)
        keys = cu_keys = None
        furthest = max(lengths)
        if max(parents) >= 0 and gathers(device):
            seen = [[*([p] if p >= 0 else ()), i] for i, p in enumerate(parents)]
            keys = torch.cat([torch.arange(starts[j], starts[j + 1]) for each in seen for j in each]).to(device)
            counts = [sum(lengths[j] for j in each) for each in seen]
            furthest = max(counts)
            cu_keys = torch.tensor(list(itertools.accumulate(counts, initial=0)), dtype=torch.int32, device=device)
        return Layout(tuple(lengths), tuple(parents), cu, spans, keys, cu_keys, furthest)

    @functools.cached_property
    def _bucketed(self) -> tuple[tuple[_Bucket, ...], torch.Tensor | None]:
        starts, device = list(itertools.accumulate(self.lengths, initial=0)), self.cu_seqlens.device
        buckets, flat_order = [], []
        for parent in dict.fromkeys(sorted(self.parents)):
            by_length = sorted((i for i, p in enumerate(self.parents) if p == parent), key=lambda i: self.lengths[i])
            prefix = slice(starts[parent], starts[parent + 1]) if parent >= 0 else None
            for members in _alike(by_length, self.lengths):
                bucket = _bucket([starts[i] for i in members], [self.lengths[i] for i in members], prefix)
                buckets.append(bucket.to(device))
                flat_order += [torch.arange(starts[i], starts[i + 1]) for i in members]
        order, row = torch.cat(flat_order), torch.arange(starts[-1])
        if torch.equal(order, row):
            return tuple(buckets), None
        inverse = torch.empty_like(order)
        inverse[order] = row
        return tuple(buckets), inverse.to(device)

    @property
    def buckets(self) -> tuple[_Bucket, ...]:
        """Parts that continue none; then, for each part that others continue, these."""
        return self._bucketed[0]

    @property
    def order(self) -> torch.Tensor | None:
        """Flat position of each token in bucket order → restores the row; None if the buckets are in row order already."""
        return self._bucketed[1]


def _to(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


def _alike(by_length: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    members: list[int] = []
    for i in by_length:
        if members and lengths[i] > max(lengths[members[0]] * _BUCKET_RATIO, lengths[members[0]] + _BUCKET_SLACK):
            yield members
            members = []
        members.append(i)
    if members:
        yield members


def _bucket(starts: list[int], lengths: list[int], prefix: slice | None = None) -> _Bucket:
    rows, longest = len(starts), max(lengths)
    equal = min(lengths) == longest
    mask = None
    if prefix is not None:
        before = prefix.stop - prefix.start
        mask = torch.ones(longest, before + longest, dtype=torch.bool).tril(before)
    if equal and all(b - a == longest for a, b in itertools.pairwise(starts)):
        return _Bucket(rows, longest, None, None, starts[0], prefix, mask)
    places = torch.arange(longest).expand(rows, -1)
    inside = places < torch.tensor(lengths).unsqueeze(1)
    # Padding repeats a real token: causal attention never lets a real query see it, and finite values stay finite.
    gather = (torch.tensor(starts).unsqueeze(1) + torch.where(inside, places, 0)).reshape(-1)
    real = None if equal else inside.reshape(-1).nonzero().squeeze(1)
    return _Bucket(rows, longest, gather, real, 0, prefix, mask)
