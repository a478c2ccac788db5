"""Which part of each parameter lies on which rank: a function of the mesh, the parameter's name and its whole shape alone.

Experts are dealt first, and then what is left in rows to the shards.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rollkeel.train.mesh import Mesh


class Box(NamedTuple):
    """A contiguous piece of a parameter; one number for each dimension."""

    start: tuple[int, ...]
    """Its first element in the whole parameter."""
    here: tuple[int, ...]
    """Its first element in the part that lies on the rank."""
    size: tuple[int, ...]

    @property
    def of_whole(self) -> tuple[slice, ...]:
        """The box in the whole parameter."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    @property
    def of_part(self) -> tuple[slice, ...]:
        """The box in the rank's part."""
        return tuple(slice(a, a + n) for a, n in zip(self.here, self.size, strict=True))


_OF_EXPERTS = re.compile(r"\.experts\.(?:gate_up|down)_proj$")
_Ranges = list[list[tuple[int, int]]]
"""For each dimension the (first, count) of what lies on a rank."""


def boxes(mesh: Mesh, name: str, shape: Sequence[int]) -> list[Box]:
    """The pieces of the parameter `name` of this whole `shape` that lie on the rank at `mesh.place`, in the order of memory; none if
    it has no row of it."""
    return list(_boxes(_ranges(mesh, name, shape)))


def part_shape(mesh: Mesh, name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of what lies on the rank at `mesh.place`."""
    return tuple(sum(n for _, n in ranges) for ranges in _ranges(mesh, name, shape))


def _ranges(mesh: Mesh, name: str, shape: Sequence[int]) -> _Ranges:
    ranges: _Ranges = [[(0, n)] for n in shape]
    if mesh.expert > 1 and _OF_EXPERTS.search(name):
        each = shape[0] // mesh.expert
        ranges[0] = [(mesh.place["expert"] * each, each)]
    if shape:
        ranges[0] = list(_within(ranges[0], mesh.rows(sum(n for _, n in ranges[0]))))
    return ranges


def _within(ranges: Sequence[tuple[int, int]], rows: slice) -> Iterator[tuple[int, int]]:
    """What is left of `ranges` if only these `rows` of them, counted from the first, are kept."""
    begun = 0
    for start, count in ranges:
        a, b = max(rows.start, begun), min(rows.stop, begun + count)
        if a < b:
            yield start + a - begun, b - a
        begun += count


def _boxes(ranges: _Ranges) -> Iterator[Box]:
    here = [list(itertools.accumulate((n for _, n in r), initial=0))[: len(r)] for r in ranges]
    along = [[(a, h, n) for (a, n), h in zip(r, at, strict=True)] for r, at in zip(ranges, here, strict=True)]
    for pieces in itertools.product(*along):
        yield Box(tuple(p[0] for p in pieces), tuple(p[1] for p in pieces), tuple(p[2] for p in pieces))
