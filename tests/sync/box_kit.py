"""A model in parts on the ranks of a mesh, without processes; and what may happen to boxes on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from rollkeel.engines.intake import Room
from rollkeel.models.presets import build_preset
from rollkeel.sync.layouts import held, parts_of
from rollkeel.sync.plan import Plan
from rollkeel.sync.sending import Outgoing, Weights, send_part
from rollkeel.train.mesh import Mesh
from rollkeel.train.parts import part_shape
from rollkeel.train.sharded import Layout, pieces_of, tensors_of
from rollkeel.types import WeightSlice, WeightUpdate

BUCKET = 5_000
"""Bytes: less than most weights of the tiny models."""


@cache
def model_of(preset: str, seed: int = 1) -> Any:
    model, _ = build_preset(preset, seed, {"initializer_range": 0.2})
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.empty_like(p).uniform_(0.5, 1.5))
    return model


@dataclass(frozen=True)
class Ranks:
    """A model in parts on all ranks of a mesh."""

    model: Any
    sizes: dict[str, int]

    def prepare(self, head: WeightUpdate) -> None:
        """As a `cluster.publish.Source`: nothing."""

    def layout(self, rank: int) -> Layout:
        return Layout(self.model, replace(Mesh(**self.sizes), rank=rank))

    def weights(self, rank: int) -> Weights:
        layout, live = self.layout(rank), dict[str, torch.Tensor]()
        for name, whole in tensors_of(self.model).items():
            mesh = layout.mesh if name in layout.dealt else Mesh()
            live[name] = whole.new_full(part_shape(mesh, name, whole.shape), torch.nan)
            for box in layout.boxes(name):
                live[name][box.of_part] = whole.detach()[box.of_whole]
        pieces = pieces_of(self.model)
        return Weights(
            held(live, parts_of(layout, pieces)), layout, pieces, {name: t.element_size() for name, t in live.items()}
        )

    def plan(self, rooms: Sequence[dict[str, Room]], mode: str, hosts: Sequence[int] | None = None) -> Plan:
        size = self.layout(0).mesh.size
        return self.weights(0).plan(rooms, mode, (list(hosts or range(size)), [99] * len(rooms)))


class Kept:
    """A carrier that keeps copies of what it is given, for each receiver."""

    def __init__(self, receivers: int = 1) -> None:
        self.came: list[list[WeightSlice]] = [[] for _ in range(receivers)]
        self.largest = 0

    def put(self, bucket: Sequence[WeightSlice], to: Sequence[int]) -> None:
        self.largest = max(self.largest, sum(s.tensor.nbytes for s in bucket))
        for receiver in to:
            self.came[receiver] += [replace(s, tensor=s.tensor.clone()) for s in bucket]

    def flush(self) -> None: ...


def sent(ranks: Ranks, rooms: Sequence[dict[str, Room]], mode: str, bucket: int = BUCKET) -> tuple[Kept, list[int]]:
    """What all ranks send to engines with these rooms, and the sum of what each of these got."""
    made, kept, sums = ranks.plan(rooms, mode), Kept(len(rooms)), [0] * len(rooms)
    for rank in range(len(made.hosts[0])):
        before = sum(s.tensor.nbytes for came in kept.came for s in came)
        about = Outgoing(rooms[0], mode, bucket)
        told = send_part(made, rank, ranks.weights(rank).held, about, kept)
        sums = [(a + b) % 2**64 for a, b in zip(sums, told, strict=True)]
        assert sum(s.tensor.nbytes for came in kept.came for s in came) - before == made.sent()[rank]
    assert kept.largest <= bucket
    return kept, sums


Fault = Callable[[list[WeightSlice], np.random.Generator], list[WeightSlice]]


def flipped(slices: list[WeightSlice], draw: np.random.Generator) -> list[WeightSlice]:
    """One bit of one element, in what is being carried."""
    at = int(draw.integers(len(slices)))
    tensor = slices[at].tensor.clone().contiguous()
    tensor.view(-1).view(torch.uint8)[int(draw.integers(tensor.nbytes))] ^= 1 << int(draw.integers(8))
    return [*slices[:at], replace(slices[at], tensor=tensor), *slices[at + 1 :]]


def dropped(slices: list[WeightSlice], draw: np.random.Generator) -> list[WeightSlice]:
    at = int(draw.integers(len(slices)))
    return slices[:at] + slices[at + 1 :]


def doubled(slices: list[WeightSlice], draw: np.random.Generator) -> list[WeightSlice]:
    first, second = draw.integers(len(slices), size=2)
    return [*slices[:second], slices[first], *slices[second:]]


def overlapping(slices: list[WeightSlice], draw: np.random.Generator) -> list[WeightSlice]:
    """A box, and before or behind it another one with half of its rows."""
    at = int(draw.choice([i for i, s in enumerate(slices) if s.tensor.dim() > 1 and len(s.tensor) > 1]))
    half = replace(slices[at], tensor=slices[at].tensor[: len(slices[at].tensor) // 2])
    return [*slices, half] if draw.integers(2) else [half, *slices]


def shifted(slices: list[WeightSlice], draw: np.random.Generator) -> list[WeightSlice]:
    """A box in the place of another one of its shape, and the other way round."""
    alike = [(i, j) for i, a in enumerate(slices) for j in range(i) if alike_but_place(a, slices[j])]
    i, j = alike[int(draw.integers(len(alike)))]
    out = list(slices)
    out[i], out[j] = replace(slices[i], starts=slices[j].starts), replace(slices[j], starts=slices[i].starts)
    return out


def alike_but_place(a: WeightSlice, b: WeightSlice) -> bool:
    return a.name == b.name and a.tensor.shape == b.tensor.shape and not torch.equal(a.tensor, b.tensor)


def permuted(slices: list[WeightSlice], draw: np.random.Generator) -> list[WeightSlice]:
    """Two experts in each other's place."""
    one, two = draw.permutation(8)[:2]
    names = {f".experts.{one}.": f".experts.{two}.", f".experts.{two}.": f".experts.{one}."}

    def other(name: str) -> str:
        return next((name.replace(a, b) for a, b in names.items() if a in name), name)

    return [replace(s, name=other(s.name)) for s in slices]
