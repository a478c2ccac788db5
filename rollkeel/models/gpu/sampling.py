"""One token per row of logits, drawn by inverting the CDF: one read of the row, and a second one of the block it falls into.

Blocks have one size, and are added up from first to last: for a uniform number a row has one token, whatever else is in the batch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollkeel.models.gpu.sizes import power

BLOCK = 2048
"""Logits of one program."""
LOWEST = tl.constexpr(-3.0e38)
"""Instead of −inf, which subtracted from itself is NaN."""


@triton.jit
def _sums(logits, tops, totals, blocks, V: tl.constexpr, BLOCK: tl.constexpr):
    """Largest logit of a block, and Σ e^(z − largest)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    lane = block * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * V + lane, mask=lane < V, other=float("-inf"))
    top = tl.maximum(tl.max(z, 0), LOWEST)
    tl.store(tops + row * blocks + block, top)
    tl.store(totals + row * blocks + block, tl.sum(tl.exp(z - top), 0))


@triton.jit
def _draw(
    logits,
    tops,
    totals,
    uniform,
    ids,
    logprobs,
    blocks,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_2: tl.constexpr,
):
    """The block in which the CDF of a row crosses `uniform` of its total, then the token of the block."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCKS_2)
    top = tl.load(tops + row * blocks + j, mask=j < blocks, other=LOWEST)
    highest = tl.max(top, 0)
    mass = tl.load(totals + row * blocks + j, mask=j < blocks, other=0.0) * tl.exp(top - highest)
    total = tl.sum(mass, 0)
    threshold = (tl.load(uniform + row) * total).to(tl.float32)
    block = _crossing(tl.cumsum(mass, 0), mass, threshold, j, BLOCKS_2)
    before = tl.sum(tl.where(j < block, mass, 0.0), 0)
    i = tl.arange(0, BLOCK)
    lane = block * BLOCK + i
    z = tl.load(logits + row * V + lane, mask=lane < V, other=float("-inf"))
    e = tl.exp(z - highest)
    chosen = _crossing(tl.cumsum(e, 0), e, threshold - before, i, BLOCK)
    token = tl.minimum(block * BLOCK + chosen, V - 1)
    tl.store(ids + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.load(logits + row * V + token) - highest - tl.log(total))


@triton.jit
def _crossing(cdf, mass, threshold, i, COUNT: tl.constexpr):
    """The first of `i` with mass whose CDF is above the threshold; where rounding leaves none, the last with mass."""
    first = tl.min(tl.where((cdf > threshold) & (mass > 0), i, COUNT), 0)
    last = tl.max(tl.where(mass > 0, i, 0), 0)
    return tl.minimum(first, last)


def draw(logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[B]` int64 ids and float32 log-probs of softmax(`logits [B, V]`) at `uniform [B]` (float64). NaN in a row: NaN and any id."""
    rows, vocabulary = logits.shape
    logits = logits.contiguous()
    blocks = -(-vocabulary // BLOCK)
    tops = logits.new_empty(rows, blocks)
    totals = torch.empty_like(tops)
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = logits.new_empty(rows)
    sums: Any = _sums[(rows, blocks)]
    sums(logits, tops, totals, blocks, V=vocabulary, BLOCK=BLOCK)
    drawn: Any = _draw[(rows,)]
    drawn(
        logits,
        tops,
        totals,
        uniform,
        ids,
        logprobs,
        blocks,
        V=vocabulary,
        BLOCK=BLOCK,
        BLOCKS_2=power(blocks),
    )
    return ids, logprobs
