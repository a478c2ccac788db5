"""How the weights of a model lie on the ranks of a trainer and in the memory of engines, by checkpoint name: what a plan is made of.

    parameter  experts.gate_up_proj [E, 2I, H]      a rank has boxes of it (train.parts), one or several
    tensors    experts.3.gate_proj.weight [I, H]    each is a region of the parameter; where both meet is a part of the tensor

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
from rollkeel.types import IntArray

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

    def of(self, box: Box) -> tuple[Span, tuple[slice, ...]] | None:
        """What `box` has of the tensor, and where that is in the rank's part; None if it has nothing."""
        low = [max(a, b) for a, b in zip(self.starts, box.start, strict=True)]
        high = [min(a, b + n) for a, b, n in zip(self.stops, box.start, box.size, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        starts = tuple(0 if d is None else low[d] - self.starts[d] for d in self.dims)
        stops = tuple(1 if d is None else high[d] - self.starts[d] for d in self.dims)
        here = zip(low, high, box.start, box.here, strict=True)
        return (starts, stops), tuple(slice(a - s + h, b - s + h) for a, b, s, h in here)

    def view(self, part: torch.Tensor) -> torch.Tensor:
        """`part`, a box of the parameter, with the dimensions of the tensor."""
        kept = [d for d in self.dims if d is not None]
        out = part.permute(*kept, *(d for d in range(part.dim()) if d not in kept))
        out = out[(..., *(0 for _ in range(part.dim() - len(kept))))]
        for i, d in enumerate(self.dims):
            out = out.unsqueeze(i) if d is None else out
        return out


def _region(shape: Sequence[int], piece: torch.Tensor) -> _Region | None:
    """None for a piece that is no box: it can only be sent by a rank that has all of the parameter."""
    at, rest, pitches = list[int](), int(piece.storage_offset()), pitches_of(shape)
    for pitch in pitches:
        index, rest = divmod(rest, pitch)
        at.append(index)
    stops, dims = [a + 1 for a in at], list[int | None]()
    for size, stride in zip(piece.shape, piece.stride(), strict=True):
        fits = (d for d, p in enumerate(pitches) if p == stride and at[d] + size <= shape[d] and d not in dims)
        found = None if size == 1 else next(fits, None)
        if size != 1 and found is None:
            return None
        dims.append(found)
        if found is not None:
            stops[found] = at[found] + size
    return _Region(tuple(dims), tuple(at), tuple(stops))


def _regions(pieces: Pieces, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, str, _Region | None]]:
    """Checkpoint name, the parameter's, and the region; layers that are alike are looked at once."""
    seen = dict[tuple[object, ...], _Region | None]()
    for name, owner, piece in pieces:
        key = shapes[owner], piece.shape, piece.stride(), piece.storage_offset()
        if key not in seen:
            seen[key] = _region(shapes[owner], piece)
        yield name, owner, seen[key]


def held(live: Mapping[str, torch.Tensor], layout: OnRank, pieces: Pieces) -> Held:
    """Views of what lies on this rank of the parameters, `live` by name."""
    out = dict[str, list[tuple[tuple[int, ...], torch.Tensor]]]()
    for (name, owner, region), (_, _, piece) in zip(_regions(pieces, layout.shapes), pieces, strict=True):
        part, found = local(live[owner]).detach(), out.setdefault(name, [])
        if region is None:
            found.append(((0,) * piece.dim(), piece_of(part, piece)))
            continue
        for inside in filter(None, map(region.of, layout.boxes(owner))):
            (starts, _), where = inside
            found.append((starts, region.view(part[where])))
    return out


def trainer_layout(layout: OnRank, pieces: Pieces, itemsizes: Mapping[str, int], hosts: Sequence[int]) -> Layout:
    """Of all ranks of `layout.mesh`. `itemsizes`: bytes of an element, by parameter; `hosts`: of each rank.

    Raises `BadInput` naming a checkpoint tensor that ranks hold in parts and that is no box of its parameter."""
    ranks = [replace(layout.mesh, rank=r, shards=None, groups={}) for r in range(layout.mesh.size)]
    boxes, lies = dict[object, dict[Box, list[int]]](), list[_Lies]()
    for (name, owner, region), (_, _, piece) in zip(_regions(pieces, layout.shapes), pieces, strict=True):
        shape = layout.shapes[owner]
        key = shape, cuts(layout.mesh, owner, shape), owner in layout.dealt
        if key not in boxes:
            boxes[key] = {}
            for number, rank in enumerate(ranks):
                for box in layout.boxes(owner, rank):
                    boxes[key].setdefault(box._replace(here=()), []).append(number)
        parts = dict[Span, list[int]]()
        for box, holders in boxes[key].items():
            if region is None and box.size != shape:
                raise BadInput(f"weight {name}: not a box of {owner}, of which ranks hold parts; set train.mesh to 1")
            if region is None:
                parts[(0,) * piece.dim(), tuple(piece.shape)] = holders
            elif (inside := region.of(box._replace(here=box.start))) is not None:
                parts[inside[0]] = holders
        lies.append(_Lies(name, tuple(piece.shape), itemsizes[owner], (), parts))
    return Layout(_families(lies), np.array(hosts))


def engine_layout(
    rooms: Sequence[Mapping[str, Room]], mode: str, itemsizes: Mapping[str, int], hosts: Sequence[int]
) -> Layout:
    """Of engines whose memory has these `rooms`, in the numeric mode that rounds it. `itemsizes`: of the trainer's weights, by
    checkpoint name; what is narrower travels."""
    parts = dict[str, dict[Span, list[int]]]()
    for number, engine in enumerate(rooms):
        for name, room in engine.items():
            parts.setdefault(name, {}).setdefault((room.starts, room.stops), []).append(number)
    known = {name: room for engine in rooms for name, room in engine.items()}
    lies = [
        _Lies(name, room.shape, min(itemsizes.get(name, 8), room.dtype.itemsize), _grain(name, room, mode), parts[name])
        for name, room in known.items()
    ]
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
        alike.setdefault((one.shape, one.itemsize, one.grain, tuple(sorted(one.parts))), []).append(one)
    out = []
    for group in alike.values():
        first, spans = group[0], sorted(group[0].parts)
        corners = np.array(spans, np.int64).reshape(len(spans), 2, len(first.shape))
        starts, stops = corners[:, 0], corners[:, 1]
        out.append(
            Family(
                [g.name for g in group], first.shape, first.itemsize, starts, stops, _holders(group, spans), first.grain
            )
        )
    return out


def _holders(group: Sequence[_Lies], spans: Sequence[Span]) -> IntArray:
    """`[N, P, R]`"""
    most = max(len(ranks) for one in group for ranks in one.parts.values())
    out = np.full((len(group), len(spans), most), NOBODY, np.int32)
    for i, one in enumerate(group):
        for p, span in enumerate(spans):
            out[i, p, : len(one.parts[span])] = one.parts[span]
    return out
