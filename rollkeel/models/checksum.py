"""A checksum of weights that depends on position and adds up over parts."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from rollkeel.models.jit import FOUND, entry

MASK = 2**64 - 1
_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOW, _STEP, _HIGH, _FLIP = 2**32 - 1, 0x9E3779B1, 0x85EBCA77, 0x5BD1E995


def _sum(bits, base, brief, out):  # type: ignore[no-untyped-def]
    """out[0] = the checksum in one pass, where PyTorch makes ten; for fewer than 2**31 elements.

    `brief`: of float32 bits as the nearest bfloat16.
    """
    total = np.uint64(0)
    if brief:
        for i in range(len(bits)):
            b = np.int32(bits[i])
            short = (b + np.int32(0x7FFF) + ((b >> np.int32(16)) & np.int32(1))) >> np.int32(16)
            value = np.uint32(np.int32(0x7FC0) if (b & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000) else short)
            x = np.uint64(np.uint32(np.uint32(i) * np.uint32(_STEP) + base))
            key = ((x * x) >> np.uint64(16)) & np.uint64(_LOW) | np.uint64(1)
            total += np.uint64((value & np.uint32(0xFFFF)) ^ np.uint32(_FLIP)) * key
    else:
        for i in range(len(bits)):
            x = np.uint64(np.uint32(np.uint32(i) * np.uint32(_STEP) + base))
            key = ((x * x) >> np.uint64(16)) & np.uint64(_LOW) | np.uint64(1)
            total += np.uint64(np.uint32(bits[i]) ^ np.uint32(_FLIP)) * key
    out[0] = total


_COMPILED = {
    width: entry(f"uint{8 * width}[::1]", "uint32", "boolean", "uint64[::1]")(_sum)
    for width in ((2, 4) if FOUND else ())
}
"""By bytes per element."""


def tensor_checksum(name: str, tensor: torch.Tensor, offset: int = 0, dtype: torch.dtype | None = None) -> int:
    """Checksum of `tensor` as elements `offset …` of the flattened tensor `name`; parts add up modulo 2**64.

    Each element's bits, read as an integer, are multiplied by an odd key of its position, so that a changed, shifted or
    missing element changes the sum. Keys are no linear function of positions (middle squares of a Weyl sequence, Widynski,
    arXiv:1704.00358), or two rows with equal sums could change places. It guards against bugs, not against an adversary.
    `dtype`: of the tensor's values in that dtype.
    """
    size = tensor.element_size()
    whole = tensor.device.type == "cpu" and tensor.numel() < 2**31 and (offset & _LOW) + tensor.numel() <= _LOW
    compiled = _COMPILED.get(size) if whole else None
    brief = compiled is not None and tensor.dtype == torch.float32 and dtype == torch.bfloat16
    if dtype is not None and dtype != tensor.dtype and not brief:
        tensor = tensor.to(dtype)
        size = tensor.element_size()
        compiled = compiled and _COMPILED.get(size)
    base = zlib.crc32(f"{name}:{2 if brief else size}".encode())
    plain = tensor.detach().contiguous()
    if compiled is not None:
        out = np.empty(1, np.uint64)
        first = (base + (offset & _LOW) * _STEP + (offset >> 32) * _HIGH) & _LOW
        compiled(plain.view(torch.uint16 if size == 2 else torch.uint32).numpy().reshape(-1), first, brief, out)
        return int(out[0])
    bits = plain.view(_WIDTH[size]).flatten().to(torch.int64)
    position = torch.arange(offset, offset + bits.numel(), dtype=torch.int64, device=bits.device)
    x = (base + (position & _LOW) * _STEP + (position >> 32) * _HIGH) & _LOW
    # int64 products and sums wrap modulo 2**64, which is the arithmetic wanted here.
    key = (x * x >> 16) & _LOW | 1
    total = (((bits & (2 ** (8 * size) - 1 if size < 8 else -1)) ^ _FLIP) * key).sum()
    return int(total.item()) & MASK
