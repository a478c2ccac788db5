"""Lossless differences between two versions of an array of bits, for weights of which few elements change in a step.

Of every `CHUNK` elements two zstd frames: the gaps between changed elements, a byte each, and their differences, byte by byte
(all lowest bytes, then all second ones). An element that moved by one unit in the last place costs its gap and a bit.
Differences are integers modulo 2**width, so that those of several steps add up (`squash`), and signs are in the lowest bit, so
that small ones of both signs are small. Nothing here says that bits arrived or had the right base: checksums of the result do.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rollkeel.errors import DeltaRefused
from rollkeel.models.checksum import UNSIGNED
from rollkeel.models.jit import FOUND, entry

CHUNK = 2**20
"""Elements coded together, so that what is not compressed yet stays in the processor's caches."""
ESCAPE = 255
"""A gap byte less than this is so many unchanged elements and a changed one; this is so many unchanged elements alone."""
_HEAD, _PART = struct.Struct("<QQQ"), struct.Struct("<IIII")
"""Bytes per element, elements, changed elements; of a chunk changed elements, gap bytes, and bytes of both frames."""
_ZSTD = pa.Codec("zstd", compression_level=1)
Bits = np.ndarray[Any, np.dtype[Any]]
"""`[n]` contiguous unsigned integers of 1, 2 or 4 bytes."""


def bits_of(tensor: torch.Tensor) -> Bits:
    """The memory of a contiguous tensor on a CPU, as `encode` and `apply` take it."""
    return tensor.view(-1).view(UNSIGNED[tensor.element_size()]).numpy()


def encode(old: Bits, new: Bits) -> Bits:
    """`[bytes]` uint8 with which `apply` turns `old` into `new`."""
    assert old.dtype == new.dtype
    assert old.shape == new.shape
    width = old.itemsize
    total = 0
    parts = [b""]
    room, scan = min(len(old), CHUNK), _scan if width in _COMPILED else _plain_scan
    gaps, planes = np.empty(room, np.uint8), np.empty((width, room), np.uint8)
    for start in range(0, len(old), CHUNK):
        count, used = scan(old[start : start + CHUNK], new[start : start + CHUNK], gaps, planes)
        frames = [_ZSTD.compress(x, asbytes=True) if count else b"" for x in (gaps[:used], planes[:, :count].ravel())]
        parts += [_PART.pack(count, used, *map(len, frames)), *frames]
        total += count
    parts[0] = _HEAD.pack(width, len(old), total)
    return np.frombuffer(bytearray().join(parts), np.uint8)


def changed(encoded: Bits) -> int:
    """How many elements differ, as the encoder counted them."""
    return _HEAD.unpack_from(encoded.data)[2]


def apply(bits: Bits, encoded: Bits) -> None:
    """Turn `bits` from the old version into the new one, in place.

    Raises `DeltaRefused` for what is no delta of as many elements; `bits` are then in between. Never writes elsewhere."""
    for start, gaps, planes in _chunks(encoded, len(bits), bits.itemsize):
        part = bits[start : start + CHUNK]
        if bits.itemsize in _COMPILED:
            _COMPILED[bits.itemsize][1](part, gaps, planes)
        else:
            positions, differences = _decoded(gaps, planes)
            part[positions] += differences.astype(bits.dtype)


def decoded(encoded: Bits, count: int, width: int) -> Iterator[tuple[Bits, Bits]]:
    """Positions and differences, int64, of the changed elements, chunk by chunk: for memory of another device. As `apply` raises."""
    for start, gaps, planes in _chunks(encoded, count, width):
        positions, differences = _decoded(gaps, planes)
        yield positions + start, differences


def squash(deltas: Sequence[Bits]) -> Bits:
    """One delta in the place of several that follow each other: their differences added up. As `apply` raises."""
    if len(deltas) == 1:
        return deltas[0]
    width, count, _ = _HEAD.unpack_from(deltas[0].data)
    total = np.zeros(count, f"u{width}")
    for encoded in deltas:
        apply(total, encoded)
    return encode(np.zeros_like(total), total)


# -- chunks ------------------------------------------------------------------------------------------------------------


def _chunks(encoded: Bits, count: int, width: int) -> Iterator[tuple[int, Bits, Bits]]:
    """First element, gaps `[g]` and planes `[width, changed]` of each chunk, checked: no gap leads out of it."""
    try:
        of, elements, left = _HEAD.unpack_from(encoded.data)
        if (of, elements) != (width, count):
            raise DeltaRefused(f"delta: expected one of {count:,} × {width} bytes, got one of {elements:,} × {of}")
        at = _HEAD.size
        for start in range(0, count, CHUNK):
            size = min(CHUNK, count - start)
            amount, used, *lengths = _PART.unpack_from(encoded.data, at)
            at += _PART.size
            if not amount <= used <= size:
                raise ValueError
            ends = at + lengths[0], at + sum(lengths)
            gaps, planes = _inflated(encoded[at : ends[0]], used), _inflated(encoded[slice(*ends)], amount * width)
            at = ends[1]
            if np.count_nonzero(gaps != ESCAPE) != amount or int(gaps.sum(dtype=np.int64)) + amount > size:
                raise ValueError
            left -= amount
            yield start, gaps, planes.reshape(width, amount)
        if at != len(encoded) or left:
            raise ValueError
    except (OSError, ValueError, struct.error):
        raise DeltaRefused("delta: expected what was encoded, got damaged bytes; publish again") from None


