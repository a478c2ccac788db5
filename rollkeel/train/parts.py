"""Which part of each parameter lies on which rank: a function of the mesh, the parameter's name and its whole shape alone.

    rows of gate|up of an expert        gate  0  1  2  3     up  0  1  2  3
    tensor rank 0 of 2                        ▣  ▣  ·  ·         ▣  ▣  ·  ·      two boxes of the whole,
    tensor rank 1 of 2                        ·  ·  ▣  ▣         ·  ·  ▣  ▣      which lie one behind the other here

Experts are dealt first, then heads, widths and vocabulary, and then what is left in rows to the shards.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rollkeel.train.mesh import Mesh, gather_into


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


class Cut(NamedTuple):
    """How a parameter is dealt over the ranks along one size of a mesh."""

    over: str
    """The size."""
    dim: int
    blocks: int = 1
    """Equal blocks that lie one behind the other along `dim`; a rank has some of each."""


_CUTS = {
    r"\.experts\.gate_up_proj$": (Cut("expert", 0), Cut("tensor", 1, 2)),
    r"\.experts\.down_proj$": (Cut("expert", 0), Cut("tensor", 2)),
    r"\.self_attn\.[qkv]_proj\.(?:weight|bias)$": (Cut("tensor", 0),),
    r"\.self_attn\.o_proj\.weight$": (Cut("tensor", 1),),
    r"\.mlp\.(?:gate|up)_proj\.weight$": (Cut("tensor", 0),),
    r"\.mlp\.down_proj\.weight$": (Cut("tensor", 1),),
}
_VOCABULARY = re.compile(r"(?:^|\.)(?:embed_tokens|lm_head)\.weight$")
_OF_HEADS = re.compile(r"\.self_attn\.[qk]_norm\.weight$")
"""Whole on every rank, but a rank's gradient is that of its heads alone."""


def cuts(mesh: Mesh, name: str, shape: Sequence[int]) -> tuple[Cut, ...]:
    """How the parameter `name` is dealt, but for rows to shards. A vocabulary that tensor ranks do not divide stays whole."""
    found = next((cuts for pattern, cuts in _CUTS.items() if re.search(pattern, name)), ())
    if _VOCABULARY.search(name) and shape[0] % mesh.tensor == 0:
        found = (Cut("tensor", 0),)
    return tuple(cut for cut in found if getattr(mesh, cut.over) > 1)


def boxes(mesh: Mesh, name: str, shape: Sequence[int]) -> list[Box]:
    """The pieces of the parameter `name` of this whole `shape` that lie on the rank at `mesh.place`, in the order of memory; none if
    it has no row of it."""
    return list(_boxes(_ranges(mesh, mesh.place, name, shape, sharded=True)))


def part_shape(mesh: Mesh, name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of what lies on the rank at `mesh.place`."""
    return tuple(sum(n for _, n in ranges) for ranges in _ranges(mesh, mesh.place, name, shape, sharded=True))


_Ranges = list[list[tuple[int, int]]]
"""For each dimension the (first, count) of what lies on a rank."""


def _ranges(mesh: Mesh, place: Mapping[str, int], name: str, shape: Sequence[int], *, sharded: bool) -> _Ranges:
    """`sharded`: with the rows dealt to shards, as FSDP deals them."""
    ranges: _Ranges = [[(0, n)] for n in shape]
    for over, dim, blocks in cuts(mesh, name, shape):
        block = shape[dim] // blocks
        each = block // getattr(mesh, over)
        ranges[dim] = [(b * block + place[over] * each, each) for b in range(blocks)]
    if sharded and shape:
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


@dataclass(frozen=True)
class Dealt:
    """A parameter of a model on a mesh."""

    shape: tuple[int, ...]
    """Of the whole."""
    over: tuple[str, ...] = ()
    """Sizes of the mesh, beside its shards, whose ranks hold different parts of it."""
    adds: tuple[str, ...] = ("replicate", "expert", "context")
    """Sizes whose ranks have each a summand of its gradient after a pass."""
    rows: bool = False
    """Whether the parts one behind the other are the whole."""


@dataclass(frozen=True)
class Deal:
    """All parameters of a model on a mesh, asked while they are whole."""

    mesh: Mesh
    named: Mapping[str, Dealt]

    @staticmethod
    def of(model: torch.nn.Module, mesh: Mesh) -> Deal:
        """A tied parameter has both of its names."""
        named = model.named_parameters(remove_duplicate=False)
        return Deal(mesh, {name: _dealt(mesh, name, tuple(p.shape)) for name, p in named})

    def counts(self, name: str) -> bool:
        """True if this rank counts the parameter in sums over a copy of the model: one of those that hold the same does."""
        over = self.named[name].over if name in self.named else ()
        return all(self.mesh.place[size] == 0 for size in ("expert", "tensor") if size not in over)

    def adds(self, name: str) -> tuple[str, ...]:
        """Sizes over whose ranks the parameter's gradients must be added after a pass."""
        return self.named.get(name, Dealt(())).adds

    @torch.no_grad()
    def keep(self, model: torch.nn.Module) -> None:
        """Leave this rank its part of the parameters, but for shards."""
        made = dict[int, torch.nn.Parameter]()
        for name, whole in list(model.named_parameters(remove_duplicate=False)):
            dealt = self.named[name]
            if dealt.over:
                ranges = _ranges(self.mesh, self.mesh.place, name, dealt.shape, sharded=False)
                if id(whole) not in made:
                    made[id(whole)] = torch.nn.Parameter(_part(whole, ranges), whole.requires_grad)
                owner, _, key = name.rpartition(".")
                setattr(model.get_submodule(owner), key, made[id(whole)])

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole parameter, on every rank; `part`: what lies here, with the rows of all shards. Collective."""
        dealt, mesh = self.named.get(name, Dealt(())), self.mesh
        if not dealt.over:
            return part
        ranks = mesh.over(*dealt.over)
        parts = part.new_empty(ranks * len(part), *part.shape[1:])
        gather_into(parts, part.contiguous(), mesh.group(*dealt.over))
        if parts.shape == dealt.shape and dealt.rows:  # as it is with experts
            return parts
        whole = part.new_empty(dealt.shape)
        for place, came in zip(mesh.places(*dealt.over), parts.chunk(ranks), strict=True):
            for box in _boxes(_ranges(mesh, place, name, dealt.shape, sharded=False)):
                whole[box.of_whole] = came[box.of_part]
        return whole


def _dealt(mesh: Mesh, name: str, shape: tuple[int, ...]) -> Dealt:
    found = cuts(mesh, name, shape)
    over = tuple(cut.over for cut in found)
    rows = len(found) == 1 and found[0].dim == 0 and found[0].blocks == 1
    adds = ["replicate", *(() if "expert" in over else ("expert",)), "context"]
    return Dealt(shape, over, (*adds, *(("tensor",) if _OF_HEADS.search(name) else ())), rows)


def _part(whole: torch.Tensor, ranges: _Ranges) -> torch.Tensor:
    part = whole.new_empty([sum(n for _, n in each) for each in ranges])
    for box in _boxes(ranges):
        part[box.of_part] = whole[box.of_whole]
    return part
