"""How the weights of a model lie on the ranks of a trainer and in the memory of engines, by checkpoint name: what a plan is made of.

    parameter  experts.gate_up_proj [E, 2I, H]      a rank has boxes of it (train.parts), one or several
    tensors    experts.3.gate_proj.weight [I, H]    each is a region of the parameter; what both have is a part of the tensor

Every process that knows the mesh and the architecture comes to the same layouts. No weight is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from rollkeel.engines.intake import Room
from rollkeel.errors import BadInput
from rollkeel.models.checksum import pitches_of
from rollkeel.models.names import piece_of
from rollkeel.models.numerics import is_quantised, scale_group, weight_rounder
from rollkeel.sync.plan import NOBODY, Family, Layout
from rollkeel.train.mesh import local
from rollkeel.train.parts import Box, cuts
from rollkeel.train.sharded import Layout as OnRank
from rollkeel.train.sharded import Pieces

Span = tuple[tuple[int, ...], tuple[int, ...]]
"""First and one past the last index of a box."""
Held = Mapping[str, Sequence[tuple[tuple[int, ...], torch.Tensor]]]
"""First index and memory of each part of a checkpoint tensor that lies on a rank, by name."""


class _Region(NamedTuple):
    """A checkpoint tensor as a box of its parameter."""

    dims: tuple[int | None, ...]
    """The parameter's dimension for each of the tensor's; None is one that has one element and is none of the parameter's."""
    starts: tuple[int, ...]
    stops: tuple[int, ...]

    def meets(self, box: Box) -> tuple[Span, tuple[slice, ...]] | None:
        """What `box` has of the tensor, and where that is in the rank's part; None if it has nothing."""
        low = [max(a, b) for a, b in zip(self.starts, box.start, strict=True)]
        high = [min(a, b + n) for a, b, n in zip(self.stops, box.start, box.size, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        starts = [0 if d is None else low[d] - self.starts[d] for d in self.dims]
        stops = [1 if d is None else high[d] - self.starts[d] for d in self.dims]
        shifts = [h - s for h, s in zip(box.here, box.start, strict=True)]
        here = [slice(a + s, b + s) for a, b, s in zip(low, high, shifts, strict=True)]
        return (tuple(starts), tuple(stops)), tuple(here)

    def view(self, part: torch.Tensor) -> torch.Tensor:
        """`part`, a box of the parameter, with the dimensions of the tensor."""
        kept = [d for d in self.dims if d is not None]
        left = [d for d in range(part.dim()) if d not in kept]
        out = part.permute(*kept, *left)
        for _ in left:
            out = out[..., 0]
        for i, d in enumerate(self.dims):
            if d is None:
                out = out.unsqueeze(i)
        return out


def _region(shape: Sequence[int], piece: torch.Tensor) -> _Region | None:
    """None for a piece that is no box: it can only be sent by a rank that has all of the parameter."""
    pitches, rest = pitches_of(shape), int(piece.storage_offset())
    starts = list[int]()
    for pitch in pitches:
        index, rest = divmod(rest, pitch)
        starts.append(index)
    stops = [a + 1 for a in starts]
    dims = list[int | None]()
    for size, stride in zip(piece.shape, piece.stride(), strict=True):
        if size == 1:
            dims.append(None)
            continue
        fits = [d for d, pitch in enumerate(pitches) if pitch == stride and starts[d] + size <= shape[d]]
        found = next((d for d in fits if d not in dims), None)
        if found is None:
            return None
        dims.append(found)
        stops[found] = starts[found] + size
    return _Region(tuple(dims), tuple(starts), tuple(stops))


class _Tensor(NamedTuple):
    """A checkpoint tensor of a trainer."""

    name: str
    owner: str
    """The parameter's name."""
    piece: torch.Tensor
    region: _Region | None


def _tensors(pieces: Pieces, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[_Tensor]:
    """Layers that are alike are looked at once."""
    seen = dict[tuple[object, ...], _Region | None]()
    for name, owner, piece in pieces:
        key = shapes[owner], piece.shape, piece.stride(), piece.storage_offset()
        if key not in seen:
            seen[key] = _region(shapes[owner], piece)
        yield _Tensor(name, owner, piece, seen[key])


class Part(NamedTuple):
    """What lies on a rank of a checkpoint tensor, or a box of it."""

    name: str
    owner: str
    """The parameter's name."""
    starts: tuple[int, ...]
    """First index of the box."""
    like: torch.Tensor
    """The box as a view of the rank's part of the parameter: only shape, strides and offset count."""
    odd: bool
    """It is not a rectangular box of the parameter; then the rank holds all of the parameter."""


def parts_of(layout: OnRank, pieces: Pieces) -> list[Part]:
    """What the rank of `layout` holds of every checkpoint tensor; the same at every publication."""
    out = list[Part]()
    for one in _tensors(pieces, layout.shapes):
        if one.region is None:
            out.append(Part(one.name, one.owner, (0,) * one.piece.dim(), one.piece, True))
            continue
        part = torch.empty(layout.part(one.owner), device="meta")
        for box in layout.boxes(one.owner):
            if (both := one.region.meets(box)) is not None:
                (starts, _), here = both
                out.append(Part(one.name, one.owner, starts, one.region.view(part[here]), False))
    return out


def held(live: Mapping[str, torch.Tensor], parts: Iterable[Part]) -> Held:
    """Views of what lies on this rank of the parameters, `live` by name."""
    out = dict[str, list[tuple[tuple[int, ...], torch.Tensor]]]()
    for part in parts:
        memory = local(live[part.owner])
        assert part.odd or memory.is_contiguous(), part.owner
        out.setdefault(part.name, []).append((part.starts, piece_of(memory, part.like)))
    return out


def trainer_layout(layout: OnRank, pieces: Pieces, itemsizes: Mapping[str, int], hosts: Sequence[int]) -> Layout:
    """Of all ranks of `layout.mesh`. `itemsizes`: bytes of an element, by parameter; `hosts`: of each rank.

    Raises `BadInput` naming a checkpoint tensor that ranks hold in parts and that is no box of its parameter."""
    mesh, lies = layout.mesh, list[_Lies]()
    ranks = [replace(mesh, rank=r, shards=None, groups={}) for r in range(mesh.size)]
    boxes = dict[object, dict[Box, list[int]]]()
    """Of parameters that are dealt alike: ranks that hold each box, wherever they hold it."""
    for one in _tensors(pieces, layout.shapes):
        shape = layout.shapes[one.owner]
        key = shape, cuts(mesh, one.owner, shape), one.owner in layout.dealt
        if key not in boxes:
            boxes[key] = {}
            for number, rank in enumerate(ranks):
                for box in layout.boxes(one.owner, rank):
                    boxes[key].setdefault(box._replace(here=box.start), []).append(number)
        parts = dict(_parts(one, shape, boxes[key]))
        lies.append(_Lies(one.name, tuple(one.piece.shape), itemsizes[one.owner], (), parts))
    return Layout(_families(lies), np.array(hosts))


def _parts(
    one: _Tensor, shape: tuple[int, ...], boxes: Mapping[Box, list[int]]
) -> Iterator[tuple[Span, Sequence[int]]]:
    """Boxes of the tensor, and the ranks that hold each."""
    for box, holders in boxes.items():
        if one.region is not None:
            if (both := one.region.meets(box)) is not None:
                yield both[0], holders
        elif box.size == shape:
            yield ((0,) * one.piece.dim(), tuple(one.piece.shape)), holders
        else:
            raise BadInput(
                f"weight {one.name}: not a box of {one.owner}, of which ranks hold parts; set train.mesh to 1"
            )


def engine_layout(
    rooms: Sequence[Mapping[str, Room]], mode: str, itemsizes: Mapping[str, int], hosts: Sequence[int]
) -> Layout:
    """Of engines whose memory has these `rooms`, in the numeric mode that rounds it. `itemsizes`: of the trainer's weights, by
    checkpoint name; what is narrower travels."""
    known = dict[str, Room]()
    parts = dict[str, dict[Span, list[int]]]()
    for number, engine in enumerate(rooms):
        for name, room in engine.items():
            known[name] = room
            parts.setdefault(name, {}).setdefault((room.starts, room.stops), []).append(number)
    lies = []
    for name, room in known.items():
        size = min(itemsizes.get(name, room.dtype.itemsize), room.dtype.itemsize)
        lies.append(_Lies(name, room.shape, size, _grain(name, room, mode), parts[name]))
    return Layout(_families(lies), np.array(hosts))


def _grain(name: str, room: Room, mode: str) -> tuple[int, ...]:
    rounds = weight_rounder(mode) is not None and is_quantised(name, torch.empty(room.shape, device="meta"))
    return (*(1 for _ in room.shape[1:]), scale_group(mode, room.shape[-1])) if rounds else ()


class _Lies(NamedTuple):
    """A tensor, and the ranks that hold each of its parts."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    grain: tuple[int, ...]
    parts: Mapping[Span, Sequence[int]]


def _families(tensors: Iterable[_Lies]) -> list[Family]:
    """Tensors that lie in the same parts, together."""
    alike = dict[tuple[object, ...], list[_Lies]]()
    for one in tensors:
        key = one.shape, one.itemsize, one.grain, tuple(sorted(one.parts))
        alike.setdefault(key, []).append(one)
    return [_family(group) for group in alike.values()]


def _family(group: Sequence[_Lies]) -> Family:
    first, spans = group[0], sorted(group[0].parts)
    corners = np.array(spans, np.int64).reshape(len(spans), 2, len(first.shape))
    most = max(len(ranks) for one in group for ranks in one.parts.values())
    holders = np.full((len(group), len(spans), most), NOBODY, np.int32)
    for i, one in enumerate(group):
        for p, span in enumerate(spans):
            ranks = one.parts[span]
            holders[i, p, : len(ranks)] = ranks
    return Family(
        names=[one.name for one in group],
        shape=first.shape,
        itemsize=first.itemsize,
        starts=corners[:, 0],
        stops=corners[:, 1],
        holders=holders,
        grain=first.grain,
    )
