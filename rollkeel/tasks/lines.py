"""A file of lines as a sequence of records that are parsed when they are asked for: in memory are 28 bytes for each, not the record."""

from __future__ import annotations

import os
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, final, overload

from rollkeel.errors import BadInput

T = TypeVar("T")
BOM = b"\xef\xbb\xbf"


@final
class Lines(Sequence[T]):
    """Records of a file, one a line, in its order; lines of white space alone are none.

    The constructor parses all lines, so that a fault stops the program before any work starts; each access parses again. The
    file stays open: one that is replaced or appended to is read on as it was.
    """

    def __init__(self, path: Path, parse: Callable[[int, bytes], T], keep: Callable[[T], bool] | None = None) -> None:
        """`parse` takes the 1-based number of a line and the line without its end; what it raises passes through. `keep` says which
        records belong to this sequence. Raises `OSError` for a file that cannot be read."""
        self._path, self._parse = path, parse
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._starts, self._lengths = array("Q"), array("Q")
        self._sums, self._numbers = array("I"), array("Q")
        self.total = 0
        """Records of the file, kept or not."""
        with open(self._descriptor, "rb", closefd=False) as file:
            self._index(file, keep)

    def _index(self, file: Any, keep: Callable[[T], bool] | None) -> None:
        start = 0
        for number, line in enumerate(file, 1):
            begin, start = start, start + len(line)
            if number == 1 and line.startswith(BOM):
                begin, line = begin + len(BOM), line.removeprefix(BOM)
            line = line.removesuffix(b"\n")
            if not line.strip():
                continue
            record = self._parse(number, line)
            self.total += 1
            if keep is None or keep(record):
                self._starts.append(begin)
                self._lengths.append(len(line))
                self._sums.append(zlib.crc32(line))
                self._numbers.append(number)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        """Raises `BadInput` where the line is no longer what it was."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number, length = self._numbers[index], self._lengths[index]
        line = os.pread(self._descriptor, length, self._starts[index])
        if len(line) != length or zlib.crc32(line) != self._sums[index]:
            raise BadInput(
                f"{self._path} line {number}: changed since it was first read; leave data alone that is in use"
            )
        return self._parse(number, line)

    def __iter__(self) -> Iterator[T]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Equal to any sequence of equal records in the same order, as a list is to a list."""
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]
