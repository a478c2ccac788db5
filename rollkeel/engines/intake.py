"""A weight update that arrives in parts, each of them written into the engine's memory and proven there as it comes."""

from __future__ import annotations

import math
from bisect import bisect, insort
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from rollkeel.engines.weights import (
    Memory,
    add_delta,
    check_all_there,
    check_base,
    check_delta,
    check_kind,
    check_total,
    misfit,
    prove_box,
    prove_piece,
)
from rollkeel.errors import EngineFailure
from rollkeel.models.checksum import PART, pitches_of
from rollkeel.models.numerics import held_checksum, is_quantised, rounded, weight_rounder
from rollkeel.types import WeightSlice, WeightUpdate


class Place(NamedTuple):
    """Of a weight in memory that senders of the same host write to (`open_memory`)."""

    start: int
    """First byte."""
    strides: tuple[int, ...]
    """Elements."""


class Room(NamedTuple):
    """A weight in an engine's memory, or the part of it that the engine holds."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole weight."""
    starts: tuple[int, ...]
    """First index of what is held."""
    stops: tuple[int, ...]
    """One past the last."""
    place: Place | None = None
    """None in memory of the engine alone."""


class Box(NamedTuple):
    """Where a slice belongs."""

    starts: tuple[int, ...]
    """First index in the whole weight."""
    within: tuple[slice, ...]
    """Its part of what an engine holds."""


class Packed:
    """A matrix whose elements lie in the order in which a kernel reads them: as much of a tensor as an `Intake` needs."""

    def __init__(self, memory: torch.Tensor, where: torch.Tensor) -> None:
        """`memory`: `[n]`, `where`: `[rows, columns]` int64, the place of each element in it."""
        self._memory, self._where = memory, where
        self.shape = where.shape
        self.dtype = memory.dtype
        self.device = memory.device

    def __getitem__(self, inside: Any) -> Packed:
        return Packed(self._memory, self._where[inside])

    def dim(self) -> int:
        return self._where.dim()

    def numel(self) -> int:
        return self._where.numel()

    def copy_(self, tensor: torch.Tensor) -> None:
        self._memory[self._where] = tensor.to(self.dtype)

    def read(self) -> torch.Tensor:
        """What is there now, a copy."""
        return self._memory[self._where]


_Across = tuple[tuple[int, ...], tuple[int, ...]]
"""First and one past the last index of a box in all dimensions but the first."""


def rooms_of(held: Mapping[str, torch.Tensor]) -> dict[str, Room]:
    """Of weights that are held whole."""
    return {n: Room(t.dtype, tuple(t.shape), (0,) * t.dim(), tuple(t.shape)) for n, t in held.items()}


def _shape(piece: WeightSlice) -> tuple[int, ...]:
    """Of what the slice is, or is a delta, of."""
    return piece.box or tuple(piece.tensor.shape)


def inside(piece: WeightSlice, room: Room) -> Box | None:
    """Where in such a room the slice lies; None if it lies elsewhere, or is empty."""
    shape, starts = _shape(piece), piece.starts
    if len(shape) != len(room.shape) or not piece.tensor.numel():
        return None
    if not starts and shape:
        first, odd = divmod(piece.offset, pitches_of(room.shape)[0])
        starts = (first, *(0 for _ in shape[1:]))
        if odd or shape[1:] != room.shape[1:]:
            return None
    if len(starts) != len(shape):
        return None
    within = list[slice]()
    for least, first, size, most in zip(room.starts, starts, shape, room.stops, strict=True):
        if not least <= first <= most - size:
            return None
        within.append(slice(first - least, first - least + size))
    return Box(starts, tuple(within))


def unchanged(piece: WeightSlice, dtype: torch.dtype, mode: str) -> bool:
    """Whether an engine of `mode` with weights of `dtype` holds just the bytes of this slice. Of the tensor only its shape and dtype count."""
    rounds = weight_rounder(mode) is not None and is_quantised(piece.name, piece.tensor) and not piece.rounded
    return not (piece.box or rounds) and piece.tensor.dtype == dtype


