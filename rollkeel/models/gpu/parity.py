"""The operations of `rollkeel.models.parity` as kernels: a row's values are a function of that row, whatever is computed beside it.

Tiles have one size and are added up in one order; a row's place in its tile moves none of its sums. Values inside are float32,
products of lower precision are summed in float32. The bits are those of the card and its compiler, not those of a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollkeel.models.gpu import layers
from rollkeel.models.gpu.decode import gated
from rollkeel.models.gpu.sizes import CORE, power

ROWS, COLUMNS, DEEP = 64, 64, 64
"""Rows, columns and inputs of one tile of a product."""
TILE = 64
"""Keys of one step of attention."""
BLOCK = 1024
LOWEST = tl.constexpr(-3.0e38)
"""Instead of −inf, which subtracted from itself is NaN."""


@triton.jit
def _matmul(
    x, weight, starts, out, N: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """A tile of the rows of one expert."""
    expert = tl.program_id(2).to(tl.int64)
    first = tl.load(starts + expert) + tl.program_id(0) * ROWS
    last = tl.load(starts + expert + 1)
    if first >= last:
        return
    m = first + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, K, DEEP):
        k = start + tl.arange(0, DEEP)
        a = tl.load(x + m[:, None] * K + k[None, :], mask=(m < last)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(
            weight + (expert * N + n[None, :]) * K + k[:, None], mask=(n < N)[None, :] & (k < K)[:, None], other=0.0
        )
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(out + m[:, None] * N + n[None, :], total, mask=(m < last)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["table_row"])
def _attend(
    query, keys, values, table, sequence, seen, out, scale, table_row,
    KV: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, D_2: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The queries of one token over a key head."""
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    count = tl.load(seen + row)
    blocks = table + tl.load(sequence + row) * table_row
    r = tl.arange(0, ROWS)
    d = tl.arange(0, D_2)
    mine = (r < GROUP)[:, None] & (d < D)[None, :]
    at_query = ((row * KV + kv) * GROUP + r)[:, None] * D + d[None, :]
    q = tl.load(query + at_query, mask=mine, other=0.0).to(tl.float32)
    top, total = tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, D_2], tl.float32)
    start = count * 0
    while start < count:
        at = start + tl.arange(0, TILE)
        there = at < count
        line = (tl.load(blocks + at // SIZE, mask=there, other=0) * KV + kv) * SIZE + at % SIZE
        k = tl.load(keys + line[None, :] * D + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(values + line[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
        scores = tl.dot(q, k.to(tl.float32), input_precision="ieee") * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp(scores - higher[:, None])
        fade = tl.exp(top - higher)
        total = total * fade + tl.sum(p, 1)
        mixed = mixed * fade[:, None] + tl.dot(p, v.to(tl.float32), input_precision="ieee")
        top = higher
        start += TILE
    tl.store(out + at_query, (mixed / total[:, None]).to(out.dtype.element_ty), mask=mine)


@triton.jit
def _route(
    logits, chosen, weights, E: tl.constexpr, E_2: tl.constexpr, K: tl.constexpr, K_2: tl.constexpr,
    GIVEN: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E_2)
    j = tl.arange(0, K_2)
    left = tl.load(logits + row * E + e, mask=e < E, other=float("-inf"))
    p = tl.where(e < E, tl.exp(left - tl.max(left, 0)), 0.0)
    total = tl.sum(p, 0)
    taken = tl.load(chosen + row * K + j, mask=j < K, other=0)
    shares = tl.zeros([K_2], tl.float32)
    kept = 0.0
    for i in tl.static_range(K):
        if GIVEN:
            best = tl.sum(tl.where(j == i, taken, 0), 0)
        else:
            best = tl.min(tl.where(left == tl.max(left, 0), e, E - 1), 0)
            left = tl.where(e == best, float("-inf"), left)
            taken = tl.where(j == i, best, taken)
        share = tl.sum(tl.where(e == best, p, 0.0), 0) / total
        shares = tl.where(j == i, share, shares)
        kept += share
    if NORMALISE:
        shares = shares / kept
    tl.store(weights + row * K + j, shares, mask=j < K)
    if not GIVEN:
        tl.store(chosen + row * K + j, taken, mask=j < K)


@triton.jit
def _normaliser(logits, tops, totals, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    for start in range(0, V, BLOCK):
        z = tl.load(logits + row * V + start + lane, mask=start + lane < V, other=LOWEST)
        top = tl.maximum(top, z)
    highest = tl.max(top, 0)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, V, BLOCK):
        z = tl.load(logits + row * V + start + lane, mask=start + lane < V, other=float("-inf"))
        total += tl.exp(z - highest).to(tl.float64)
    tl.store(tops + row, highest)
    tl.store(totals + row, tl.sum(total, 0))


def matmul(x: torch.Tensor, weight: torch.Tensor, starts: Any) -> torch.Tensor:
    """See `rollkeel.models.parity.matmul`; `starts` may lie on the device. Of one matrix they are all rows."""
    x, weight = x.contiguous(), weight.contiguous()
    experts, columns, width = weight.shape
    if experts == 1:  # made there: a CUDA graph records no copy from the host
        starts = torch.arange(2, device=x.device) * len(x)
    starts = torch.as_tensor(starts, dtype=torch.int64).to(x.device)
    out = torch.empty(len(x), columns, device=x.device)
    kernel: Any = _matmul[(-(-len(x) // ROWS), -(-columns // COLUMNS), experts)]
    sizes: Any = {"ROWS": ROWS, "COLUMNS": COLUMNS, "DEEP": DEEP, "WIDEN": not x.is_cuda}
    kernel(x.to(weight.dtype), weight, starts, out, N=columns, K=width, **sizes)
    return out


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x · weight / rms(x) over the last dimension, in the dtype of `x`."""
    with torch.no_grad():
        return layers.norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)


def swiglu(wide: torch.Tensor) -> torch.Tensor:
    """See `rollkeel.models.parity.swiglu`."""
    return gated(wide, once=True)


def angles(positions: torch.Tensor, frequency: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin `[N, 1, d/2]` of position · frequency, in float64 until the end."""
    angle = (positions.float()[:, None, None] * frequency).double()
    return (angle.cos() * factor).float(), (angle.sin() * factor).float()


def route(logits: torch.Tensor, given: bool, normalise: bool, chosen: torch.Tensor, weights: torch.Tensor) -> None:
    """The k largest of `logits [N, E]`, ties to the lower id, into `chosen [N, k]` unless they are `given`; their shares."""
    experts, count = logits.shape[1], chosen.shape[1]
    kernel: Any = _route[(len(logits),)]
    sizes: Any = {"E": experts, "E_2": power(experts), "K": count, "K_2": power(count)}
    kernel(logits.contiguous(), chosen, weights, **sizes, GIVEN=given, NORMALISE=normalise)


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, where: Any, kv_heads: int, scale: float
) -> torch.Tensor:
    """`[N, H, d]`; see `rollkeel.models.parity.attention`."""
    q, keys, values = q.contiguous(), keys.contiguous(), values.contiguous()
    table, sequence, seen = (torch.as_tensor(t).to(q.device) for t in where)
    out, width = torch.empty_like(q), q.shape[2]
    kernel: Any = _attend[(len(q), kv_heads)]
    group = q.shape[1] // kv_heads
    sizes: Any = {
        "KV": kv_heads,
        "GROUP": group,
        "SIZE": keys.shape[1],
        "D": width,
        "D_2": power(width, CORE),
    }
    kernel(
        q, keys, values, table, sequence, seen, out, scale, table.stride(0),
        **sizes, ROWS=power(group, CORE), TILE=TILE,
    )  # fmt: skip
    return out


def log_normaliser(z: torch.Tensor) -> torch.Tensor:
    """`[n, 1]` float64: log Σ exp of each row of `z [n, V]`."""
    tops, totals = z.new_empty(len(z), 1), z.new_empty(len(z), 1, dtype=torch.float64)
    kernel: Any = _normaliser[(len(z),)]
    kernel(z.contiguous(), tops, totals, V=z.shape[1], BLOCK=BLOCK)
    return tops.double() + totals.log()
