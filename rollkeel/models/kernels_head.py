"""Softmax over a vocabulary and its gradient in float32, where the logits lie: a row goes through a cache once."""

from __future__ import annotations

import numpy as np

from rollkeel.models.jit import entry, exp, intrinsic, types
from rollkeel.models.tiles import LANES, row
from rollkeel.models.vectors import Vectors

_ROWS = "float32[:, ::1]"
_EACH = "float32[::1]"
BLOCK = 128
"""Vectors whose sums are float32."""


@intrinsic
def _largest(context, z, vectors, lanes):
    """`lanes [LANES]` receives the largest in each lane; what is no number does not count."""

    def codegen(context, builder, signature, args):
        z, vectors, lanes = args
        code = Vectors(builder)

        def larger(n, best):
            value = code.load(code.at(z, builder.mul(n, code.number(LANES))))
            over = builder.fcmp_ordered(">", value, best[0])
            return [builder.select(over, value, best[0])]

        least = code.each(float("-inf"))
        (found,) = code.loop(vectors, [least], larger)
        code.store(found, lanes)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), codegen


@intrinsic
def _weighed(context, z, vectors, top, lanes):
    """z → exp(z − top); `lanes [2 · LANES]` receives their sums, and those of (z − top) · exp(z − top)."""

    def codegen(context, builder, signature, args):
        z, vectors, top, lanes = args
        code = Vectors(builder)
        most = code.spread(top)
        nothing = code.each(0.0)

        def weigh(n, sums):
            at = builder.mul(n, code.number(LANES))
            place = code.at(z, at)
            below = builder.fsub(code.load(place), most)
            weight = code.exp(below)
            code.store(weight, place)
            return [builder.fadd(sums[0], weight), code.call("fma", below, weight, sums[1])]

        total, mean = code.loop(vectors, [nothing, nothing], weigh)
        code.store(total, lanes)
        code.store(mean, code.at(lanes, code.number(LANES)))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32, types.intp), codegen


@intrinsic
def _sloped(context, z, vectors, normaliser, entropy, by_logprob, by_entropy):
    """z → p · (by_entropy · (log p + entropy) + by_logprob), where log p = z − normaliser."""

    def codegen(context, builder, signature, args):
        z, vectors, *rest = args
        code = Vectors(builder)
        normaliser, entropy, by_logprob, by_entropy = map(code.spread, rest)

        def slope(n, _):
            at = builder.mul(n, code.number(LANES))
            place = code.at(z, at)
            below = builder.fsub(code.load(place), normaliser)
            steep = code.call("fma", by_entropy, builder.fadd(below, entropy), by_logprob)
            code.store(builder.fmul(code.exp(below), steep), place)
            return []

        code.loop(vectors, [], slope)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, *[types.float32] * 4), codegen


@entry(_ROWS, _EACH, _EACH)
def statistics(z, normaliser, entropies):
    """Logits `z [N, V]` → probabilities; `[N]` log Σ exp(z), and the entropy of each row in nats."""
    size = z.shape[1]
    whole = size // LANES
    lanes = np.empty(2 * LANES, np.float32)
    for n in range(len(z)):
        at = z.ctypes.data + 4 * n * size
        top = np.float32(-np.inf)
        if whole:
            _largest(at, whole, lanes.ctypes.data)
            for value in lanes[:LANES]:
                top = max(top, value)
        for v in range(whole * LANES, size):
            value = z[n, v]
            if value > top:
                top = value
        total = 0.0
        mean = 0.0
        for first in range(0, whole, BLOCK):
            _weighed(at + 4 * first * LANES, min(BLOCK, whole - first), top, lanes.ctypes.data)
            total += lanes[:LANES].sum()
            mean += lanes[LANES:].sum()
        for v in range(whole * LANES, size):
            below = z[n, v] - top
            z[n, v] = exp(below) if below == below else below
            total += z[n, v]
            mean += below * z[n, v]
        above = np.log(total)
        normaliser[n] = top + above
        entropies[n] = above - mean / total
        row(z, n * size, np.float32(1 / total), z, n * size, size, 1)


@entry(_ROWS, _EACH, _EACH, _EACH, _EACH)
def gradient(z, normaliser, entropies, by_logprob, by_entropy):
    """Logits `z [N, V]` → p · (by_entropy · (log p + H) + by_logprob), of what `statistics` found in them."""
    size = z.shape[1]
    whole = size // LANES
    for n in range(len(z)):
        if whole:
            _sloped(z.ctypes.data + 4 * n * size, whole, normaliser[n], entropies[n], by_logprob[n], by_entropy[n])
        for v in range(whole * LANES, size):
            below = z[n, v] - normaliser[n]
            p = exp(below) if below == below else below
            steep = by_entropy[n] * (below + entropies[n]) + by_logprob[n]
            z[n, v] = p * steep
