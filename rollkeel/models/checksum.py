"""A checksum of weights that depends on position and adds up over parts."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from rollkeel.models.jit import FOUND, entry

MASK = 2**64 - 1
_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@entry("int32[::1]", "int64", "int64", "int64[::1]")
def _sum(bits, offset, key, out):  # type: ignore[no-untyped-def]
    """out[0] = the checksum of 4-byte elements in one pass, where PyTorch makes six."""
    total = np.int64(0)
    for i in range(len(bits)):
        total += (np.int64(bits[i]) + np.int64(0x9E3779B9)) * (np.int64(2) * (offset + i) + key)
    out[0] = total


def tensor_checksum(name: str, tensor: torch.Tensor, offset: int = 0) -> int:
    """Checksum of `tensor` as elements `offset …` of the flattened tensor `name`; parts add up modulo 2**64.

    Each element's bits, read as an integer, are multiplied by an odd number that grows with its position, so a changed,
    swapped, shifted or missing element changes the sum. It guards against bugs, not against an adversary.
    """
    bits = tensor.detach().contiguous().view(_WIDTH[tensor.element_size()]).flatten()
    key = (zlib.crc32(name.encode()) << 1 | 1) + (tensor.element_size() << 40)
    # int64 products and sums wrap modulo 2**64, which is the arithmetic wanted here.
    if FOUND and bits.dtype == torch.int32 and bits.device.type == "cpu":
        out = np.empty(1, np.int64)
        _sum(bits.numpy(), offset, key, out)
        return int(out[0]) & MASK
    bits = bits.to(torch.int64)
    position = torch.arange(offset, offset + bits.numel(), dtype=torch.int64, device=bits.device)
    total = ((bits + 0x9E3779B9) * (2 * position + key)).sum()
    return int(total.item()) & MASK
