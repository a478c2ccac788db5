"""What a rank of the trainer sends: the boxes that the plan gives it, cut from its own memory, in buckets of bounded size.

    plan.sends(rank) ─▶ routes: boxes for the same engines ─▶ slices: rounded, summed ─▶ buckets ─▶ a carrier

A carrier brings buckets to engines: through Ray's object store or shared memory (`rollkeel.cluster`), a process group (`sync.group`), or
files (`sync.files`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from rollkeel.engines.intake import Room, rooms_of
from rollkeel.engines.shared_memory import ALIGN, WINDOW, buckets
from rollkeel.models.checksum import MASK, pitches_of
from rollkeel.models.numerics import held_checksum, rounded
from rollkeel.sync.layouts import Held, Part, engine_layout, held, parts_of, trainer_layout
from rollkeel.sync.plan import Copy, Plan, plan
from rollkeel.train.sharded import Layout, Pieces, tensors_of
from rollkeel.types import WeightSlice, WeightUpdate

MADE = 1.5
"""Buckets that a sender needs beside those: rounded or narrowed weights of the one that it fills, and of a piece of the next."""
PIECES = 4
"""Least pieces of a full bucket."""


class Carrier(Protocol):
    """Brings buckets from one sender to receivers, numbered as the plan numbers them. Every wait has a deadline."""

    def put(self, bucket: Sequence[WeightSlice], to: Sequence[int]) -> None:
        """Take a bucket, whose tensors may change when this has returned. Waits while `WINDOW` others are under way.

        Raises `EngineFailure` naming the receiver that died, fell silent or refused a bucket."""
        ...

    def flush(self) -> None:
        """Wait until all buckets have arrived and are proven."""
        ...


@dataclass(frozen=True)
class Weights:
    """Weights as a rank has them: all of them here, or parts on all ranks of `layout.mesh`."""

    held: Held
    layout: Layout | None
    """None for weights that this process holds whole."""
    pieces: Pieces = ()
    itemsizes: Mapping[str, int] | None = None

    @staticmethod
    def of(model: torch.nn.Module, layout: Layout, pieces: Pieces, parts: Sequence[Part] | None = None) -> Weights:
        """Of a trainer's model, see `LocalTrainer.parts`. `parts`: the result of `parts_of`, for callers that ask often."""
        live = tensors_of(model)
        sizes = {name: tensor.element_size() for name, tensor in live.items()}
        parts = parts_of(layout, pieces) if parts is None else parts
        return Weights(held(live, parts), layout, pieces, sizes)

    @staticmethod
    def whole(named: Mapping[str, torch.Tensor]) -> Weights:
        return Weights({name: [((0,) * t.dim(), t.detach())] for name, t in named.items()}, None)

    def plan(self, rooms: Sequence[Mapping[str, Room]], mode: str, hosts: tuple[Sequence[int], Sequence[int]]) -> Plan:
        """How they come to engines with these `rooms`; `hosts`: of ranks and engines. The same on every rank."""
        if self.layout is None:
            here = {name: parts[0][1] for name, parts in self.held.items()}
            own = {name: tensor.element_size() for name, tensor in here.items()}
            source = engine_layout([rooms_of(here)], "fp32", own, hosts[0][:1])
        else:
            assert self.itemsizes is not None
            own = {name: self.itemsizes[owner] for name, owner, _ in self.pieces}
            source = trainer_layout(self.layout, self.pieces, self.itemsizes, hosts[0])
        return plan(source, engine_layout(rooms, mode, own, hosts[1]))


Ready = Sequence[tuple[tuple[int, ...], list[WeightSlice]]]
"""What a rank sends, in order, by who receives it."""


def send_part(
    made: Plan,
    rank: int,
    weights: Held,
    about: Outgoing,
    carrier: Carrier,
    through: Callable[[Iterable[WeightSlice]], Iterable[WeightSlice]] = lambda slices: slices,
    ready: Ready = (),
) -> list[int]:
    """Send what `made` gives this rank, each slice as `through` makes it. Returns the sum of checksums that each receiver got from it.
    `ready`: what `ready_of` says of these weights."""
    sums = [0] * len(made.hosts[1])
    for to, pieces in ready or _made(made, rank, weights, about):
        for bucket in buckets(through(pieces), about.bucket_bytes):
            carrier.put(bucket, to)
            for receiver in to:
                sums[receiver] += sum(piece.checksum for piece in bucket)
            del bucket  # or what was made for it would stay while the next one is made
    carrier.flush()
    return [total & MASK for total in sums]


def _made(
    made: Plan, rank: int, weights: Held, about: Outgoing
) -> Iterator[tuple[tuple[int, ...], Iterator[WeightSlice]]]:
    for to, copies in routes(made, rank).items():
        yield to, slices(copies, weights, about)


