"""The operations of `parity.py` as numba functions, each output element by one order of IEEE operations.

No `fastmath`: the compiler may take many elements at once but must not change the order of one's sums, nor fuse a product
with a sum on its own. Where they are fused, `fma` says so. So an element is a function of its inputs alone, whatever
else is in the batch, on every machine.
"""

from __future__ import annotations

import math

import numpy as np

from rollkeel.models.jit import as_float, fma, strict, strict_entry

TILE = 128
"""Inputs whose products are added up before they join the rest: longer sums lose more."""
WIDE = 64
"""Outputs computed together."""


@strict
def _exp(x):
    """`exp` of `jit.py` with its order of operations kept."""
    lost = x - x  # NaN where x is not finite, which a minimum would hide
    x = min(max(x, np.float32(-87.0)), np.float32(87.0))
    e = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - e * np.float32(0.693359375) - e * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = as_float(np.int32((np.int32(e) + np.int32(127)) << np.int32(23)))
    return (p * r * r + r + np.float32(1.0)) * power + lost


@strict
def _dot(a, b):
    """Σ a · b by eight sums side by side, joined in pairs."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0)
    whole = len(a) - len(a) % 8
    for i in range(0, whole, 8):
        s0, s1 = fma(a[i], b[i], s0), fma(a[i + 1], b[i + 1], s1)
        s2, s3 = fma(a[i + 2], b[i + 2], s2), fma(a[i + 3], b[i + 3], s3)
        s4, s5 = fma(a[i + 4], b[i + 4], s4), fma(a[i + 5], b[i + 5], s5)
        s6, s7 = fma(a[i + 6], b[i + 6], s6), fma(a[i + 7], b[i + 7], s7)
    for i in range(whole, len(a)):
        s0 = fma(a[i], b[i], s0)
    return ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))


@strict
def _tile(x, panel, total, out, begins):
    """Add one tile's products to `out`, or begin it."""
    for j in range(len(total)):
        total[j] = np.float32(0)
    whole = len(x) - len(x) % 8
    for i in range(0, whole, 8):
        a = x[i]
        b = x[i + 1]
        c = x[i + 2]
        d = x[i + 3]
        e = x[i + 4]
        f = x[i + 5]
        g = x[i + 6]
        h = x[i + 7]
        for j in range(len(total)):
            t = fma(a, panel[i, j], total[j])
            t = fma(b, panel[i + 1, j], t)
            t = fma(c, panel[i + 2, j], t)
            t = fma(d, panel[i + 3, j], t)
            t = fma(e, panel[i + 4, j], t)
            t = fma(f, panel[i + 5, j], t)
            t = fma(g, panel[i + 6, j], t)
            total[j] = fma(h, panel[i + 7, j], t)
    for i in range(whole, len(x)):
        for j in range(len(total)):
            total[j] = fma(x[i], panel[i, j], total[j])
    for j in range(len(total)):
        out[j] = total[j] if begins else out[j] + total[j]


_INT, _TABLE, _FLOAT, _ROW, _CUBE = (
    "int64[::1]",
    "int64[:, ::1]",
    "float32[::1]",
    "float32[:, ::1]",
    "float32[:, :, ::1]",
)


@strict_entry(_ROW, _CUBE, _INT, _ROW)
def matmul(x, weight, starts, out):
    """out [M, N] = rows `starts[e]` to `starts[e + 1]` of x [M, K] @ weight[e] [N, K]ᵀ.

    An element is a sum over tiles of `TILE` inputs, and a tile a chain of fused products, both in the order of the inputs.
    """
    count, width = weight.shape[1], x.shape[1]
    panel, total = np.empty((TILE, WIDE), np.float32), np.empty(WIDE, np.float32)
    for e in range(weight.shape[0]):
        first, last = starts[e], starts[e + 1]
        if first == last:
            continue
        for n in range(0, count, WIDE):
            wide = min(WIDE, count - n)
            for k in range(0, width, TILE):
                deep = min(TILE, width - k)
                for j in range(wide):
                    for i in range(deep):
                        panel[i, j] = weight[e, n + j, k + i]
                for m in range(first, last):
                    _tile(x[m, k : k + deep], panel, total[:wide], out[m, n : n + wide], k == 0)


@strict_entry(_ROW, _FLOAT, "float32", _ROW)
def norm(x, weight, eps, out):
    """out = x · weight / rms(x) per row of `x [N, D]`."""
    for n in range(x.shape[0]):
        scale = np.float32(1) / np.sqrt(_dot(x[n], x[n]) / np.float32(x.shape[1]) + eps)
        for d in range(x.shape[1]):
            out[n, d] = x[n, d] * scale * weight[d]


@strict_entry(_INT, _FLOAT, "float64", _ROW, _ROW)
def angles(positions, frequency, factor, cos, sin):
    """cos, sin [N, d/2] of position · frequency, in float64 until the end."""
    for n in range(len(positions)):
        for d in range(len(frequency)):
            angle = np.float64(np.float32(positions[n]) * frequency[d])
            cos[n, d], sin[n, d] = math.cos(angle) * factor, math.sin(angle) * factor


