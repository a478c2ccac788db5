"""Buckets of weights from rank to rank of one process group (gloo, NCCL), where trainer and engines are in one.

Each bucket is three messages: two lengths, what its tensors are, and their bytes one behind the other.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rollkeel.engines.shared_memory import aligned, places, write
from rollkeel.errors import EngineFailure
from rollkeel.models.checksum import MASK
from rollkeel.sync.sending import WINDOW
from rollkeel.types import WeightSlice


class GroupCarrier:
    """A `rollkeel.sync.sending.Carrier` of one rank. Receivers must be receiving."""

    def __init__(self, receivers: Sequence[int], deadline_s: float, group: Any = None, device: str = "cpu") -> None:
        """`receivers`: ranks of the default group, in the order of the plan's numbers. `deadline_s`: longest wait for one of them."""
        self._receivers, self._group, self._device = receivers, group, device
        self._deadline_s, self._under_way = deadline_s, deque[list[tuple[Any, int]]]()

    def put(self, bucket: Sequence[WeightSlice], to: Sequence[int]) -> None:
        if len(self._under_way) == WINDOW:
            self._sent(self._under_way.popleft())
        data = torch.empty(sum(aligned(s.tensor.nbytes) for s in bucket), dtype=torch.uint8, device=self._device)
        write(bucket, data)
        like = [(str(s.tensor.dtype).removeprefix("torch."), list(s.tensor.shape)) for s in bucket]
        about = [(*each, s.name, s.checksum, s.starts, s.rounded) for each, s in zip(like, bucket, strict=True)]
        self._send(about, data, to)

    def flush(self) -> None:
        while self._under_way:
            self._sent(self._under_way.popleft())

    def finish(self, sums: Sequence[int]) -> None:
        """Say that no more will come. `sums`: of what each receiver got, see `sending.send_part`."""
        for receiver, total in enumerate(sums):
            self._send(total, torch.empty(0, dtype=torch.uint8, device=self._device), [receiver])
        self.flush()

    def _send(self, about: Any, data: torch.Tensor, to: Sequence[int]) -> None:
        told = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8, device=self._device)
        lengths = torch.tensor([len(told), len(data)], device=self._device)
        messages = [lengths, told, *([data] if len(data) else [])]
        ranks = [self._receivers[receiver] for receiver in to]
        self._under_way.append([(dist.isend(m, r, group=self._group), r) for r in ranks for m in messages])

    def _sent(self, works: Sequence[tuple[Any, int]]) -> None:
        for work, rank in works:
            _wait(work, self._deadline_s, f"rank {rank} to take weights")


class Received:
    """What a receiver gets: buckets, which stay as they are until the next one is asked for."""

    def __init__(self, senders: Sequence[int], deadline_s: float, group: Any = None, device: str = "cpu") -> None:
        """`senders`: ranks of the default group that send or `finish`. `deadline_s`: longest wait for one of them."""
        self._senders, self._deadline_s, self._group, self._device = list(senders), deadline_s, group, device
        self.checksum = 0
        """Of all slices, as the senders that have ended said."""

    def __iter__(self) -> Iterator[list[WeightSlice]]:
        """One bucket of each sender in turn. Raises `EngineFailure` naming a rank that does not go on."""
        coming = {rank: self._asked(rank) for rank in self._senders}
        while coming:
            for rank in list(coming):
                lengths, work = coming.pop(rank)
                self._came(work, rank)
                told, data = (torch.empty(n, dtype=torch.uint8, device=self._device) for n in lengths.tolist())
                for part in (told, *([data] if len(data) else [])):
                    self._came(dist.irecv(part, rank, group=self._group), rank)
                about = json.loads(bytes(told.tolist()))
                if isinstance(about, int):
                    self.checksum = (self.checksum + about) & MASK
                    continue
                coming[rank] = self._asked(rank)
                tensors = places([(getattr(torch, dtype), shape) for dtype, shape, *_ in about], data)
                yield [
                    WeightSlice(name=name, tensor=tensor, checksum=checksum, starts=tuple(starts), rounded=rounded)
                    for (_, _, name, checksum, starts, rounded), tensor in zip(about, tensors, strict=True)
                ]

    def _asked(self, rank: int) -> tuple[torch.Tensor, Any]:
        lengths = torch.empty(2, dtype=torch.int64, device=self._device)
        return lengths, dist.irecv(lengths, rank, group=self._group)

    def _came(self, work: Any, rank: int) -> None:
        _wait(work, self._deadline_s, f"weights of rank {rank}")


def _wait(work: Any, deadline_s: float, what: str) -> None:
    try:
        work.wait(timedelta(seconds=deadline_s))
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:120]
        raise EngineFailure(f"weights: waited at most {deadline_s:g} s for {what} ({reason})") from None