def _inflated(frame: Bits, size: int) -> Bits:
    """`[size]` uint8. Raises `OSError` or `ValueError` for anything else."""
    if not size and not len(frame):
        return np.empty(0, np.uint8)
    return np.frombuffer(_ZSTD.decompress(frame, decompressed_size=size), np.uint8)


def _decoded(gaps: Bits, planes: Bits) -> tuple[Bits, Bits]:
    ends = np.cumsum(gaps + (gaps != ESCAPE), dtype=np.int64)
    folded = sum((plane.astype(np.int64) << 8 * i for i, plane in enumerate(planes)), np.zeros((), np.int64))
    return ends[gaps != ESCAPE] - 1, folded >> 1 ^ -(folded & 1)


def _plain_scan(old: Bits, new: Bits, gaps: Bits, planes: Bits) -> tuple[int, int]:
    """Fills `gaps [≥ n]` and `planes [width, ≥ n]`; returns how many elements changed and how many gap bytes there are."""
    where = np.flatnonzero(old != new)
    unchanged = np.diff(where, prepend=-1) - 1
    ends = np.cumsum(unchanged // ESCAPE + 1)
    used = int(ends[-1]) if len(ends) else 0
    gaps[:used] = ESCAPE
    gaps[ends - 1] = unchanged % ESCAPE
    difference = (new[where] - old[where]).astype(np.uint64)
    folded = difference << np.uint64(1) ^ np.uint64(0) - (difference >> np.uint64(8 * old.itemsize - 1))
    for i, plane in enumerate(planes):
        plane[: len(where)] = folded >> np.uint64(8 * i) & np.uint64(255)
    return len(where), used


# -- compiled ----------------------------------------------------------------------------------------------------------


def _scan(old: Bits, new: Bits, gaps: Bits, planes: Bits) -> tuple[int, int]:
    """`_plain_scan`, in one visit to memory."""
    counts = np.zeros(2, np.int64)
    _COMPILED[old.itemsize][0](old, new, np.empty(len(old), np.int32), gaps, planes, counts)
    return int(counts[0]), int(counts[1])


def _find(old, new, where, gaps, planes, counts):  # type: ignore[no-untyped-def]
    k = 0
    g = 0
    last = -1
    for i in range(len(old)):
        where[k] = i  # whether it changed or not, and counted if it did: a branch would often be guessed wrong
        k += old[i] != new[i]
    top, full = np.uint64(8 * old.itemsize - 1), np.uint64(2 ** (8 * old.itemsize) - 1)
    for c in range(k):
        i = where[c]
        unchanged = i - last - 1
        while unchanged >= ESCAPE:
            gaps[g] = ESCAPE
            g += 1
            unchanged -= ESCAPE
        gaps[g] = unchanged
        g += 1
        last = i
        difference = (np.uint64(new[i]) - np.uint64(old[i])) & full
        folded = (difference << np.uint64(1)) ^ (np.uint64(0) - (difference >> top))
        for p in range(old.itemsize):
            planes[p, c] = (folded >> np.uint64(8 * p)) & np.uint64(255)
    counts[0], counts[1] = k, g


def _add(bits, gaps, planes):  # type: ignore[no-untyped-def]
    one, k, at = np.uint64(1), np.uint64(0), np.uint64(0)  # signed indices are asked whether they count from the end
    for g in gaps:
        at += np.uint64(g)
        if g == ESCAPE:
            continue
        folded = np.uint64(0)
        for p in range(bits.itemsize):
            folded |= np.uint64(planes[np.uint64(p), k]) << np.uint64(8 * p)
        bits[at] += (folded >> one) ^ (np.uint64(0) - (folded & one))
        k += one
        at += one


_COMPILED: dict[int, tuple[Any, Any]] = {
    width: (
        entry(
            f"uint{8 * width}[::1]", f"uint{8 * width}[::1]", "int32[::1]", "uint8[::1]", "uint8[:, ::1]", "int64[::1]"
        )(_find),
        entry(f"uint{8 * width}[::1]", "Array(uint8, 1, 'C', readonly=True)", "Array(uint8, 2, 'C', readonly=True)")(
            _add
        ),
    )
    for width in ((1, 2, 4) if FOUND else ())
}
"""By bytes per element."""
