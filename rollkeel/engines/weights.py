"""Applying a weight update to an engine in place, and the proof that its memory holds the weights that were published."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from rollkeel.errors import EngineFailure
from rollkeel.models.checksum import MASK
from rollkeel.models.numerics import held_checksum, rounded, update_checksum
from rollkeel.types import WeightSlice, WeightUpdate


def apply_update(update: WeightUpdate, destinations: Mapping[str, torch.Tensor], mode: str) -> None:
    """Write every slice, rounded as `mode` rounds, to the view of its name; `prove` says whether it is there. Of a shared update
    nothing is written: every slice must be that view already.

    Raises `EngineFailure` for an unknown or missing name, a wrong shape, a name that comes twice, or shared memory that is not.
    """
    _check_kind(update)
    missing = dict.fromkeys(destinations)
    for piece in update.slices:
        view = destinations.get(piece.name)
        if view is None or piece.tensor.shape != view.shape or piece.offset:
            raise _misfit(piece, view, update.version)
        if piece.name not in missing:
            raise EngineFailure(f"weight update {update.version}: {piece.name} arrived twice")
        del missing[piece.name]
        if not update.shared:
            view.copy_(rounded(piece.name, piece.tensor.to(view.device), mode))
        elif not _same_memory(piece.tensor, view):
            raise EngineFailure(
                f"weight update {update.version}: {piece.name} is not in the memory that trainer and engine share; something"
                " gave one of them another tensor since the run began"
            )
    _check_all_there(missing, update.version)


def _check_kind(update: WeightUpdate) -> None:
    if update.kind not in ("full", "adapter"):
        raise EngineFailure(f"weight update {update.version}: expected all weights or adapters, got {update.kind!r}")


def _misfit(piece: WeightSlice, view: torch.Tensor | None, version: int) -> EngineFailure:
    if view is None:
        return EngineFailure(f"weight update {version}: the engine has no weight named {piece.name}")
    return EngineFailure(
        f"weight update {version}: {piece.name} has shape {tuple(piece.tensor.shape)} at offset {piece.offset}, the engine"
        f" expects {tuple(view.shape)}"
    )


def _check_all_there(missing: Collection[str], version: int) -> None:
    if missing:
        raise EngineFailure(
            f"weight update {version}: {len(missing)} weights did not arrive, first {next(iter(missing))}"
        )


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = ((t.data_ptr(), t.device, t.dtype, t.shape, t.stride()) for t in (one, other))
    return first == second


class Memory(Protocol):
    """A forward: views of what it computes with, weights by checkpoint name and the adapters beside them by PEFT's."""

    destinations: dict[str, torch.Tensor]
    adapters: dict[str, torch.Tensor]


def take(update: WeightUpdate, memory: Memory, mode: str, base: int) -> tuple[int, int]:
    """Apply and prove an update of all weights, which leaves adapters at zero, or of adapters beside the weights `base`, which no
    mode rounds. Returns its checksum and the version of the weights. Raises `EngineFailure`; nothing may then be served."""
    if update.kind != "adapter":
        apply_update(update, memory.destinations, mode)
        for tensor in memory.adapters.values():
            tensor.zero_()
        return prove(update, memory.destinations, mode), update.version
    _check_base(update, memory, base)
    apply_update(update, memory.adapters, "fp32")
    return prove(update, memory.adapters, "fp32"), base


def _check_base(update: WeightUpdate, memory: Memory, base: int) -> None:
    """Raises `EngineFailure` unless these adapters can stand beside the weights `base`."""
    if not memory.adapters:
        raise EngineFailure(f"weight update {update.version}: this engine was opened without adapters (train.lora)")
    if base < 0 or update.base_version != base:
        raise EngineFailure(
            f"weight update {update.version}: its adapters belong to weights {update.base_version}, the engine has"
            f" {base if base >= 0 else 'none that are proven'}"
        )


