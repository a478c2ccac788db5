"""A checksum of weights that depends on position and adds up over parts."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import torch

from rollkeel.models import gpu
from rollkeel.models.jit import FOUND, entry

MASK = 2**64 - 1
PART = 2**19
"""Elements at one time: what a part needs beside the weights stays below 32 MB, and in the processor's caches."""
PART_OF_KERNEL = 2**27
"""The same on a GPU: one launch for most tensors."""
SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by bytes per element, that every device computes with."""
_LOW, _STEP, _HIGH, _FLIP = 2**32 - 1, 0x9E3779B1, 0x85EBCA77, 0x5BD1E995


def _sum(bits, base, out):  # type: ignore[no-untyped-def]
    """Adds to out[0] the checksum in one pass, where PyTorch makes ten; for fewer than 2**31 elements."""
    total = np.uint64(0)
    for i in range(len(bits)):
        x = np.uint64(np.uint32(np.uint32(i) * np.uint32(_STEP) + base))
        key = ((x * x) >> np.uint64(16)) & np.uint64(_LOW) | np.uint64(1)
        total += (np.uint64(bits[i]) ^ np.uint64(_FLIP)) * key
    out[0] += total


_COMPILED = {
    width: entry(f"uint{8 * width}[::1]", "uint32", "uint64[::1]")(_sum) for width in ((1, 2, 4, 8) if FOUND else ())
}
"""By bytes per element."""
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def tensor_checksum(name: str, tensor: torch.Tensor, offset: int = 0, dtype: torch.dtype | None = None) -> int:
    """Checksum of `tensor` as elements `offset …` of the flattened tensor `name`; parts add up modulo 2**64.

    Each element's bits, read as an integer, are multiplied by an odd key of its position, so that a changed, shifted or
    missing element changes the sum. Keys are no linear function of positions (middle squares of a Weyl sequence, Widynski,
    arXiv:1704.00358), or two rows with equal sums could change places. It guards against bugs, not against an adversary.
    `dtype`: of the tensor's values in that dtype.
    """
    dtype = dtype or tensor.dtype
    base = zlib.crc32(f"{name}:{dtype.itemsize}".encode())
    on_host, on_device = np.zeros(1, np.uint64), torch.zeros((), dtype=torch.int64, device=tensor.device)
    compiled = _COMPILED.get(dtype.itemsize) if tensor.device.type == "cpu" else None
    kernel = gpu.taken(tensor)
    for part in _parts(tensor.detach(), PART_OF_KERNEL if kernel else PART):
        plain = part.to(dtype)
        if kernel:
            from rollkeel.models.gpu.checksum import block_sums

            on_device += block_sums(plain.view(SIGNED[dtype.itemsize]), offset, base, _STEP, _HIGH, _FLIP).sum()
        elif compiled is not None and (offset & _LOW) + len(part) <= _LOW:
            first = (base + (offset & _LOW) * _STEP + (offset >> 32) * _HIGH) & _LOW
            compiled(plain.view(UNSIGNED[dtype.itemsize]).numpy(), first, on_host)
        else:
            on_device += _plain_sum(plain, base, offset)
        offset += len(part)
    return (int(on_host[0]) + int(on_device)) & MASK


def _parts(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """The elements of a tensor in order, contiguous and flat, at most `most` at one time."""
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(most) if tensor.numel() else ()
        return
    rows = most * len(tensor) // tensor.numel()
    for part in tensor.split(max(1, rows)):
        yield from (part.contiguous().view(-1),) if rows else _parts(part[0], most)


def _plain_sum(part: torch.Tensor, base: int, offset: int) -> torch.Tensor:
    size = part.element_size()
    bits = part.view(SIGNED[size]).to(torch.int64)
    position = torch.arange(offset, offset + len(part), device=part.device)
    x = (base + (position & _LOW) * _STEP + (position >> 32) * _HIGH) & _LOW
    # int64 products and sums wrap modulo 2**64, which is the arithmetic wanted here.
    key = (x * x >> 16) & _LOW | 1
    return (((bits & (2 ** (8 * size) - 1 if size < 8 else -1)) ^ _FLIP) * key).sum()
