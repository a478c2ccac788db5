"""The sum of `rollkeel.models.checksum` in one read."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Elements of a program."""


@triton.jit(do_not_specialize=["offset", "base"])
def _sum(
    elements,
    sums,
    count,
    offset,
    base,
    MASK: tl.constexpr,
    STEP: tl.constexpr,
    HIGH: tl.constexpr,
    FLIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of `BLOCK` elements, which begin at position `offset` of their tensor; all modulo 2**32 or 2**64."""
    program = tl.program_id(0).to(tl.int64)
    i = program * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(elements + i, mask=i < count, other=0).to(tl.uint64) & MASK
    position = (offset + i).to(tl.uint64)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    x = (low * STEP + high * HIGH + base.to(tl.uint32)).to(tl.uint64)
    key = ((x * x >> 16) & 0xFFFFFFFF) | 1
    total = tl.sum(tl.where(i < count, (bits ^ FLIP) * key, 0), 0)
    tl.store(sums + program, total.to(tl.int64))


def block_sums(bits: torch.Tensor, offset: int, base: int, step: int, high: int, flip: int) -> torch.Tensor:
    """int64, whose sum is that of `bits`, contiguous and flat integers of any width at `offset` of a tensor."""
    size = 8 * bits.element_size()
    sums = torch.empty(-(-len(bits) // BLOCK), dtype=torch.int64, device=bits.device)
    kernel: Any = _sum[(len(sums),)]
    kernel(
        bits,
        sums,
        len(bits),
        offset,
        base,
        MASK=2**size - 1,
        STEP=step,
        HIGH=high,
        FLIP=flip,
        BLOCK=BLOCK,
    )
    return sums
