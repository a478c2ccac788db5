"""A checksum of weights that depends on position and adds up over parts."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from rollkeel.models.jit import FOUND, entry

MASK = 2**64 - 1
_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum(bits, offset, key, brief, out):  # type: ignore[no-untyped-def]
    """out[0] = the checksum in one pass, where PyTorch makes six; for fewer than 2**31 elements.

    `brief`: of float32 bits as the nearest bfloat16. What all positions share is summed apart: a product of two 32-bit
    numbers is one instruction, one of 64 bits is five.
    """
    plain = placed = np.int64(0)
    if brief:
        for i in range(len(bits)):
            b = np.int32(bits[i])
            short = (b + np.int32(0x7FFF) + ((b >> np.int32(16)) & np.int32(1))) >> np.int32(16)
            value = np.int64(np.int32(0x7FC0) if (b & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000) else short)
            plain += value
            placed += value * np.int64(np.int32(i))
    else:
        for i in range(len(bits)):
            value = np.int64(bits[i])
            plain += value
            placed += value * np.int64(np.int32(i))
    n, first = np.int64(len(bits)), np.int64(2) * offset + key
    out[0] = np.int64(2) * placed + first * plain + np.int64(0x9E3779B9) * (n * (n - np.int64(1)) + n * first)


_COMPILED = {
    width: entry(f"int{8 * width}[::1]", "int64", "int64", "boolean", "int64[::1]")(_sum)
    for width in ((2, 4) if FOUND else ())
}
"""By bytes per element."""


def tensor_checksum(name: str, tensor: torch.Tensor, offset: int = 0, dtype: torch.dtype | None = None) -> int:
    """Checksum of `tensor` as elements `offset …` of the flattened tensor `name`; parts add up modulo 2**64.

    Each element's bits, read as an integer, are multiplied by an odd number that grows with its position, so a changed,
    swapped, shifted or missing element changes the sum. It guards against bugs, not against an adversary. `dtype`: of the
    tensor's values in that dtype.
    """
    compiled = _COMPILED.get(tensor.element_size()) if tensor.device.type == "cpu" and tensor.numel() < 2**31 else None
    brief = compiled is not None and tensor.dtype == torch.float32 and dtype == torch.bfloat16
    if dtype is not None and dtype != tensor.dtype and not brief:
        tensor = tensor.to(dtype)
        compiled = compiled and _COMPILED.get(tensor.element_size())
    bits = tensor.detach().contiguous().view(_WIDTH[tensor.element_size()]).flatten()
    key = (zlib.crc32(name.encode()) << 1 | 1) + ((2 if brief else tensor.element_size()) << 40)
    # int64 products and sums wrap modulo 2**64, which is the arithmetic wanted here.
    if compiled is not None:
        out = np.empty(1, np.int64)
        compiled(bits.numpy(), offset, key, brief, out)
        return int(out[0]) & MASK
    bits = bits.to(torch.int64)
    position = torch.arange(offset, offset + bits.numel(), dtype=torch.int64, device=bits.device)
    total = ((bits + 0x9E3779B9) * (2 * position + key)).sum()
    return int(total.item()) & MASK
