"""Buckets of weights between two processes of one host: memory that both map, so many slots of it, one bucket in each.

The sender writes a bucket and tells the receiver its slot; when the receiver has said that it took it, the slot is free. The memory has no
name in any folder: it ends with the processes that map it, however they end.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import torch

from rollkeel.types import WeightSlice

T = TypeVar("T")
ALIGN = 64
"""Bytes; each tensor begins at a multiple."""
AVAILABLE = sys.platform == "linux"
WINDOW = 2
"""Buckets that a sender may have under way to one receiver."""


Like = Sequence[tuple[torch.dtype, Sequence[int]]]
"""Dtype and shape of each tensor of a bucket."""


class Slot(NamedTuple):
    """Where a bucket is, as the receiver is told."""

    path: str
    """Of the memory, as other processes of this host open it."""
    start: int


class Ring:
    """The sender's end."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        """Raises `OSError` where there is not so much memory."""
        self._slot, self._next = aligned(slot_bytes), 0
        size = self._slot * slots
        self._file = allocated(size)
        try:
            self._bytes = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        except BaseException:
            os.close(self._file)
            raise
        self.path = named(self._file)

    def put(self, bucket: Sequence[WeightSlice]) -> Slot:
        """Write a bucket, which fits, into the slot that was written to longest ago."""
        start, self._next = self._next, (self._next + self._slot) % len(self._bytes)
        write(bucket, self._bytes[start : start + self._slot])
        return Slot(self.path, start)

    def close(self) -> None:
        """Give the memory back once nobody maps it."""
        os.close(self._file)


def allocated(size: int) -> int:
    """An open file without a name, of memory that is there: what is missing shows here, as an `OSError`, and not as a SIGBUS at the first
    write."""
    if hasattr(os, "memfd_create"):  # not in /dev/shm, which containers make small
        file = os.memfd_create("rollkeel-weights", os.MFD_CLOEXEC)
    else:
        file, name = tempfile.mkstemp()
        os.unlink(name)
    try:
        os.posix_fallocate(file, 0, size) if hasattr(os, "posix_fallocate") else os.ftruncate(file, size)
    except OSError:
        os.close(file)
        raise
    return file


def named(file: int) -> str:
    """An open file without a name, as other processes of this host open it."""
    return f"/proc/{os.getpid()}/fd/{file}#{os.fstat(file).st_ino}"


def opened(path: str) -> torch.Tensor:
    """The receiver's end: the bytes of what is `named` so. Raises `OSError`, also where it is another file that is there: to a process in a
    container numbers of processes mean others."""
    where, _, number = path.partition("#")
    with open(where, "r+b") as file:
        if os.fstat(file.fileno()).st_ino != int(number or 0):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


class OpenedFiles(dict[str, T]):
    """What was opened, by path, as long as it is there. Several threads may ask."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = threading.Lock()

    def get_or(self, path: str, opens: Callable[[], T]) -> T:
        """As it was opened before, or by `opens`; lets go of what is gone, which no memory would be left for. Raises `OSError`."""
        with self._asked:
            self._forget()
            if path not in self:
                self[path] = opens()
            return self[path]

    def forget(self) -> None:
        """Let go of what is gone."""
        with self._asked:
            self._forget()

    def _forget(self) -> None:
        for path in list(self):
            where, _, number = path.partition("#")
            with suppress(OSError):
                if os.stat(where).st_ino == int(number or 0):
                    continue
            del self[path]


def read(slot: Slot, like: Like, rings: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in a slot, where they lie; `rings`: opened, by path."""
    return list(places(like, rings[slot.path][slot.start :]))


def buckets(pieces: Iterable[WeightSlice], most: int) -> Iterator[list[WeightSlice]]:
    """Slices in order, together at most `most` bytes; a larger one alone."""
    bucket, size = list[WeightSlice](), 0
    for piece in pieces:
        more = aligned(piece.tensor.numel() * piece.tensor.element_size())
        if bucket and size + more > most:
            yield bucket
            bucket, size = [], 0
        bucket.append(piece)
        size += more
    if bucket:
        yield bucket


def write(bucket: Sequence[WeightSlice], memory: torch.Tensor) -> None:
    """Copy the tensors of a bucket one behind the other to bytes that are enough for them."""
    like = [(piece.tensor.dtype, piece.tensor.shape) for piece in bucket]
    for piece, place in zip(bucket, places(like, memory), strict=True):
        place.copy_(piece.tensor)


def places(like: Like, memory: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of bytes as tensors one behind the other."""
    start = 0
    for dtype, shape in like:
        size = torch.Size(shape).numel() * dtype.itemsize
        yield memory[start : start + size].view(dtype).view(tuple(shape))
        start += aligned(size)


def aligned(size: int) -> int:
    """Bytes that a tensor of `size` bytes takes."""
    return -(-size // ALIGN) * ALIGN
