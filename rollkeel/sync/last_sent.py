"""What a rank sent last of its boxes, bit for bit as engines hold them, so that it can send what changed alone.

Weights of one dimension (norms, biases) always travel whole, as in `sync.history`, and so do boxes that engines round themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from rollkeel.engines.intake import Room
from rollkeel.errors import DeltaRefused
from rollkeel.models import delta
from rollkeel.models.checksum import SIGNED
from rollkeel.models.numerics import is_quantised, weight_rounder
from rollkeel.sync.history import EVERY
from rollkeel.sync.sending import Outgoing
from rollkeel.types import WeightSlice, WeightUpdate

Slices = Iterable[WeightSlice]


class Traffic(NamedTuple):
    """Of a publication; those of several ranks add up."""

    changed: int = 0
    seen: int = 0
    """Elements that were compared with those before, and of them changed ones."""
    nbytes: int = 0
    deltas: int = 0
    """Publications of changes alone."""


class LastSent:
    """One rank's memory. `through` takes what is sent as it is sent."""

    def __init__(self) -> None:
        self.version, self.traffic = -1, Traffic()
        self._plan: Hashable = None
        self._bits = dict[tuple[str, tuple[int, ...]], torch.Tensor]()

    def through(self, head: WeightUpdate, plan: Hashable, about: Outgoing) -> Callable[[Slices], Slices]:
        """Turns slices into what travels, and remembers them. `plan`: names the one by which they are cut. `done` comes last.

        Raises `DeltaRefused` for a delta from weights that are not remembered."""
        by_delta = head.kind == "delta"
        if by_delta and (self.version < 0 or (self.version, self._plan) != (head.base_version, plan)):
            raise DeltaRefused(
                f"weight update {head.version}: a rank remembers weights {self.version}, not weights {head.base_version}"
                " in the same parts; publish all weights"
            )
        if not by_delta and head.version == self.version and plan != self._plan:
            return lambda slices: slices  # for an engine that came later: the others still have those in memory here
        if plan != self._plan:
            self._bits.clear()
        known = self.version >= 0
        self.version = -1
        self._plan = plan
        self.traffic = Traffic(deltas=int(by_delta))
        return lambda slices: self._noted(slices, about, by_delta, known)

    def done(self, head: WeightUpdate, plan: Hashable) -> None:
        """All of `head` was sent and proven."""
        if plan == self._plan:
            self.version = head.version

    def _noted(self, slices: Slices, about: Outgoing, by_delta: bool, known: bool) -> Iterator[WeightSlice]:
        number = -1
        for piece in slices:
            if not _final(piece, about.rooms[piece.name], about.mode):
                yield piece
                continue
            number += 1
            new = piece.tensor.to(about.rooms[piece.name].dtype).cpu().contiguous()
            old = self._bits.get((piece.name, piece.starts))
            if by_delta:
                if old is None:
                    raise DeltaRefused(f"weight {piece.name}: a rank does not remember its box at {piece.starts}")
                made = delta.encode(delta.bits_of(old), delta.bits_of(new))
                self._count(delta.changed(made), new.numel())
                yield replace(piece, tensor=torch.from_numpy(made), box=tuple(new.shape))
            else:
                if known and old is not None and number % EVERY == 0:
                    bits = SIGNED[new.element_size()]
                    self._count(int((new.view(bits) != old.view(bits)).sum()), new.numel())
                yield piece
            if old is None:
                self._bits[piece.name, piece.starts] = new.clone() if new.data_ptr() == piece.tensor.data_ptr() else new
            else:
                old.copy_(new)

    def _count(self, changed: int, seen: int) -> None:
        before = self.traffic
        self.traffic = before._replace(changed=before.changed + changed, seen=before.seen + seen)


def _final(piece: WeightSlice, room: Room, mode: str) -> bool:
    """Whether the slice is what an engine will have in memory, and may be sent as a delta."""
    if piece.tensor.dim() < 2 or not piece.tensor.is_floating_point():
        return False
    whole = torch.empty(room.shape, device="meta")
    return piece.rounded or weight_rounder(mode) is None or not is_quantised(piece.name, whole)
