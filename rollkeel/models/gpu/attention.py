"""Attention of one new token per sequence over the keys and values where a paged cache has them.

A row's sum has one order whatever stands beside it: keys in tiles of one size, tiles in splits of one size, splits from first
to last. So a sequence gets the same bits alone, in any batch and with any width of the table.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

SPLIT = 512
"""Keys of one program: a few long sequences still fill a GPU."""
TILE_BYTES = 2**14
"""Most bytes of the keys of one step of a program."""
NO_WINDOW = 2**60
LOWEST = tl.constexpr(-3.0e38)
"""Instead of −inf, which subtracted from itself is NaN."""


@triton.jit(do_not_specialize=["table_row", "splits"])
def _attend(
    query, keys, values, table, positions, sinks, out, parts, scale, table_row, splits, query_row, query_head,
    KV: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, SINGLE: tl.constexpr, WIDEN: tl.constexpr, SPLIT: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, WIDTH_2: tl.constexpr, VALUES_2: tl.constexpr,
):  # fmt: skip
    """One split of the keys of one sequence and key head; the group's queries are the rows of its products."""
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.maximum(tl.load(positions + row), 0)
    first = tl.maximum(position - WINDOW + 1, 0)
    start = split * SPLIT
    if (start > position) | (start + SPLIT <= first):
        return
    r = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH_2)
    e = tl.arange(0, VALUES_2)
    head = kv * GROUP + r
    q = tl.load(
        query + row * query_row + head[:, None] * query_head + d[None, :],
        mask=(r < GROUP)[:, None] & (d < WIDTH)[None, :],
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)
    top, total = tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32)
    if SINKS and start <= first:  # they count once
        top = tl.load(sinks + head, mask=r < GROUP, other=0.0).to(tl.float32)
        total += 1.0
    mixed = tl.zeros([ROWS, VALUES_2], tl.float32)
    for offset in range(0, SPLIT, TILE):
        at = start + offset + tl.arange(0, TILE)
        seen = (at <= position) & (at >= first)
        block = tl.load(table + row * table_row + at // SIZE, mask=seen, other=0).to(tl.int64)
        line = (block * KV + kv) * SIZE + at % SIZE
        k = tl.load(keys + line[None, :] * WIDTH + d[:, None], mask=seen[None, :] & (d < WIDTH)[:, None], other=0.0)
        v = tl.load(values + line[:, None] * VALUES + e[None, :], mask=seen[:, None] & (e < VALUES)[None, :], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp(scores - higher[:, None])
        fade = tl.exp(top - higher)
        total = total * fade + tl.sum(p, 1)
        p = p.to(v.dtype).to(q.dtype)
        mixed = mixed * fade[:, None] + tl.dot(p, v.to(q.dtype), input_precision="ieee")
        top = higher
    to = row * KV * GROUP + head
    mask = (r < GROUP)[:, None] & (e < VALUES)[None, :]
    if SINGLE:
        tl.store(out + to[:, None] * VALUES + e[None, :], (mixed / total[:, None]).to(out.dtype.element_ty), mask=mask)
    else:
        part = parts + (to * splits + split) * (VALUES + 2)
        tl.store(part[:, None] + e[None, :], mixed, mask=mask)
        tl.store(part + VALUES, top, mask=r < GROUP)
        tl.store(part + VALUES + 1, total, mask=r < GROUP)


@triton.jit(do_not_specialize=["splits"])
def _merge(
    positions,
    out,
    parts,
    splits,
    HEADS: tl.constexpr,
    VALUES: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    VALUES_2: tl.constexpr,
):
    """The splits of one sequence and head, from first to last."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.maximum(tl.load(positions + row), 0)
    split = tl.maximum(position - WINDOW + 1, 0) // SPLIT
    to = row * HEADS + head
    e = tl.arange(0, VALUES_2)
    top = tl.full([1], LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([VALUES_2], tl.float32)
    while split * SPLIT <= position:
        part = parts + (to * splits + split) * (VALUES + 2)
        own = tl.load(part + VALUES + tl.arange(0, 1))
        higher = tl.maximum(top, own)
        fade = tl.exp(top - higher)
        share = tl.exp(own - higher)
        total = total * fade + share * tl.load(part + VALUES + 1)
        own_mixed = tl.load(part + e, mask=e < VALUES, other=0.0)
        mixed = mixed * fade + own_mixed * share
        top = higher
        split += 1
    tl.store(out + to * VALUES + e, (mixed / total).to(out.dtype.element_ty), mask=e < VALUES)


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    *,
    kv_heads: int,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[S, H * dv]` attention of `query [S, H, d]`, the token at `positions [S]` of each sequence, over what `PagedCache` has.

    `keys`, `values`: `[num_blocks * kv_heads, block_size, d or dv]`, contiguous; `table [S, B]`: block ids, of which only those
    up to a row's position are read. A position below 0 counts as 0. Reads no value on the host.
    """
    sequences, heads, width = query.shape
    _, size, value_width = values.shape
    group = heads // kv_heads
    splits = -(-table.shape[1] * size // SPLIT)
    query = query if query.stride(2) == 1 else query.contiguous()
    out = query.new_empty(sequences, heads * value_width)
    parts = query.new_empty((sequences, heads, splits if splits > 1 else 0, value_width + 2), dtype=torch.float32)
    widths: Any = {"WIDTH_2": _power(width), "VALUES_2": _power(value_width)}
    tile = max(16, min(64, TILE_BYTES // (max(widths.values()) * keys.element_size())))
    common: Any = {"WINDOW": window or NO_WINDOW, "VALUES": value_width, "SPLIT": SPLIT}
    attend: Any = _attend[(sequences, kv_heads, splits)]
    attend(
        query,
        keys,
        values,
        table,
        positions,
        query if sinks is None else sinks,
        out,
        parts,
        scale,
        table.stride(0),
        splits,
        query.stride(0),
        query.stride(1),
        KV=kv_heads,
        GROUP=group,
        SIZE=size,
        WIDTH=width,
        SINKS=sinks is not None,
        SINGLE=splits == 1,
        WIDEN=not query.is_cuda,
        TILE=tile,
        ROWS=_power(group),
        **common,
        **widths,
        num_stages=2,
    )
    if splits > 1:
        merge: Any = _merge[(sequences, heads)]
        merge(positions, out, parts, splits, HEADS=heads, VALUES_2=widths["VALUES_2"], **common)
    return out


def _power(count: int) -> int:
    """Rows and columns of a product: at least what a tensor core takes."""
    return max(16, 1 << (count - 1).bit_length())