def ready_of(made: Plan, rank: int, weights: Held, about: Outgoing) -> Ready:
    """All that this rank sends, if it is sent as it lies here, with its checksums; nothing where something is rounded or narrowed before,
    which would take memory."""
    for copy in made.sends(rank):
        if copy.rounds or _narrows(about.rooms[copy.name], weights[copy.name][0][1]):
            return []
    return [(to, list(pieces)) for to, pieces in _made(made, rank, weights, about)]


class WholeFeed:
    """A `rollkeel.engines.boxes.Feed` of updates whose tensors this process holds whole, to processes of its own host."""

    def __init__(self, buffer_mb: float) -> None:
        """`buffer_mb`: most memory for weights on their way."""
        self.bucket_bytes = max(ALIGN, int(buffer_mb * 2**20 / (WINDOW + MADE)))
        self.made: Plan | None = None
        """For the processes that were fed last."""
        self._key: tuple[Any, ...] = ()

    def __call__(
        self, update: WeightUpdate, rooms: Sequence[Mapping[str, Room]], mode: str, carrier: Carrier
    ) -> list[int]:
        weights = Weights.whole({piece.name: piece.tensor for piece in update.slices})
        key = rooms, mode, [(p.name, p.tensor.shape, p.tensor.dtype) for p in update.slices]
        if self.made is None or key != self._key:
            self.made, self._key = weights.plan(rooms, mode, ([0], [0] * len(rooms))), key
        every = {name: room for held in rooms for name, room in held.items()}
        return send_part(self.made, 0, weights.held, Outgoing(every, mode, self.bucket_bytes), carrier)


class Outgoing(NamedTuple):
    """How boxes are made."""

    rooms: Mapping[str, Room]
    """Of engines, by checkpoint name; how large a part of it is, is not looked at."""
    mode: str
    bucket_bytes: int


def routes(made: Plan, rank: int) -> dict[tuple[int, ...], list[Copy]]:
    """The copies of a sender by all who receive the same box, each box once."""
    receivers = dict[tuple[object, ...], list[int]]()
    first = dict[tuple[object, ...], Copy]()
    for copy in made.sends(rank):
        box = copy.name, copy.starts, copy.stops
        receivers.setdefault(box, []).append(copy.receiver)
        first.setdefault(box, copy)
    out = dict[tuple[int, ...], list[Copy]]()
    for box, to in receivers.items():
        out.setdefault(tuple(sorted(to)), []).append(first[box])
    return out


def _narrows(room: Room, box: torch.Tensor) -> bool:
    return room.dtype.itemsize < box.element_size()


def slices(copies: Iterable[Copy], weights: Held, about: Outgoing) -> Iterator[WeightSlice]:
    """The boxes of `copies`, rounded where the plan says so, in pieces of part of a bucket, with the checksums of what must be in the
    engines' memory."""
    most = about.bucket_bytes // PIECES
    for copy in copies:
        room = about.rooms[copy.name]
        pitches, box = pitches_of(room.shape), _within(weights[copy.name], copy)
        narrow = room.dtype if _narrows(room, box) else box.dtype
        for rows, first in _cut(box, copy.starts, most, narrow.itemsize, 1):
            made = (rounded(copy.name, rows, about.mode) if copy.rounds else rows).to(narrow)
            for piece, starts in _cut(made, first, most, narrow.itemsize, made.dim()):
                offset = sum(a * p for a, p in zip(starts, pitches, strict=True))
                checksum = held_checksum(copy.name, piece, about.mode, offset, pitches)
                yield WeightSlice(name=copy.name, tensor=piece, checksum=checksum, starts=starts, rounded=copy.rounds)


def _within(parts: Sequence[tuple[tuple[int, ...], torch.Tensor]], copy: Copy) -> torch.Tensor:
    """The memory of a box that lies in one of these parts."""
    for starts, part in parts:
        box = copy.within(starts)
        if all(s.start >= 0 and s.stop <= n for s, n in zip(box, part.shape, strict=True)):
            return part[box]
    raise AssertionError(f"{copy}: lies on no part of this rank")


def _cut(
    box: torch.Tensor, starts: tuple[int, ...], most: int, itemsize: int, dims: int, at: int = 0
) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Parts of at most `most` bytes, if cutting along the first `dims` dimensions is enough for that, and the first index of each."""
    size = box.numel() * itemsize
    if size <= most or at == min(dims, box.dim()):
        yield box, starts
        return
    each = max(1, most * box.shape[at] // size)
    for first in range(0, box.shape[at], each):
        part = box.narrow(at, first, min(each, box.shape[at] - first))
        yield from _cut(part, (*starts[:at], starts[at] + first, *starts[at + 1 :]), most, itemsize, dims, at + 1)
