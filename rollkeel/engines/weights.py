"""Applying a weight update to an engine in place, and the proof that its memory holds the weights that were published."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from rollkeel.errors import DeltaRefused, EngineFailure
from rollkeel.models.checksum import MASK, SIGNED
from rollkeel.models.numerics import held_checksum, rounded, update_checksum
from rollkeel.types import WeightSlice, WeightUpdate


def apply_update(update: WeightUpdate, destinations: Mapping[str, torch.Tensor], mode: str) -> None:
    """Write every slice, rounded as `mode` rounds, to the view of its name; `prove` says whether it is there. Of a shared update
    nothing is written: every slice must be that view already. Of a delta, slices of uint8 are encoded (`models.delta`).

    Raises `EngineFailure` for an unknown or missing name, a wrong shape, a name that comes twice, or shared memory that is not.
    """
    missing = dict.fromkeys(destinations)
    for piece in update.slices:
        view = destinations.get(piece.name)
        encoded = update.kind == "delta" and piece.tensor.dtype == torch.uint8
        if view is None or not (encoded or piece.tensor.shape == view.shape) or piece.offset:
            raise misfit(piece, view, update.version)
        if piece.name not in missing:
            raise EngineFailure(f"weight update {update.version}: {piece.name} arrived twice")
        del missing[piece.name]
        if encoded:
            add_delta(view, piece.tensor)
        elif not update.shared:
            view.copy_(rounded(piece.name, piece.tensor.to(view.device), mode))
        elif not _same_memory(piece.tensor, view):
            raise EngineFailure(
                f"weight update {update.version}: {piece.name} is not in the memory that trainer and engine share; something"
                " gave one of them another tensor since the run began"
            )
    check_all_there(missing, update.version)


def add_delta(view: torch.Tensor, encoded: torch.Tensor) -> None:
    """Add an encoded delta to the weight that it was made for."""
    from rollkeel.models import delta

    flat, data = view.contiguous().view(-1), encoded.numpy()
    if view.device.type == "cpu":
        delta.apply(delta.bits_of(flat), data)
    else:
        bits = flat.view(SIGNED[view.element_size()])
        for positions, differences in delta.decoded(data, len(bits), view.element_size()):
            where, what = (torch.from_numpy(part).to(view.device) for part in (positions, differences))
            bits[where] += what.to(bits.dtype)
    if not view.is_contiguous():
        view.copy_(flat.view_as(view))


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
    mode rounds. Returns its checksum and the version of the weights. Raises `EngineFailure`; nothing may then be served, and a
    delta is `DeltaRefused` whatever is wrong with it."""
    if update.kind == "delta":
        try:
            check_delta(update, mode, base)
            return _whole(update, memory, mode)
        except EngineFailure as error:
            raise DeltaRefused(str(error)) from None
    check_kind(update)
    if update.kind == "full":
        return _whole(update, memory, mode)
    check_base(update, memory, base)
    apply_update(update, memory.adapters, "fp32")
    return prove(update, memory.adapters, "fp32"), base


def _whole(update: WeightUpdate, memory: Memory, mode: str) -> tuple[int, int]:
    apply_update(update, memory.destinations, mode)
    for tensor in memory.adapters.values():
        tensor.zero_()
    return prove(update, memory.destinations, mode), update.version


def check_delta(update: WeightUpdate, mode: str, base: int) -> None:
    """Raises `EngineFailure` unless this delta was made for what the engine holds."""
    if base < 0 or (update.base_version, update.mode) != (base, mode):
        raise EngineFailure(
            f"weight update {update.version}: a delta of {update.mode} weights {update.base_version}, the engine has"
            f" {f'{mode} weights {base}' if base >= 0 else 'none that are proven'}; publish all weights"
        )


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


def prove_piece(
    piece: WeightSlice, held: torch.Tensor, update: WeightUpdate, mode: str, source: torch.Tensor | None = None
) -> None:
    """Raises `EngineFailure` unless `held` is what the slice says, rounded to `mode`. `source`: is copied there before."""
    if update.mode != mode:
        piece = _restated(piece, update, mode)
    if held_checksum(piece.name, held, mode, piece.offset, source=source) != piece.checksum:
        came = 0 if update.kind == "delta" else update_checksum(piece.name, piece.tensor, mode, piece.offset)
        raise _unproven(piece, came, update, mode)


def prove_box(
    piece: WeightSlice,
    held: torch.Tensor,
    at: tuple[int, Sequence[int]],
    update: WeightUpdate,
    mode: str,
    source: torch.Tensor | None = None,
) -> None:
    """The same of a box that nothing rounds any more, or not yet. `at`: its offset and pitches, see `held_checksum`."""
    if held_checksum(piece.name, held, mode, *at, source) != piece.checksum:
        raise _unproven(piece, held_checksum(piece.name, piece.tensor, mode, *at), update, mode)


def _unproven(piece: WeightSlice, came: int, update: WeightUpdate, mode: str) -> EngineFailure:
    """Why memory does not hold `piece`, of which what arrived has the checksum `came`."""
    if update.kind == "delta":
        return EngineFailure(
            f"weight update {update.version}: the engine's memory of {piece.name} is not what was published; the delta is"
            " damaged, or not of what the engine held"
        )
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