@strict_entry(_ROW, _ROW)
def swiglu(wide, out):
    """silu(gate) · up of `wide [N, 2W]` = [gate | up]."""
    width = out.shape[1]
    for n in range(len(out)):
        gate = wide[n, :width]
        up = wide[n, width:]
        to = out[n]
        for d in range(width):
            to[d] = gate[d] / (np.float32(1) + _exp(-gate[d])) * up[d]


@strict
def _scores(query, keys, scale, s):
    """s = scale · query · keys[:, t], each a chain of fused products over `query [d]`; `keys [d, L]`."""
    for t in range(len(s)):
        s[t] = np.float32(0)
    whole = len(query) - len(query) % 4
    for d in range(0, whole, 4):
        w = query[d]
        x = query[d + 1]
        y = query[d + 2]
        z = query[d + 3]
        for t in range(len(s)):
            a = fma(x, keys[d + 1, t], fma(w, keys[d, t], s[t]))
            s[t] = fma(z, keys[d + 3, t], fma(y, keys[d + 2, t], a))
    for d in range(whole, len(query)):
        for t in range(len(s)):
            s[t] = fma(query[d], keys[d, t], s[t])
    for t in range(len(s)):
        s[t] *= scale


@strict
def _mix(s, values, o):
    """o = Σ s · values / Σ s, both in the order of `values [L, d]`."""
    for d in range(len(o)):
        o[d] = np.float32(0)
    whole, total = len(s) - len(s) % 4, np.float32(0)
    for t in range(0, whole, 4):
        w = s[t]
        x = s[t + 1]
        y = s[t + 2]
        z = s[t + 3]
        total = total + w + x + y + z
        for d in range(len(o)):
            a = fma(x, values[t + 1, d], fma(w, values[t, d], o[d]))
            o[d] = fma(z, values[t + 3, d], fma(y, values[t + 2, d], a))
    for t in range(whole, len(s)):
        total += s[t]
        for d in range(len(o)):
            o[d] = fma(s[t], values[t, d], o[d])
    for d in range(len(o)):
        o[d] /= total


@strict_entry(_CUBE, _CUBE, _CUBE, _TABLE, _INT, _INT, "int64", "float32", _CUBE)
def attend(query, keys, values, table, sequence, seen, kv_heads, scale, out):
    """out [N, H, d]: each of `query [N, H, d]` over the first `seen [N]` keys of its `sequence [N]`, in their order.

    `keys`, `values [blocks · KV, size, d]`; `table [S, B]`: the blocks of each sequence. A packed row is blocks of one token.
    """
    size = keys.shape[1]
    group = query.shape[1] // kv_heads
    width = query.shape[2]
    longest = 0
    for n in range(len(seen)):
        longest = max(longest, seen[n])
    scores = np.empty(longest, np.float32)
    own_keys, own_values = np.empty((width, longest), np.float32), np.empty((longest, width), np.float32)
    for kv in range(kv_heads):
        gathered = 0
        for n in range(len(query)):
            if n == 0 or sequence[n] != sequence[n - 1]:
                gathered = 0
            while gathered < seen[n]:
                row, at = table[sequence[n], gathered // size] * kv_heads + kv, gathered % size
                for d in range(width):
                    own_keys[d, gathered], own_values[gathered, d] = keys[row, at, d], values[row, at, d]
                gathered += 1
            s = scores[: seen[n]]
            for h in range(kv * group, (kv + 1) * group):
                _scores(query[n, h], own_keys, scale, s)
                top = np.float32(-np.inf)
                for t in range(len(s)):
                    top = max(top, s[t])
                for t in range(len(s)):
                    s[t] = _exp(s[t] - top)
                _mix(s, own_values, out[n, h])


@strict_entry(_ROW, "boolean", "boolean", _TABLE, _ROW)
def route(logits, given, normalise, chosen, weights):
    """The `k` largest of `logits [N, E]`, ties to the lower id, unless `chosen [N, k]` is given; and their softmax weights."""
    experts, k = logits.shape[1], chosen.shape[1]
    p = np.empty(experts, np.float32)
    for n in range(len(logits)):
        top = logits[n, 0]
        for e in range(experts):
            top = max(top, logits[n, e])
        total = np.float32(0)
        for e in range(experts):
            p[e] = _exp(logits[n, e] - top)
            total += p[e]
        kept = np.float32(0)
        for i in range(k):
            best = chosen[n, i] if given else 0
            if not given:
                best = -1
                for e in range(experts):
                    taken = False
                    for j in range(i):
                        taken |= chosen[n, j] == e
                    if not taken and (best < 0 or logits[n, e] > logits[n, best]):
                        best = e
            chosen[n, i], weights[n, i] = best, p[best] / total
            kept += weights[n, i]
        if normalise:
            for i in range(k):
                weights[n, i] /= kept


@strict_entry(_ROW, "float64[::1]")
def log_normaliser(logits, out):
    """log Σ exp of each row of `logits [N, V]`."""
    p = np.empty(logits.shape[1], np.float32)
    for n in range(len(logits)):
        row = logits[n]
        top = row[0]
        for v in range(len(row)):
            top = max(top, row[v])
        for v in range(len(row)):
            p[v] = _exp(row[v] - top)
        total = 0.0
        for v in range(len(row)):
            total += np.float64(p[v])
        out[n] = np.float64(top) + math.log(total)
