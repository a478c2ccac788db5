"""What was published last, bit for bit, and deltas that lead there from the publications before it.

version 3 ──delta──▶ 4 ──delta──▶ 6        an engine at 6 gets nothing, at 4 one delta, at 3 both of them added up,
                                           at anything else all weights
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from rollkeel.models import delta
from rollkeel.models.checksum import SIGNED
from rollkeel.models.numerics import compute_dtype, rounded
from rollkeel.sync.shared import KEPT
from rollkeel.types import WeightSlice, WeightUpdate

MOST_CHANGED = 0.25
"""Share of changed elements above which `auto` sends all weights: a delta then has a tenth of their bytes, and takes longer to make
than they take over a link of 1 GB/s (benchmarks/deltas.py)."""
EVERY = 16
"""`auto` looks at one row of so many."""


@dataclass(frozen=True)
class Delta:
    """What leads from one publication to the next."""

    base: int
    version: int
    encoded: Mapping[str, torch.Tensor]
    """By name, as `models.delta.encode` made it."""

    @cached_property
    def nbytes(self) -> int:
        return sum(t.numel() for t in self.encoded.values())


def catch_up(held: int, kept: Sequence[Delta], newest: int, full: int) -> list[Delta] | None:
    """The deltas that lead from version `held` to `newest`; None where not all are kept, or they have as many bytes as `full`.

    `kept`: oldest first. `held`: −1 for an engine without proven weights."""
    chain, at = list[Delta](), newest
    for one in reversed(kept):
        if at != held and one.version == at:
            chain.insert(0, one)
            at = one.base
    return chain if at == held and sum(one.nbytes for one in chain) < full else None


def trimmed(kept: Sequence[Delta], most: int) -> list[Delta]:
    """The newest of `kept` that have at most `most` bytes together, and the newest one whatever its size."""
    out, size = list[Delta](), 0
    for one in reversed(kept):
        size += one.nbytes
        if out and size > most:
            break
        out.insert(0, one)
    return out


class History:
    """Publications in one numeric mode. Weights of one dimension (norms, biases) always travel whole: they are few, and engines may
    hold them more precisely than their mode."""

    def __init__(self, kind: str, mode: str) -> None:
        """`kind`: `delta`, or `auto`."""
        self.version, self.kept = -1, list[Delta]()
        self.changed: float | None = None
        """Share of elements that the last publication changed; where `auto` sent all weights, of the rows that it looked at."""
        self._kind = kind
        self._mode = mode
        self._base = dict[str, torch.Tensor]()

    def advance(self, full: WeightUpdate) -> None:
        """Take note of the publication `full`; what an engine then needs, `update` says."""
        last, self.version = self.version, -1  # unless all of this is done
        large = [p for p in full.slices if p.tensor.dim() > 1 and p.tensor.is_floating_point()]
        known = {n: t.shape for n, t in self._base.items()} == {p.name: p.tensor.shape for p in large}
        by_delta, self.changed = known and 0 <= last < full.version, None
        if by_delta and self._kind == "auto":
            self.changed = self._looked(large)
            by_delta = self.changed <= MOST_CHANGED
        encoded = dict[str, torch.Tensor]()
        if not known:
            self._base.clear()
        for piece in large:
            new = self._served(piece.name, piece.tensor)
            if by_delta:
                made = delta.encode(delta.bits_of(self._base[piece.name]), delta.bits_of(new))
                encoded[piece.name] = torch.from_numpy(made)
            if known:
                self._base[piece.name].copy_(new)
            else:
                self._base[piece.name] = new.clone()
        self.kept = [*self.kept, Delta(last, full.version, encoded)] if by_delta else []
        size = sum(t.numel() * t.element_size() for t in self._base.values())
        self.kept = trimmed(self.kept, int(KEPT * size))
        if by_delta:
            counts = sum(delta.changed(t.numpy()) for t in encoded.values())
            self.changed = counts / max(1, sum(t.numel() for t in self._base.values()))
        self.version = full.version

    def update(self, full: WeightUpdate, held: int) -> WeightUpdate:
        """The update that brings an engine from the weights `held` to those of `full`, which `advance` was told last."""
        chain = catch_up(held, self.kept, full.version, nbytes(full))
        if not chain:
            return full

        def travels(piece: WeightSlice) -> WeightSlice:
            if piece.name not in self._base:
                return piece
            made = delta.squash([one.encoded[piece.name].numpy() for one in chain])
            return replace(piece, tensor=torch.from_numpy(made))

        return replace(full, kind="delta", base_version=held, slices=[travels(piece) for piece in full.slices])

    def _served(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What an engine of this mode holds of a weight, contiguous on the CPU."""
        return rounded(name, tensor, self._mode).to(compute_dtype(self._mode)).cpu().contiguous()

    def _looked(self, large: Sequence[WeightSlice]) -> float:
        """Share of changed elements in some rows of every weight; rounding never goes beyond a row."""
        changed, seen = 0, 0
        for piece in large:
            new, old = self._served(piece.name, piece.tensor[::EVERY]), self._base[piece.name][::EVERY]
            bits = SIGNED[new.element_size()]
            changed += int((new.view(bits) != old.view(bits)).sum())
            seen += new.numel()
        return changed / max(1, seen)


def nbytes(update: WeightUpdate) -> int:
    """Bytes of an update's tensors."""
    return sum(p.tensor.numel() * p.tensor.element_size() for p in update.slices)
