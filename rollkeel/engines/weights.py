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
    check_kind(update)
    missing = dict.fromkeys(destinations)
    for piece in update.slices:
        view = destinations.get(piece.name)
        if view is None or piece.tensor.shape != view.shape or piece.offset:
            raise misfit(piece, view, update.version)
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
    check_all_there(missing, update.version)


def check_kind(update: WeightUpdate) -> None:
    if update.kind not in ("full", "adapter"):
        raise EngineFailure(f"weight update {update.version}: expected all weights or adapters, got {update.kind!r}")


def misfit(piece: WeightSlice, view: torch.Tensor | None, version: int) -> EngineFailure:
    if view is None:
        return EngineFailure(f"weight update {version}: the engine has no weight named {piece.name}")
    place = f"at index {piece.starts}" if piece.starts else f"at offset {piece.offset}"
    return EngineFailure(
        f"weight update {version}: {piece.name} has shape {tuple(piece.tensor.shape)} {place}, the engine"
        f" expects {tuple(view.shape)}"
    )


def check_all_there(missing: Collection[str], version: int) -> None:
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
    check_base(update, memory, base)
    apply_update(update, memory.adapters, "fp32")
    return prove(update, memory.adapters, "fp32"), base


def check_base(update: WeightUpdate, memory: Memory, base: int) -> None:
    """Raises `EngineFailure` unless these adapters can stand beside the weights `base`."""
    if not memory.adapters:
        raise EngineFailure(f"weight update {update.version}: this engine was opened without adapters (train.lora)")
    if base < 0 or update.base_version != base:
        raise EngineFailure(
            f"weight update {update.version}: its adapters belong to weights {update.base_version}, the engine has"
            f" {base if base >= 0 else 'none that are proven'}"
        )


def prove(update: WeightUpdate, held: Mapping[str, torch.Tensor], mode: str) -> int:
    """The checksum of the update, recomputed over `held`: views of the memory that the engine computes with, by checkpoint name.
    A shared update was summed there by the publisher.

    Raises `EngineFailure` naming the first weight that is not there as the publisher wants it.
    """
    for piece in () if update.shared else update.slices:
        prove_piece(piece, held[piece.name], update, mode)
    return check_total(sum(piece.checksum for piece in update.slices), update.checksum, update.version)


def prove_piece(piece: WeightSlice, held: torch.Tensor, update: WeightUpdate, mode: str) -> None:
    """Raises `EngineFailure` unless `held` is what the slice says, rounded to `mode`."""
    if update.mode != mode:
        piece = _restated(piece, update, mode)
    if held_checksum(piece.name, held, mode, piece.offset) != piece.checksum:
        raise _unproven(piece, update_checksum(piece.name, piece.tensor, mode, piece.offset), update, mode)


def prove_box(
    piece: WeightSlice, held: torch.Tensor, at: tuple[int, Sequence[int]], update: WeightUpdate, mode: str
) -> None:
    """The same of a box that nothing rounds any more, or not yet. `at`: its offset and pitches, see `held_checksum`."""
    if held_checksum(piece.name, held, mode, *at) != piece.checksum:
        raise _unproven(piece, held_checksum(piece.name, piece.tensor, mode, *at), update, mode)


def _unproven(piece: WeightSlice, came: int, update: WeightUpdate, mode: str) -> EngineFailure:
    """Why memory does not hold `piece`, of which what arrived has the checksum `came`."""
    if came != piece.checksum:
        return EngineFailure(f"weight update {update.version}: {piece.name} arrived with a wrong checksum")
    if not bool(torch.isfinite(piece.tensor).all()):
        return EngineFailure(f"weight update {update.version}: {piece.name} is not finite; the weights have diverged")
    return EngineFailure(
        f"weight update {update.version}: the engine's memory of {piece.name} is not what was published, rounded to"
        f" {mode}; its load skipped, misplaced or changed it"
    )


def check_total(total: int, expected: int, version: int) -> int:
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