class Intake:
    """An update whose slices come in parts, in any order, and a large weight in several slices of whole rows: each part is
    written and proven as it comes, and `finish` says whether all of the update is there.

    After an error nothing may be served. No slice is kept, so what arrives needs no more memory than one part of it."""

    def __init__(self, head: WeightUpdate, memory: Memory, mode: str, base: int) -> None:
        """`head`: the update without slices and checksum. `base`: version of the weights that the engine holds."""
        _check_kind(head)
        self._head, self._total = head, 0
        self._held, self._mode, self._base = memory.destinations, mode, head.version
        if head.kind == "adapter":
            _check_base(head, memory, base)
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
            _prove_piece(piece, view, self._head, self._mode)
            self._total += piece.checksum

    def finish(self, checksum: int) -> tuple[int, int]:
        """As `take` does: the checksum, and the version of the weights. `checksum`: of all slices, as the sender knows it."""
        version = self._head.version
        _check_all_there([n for n, view in self._held.items() if not self._covers(n, view.numel())], version)
        _check_total(self._total, checksum, version)
        return checksum, self._base

    def _rows(self, piece: WeightSlice) -> torch.Tensor:
        """The rows of the engine's weight that the slice is for."""
        view, shape = self._held.get(piece.name), piece.tensor.shape
        if view is not None and shape == view.shape and not piece.offset:
            return view
        if view is None or not view.numel() or shape[1:] != view.shape[1:] or len(shape) != view.dim():
            raise _misfit(piece, view, self._head.version)
        first, odd = divmod(piece.offset, view[0].numel())
        if odd or first + shape[0] > len(view):
            raise _misfit(piece, view, self._head.version)
        return view[first : first + shape[0]]

    def _covers(self, name: str, elements: int) -> bool:
        end = 0
        for offset, length in sorted(self._arrived[name].items()):
            if offset != end:
                return False
            end += length
        return end == elements and bool(self._arrived[name])


def prove(update: WeightUpdate, held: Mapping[str, torch.Tensor], mode: str) -> int:
    """The checksum of the update, recomputed over `held`: views of the memory that the engine computes with, by checkpoint name.
    A shared update was summed there by the publisher.

    Raises `EngineFailure` naming the first weight that is not there as the publisher wants it.
    """
    for piece in () if update.shared else update.slices:
        _prove_piece(piece, held[piece.name], update, mode)
    return _check_total(sum(piece.checksum for piece in update.slices), update.checksum, update.version)


def _prove_piece(piece: WeightSlice, held: torch.Tensor, update: WeightUpdate, mode: str) -> None:
    if update.mode != mode:
        piece = _restated(piece, update, mode)
    if held_checksum(piece.name, held, mode, piece.offset) == piece.checksum:
        return
    if update_checksum(piece.name, piece.tensor, mode, piece.offset) != piece.checksum:
        raise EngineFailure(f"weight update {update.version}: {piece.name} arrived with a wrong checksum")
    if not bool(torch.isfinite(piece.tensor).all()):
        raise EngineFailure(f"weight update {update.version}: {piece.name} is not finite; the weights have diverged")
    raise EngineFailure(
        f"weight update {update.version}: the engine's memory of {piece.name} is not what was published, rounded to"
        f" {mode}; its load skipped, misplaced or changed it"
    )


def _check_total(total: int, expected: int, version: int) -> int:
    if total & MASK != expected:
        raise EngineFailure(
            f"weight update {version}: its slices have checksum {total & MASK:016x}, expected {expected:016x}; publish again"
        )
    return expected


def _restated(piece: WeightSlice, update: WeightUpdate, mode: str) -> WeightSlice:
    """The slice with the checksum of what `mode` makes of it, for an update that does not know this engine's mode."""
    if update_checksum(piece.name, piece.tensor, update.mode, piece.offset) != piece.checksum:
        raise EngineFailure(f"weight update {update.version}: {piece.name} arrived with a wrong checksum")
    return replace(piece, checksum=update_checksum(piece.name, piece.tensor, mode, piece.offset))
