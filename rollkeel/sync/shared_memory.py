"""Buckets of weights between two processes of one host: memory that both map, so many slots of it, one bucket in each.

The sender writes a bucket and tells the receiver its slot; when the receiver has said that it took it, the slot is free. The memory has no
name in any folder: it ends with the processes that map it, however they end.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from rollkeel.types import WeightSlice

ALIGN = 64
"""Bytes; each tensor begins at a multiple."""
AVAILABLE = sys.platform == "linux"


class Slot(NamedTuple):
    """Where a bucket is, as the receiver is told."""

    path: str
    """Of the memory, as other processes of this host open it."""
    start: int


class Ring:
    """The sender's end."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        """Raises `OSError` where there is not so much memory."""
        self._slot, self._next = -(-slot_bytes // ALIGN) * ALIGN, 0
        size = self._slot * slots
        self._file = os.memfd_create("rollkeel-weights", os.MFD_CLOEXEC)
        os.posix_fallocate(self._file, 0, size)  # so that memory that is not there is told here, and not by a SIGBUS
        self._bytes = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def put(self, bucket: Sequence[WeightSlice]) -> Slot:
        """Write a bucket, which fits, into the slot that was written to longest ago."""
        start, self._next = self._next, (self._next + self._slot) % len(self._bytes)
        places = _places([(p.tensor.dtype, tuple(p.tensor.shape)) for p in bucket], self._bytes[start:][: self._slot])
        for piece, place in zip(bucket, places, strict=True):
            place.copy_(piece.tensor)
        return Slot(self.path, start)

    def close(self) -> None:
        """Give the memory back once nobody maps it."""
        os.close(self._file)


def opened(path: str) -> torch.Tensor:
    """The receiver's end: the bytes of a ring. Raises `OSError`."""
    with open(path, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


def read(
    slot: Slot, like: Sequence[tuple[torch.dtype, tuple[int, ...]]], rings: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors in a slot, where they lie; `like`: dtype and shape of each, `rings`: opened, by path."""
    return list(_places(like, rings[slot.path][slot.start :]))


def _places(like: Sequence[tuple[torch.dtype, tuple[int, ...]]], memory: torch.Tensor) -> Iterator[torch.Tensor]:
    start = 0
    for dtype, shape in like:
        size = torch.Size(shape).numel() * dtype.itemsize
        yield memory[start : start + size].view(dtype).view(shape)
        start += -(-size // ALIGN) * ALIGN
