"""Attention of one new token per sequence over the keys and values where a paged cache has them.

A row's sum has one order whatever stands beside it: keys in tiles of one size, tiles in splits of one size, splits from first
to last. So a sequence gets the same bits alone, in any batch and with any width of the table.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollkeel.models.gpu.sizes import CORE, power

SPLIT = 256
"""Keys of one program, a power of two: a few long sequences still fill a GPU."""
TILE_BYTES, WARPS, STAGES = 2**13, 1, 3
"""Bytes of the keys of one step of a program, its warps, and how many steps are on their way to it. One warp waits for no other."""
EXACT = 2**14, 4, 2
"""The same in float32, whose products have no tensor cores."""
MERGED = 8
"""Splits that are added up at once."""
NO_WINDOW = 2**30
LOWEST = tl.constexpr(-3.0e38)
"""Instead of −inf, which subtracted from itself is NaN."""


@triton.jit
def _lines(
    blocks, row_blocks, at, offset, seen, kv,
    KV: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Where the keys `at` lie, by the `blocks` of their split or, where these are not at hand, by those of the sequence."""
    if BLOCKS:
        block = tl.sum(tl.where(tl.arange(0, COUNT) == offset // SIZE, blocks, 0), 0)
        for i in tl.static_range(1, BLOCKS):
            later = tl.sum(tl.where(tl.arange(0, COUNT) == offset // SIZE + i, blocks, 0), 0)
            block = tl.where(tl.arange(0, TILE) < i * SIZE, block, later)
    else:
        block = tl.load(row_blocks + at // SIZE, mask=seen, other=0)
    return (block.to(tl.int64) * KV + kv) * SIZE + at % SIZE


@triton.jit
def _store(
    out, parts, sums, to, part, top, total, mixed,
    GROUP: tl.constexpr, VALUES: tl.constexpr, SINGLE: tl.constexpr, ROWS: tl.constexpr, VALUES_2: tl.constexpr,
):  # fmt: skip
    inside = tl.arange(0, ROWS) < GROUP
    e = tl.arange(0, VALUES_2)[None, :]
    mask = inside[:, None] & (e < VALUES)
    if SINGLE:
        tl.store(out + to[:, None] * VALUES + e, (mixed / total[:, None]).to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(parts + part[:, None] * VALUES + e, mixed, mask=mask)
        tl.store(sums + 2 * part, top, mask=inside)
        tl.store(sums + 2 * part + 1, total, mask=inside)


@triton.jit(do_not_specialize=["table_row", "splits"])
def _attend(
    query, keys, values, table, positions, sinks, out, parts, sums, scale, table_row, splits, query_row, query_head,
    KV: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, SINGLE: tl.constexpr, WIDEN: tl.constexpr, SPLIT: tl.constexpr,
    TILE: tl.constexpr, BLOCKS: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, WIDTH_2: tl.constexpr,
    VALUES_2: tl.constexpr,
):  # fmt: skip
    """One split of the keys of one sequence and key head; the group's queries are the rows of its products."""
    kv = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    position = tl.maximum(tl.load(positions + row), 0).to(tl.int32)
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
    # A key's address comes from no load of the same step, so that a step ahead need not wait for one.
    near = start // SIZE + tl.arange(0, COUNT)
    row_blocks = table + row * table_row
    blocks = tl.load(row_blocks + near, mask=near <= position // SIZE, other=0).to(tl.int32)
    begin, end = 0, SPLIT
    if not WIDEN:  # in the interpreter only constants can be bounds
        begin = tl.maximum(first - start, 0) // TILE * TILE
        end = tl.minimum(position + 1 - start, SPLIT)
    for offset in range(begin, end, TILE):
        at = start + offset + tl.arange(0, TILE)
        seen = (at <= position) & (at >= first)
        line = _lines(blocks, row_blocks, at, offset, seen, kv, KV, SIZE, TILE, BLOCKS, COUNT)
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
    part = to * splits + split
    _store(out, parts, sums, to, part, top, total, mixed, GROUP, VALUES, SINGLE, ROWS, VALUES_2)


@triton.jit(do_not_specialize=["splits"])
def _merge(
    positions,
    out,
    parts,
    sums,
    splits,
    HEADS: tl.constexpr,
    VALUES: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGED: tl.constexpr,
    VALUES_2: tl.constexpr,
):
    """The splits of one sequence and head, `MERGED` at once, from first to last."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    position = tl.maximum(tl.load(positions + row), 0).to(tl.int32)
    first, last = tl.maximum(position - WINDOW + 1, 0) // SPLIT, position // SPLIT
    to = row * HEADS + head
    e = tl.arange(0, VALUES_2)
    top = tl.full([1], LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([VALUES_2], tl.float32)
    start = first // MERGED * MERGED
    while start <= last:
        split = start + tl.arange(0, MERGED)
        seen = (split >= first) & (split <= last)
        part = to * splits + split
        own = tl.load(sums + 2 * part, mask=seen, other=LOWEST)
        own_total = tl.load(sums + 2 * part + 1, mask=seen, other=0.0)
        mask = seen[:, None] & (e < VALUES)[None, :]
        own_mixed = tl.load(parts + part[:, None] * VALUES + e[None, :], mask=mask, other=0.0)
        higher = tl.maximum(top, tl.max(own, 0))
        fade = tl.exp(top - higher)
        share = tl.exp(own - higher)
        total = total * fade + tl.sum(share * own_total, 0)
        mixed = mixed * fade + tl.sum(share[:, None] * own_mixed, 0)
        top = higher
        start += MERGED
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
    shape = sequences, heads, splits if splits > 1 else 0
    parts, sums = (query.new_empty((*shape, each), dtype=torch.float32) for each in (value_width, 2))
    wide, common = power(width, CORE), dict[str, Any](WINDOW=window or NO_WINDOW, SPLIT=SPLIT)
    common |= {"VALUES": value_width, "VALUES_2": power(value_width, CORE)}
    attend: Any = _attend[(kv_heads, sequences, splits)]
    attend(
        query,
        keys,
        values,
        table,
        positions,
        query if sinks is None else sinks,
        out,
        parts,
        sums,
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
        ROWS=power(group, CORE),
        WIDTH_2=wide,
        **common,
        **_sizes(keys, size, power(group, CORE), max(wide, power(value_width, CORE))),
    )
    if splits > 1:
        merge: Any = _merge[(heads, sequences)]
        merge(positions, out, parts, sums, splits, HEADS=heads, MERGED=MERGED, num_warps=1, **common)
    return out


def _sizes(keys: torch.Tensor, size: int, rows: int, width: int) -> Any:
    most, warps, stages = EXACT if keys.dtype == torch.float32 else (TILE_BYTES, WARPS, STAGES)
    tile = max(16, min(64, most // (width * keys.element_size())))
    launch = {"num_warps": min(8, warps * max(1, rows * width // 2048)), "num_stages": stages}
    return {"TILE": tile, "BLOCKS": _blocks(tile, size), "COUNT": power(SPLIT // size), **launch}


def _blocks(tile: int, size: int) -> int:
    """Blocks that a tile lies in, if they are few and neither tiles nor splits end within one; else 0."""
    whole = SPLIT % size == 0 if size < SPLIT else size % SPLIT == 0
    even = size % tile == 0 or tile % size == 0
    return max(1, tile // size) if whole and even and tile <= 4 * size else 0
