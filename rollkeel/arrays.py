"""Arrays of numbers in few bytes, for messages between processes. Every bit arrives.

Most facts about tokens are the same, or one more, for all tokens of a sequence: they travel as runs of equal differences between
neighbours, and so do the bits of floats. Other whole numbers take as many bits as their range needs. What is packed is a plain tuple, which
pickles to a few bytes more than it holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Packed = tuple[Any, ...]
FEW = 2**20
"""Of more numbers, whole bytes are taken instead of bits: that is faster."""
_WIDTHS = (np.int8, np.int16, np.int32, np.int64)
_WHOLE = {"i": "", "u": "", "b": "u1", "f": "i4"}
"""As what arrays of a kind of dtype are looked at as whole numbers."""


def packed(array: np.ndarray) -> Packed:
    """dtype, shape, and bytes or numbers."""
    head, kind = (array.dtype.str, array.shape), array.dtype.kind
    if not array.size or kind not in _WHOLE or array.dtype == np.float64 or array.dtype == np.uint64:
        return *head, array.tobytes()
    whole = array.reshape(-1).view(_WHOLE[kind] or array.dtype)
    plain: Any = array.tobytes() if kind == "f" else _numbers(whole)
    if array.size > FEW and whole.itemsize < 4:
        return *head, plain
    steps = np.diff(whole, prepend=whole.dtype.type(0))
    starts = np.flatnonzero(np.concatenate([[True], steps[1:] != steps[:-1]]))
    if 2 * len(starts) < array.size:
        runs = _numbers(steps[starts]), _numbers(np.diff(starts, append=steps.size))
        if sum(len(numbers[-1]) for numbers in runs) < len(plain if kind == "f" else plain[-1]):
            return *head, *runs
    return *head, plain


def unpacked(told: Packed) -> np.ndarray:
    """The array that was packed, in memory of its own."""
    dtype, shape, first, *counts = np.dtype(told[0]), *told[1:]
    if isinstance(first, bytes):
        return np.frombuffer(first, dtype).reshape(shape).copy()
    whole = np.dtype(_WHOLE[dtype.kind] or dtype)
    values = _read(first).astype(whole)
    if counts:
        values = np.cumsum(np.repeat(values, _read(counts[0])), dtype=whole)
    return values.view(dtype).reshape(shape)


def _numbers(whole: np.ndarray) -> Packed:
    """How many, the least, bits of each above it, bytes; or how many, their dtype and bytes."""
    low, high = int(whole.min()), int(whole.max())
    bits = (high - low).bit_length()
    if whole.size <= FEW and bits < 8 * whole.itemsize:
        above = whole.astype(np.int64).view(np.uint64) - np.uint64(low % 2**64)
        planes = [np.packbits((above >> np.uint64(bit)).astype(np.uint8) & 1) for bit in range(bits)]
        return len(whole), low, bits, b"".join(plane.tobytes() for plane in planes)
    width = next(w for w in _WIDTHS if np.iinfo(w).min <= low and high <= np.iinfo(w).max)
    return len(whole), np.dtype(width).str, whole.astype(width).tobytes()


def _read(numbers: Packed) -> np.ndarray:
    count, *about, data = numbers
    if len(about) == 1:
        return np.frombuffer(data, about[0])
    low, bits = about
    above = np.zeros(count, np.uint64)
    for bit, plane in enumerate(np.frombuffer(data, np.uint8).reshape(bits, -(-count // 8))):
        above |= np.unpackbits(plane, count=count).astype(np.uint64) << np.uint64(bit)
    return (above + np.uint64(low % 2**64)).view(np.int64)
