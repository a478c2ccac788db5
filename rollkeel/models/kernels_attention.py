"""Causal attention over a packed row of float32, forward and backward, where the parts lie: no padding, no copies by length, no mask.

`QUERIES` queries of a head are taken at a time, as columns, behind all of the keys that the last of them sees; their scores fit into a
cache. What a query comes to does not depend on which others are in the row.
"""

from __future__ import annotations

import numpy as np

from rollkeel.models.jit import entry, jit
from rollkeel.models.tiles import COLUMNS, QUERIES, ROWS, aligned, largest, product, row, sloped, turn, up, weighed


@jit
def _most(spans):
    """Keys that a part sees at most, rounded up to whole tiles."""
    most = 0
    for s in range(len(spans)):
        most = max(most, spans[s, 1] - spans[s, 0] + spans[s, 3] - spans[s, 2])
    return up(most, ROWS)


@jit
def _token(span, t):
    """The token of key t of a part; the keys of its prefix come first."""
    known = span[3] - span[2]
    return span[2] + t if t < known else span[0] + t - known


@jit
def _gathered(x, head, width, span, seen, out):
    """The first `seen` rows of this head in `x [N, heads · width]` that a part of this span sees."""
    for t in range(seen):
        row(x, _token(span, t) * x.shape[1] + head * width, 1, out, t * out.shape[1], width, 1)


@jit
def _spread(rows, head, width, span, seen, x):
    """The reverse, added to `x`."""
    for t in range(seen):
        row(rows, t * rows.shape[1], 1, x, _token(span, t) * x.shape[1] + head * width, width, 0)


@jit
def _columns(x, head, width, first, count, factor, rows, columns):
    """`rows [QUERIES, ·]` = factor · `count` rows of this head from `first` on, zeros behind them, and the same as `columns`."""
    for i in range(count):
        row(x, (first + i) * x.shape[1] + head * width, factor, rows, i * rows.shape[1], width, 1)
    rows[count:] = 0
    turn(rows, columns)


@entry(
    "float32[:, ::1]", "float32[:, ::1]", "float32[:, ::1]", "int64[:, ::1]", "int64[::1]", "float32",
    "float32[:, ::1]", "float32[:, :, ::1]",
)  # fmt: skip
def attend(q, k, v, spans, shape, scale, out, sums):
    """`out [N, heads · width]` of `q` of that shape, `k` and `v [N, kv_heads · width]`.

    `spans [S, 4]`: first token of each part and of what follows it, and the same of the part that it continues (0, 0: none).
    `shape`: heads, kv_heads, width, and the first kv_head that is computed here and the one behind the last.
    `sums [heads, N, 2]`: largest score of each query, and 1 / Σ exp(score − largest), for `attend_backward`.
    """
    heads, kv_heads, width, from_head, to_head = shape
    group = heads // kv_heads
    wide = up(width, COLUMNS)
    most = _most(spans)
    keys = aligned(most, wide)
    values = aligned(most, wide)
    scores = aligned(most, QUERIES)
    rows = aligned(QUERIES, wide)
    columns = aligned(wide, QUERIES)
    mixed = aligned(QUERIES, wide)
    top = np.empty(QUERIES, np.float32)
    total = np.empty(QUERIES, np.float32)
    one = np.ones(QUERIES, np.float32)
    for s in range(len(spans)):
        first, end, prefix, prefix_end = spans[s]
        known = prefix_end - prefix
        every = known + end - first
        for head in range(from_head * group, to_head * group):
            if head % group == 0:
                _gathered(k, head // group, width, spans[s], every, keys)
                _gathered(v, head // group, width, spans[s], every, values)
            for start in range(first, end, QUERIES):
                count = min(QUERIES, end - start)
                sure = known + start - first
                seen = sure + count
                _columns(q, head, width, start, count, scale, rows, columns)
                product(keys, wide, 1, columns, scores, seen, width, 1)
                largest(scores, seen, sure, top)
                weighed(scores, seen, sure, top, one, total)
                product(scores, 1, QUERIES, values, mixed, QUERIES, seen, 1)
                for i in range(count):
                    share = np.float32(1) / total[i]
                    sums[head, start + i, 0] = top[i]
                    sums[head, start + i, 1] = share
                    row(mixed, i * wide, share, out, (start + i) * out.shape[1] + head * width, width, 1)


@entry(
    "float32[:, ::1]", "float32[:, ::1]", "float32[:, ::1]", "float32[:, ::1]", "int64[:, ::1]", "int64[::1]", "float32",
    "float32[:, :, ::1]", "float32[:, ::1]", "float32[:, ::1]", "float32[:, ::1]",
)  # fmt: skip
def attend_backward(g, q, k, v, spans, shape, scale, sums, dq, dk, dv):
    """Gradients of `attend` by q, written to `dq`, and by k and v, added to `dk` and `dv`; `g [N, heads · width]` is that of its result."""
    heads, kv_heads, width, from_head, to_head = shape
    group = heads // kv_heads
    wide = up(width, COLUMNS)
    most = _most(spans)
    keys = aligned(most, wide)
    values = aligned(most, wide)
    d_keys = aligned(most, wide)
    d_values = aligned(most, wide)
    weights = aligned(most, QUERIES)
    slopes = aligned(most, QUERIES)
    mixed = aligned(QUERIES, wide)
    rows = aligned(QUERIES, wide)
    columns = aligned(wide, QUERIES)
    g_rows = aligned(QUERIES, wide)
    g_columns = aligned(wide, QUERIES)
    top = np.empty(QUERIES, np.float32)
    share = np.empty(QUERIES, np.float32)
    total = np.empty(QUERIES, np.float32)
    for s in range(len(spans)):
        first, end, prefix, prefix_end = spans[s]
        known = prefix_end - prefix
        every = known + end - first
        for head in range(from_head * group, to_head * group):
            if head % group == 0:
                _gathered(k, head // group, width, spans[s], every, keys)
                _gathered(v, head // group, width, spans[s], every, values)
                d_keys[:every] = 0
                d_values[:every] = 0
            for start in range(first, end, QUERIES):
                count = min(QUERIES, end - start)
                sure = known + start - first
                seen = sure + count
                _columns(q, head, width, start, count, scale, rows, columns)
                _columns(g, head, width, start, count, np.float32(1), g_rows, g_columns)
                top[:] = 0
                share[:] = 0
                for i in range(count):
                    top[i] = sums[head, start + i, 0]
                    share[i] = sums[head, start + i, 1]
                product(keys, wide, 1, columns, weights, seen, width, 1)
                product(values, wide, 1, g_columns, slopes, seen, width, 1)
                whole = up(seen, ROWS)
                weights[seen:whole] = 0
                slopes[seen:whole] = 0
                weighed(weights, seen, sure, top, share, total)
                product(weights, QUERIES, 1, g_rows, d_values, seen, QUERIES, 0)
                sloped(weights, slopes, seen)
                product(slopes, QUERIES, 1, rows, d_keys, seen, QUERIES, 0)
                product(slopes, 1, QUERIES, keys, mixed, QUERIES, seen, 1)
                for i in range(count):
                    row(mixed, i * wide, scale, dq, (start + i) * dq.shape[1] + head * width, width, 1)
            if head % group == group - 1:
                _spread(d_keys, head // group, width, spans[s], every, dk)
                _spread(d_values, head // group, width, spans[s], every, dv)
