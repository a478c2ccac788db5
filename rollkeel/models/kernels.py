"""The arithmetic of `CompiledDecode` as numba functions: two calls per step where PyTorch needs four hundred.

At decode sizes a layer is a hundred microseconds of arithmetic inside as much dispatch. Here `layers` is the whole stack of
norms, rotary embedding, attention over the paged cache where it lies, routing and experts, and `draw` is the head, the draw
and its bookkeeping. A row's bits are its own, whatever is beside it. Needs numba (extra `cpu`) and float32; elsewhere `FastForward`
does the same in PyTorch.
"""

from __future__ import annotations

import math

import numpy as np

from rollkeel.models.jit import carray, entry, exp, jit, pointer
from rollkeel.models.tiles import DOTS, dots, dots_at, mix, up

UNROLL = 8
"""Keys, or logits, per pass of an unrolled loop."""
WEIGHTS = ("norm1", "qkv", "qkv_bias", "qk_norm", "out", "norm2", "router", "up", "down")
"""Columns of a layer's row of addresses (0: it has none); keys, values, experts, top-k and expert width follow."""


@jit
def _rows(work, at, n, width):
    """`[n, width]` of the scratch `work` from float `at` on, and where the next begins, at a line of the cache."""
    return work[at : at + n * width].reshape(n, width), (at + n * width + 15) // 16 * 16


@jit
def _rms(x, weight, eps, out):
    for n in range(x.shape[0]):
        total = np.float32(0)
        for d in range(x.shape[1]):
            total += x[n, d] * x[n, d]
        scale = np.float32(1) / np.sqrt(total / np.float32(x.shape[1]) + eps)
        for d in range(x.shape[1]):
            out[n, d] = x[n, d] * scale * weight[d]


@jit
def _top(s, n):
    """Largest of s[:n], n ≥ 1; eight comparisons side by side, because one chain of them waits for itself."""
    a = b = c = d = e = f = g = h = s[0]
    for t in range(0, n - n % UNROLL, UNROLL):
        a = max(a, s[t])
        b = max(b, s[t + 1])
        c = max(c, s[t + 2])
        d = max(d, s[t + 3])
        e = max(e, s[t + 4])
        f = max(f, s[t + 5])
        g = max(g, s[t + 6])
        h = max(h, s[t + 7])
    for t in range(n - n % UNROLL, n):
        a = max(a, s[t])
    return max(max(max(a, b), max(c, d)), max(max(e, f), max(g, h)))


@jit
def _rotate(qkv, heads, kv_heads, norm, eps, positions, cos, sin):
    """Head norm (if `norm` has rows: of queries, of keys) and rotary embedding of the queries and keys in `qkv [N, all, d]`."""
    half = qkv.shape[2] // 2
    for n in range(qkv.shape[0]):
        for h in range(heads + kv_heads):
            v = qkv[n, h]
            if norm.shape[0]:
                total = np.float32(0)
                for d in range(2 * half):
                    total += v[d] * v[d]
                scale = np.float32(1) / np.sqrt(total / np.float32(2 * half) + eps)
                weight = norm[0 if h < heads else 1]
                for d in range(2 * half):
                    v[d] = v[d] * scale * weight[d]
            c, s = cos[positions[n]], sin[positions[n]]
            for d in range(half):
                a, b = v[d], v[d + half]
                v[d] = a * c[d] - b * s[d]
                v[d + half] = b * c[d] + a * s[d]