class Intake:
    """An update whose slices come in parts, in any order, and a large weight in several boxes: each is written and proven as it
    comes, and `finish` says whether all of the update is there.

    After an error nothing may be served. No slice is kept, so what arrives needs no more memory than one part of it."""

    def __init__(
        self, head: WeightUpdate, memory: Memory, mode: str, base: int, rooms: Mapping[str, Room] | None = None
    ) -> None:
        """`head`: the update without slices and checksum. `base`: version of the weights that the engine holds. `rooms`: of an
        engine that holds parts of weights."""
        if head.kind == "delta":
            check_delta(head, mode, base)
        else:
            check_kind(head)
        self._head, self._total = head, 0
        self._held = memory.destinations
        self._mode = mode
        self._base = head.version
        if head.kind == "adapter":
            check_base(head, memory, base)
            self._held = memory.adapters
            self._mode = "fp32"
            self._base = base
        else:
            for tensor in memory.adapters.values():
                tensor.zero_()
        self.rooms = rooms_of(self._held) if rooms is None else dict(rooms)
        self._arrived: dict[str, dict[_Across, list[tuple[int, int]]]] = {name: {} for name in self._held}
        """First and one past the last row of each box, in order, by name and by what the box is in the other dimensions."""
        self._missing = {name: view.numel() for name, view in self._held.items()}
        """Elements that have not arrived."""
        self._waiting: dict[str, torch.dtype] = {}
        """Weights that are rounded once all of them is there, and the dtype to round them in."""

    @torch.inference_mode()
    def take(self, slices: Sequence[WeightSlice]) -> None:
        """Write these slices, rounded, and prove that they are there. One on the meta device has been written there as it is."""
        for piece in slices:
            room, starts, view = self._place(piece)
            self._enter(piece, starts)
            self._write(piece, view, room, starts)
            self._total += piece.checksum
            if piece.name in self._waiting and not self._missing[piece.name]:
                self._round(piece.name, self._waiting[piece.name])

    def finish(self, checksum: int) -> tuple[int, int]:
        """As `take` does: the checksum, and the version of the weights. `checksum`: of all slices, as the sender knows it."""
        version = self._head.version
        missing = [name for name, count in self._missing.items() if count or not self._arrived[name]]
        check_all_there(missing, version)
        check_total(self._total, checksum, version)
        return checksum, self._base

    def live(self, piece: WeightSlice) -> torch.Tensor | None:
        """Where the bytes of such a slice may be written before it is taken: the engine's own memory, if it is in one piece and holds
        just these bytes. Of `piece` only the tensor's shape and dtype count, so it may be on the meta device."""
        _, _, view = self._place(piece)
        if isinstance(view, Packed) or not unchanged(piece, view.dtype, self._mode):
            return None
        return view if view.is_contiguous() else None

    def _place(self, piece: WeightSlice) -> tuple[Room, tuple[int, ...], torch.Tensor]:
        """The room of the engine's weight, the first index of the slice in the whole of it, and the memory that it is for."""
        view, room = self._held.get(piece.name), self.rooms.get(piece.name)
        box = None if room is None or view is None else inside(piece, room)
        if box is None or room is None or view is None:
            raise misfit(piece, view, self._head.version)
        whole = tuple(piece.tensor.shape) == view.shape and not isinstance(view, Packed)
        return room, box.starts, view if whole and not piece.box else view[box.within]

    def _enter(self, piece: WeightSlice, starts: tuple[int, ...]) -> None:
        """Raises `EngineFailure` for a box that has arrived already, all of it or in part."""
        stops = tuple(a + n for a, n in zip(starts, _shape(piece), strict=True))
        (first, last), across = (starts[0], stops[0]) if starts else (0, 1), (starts[1:], stops[1:])
        arrived = self._arrived[piece.name]
        for other, taken in arrived.items():
            if all(a < d and c < b for a, b, c, d in zip(*across, *other, strict=True)):
                at = bisect(taken, first, key=itemgetter(0))
                for a, b in taken[max(0, at - 1) : at + 1]:
                    if a < last and first < b:
                        same = (a, b, other) == (first, last, across)
                        said = "" if same else f": its box at {starts} overlaps one at {(a, *other[0])}"
                        raise EngineFailure(f"weight update {self._head.version}: {piece.name} arrived twice{said}")
        insort(arrived.setdefault(across, []), (first, last))
        self._missing[piece.name] -= math.prod(_shape(piece))

    def _write(self, piece: WeightSlice, view: torch.Tensor, room: Room, starts: tuple[int, ...]) -> None:
        name = piece.name
        head = self._head
        mode = self._mode
        pitches = pitches_of(room.shape)
        offset = sum(a * p for a, p in zip(starts, pitches, strict=True))
        if piece.box:
            if head.kind != "delta":
                raise EngineFailure(f"weight update {head.version}: {name} arrived as a delta in a {head.kind} update")
            add_delta(view, piece.tensor)
            prove_box(piece, view, (offset, pitches), head, mode)
            return
        if piece.tensor.is_meta:
            if isinstance(view, Packed) or not unchanged(piece, view.dtype, mode):
                raise EngineFailure(f"weight update {head.version}: {name} is not held as it was written")
            piece = replace(piece, tensor=view)
        tensor = piece.tensor.to(view.device)
        rounds = weight_rounder(mode) is not None and is_quantised(name, view)
        if (piece.rounded or piece.starts) and head.mode != mode:
            raise EngineFailure(
                f"weight update {head.version}: {name} was sent for engine.dtype={head.mode}, the engine's is {mode}"
            )
        waits = rounds and not piece.rounded and tensor.shape[1:] != room.shape[1:]
        if waits != (name in self._waiting) and self._missing[name] + tensor.numel() < self._held[name].numel():
            raise EngineFailure(f"weight update {head.version}: {name} arrived rounded in some boxes only")
        if waits:
            self._waiting[name] = tensor.dtype
        exact = not rounds or piece.rounded or waits
        new = tensor if exact else rounded(name, tensor, mode)
        if isinstance(view, Packed):
            view.copy_(new)
            view = view.read()
            new = None
        elif new.data_ptr() == view.data_ptr():
            new = None  # it was written there as it came
        if piece.starts and exact:
            prove_box(piece, view, (offset, pitches), head, mode, new)
        else:
            prove_piece(piece if piece.offset == offset else replace(piece, offset=offset), view, head, mode, new)

    def _round(self, name: str, dtype: torch.dtype) -> None:
        """Round in place what is held of a weight, some rows at a time. Its boxes were proven as they came."""
        whole, room = self._held[name], self.rooms[name]
        if whole.shape[-1] != room.shape[-1]:
            raise EngineFailure(
                f"weight update {self._head.version}: {name} is rounded by rows of {room.shape[-1]}, the engine holds"
                f" {whole.shape[-1]} of each"
            )
        for rows in whole.split(max(1, PART * len(whole) // whole.numel())):
            right = rounded(name, rows.to(dtype), self._mode)
            rows.copy_(right)
            if held_checksum(name, rows, self._mode) != held_checksum(name, right, self._mode):
                raise EngineFailure(
                    f"weight update {self._head.version}: the engine's memory of {name} changed while it was rounded"
                )
