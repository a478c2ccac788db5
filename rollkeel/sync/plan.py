"""Which rank sends which part of which weight to whom: a pure function of how the weights lie on both sides.

    trainer ranks            copies                       engine ranks
    ┌──────────┐   rows 0–3 of q_proj, once each          ┌────────────────┐
    │ rows 0–5 │ ───────────────────────────────────────▶ │ rows 0–3       │
    │ rows 6–11│ ──┐       rows 4–5 and 6–7                │ rows 4–7       │
    └──────────┘   └──────────────────────────────────▶   └────────────────┘

Each element that an engine rank holds comes from exactly one trainer rank, in the smallest number of boxes. Nothing is gathered.
Among the ranks that hold the same part, one on the receiver's host sends; otherwise they take turns, so that all send about as many
bytes. Every process that is given the two layouts computes the same plan. Imports no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rollkeel.errors import BadInput
from rollkeel.types import IntArray

NOBODY = -1
"""Fills rows of holders that have fewer ranks than others."""


@dataclass(frozen=True)
class Family:
    """Tensors of one shape that lie in the same parts: part p of tensor i lies whole on each of the ranks `holders[i, p]`."""

    names: Sequence[str]
    """`[N]` checkpoint names."""
    shape: tuple[int, ...]
    itemsize: int
    """Bytes of an element where it lies."""
    starts: IntArray
    """`[P, D]` first index of each part."""
    stops: IntArray
    """`[P, D]` one past the last."""
    holders: IntArray
    """`[N, P, R]` ranks, each row filled up with `NOBODY`."""
    grain: tuple[int, ...] = ()
    """Elements along each dimension that share one scale, and so can only be rounded together; empty if nothing is rounded."""

    @property
    def sizes(self) -> IntArray:
        """`[P]` elements of each part."""
        return np.prod(self.stops - self.starts, axis=1)


@dataclass(frozen=True)
class Layout:
    """How weights lie on one side."""

    families: Sequence[Family]
    hosts: IntArray
    """`[ranks]` number of the host that each rank runs on; both sides number hosts alike."""


@dataclass(frozen=True)
class Copy:
    """One message: the box `starts` … `stops` of a tensor, in indices of the whole."""

    name: str
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    sender: int
    receiver: int
    rounds: bool
    """True if the sender rounds what it sends; False if the receiver gets it as the sender has it."""

    def within(self, starts: Sequence[int]) -> tuple[slice, ...]:
        """Where the box lies in a part that begins at `starts`."""
        return tuple(slice(a - s, b - s) for a, b, s in zip(self.starts, self.stops, starts, strict=True))


@dataclass(frozen=True)
class Section:
    """The same box of several tensors, each from one of its senders to all its receivers."""

    names: Sequence[str]
    starts: IntArray
    """`[D]`"""
    stops: IntArray
    """`[D]`"""
    receivers: IntArray
    """`[N, R]`"""
    senders: IntArray
    """`[N, R]`; `NOBODY` where there is no receiver."""
    itemsize: int
    rounds: bool

    @property
    def nbytes(self) -> int:
        """Of one copy."""
        return int(np.prod(self.stops - self.starts)) * self.itemsize

    @property
    def count(self) -> int:
        """Copies."""
        return int((self.senders != NOBODY).sum())


@dataclass(frozen=True)
class Plan:
    """All copies of a publication."""

    sections: Sequence[Section]
    hosts: tuple[IntArray, IntArray]
    """Of senders and receivers."""

    @cached_property
    def count(self) -> int:
        """Copies."""
        return sum(section.count for section in self.sections)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(section.nbytes * section.count for section in self.sections)

    def sent(self) -> IntArray:
        """`[ranks]` bytes that each sender sends."""
        return self._bytes([s.senders for s in self.sections], len(self.hosts[0]))

    def received(self) -> IntArray:
        """`[ranks]` bytes that each receiver gets."""
        return self._bytes([s.receivers for s in self.sections], len(self.hosts[1]))

    def between_hosts(self) -> int:
        """Bytes of the copies whose ends are on different hosts."""
        here, there, total = *self.hosts, 0
        for section in self.sections:
            asked = section.senders != NOBODY
            apart = here[section.senders[asked]] != there[section.receivers[asked]]
            total += section.nbytes * int(apart.sum())
        return total

    def sends(self, rank: int) -> Iterator[Copy]:
        """What a sender sends, in the order that receivers expect."""
        return self._of("senders", rank)

    def receives(self, rank: int) -> Iterator[Copy]:
        """What a receiver gets, in the order in which each sender sends it."""
        return self._of("receivers", rank)

    def peers(self, side: str, rank: int) -> dict[int, int]:
        """Bytes that a rank of `senders` or `receivers` exchanges with each of the other side."""
        other, out = "receivers" if side == "senders" else "senders", dict[int, int]()
        for section in self.sections:
            mine = (getattr(section, side) == rank) & (section.senders != NOBODY)
            for peer, count in zip(*np.unique(getattr(section, other)[mine], return_counts=True), strict=True):
                out[int(peer)] = out.get(int(peer), 0) + int(count) * section.nbytes
        return out

    def _bytes(self, ranks: Sequence[IntArray], count: int) -> IntArray:
        total = np.zeros(count, np.int64)
        for section, of in zip(self.sections, ranks, strict=True):
            total += np.bincount(of[section.senders != NOBODY], minlength=count) * section.nbytes
        return total

    def _of(self, side: str, rank: int) -> Iterator[Copy]:
        for section in self.sections:
            mine = (getattr(section, side) == rank) & (section.senders != NOBODY)
            box = tuple(section.starts.tolist()), tuple(section.stops.tolist())
            for i, j in np.argwhere(mine).tolist():
                ends = int(section.senders[i, j]), int(section.receivers[i, j])
                yield Copy(section.names[i], *box, *ends, section.rounds)


def plan(source: Layout, target: Layout, tied: Mapping[str, str] | None = None) -> Plan:
    """The copies that bring every part of `target` from `source`.

    `tied`: target name → the name under which the source has that tensor. Raises `BadInput` for a tensor that the source does not
    have, has in another shape or not whole, and for parts that overlap.
    """
    for side in (source, target):
        for family in side.families:
            _check(family, side is source)
    boxes = [box for pair in _pairs(source, target, tied or {}) for box in _boxes(pair)]
    # The largest first: small ones even out what is left.
    boxes.sort(key=lambda box: (-box.size, box.pair.wanted.names[0]))
    load = np.zeros(len(source.hosts), np.int64)
    sections = []
    for box in boxes:
        family, wanted = box.pair.family, box.pair.wanted
        rounds = bool(wanted.grain) and _aligned(box, wanted)
        itemsize = wanted.itemsize if rounds or not wanted.grain else family.itemsize
        receivers = wanted.holders[box.pair.there, box.its]
        candidates = np.sort(family.holders[box.pair.here, box.part], axis=1)
        senders = _senders(candidates, receivers, (source.hosts, target.hosts), load, box.size * itemsize)
        names = [wanted.names[int(i)] for i in box.pair.there]
        sections.append(Section(names, box.starts, box.stops, receivers, senders, itemsize, rounds))
    return Plan(sections, (source.hosts, target.hosts))


class _Pair(NamedTuple):
    """Families that have tensors in common, and the numbers of these in both."""

    family: Family
    wanted: Family
    here: IntArray
    there: IntArray


class _Box(NamedTuple):
    """What a part of the trainer's and a part of the engine's have in common."""

    pair: _Pair
    part: int
    its: int
    size: int
    starts: IntArray
    stops: IntArray


def _pairs(source: Layout, target: Layout, tied: Mapping[str, str]) -> Iterator[_Pair]:
    at = {name: (f, i) for f, family in enumerate(source.families) for i, name in enumerate(family.names)}
    for wanted in target.families:
        members: dict[int, list[tuple[int, int]]] = {}
        for i, name in enumerate(wanted.names):
            found = at.get(tied.get(name, name))
            if found is None:
                raise BadInput(f"weight {name}: an engine holds it, no trainer rank does; publish from the same model")
            members.setdefault(found[0], []).append((found[1], i))
        for f, numbers in members.items():
            family = source.families[f]
            if family.shape != wanted.shape:
                name = wanted.names[numbers[0][1]]
                shapes = f"{list(wanted.shape)} in the engine, {list(family.shape)} in the trainer"
                raise BadInput(f"weight {name}: shape {shapes}; publish from the same model")
            yield _Pair(family, wanted, *np.array(numbers).T)


def _boxes(pair: _Pair) -> Iterator[_Box]:
    family, wanted = pair.family, pair.wanted
    starts = np.maximum(family.starts[:, None], wanted.starts[None])
    stops = np.minimum(family.stops[:, None], wanted.stops[None])
    sizes = np.prod(np.maximum(stops - starts, 0), axis=2)
    for its in np.flatnonzero(sizes.sum(0) != wanted.sizes).tolist():
        box = list(zip(wanted.starts[its].tolist(), wanted.stops[its].tolist(), strict=True))
        raise BadInput(f"weight {wanted.names[0]}: the trainer's ranks do not hold all of {box}; check its layout")
    for part, its in np.argwhere(sizes).tolist():
        yield _Box(pair, part, its, int(sizes[part, its]), starts[part, its], stops[part, its])


def _check(family: Family, alone: bool) -> None:
    """Raises `BadInput` if two parts overlap: any two (`alone`), or two that one rank holds."""
    starts, stops = family.starts, family.stops
    for one in range(len(starts) - 1):
        later = slice(one + 1, None)
        meets = (np.minimum(stops[one], stops[later]) > np.maximum(starts[one], starts[later])).all(1)
        for two in (one + 1 + np.flatnonzero(meets)).tolist():
            both = family.holders[:, one, :, None] == family.holders[:, two, None, :]
            both &= family.holders[:, one, :, None] != NOBODY
            if alone or both.any():
                name = family.names[0 if alone else int(np.argwhere(both)[0][0])]
                raise BadInput(f"weight {name}: its parts {one} and {two} overlap; deal each element once")


def _aligned(box: _Box, wanted: Family) -> bool:
    """True if no group of elements with one scale is cut."""
    grain, shape = np.array(wanted.grain), np.array(wanted.shape)
    return bool((box.starts % grain == 0).all() and ((box.stops % grain == 0) | (box.stops == shape)).all())


def _senders(
    candidates: IntArray, receivers: IntArray, hosts: tuple[IntArray, IntArray], load: IntArray, nbytes: int
) -> IntArray:
    """Who sends: of `[N, C]` sorted candidates to each of `[N, R]` receivers. Adds to `load` what each sends."""
    out = np.full(receivers.shape, NOBODY, receivers.dtype)
    asked = receivers != NOBODY
    here, there = hosts
    far = np.ones(receivers.shape, bool)
    if np.isin(here[candidates[candidates != NOBODY]], there[receivers[asked]]).any():
        same = (here[candidates][:, None] == there[receivers][:, :, None]) & (candidates != NOBODY)[:, None]
        near = same.any(2) & asked
        far = ~near
        i, j = np.nonzero(near)
        out[i, j] = _turns(
            np.sort(np.where(same[i, j], candidates[i], NOBODY), axis=1), np.ones(len(i), int), load, nbytes
        )
    left = asked & far
    i, j = np.nonzero(left)
    out[i, j] = _turns(candidates, left.sum(1), load, nbytes)
    return out


def _turns(candidates: IntArray, asked: IntArray, load: IntArray, nbytes: int) -> IntArray:
    """`asked[m]` times one of the `[M, C]` candidates of each row, row by row: those with the same candidates take turns, the least
    loaded first."""
    sets, of = np.unique(candidates, axis=0, return_inverse=True)
    of = of.reshape(-1)
    weight = np.where(sets == NOBODY, np.iinfo(np.int64).max, load[sets])
    sets = np.take_along_axis(sets, np.argsort(weight, axis=1, kind="stable"), axis=1)
    count = (sets != NOBODY).sum(1)
    order = np.argsort(of, kind="stable")
    before = np.cumsum(asked[order]) - asked[order]
    first = np.empty_like(before)
    begins = np.searchsorted(of[order], np.arange(len(sets)))
    first[order] = before - before[begins][of[order]]
    row = np.repeat(np.arange(len(asked)), asked)
    turn = np.arange(len(row)) - np.repeat(np.cumsum(asked) - asked, asked) + first[row]
    chosen = sets[of[row], turn % count[of[row]]]
    load += np.bincount(chosen, minlength=len(load)) * nbytes
    return chosen


def dealt(
    names: Sequence[str],
    shape: tuple[int, ...],
    itemsize: int,
    ranks: IntArray,
    axes: Sequence[str],
    cuts: Iterable[tuple[str, int]] = (),
    members: tuple[str, IntArray] | None = None,
    grain: tuple[int, ...] = (),
) -> Family:
    """The family of tensors that lie over a mesh: `ranks` in the form of its sizes, which `axes` names.

    `cuts`: axes that cut a dimension into parts of equal length, the last one shorter, from the outermost to the innermost.
    `members`: an axis along which whole tensors are dealt, and `[N]` the place of each. All other axes hold the same.
    """
    cuts = list(cuts)
    sizes = dict(zip(axes, ranks.shape, strict=True))
    places = list(itertools.product(*(range(sizes[axis]) for axis, _ in cuts)))
    boxes = [_box(shape, [(d, sizes[axis], i) for (axis, d), i in zip(cuts, place, strict=True)]) for place in places]
    filled = [k for k, box in enumerate(boxes) if math.prod(b - a for a, b in box) > 0]
    first = [axes.index(axis) for axis, _ in cuts] + ([axes.index(members[0])] if members else [])
    grid = np.moveaxis(ranks.astype(np.int32), first, range(len(first)))  # a trillion parameters have 3e8 copies
    grid = grid.reshape(len(places), sizes[members[0]] if members else 1, -1)[filled]
    where = members[1] if members else np.zeros(len(names), np.int64)
    starts, stops = np.array([boxes[k] for k in filled], np.int64).reshape(len(filled), -1, 2).transpose(2, 0, 1)
    return Family(names, shape, itemsize, starts, stops, grid.swapaxes(0, 1)[where], grain)


def _box(shape: tuple[int, ...], cuts: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    box = [(0, n) for n in shape]
    for d, parts, i in cuts:
        a, b = box[d]
        each = -(-(b - a) // parts)
        box[d] = min(a + i * each, b), min(a + (i + 1) * each, b)
    return box