@jit
def _attend(qkv, heads, kv_heads, keys, values, table, positions, scale, scores, out):
    """Store each token's key and value in its block, then attend over the sequence's blocks; `out [N, heads * d]`.

    `scores [heads / kv_heads, most keys]` is scratch."""
    size = keys.shape[1]
    width = qkv.shape[2]
    group = heads // kv_heads
    for b in range(qkv.shape[0]):
        n = positions[b] + 1
        blocks = (n + size - 1) // size
        for h in range(kv_heads):
            row = table[b, positions[b] // size] * kv_heads + h
            keys[row, positions[b] % size] = qkv[b, heads + h]
            values[row, positions[b] % size] = qkv[b, heads + kv_heads + h]
            for j in range(blocks):
                of, at = keys[table[b, j] * kv_heads + h].ctypes.data, scores.ctypes.data + 4 * j * size
                # A few more than there are cost less than the odd ones; nobody reads them.
                count = min(size, up(n - j * size, DOTS))
                dots_at(qkv[b, h * group].ctypes.data, group, of, count, width, at, scores.shape[1], 1)
            for g in range(group):
                s = scores[g]
                top = _top(s, n)
                for t in range(n):
                    s[t] = exp(scale * (s[t] - top))
                total = np.float32(0)
                for t in range(n):
                    total += s[t]
                o = out[b, (h * group + g) * width : (h * group + g + 1) * width]
                for j in range(blocks):
                    of, at = values[table[b, j] * kv_heads + h].ctypes.data, s.ctypes.data + 4 * j * size
                    mix(at, of, min(size, n - j * size), width, o.ctypes.data, j == 0)
                for d in range(width):
                    o[d] /= total


@jit
def _route(h, router, normalise, chosen, weights):
    """The `k` most probable experts of each token and their weights, most probable first."""
    experts, k = router.shape[0], chosen.shape[1]
    p = np.empty(experts, np.float32)
    for n in range(h.shape[0]):
        for e in range(experts):
            dot = np.float32(0)
            for d in range(h.shape[1]):
                dot += h[n, d] * router[e, d]
            p[e] = dot
        top = _top(p, experts)
        total = np.float32(0)
        for e in range(experts):
            p[e] = exp(p[e] - top)
            total += p[e]
        kept = np.float32(0)
        for i in range(k):
            best = 0
            for e in range(experts):
                if p[e] > p[best]:
                    best = e
            chosen[n, i], weights[n, i] = best, p[best] / total
            kept += weights[n, i]
            p[best] = -1
        if normalise:
            for i in range(k):
                weights[n, i] /= kept


@jit
def _experts(h, up, down, chosen, weights, x, work, free):
    """x += Σ weight · expert(h) over each token's chosen experts; one matrix product per expert and projection."""
    n, k = chosen.shape
    wide = up.shape[1]
    width = down.shape[2]
    dim = h.shape[1]
    start = np.zeros(up.shape[0] + 1, np.int64)
    for t in range(n):
        for i in range(k):
            start[chosen[t, i] + 1] += 1
    for e in range(up.shape[0]):
        start[e + 1] += start[e]
    at = start.copy()
    rows, free = _rows(work, free, n * k, dim)
    mid, free = _rows(work, free, n * k, wide)
    act, free = _rows(work, free, n * k, width)
    place = np.empty((n, k), np.int64)
    for t in range(n):
        for i in range(k):
            j = at[chosen[t, i]]
            at[chosen[t, i]] += 1
            rows[j], place[t, i] = h[t], j
    for e in range(up.shape[0]):
        a, b = start[e], start[e + 1]
        if a == b:
            continue
        dots(rows[a:b], up[e], mid[a:b], 1)
        for j in range(a, b):
            gate = mid[j, :width]
            up_part = mid[j, width:]
            out = act[j]
            for d in range(width):
                out[d] = gate[d] / (np.float32(1) + exp(min(-gate[d], np.float32(80)))) * up_part[d]
        dots(act[a:b], down[e], rows[a:b], 1)
    for t in range(n):
        for i in range(k):
            w, y = weights[t, i], rows[place[t, i]]
            for d in range(dim):
                x[t, d] += w * y[d]


_INT, _ROWS, _FLOAT, _ROW = "int64[::1]", "int64[:, ::1]", "float32[::1]", "float32[:, ::1]"


@entry(
    _INT, _INT, _INT, _ROWS, _ROW, _ROW, _ROW, _FLOAT, _ROWS, _INT, _FLOAT, "int64[:, :, ::1]", _FLOAT, _ROW
)  # fmt: skip
def layers(active, token, position, table, embedding, cos, sin, norm, rows, shape, scalars, chosen, work, h):
    """Final-norm hidden states `h [N, D]` of the last token of every active slot; arguments: see `compiled.py`."""
    heads, kv_heads, width, blocks, size = shape
    eps = scalars[0]
    scale = scalars[1]
    normalise = scalars[2] > 0
    count = len(active)
    dim = embedding.shape[1]
    all_heads = heads + 2 * kv_heads
    x, free = _rows(work, 0, count, dim)
    qkv, free = _rows(work, free, count, all_heads * width)
    mixed, free = _rows(work, free, count, heads * width)
    parts, scores = (
        qkv.reshape(count, all_heads, width),
        np.empty((heads // kv_heads, table.shape[1] * size), np.float32),
    )
    positions, own = np.empty(count, np.int64), np.empty((count, table.shape[1]), np.int64)
    for n in range(count):
        x[n], positions[n], own[n] = embedding[token[active[n]]], position[active[n]], table[active[n]]
    moe = 0
    for layer in range(len(rows)):
        at = rows[layer]
        experts = at[11]
        k = at[12]
        inner = at[13]
        _rms(x, carray(pointer(at[0]), (dim,)), eps, h)
        dots(h, carray(pointer(at[1]), (all_heads * width, dim)), qkv, 1)
        if at[2]:
            bias = carray(pointer(at[2]), (all_heads * width,))
            for n in range(count):
                for d in range(len(bias)):
                    qkv[n, d] += bias[d]
        norms = carray(pointer(at[3]), (2 if at[3] else 0, width))
        _rotate(parts, heads, kv_heads, norms, eps, positions, cos, sin)
        keys = carray(pointer(at[9]), (blocks * kv_heads, size, width))
        values = carray(pointer(at[10]), (blocks * kv_heads, size, width))
        _attend(parts, heads, kv_heads, keys, values, own, positions, scale, scores, mixed)
        dots(mixed, carray(pointer(at[4]), (dim, heads * width)), x, 0)
        _rms(x, carray(pointer(at[5]), (dim,)), eps, h)
        picked, weights = np.zeros((count, k), np.int64), np.ones((count, k), np.float32)
        if at[6]:
            _route(h, carray(pointer(at[6]), (experts, dim)), normalise, picked, weights)
            if len(chosen):
                chosen[moe] = picked
            moe += 1
        up, down = carray(pointer(at[7]), (experts, 2 * inner, dim)), carray(pointer(at[8]), (experts, dim, inner))
        _experts(h, up, down, picked, weights, x, work, free)
    _rms(x, norm, eps, h)


@jit
def _uniform(key, counter):
    """As `engines.rng.uniforms`: SplitMix64 of the request's key and the token's index, in [0, 1)."""
    x = np.uint64(key) + (np.uint64(counter) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.float64((x ^ (x >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@jit
def _pick(p, sums, uniform):
    """Index drawn from unnormalised `p [V]` by inverting its CDF, and Σ p. `sums`: scratch, one per 64 entries."""
    total = 0.0
    for j in range(len(sums)):
        part = np.float32(0)
        for v in range(64 * j, min(64 * j + 64, len(p))):
            part += p[v]
        sums[j] = part
        total += np.float64(part)
    left = uniform * total
    j = 0
    while j + 1 < len(sums) and left >= sums[j]:
        left -= sums[j]
        j += 1
    last = 64 * j
    for v in range(64 * j, min(64 * j + 64, len(p))):
        if p[v] > 0:
            last = v  # rounding may leave a remainder behind the last of the 64: the last possible one has it
            if left < p[v]:
                break
            left -= p[v]
    return last, total


@entry(
    _INT, _ROW, _ROW, _FLOAT, _INT, _INT, _INT, _INT, _INT, _INT, _ROWS, _ROWS, _ROW, _ROW, _ROW, "uint8[:, ::1]"
)  # fmt: skip
def draw(
    active,
    hidden,
    head,
    temperature,
    key,
    token,
    position,
    made,
    limit,
    drawn,
    stop,
    ids,
    logprobs,
    kept,
    logits,
    ended,
):
    """One token for every active slot and what `Slots.record` notes of it; `ended [3, N]`: stopped, out of room, not finite."""
    vocabulary = head.shape[0]
    dots(hidden, head, logits, 1)
    p = np.empty(vocabulary, np.float32)
    sums = np.empty((vocabulary + 63) // 64, np.float32)
    for n in range(len(active)):
        slot = active[n]
        z = logits[n]
        if temperature[slot] != 1:
            for v in range(vocabulary):
                z[v] /= temperature[slot]
        top = _top(z, vocabulary)
        for v in range(vocabulary):
            p[v] = exp(z[v] - top)
        chosen, total = _pick(p, sums, _uniform(key[slot], drawn[slot]))
        logprob = (
            np.float32(min(np.float64(z[chosen]) - np.float64(top) - math.log(total), 0.0))
            if total == total
            else np.float32(np.nan)
        )
        at = made[slot]
        ids[slot, at], logprobs[slot, at], kept[slot, at] = chosen, logprob, 1
        token[slot] = chosen
        position[slot] += 1
        made[slot] += 1
        drawn[slot] += 1
        ended[0, n], ended[1, n], ended[2, n] = 0, at + 1 >= limit[slot], not math.isfinite(logprob)
        for i in range(stop.shape[1]):
            if stop[slot, i] == chosen:
                ended[0, n] = 1
