"""Buckets of weights from rank to rank of one process group (gloo, NCCL), where trainer and engines are in one.

Each bucket is messages: a head of fixed size, with what its tensors are if that fits, and their bytes: of large ones from where they lie,
of small ones together. A message travels once it is asked for. So that one is always on its way, gloo gets the last of a bucket behind the
head of the next one, of which a receiver then asks for the rest; NCCL has no tags, and gets all in the order in which it is asked for.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rollkeel.engines.shared_memory import aligned, places, write
from rollkeel.errors import EngineFailure
from rollkeel.models.checksum import MASK
from rollkeel.sync.sending import WINDOW
from rollkeel.types import WeightSlice

ALONE = 2**19
"""Bytes from which on a tensor is a message of its own."""
PARTS, SAID = 0, 1
"""Tags of bytes, and of what they are."""
HEAD, COUNT = 8192, 8
"""Bytes of a head, and of the number with which it begins: of bytes that it says, or that the next message says."""


_Message = tuple[torch.Tensor, Any]
"""What is to come into memory, and what tells when it is there."""
_Works = list[tuple[Any, int]]
"""What tells that a message was taken, and by which rank."""


class GroupCarrier:
    """A `rollkeel.sync.sending.Carrier` of one rank. Receivers must be receiving. After an error messages may be under way, and the group is
    of no use any more."""

    def __init__(self, receivers: Sequence[int], deadline_s: float, group: Any = None, device: str = "cpu") -> None:
        """`receivers`: ranks of the default group, in the order of the plan's numbers. `deadline_s`: longest wait for one of them."""
        self._receivers = receivers
        self._group = group
        self._device = device
        self._deadline_s, self._under_way = deadline_s, deque[_Works]()
        self._held: tuple[_Works, torch.Tensor, list[int]] | None = None
        """The last message of the last bucket, to whom it goes, and the others."""

    def put(self, bucket: Sequence[WeightSlice], to: Sequence[int]) -> None:
        if len(self._under_way) == WINDOW:
            self._sent(self._under_way.popleft())
        like = [(str(s.tensor.dtype).removeprefix("torch."), list(s.tensor.shape)) for s in bucket]
        about = [(*each, s.name, s.checksum, s.starts, s.rounded) for each, s in zip(like, bucket, strict=True)]
        parts = list(self._parts(bucket))
        self._send([[(part.nbytes, count) for part, count in parts], about], [part for part, _ in parts], to)

    def flush(self) -> None:
        self._let_go()
        while self._under_way:
            self._sent(self._under_way.popleft())

    def finish(self, sums: Sequence[int]) -> None:
        """Say that no more will come. `sums`: of what each receiver got, see `sending.send_part`."""
        for receiver, total in enumerate(sums):
            self._send(total, [], [receiver])
        self.flush()

    def _parts(self, bucket: Sequence[WeightSlice]) -> Iterator[tuple[torch.Tensor, int]]:
        """The bytes of a bucket in order, and of how many slices each part is. What lies in one piece stays where it is: nobody
        changes weights while they are sent."""
        small = list[WeightSlice]()
        for piece in (*bucket, None):
            alone = piece is not None and piece.tensor.nbytes >= ALONE and piece.tensor.is_contiguous()
            if small and (alone or piece is None):
                packed = torch.empty(
                    sum(aligned(s.tensor.nbytes) for s in small), dtype=torch.uint8, device=self._device
                )
                write(small, packed)
                yield packed, len(small)
                small = []
            if piece is not None and alone:
                yield piece.tensor.to(self._device).view(-1).view(torch.uint8), 1
            elif piece is not None:
                small.append(piece)

    def _send(self, about: Any, parts: Sequence[torch.Tensor], to: Sequence[int]) -> None:
        told = json.dumps(about).encode()
        fits = len(told) <= HEAD - COUNT
        head = len(told).to_bytes(COUNT, "little") + (told if fits else b"")
        said = [head.ljust(HEAD, b"\0"), *([] if fits else [told])]
        first, *more = [torch.frombuffer(bytearray(one), dtype=torch.uint8).to(self._device) for one in said]
        ranks = [self._receivers[receiver] for receiver in to]
        works = self._out([first, *more], ranks, SAID)
        self._under_way.append(works)
        self._let_go()
        works += self._out(parts[:-1], ranks)
        if parts:
            self._held = works, parts[-1], ranks
        if dist.get_backend(self._group) != "gloo":
            self._let_go()

    def _out(self, messages: Sequence[torch.Tensor], ranks: Sequence[int], tag: int = PARTS) -> _Works:
        return [(dist.isend(message, rank, self._group, tag), rank) for rank in ranks for message in messages]

    def _let_go(self) -> None:
        """Send what was held back."""
        if self._held is not None:
            works, part, ranks = self._held
            works += self._out([part], ranks)
            self._held = None

    def _sent(self, works: _Works) -> None:
        for work, rank in works:
            _wait(work, self._deadline_s, f"rank {rank} to take weights")


