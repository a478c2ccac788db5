"""A weight update that arrives in parts, each of them written into the engine's memory and proven there as it comes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollkeel.engines.weights import (
    Memory,
    check_all_there,
    check_base,
    check_kind,
    check_total,
    misfit,
    prove_piece,
)
from rollkeel.errors import EngineFailure
from rollkeel.models.numerics import rounded
from rollkeel.types import WeightSlice, WeightUpdate


class Intake:
    """An update whose slices come in parts, in any order, and a large weight in several slices of whole rows: each part is
    written and proven as it comes, and `finish` says whether all of the update is there.

    After an error nothing may be served. No slice is kept, so what arrives needs no more memory than one part of it."""

    def __init__(self, head: WeightUpdate, memory: Memory, mode: str, base: int) -> None:
        """`head`: the update without slices and checksum. `base`: version of the weights that the engine holds."""
        check_kind(head)
        self._head, self._total = head, 0
        self._held, self._mode, self._base = memory.destinations, mode, head.version
        if head.kind == "adapter":
            check_base(head, memory, base)
            self._held, self._mode, self._base = memory.adapters, "fp32", base
        else:
            for tensor in memory.adapters.values():
                tensor.zero_()
        self._arrived: dict[str, dict[int, int]] = {name: {} for name in self._held}
        """Elements of each slice, by its offset, by name."""

    @torch.inference_mode()
    def take(self, slices: Sequence[WeightSlice]) -> None:
        """Write these slices, rounded, and prove that they are there."""
        for piece in slices:
            view = self._rows(piece)
            if piece.offset in self._arrived[piece.name]:
                raise EngineFailure(f"weight update {self._head.version}: {piece.name} arrived twice")
            self._arrived[piece.name][piece.offset] = piece.tensor.numel()
            view.copy_(rounded(piece.name, piece.tensor.to(view.device), self._mode))
            prove_piece(piece, view, self._head, self._mode)
            self._total += piece.checksum

    def finish(self, checksum: int) -> tuple[int, int]:
        """As `take` does: the checksum, and the version of the weights. `checksum`: of all slices, as the sender knows it."""
        version = self._head.version
        check_all_there([n for n, view in self._held.items() if not self._covers(n, view.numel())], version)
        check_total(self._total, checksum, version)
        return checksum, self._base

    def _rows(self, piece: WeightSlice) -> torch.Tensor:
        """The rows of the engine's weight that the slice is for."""
        view, shape = self._held.get(piece.name), piece.tensor.shape
        if view is not None and shape == view.shape and not piece.offset:
            return view
        if view is None or not view.numel() or shape[1:] != view.shape[1:] or len(shape) != view.dim():
            raise misfit(piece, view, self._head.version)
        first, odd = divmod(piece.offset, view[0].numel())
        if odd or first + shape[0] > len(view):
            raise misfit(piece, view, self._head.version)
        return view[first : first + shape[0]]

    def _covers(self, name: str, elements: int) -> bool:
        end = 0
        for offset, length in sorted(self._arrived[name].items()):
            if offset != end:
                return False
            end += length
        return end == elements and bool(self._arrived[name])