class Received:
    """What a receiver gets: buckets, which stay as they are until the next one is asked for."""

    def __init__(
        self,
        senders: Sequence[int],
        deadline_s: float,
        group: Any = None,
        device: str = "cpu",
        into: Callable[[WeightSlice], torch.Tensor | None] = lambda piece: None,
    ) -> None:
        """`senders`: ranks of the default group that send or `finish`. `deadline_s`: longest wait for one of them. `into`: memory
        of this device that a slice, whose tensor is on the meta device, may be written to as it comes, see `Intake.live`."""
        self._senders = list(senders)
        self._into = into
        self._deadline_s = deadline_s
        self._group = group
        self._device = device
        self._rooms: dict[int, list[torch.Tensor]] = {rank: [torch.empty(0)] * 2 for rank in senders}
        """Two of each sender: for the bucket that is taken and for the one that comes."""
        self.checksum = 0
        """Of all slices, as the senders that have ended said."""

    def __iter__(self) -> Iterator[list[WeightSlice]]:
        """One bucket of each sender in turn. Raises `EngineFailure` naming a rank that does not go on."""
        heads = {rank: self._message(rank, HEAD) for rank in self._senders}
        ahead = {rank: self._next(heads, rank) for rank in self._senders}
        while ahead:
            for rank in list(ahead):
                coming = ahead.pop(rank)
                if coming is None:
                    continue
                ahead[rank] = self._next(heads, rank)
                slices, parts = coming
                for part in parts:
                    self._came(part, rank)
                yield slices

    def _next(self, heads: dict[int, _Message], rank: int) -> tuple[list[WeightSlice], list[Any]] | None:
        """Ask for a bucket and the head behind it; None where the sender has ended."""
        head = self._read(heads.pop(rank), rank)
        size = int.from_bytes(head[:COUNT], "little")
        fits = size <= HEAD - COUNT
        about = json.loads(head[COUNT : COUNT + size] if fits else self._read(self._message(rank, size), rank))
        if isinstance(about, int):
            self.checksum = (self.checksum + about) & MASK
            return None
        sizes, slices = about
        bucket = self._bucket(rank, sizes, slices, self._room(rank, sum(aligned(nbytes) for nbytes, _ in sizes)))
        heads[rank] = self._message(rank, HEAD)
        return bucket

    def _bucket(
        self, rank: int, sizes: list[list[int]], about: list[Any], data: torch.Tensor
    ) -> tuple[list[WeightSlice], list[Any]]:
        """One bucket, of which `sizes` has the bytes and the number of slices of each message, and what has to be waited for."""
        slices, parts = list[WeightSlice](), list[Any]()
        tensors = places([(getattr(torch, dtype), shape) for dtype, shape, *_ in about], data)
        for (_, _, name, checksum, starts, rounded), tensor in zip(about, tensors, strict=True):
            slices.append(
                WeightSlice(name=name, tensor=tensor, checksum=checksum, starts=tuple(starts), rounded=rounded)
            )
        start = first = 0
        for size, count in sizes:
            room, piece = data[start : start + size], slices[first]
            live = self._into(replace(piece, tensor=piece.tensor.to("meta"))) if count == 1 else None
            if live is not None and live.nbytes == size:
                slices[first] = replace(piece, tensor=live)
                room = live.view(-1).view(torch.uint8)
            parts.append(dist.irecv(room, rank, self._group, PARTS))
            start += aligned(size)
            first += count
        return slices, parts

    def _room(self, rank: int, size: int) -> torch.Tensor:
        """Memory for a bucket of a sender, which takes the place of the one before its last: fresh memory costs more than what is sent."""
        rooms = self._rooms[rank]
        rooms.reverse()
        if len(rooms[0]) < size:
            rooms[0] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return rooms[0][:size]

    def _message(self, rank: int, size: int) -> _Message:
        data = torch.empty(size, dtype=torch.uint8, device=self._device)
        return data, dist.irecv(data, rank, self._group, SAID)

    def _read(self, message: _Message, rank: int) -> bytes:
        data, work = message
        self._came(work, rank)
        return data.cpu().numpy().tobytes()

    def _came(self, work: Any, rank: int) -> None:
        _wait(work, self._deadline_s, f"weights of rank {rank}")


def _wait(work: Any, deadline_s: float, what: str) -> None:
    try:
        work.wait(timedelta(seconds=deadline_s))
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:120]
        raise EngineFailure(f"weights: waited at most {deadline_s:g} s for {what} ({reason})") from None
