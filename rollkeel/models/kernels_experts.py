"""SwiGLU experts in float32, forward and backward, for a block of tokens at a time: what it passes through stays in a cache.

A product per expert writes what comes between to memory and reads it again, half a dozen times. What a token comes to does not depend
on which others are in its block.
"""

from __future__ import annotations

import numpy as np

from rollkeel.models.jit import entry, intrinsic, jit, types
from rollkeel.models.tiles import LANES, ROWS, aligned, product, row, turn, up
from rollkeel.models.vectors import Vectors

BLOCK = 64
"""Tokens."""
MOST = 80.0  # of which e to the power is a number


def _sigmoid(code, gate):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(−gate)) of a vector; what is no number stays."""
    builder = code.builder
    most = code.each(MOST)
    one = code.each(1.0)
    power = builder.fneg(gate)
    over = builder.fcmp_ordered(">", power, most)
    power = builder.select(over, most, power)
    return builder.fdiv(one, builder.fadd(one, code.exp(power)))


@intrinsic
def _gate(context, hidden, width, out):
    """`out [width]` = silu(gate) · up of `hidden` = [gate | up], by addresses; a multiple of LANES."""

    def codegen(context, builder, signature, args):
        hidden, width, out = args
        code = Vectors(builder)
        ups = code.at(hidden, width)

        def put(n, _):
            at = builder.mul(n, code.number(LANES))
            gate = code.load(code.at(hidden, at))
            silu = builder.fmul(gate, _sigmoid(code, gate))
            active = builder.fmul(silu, code.load(code.at(ups, at)))
            code.store(active, code.at(out, at))
            return []

        code.loop(builder.udiv(width, code.number(LANES)), [], put)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), codegen


@intrinsic
def _gate_backward(context, hidden, width, slope, share, active, out, dots):
    """Of `active` = `share` · silu(gate) · up, whose gradient is `slope [width]`: itself, the gradient `out [2 · width]` by `hidden`, and
    in LANES `dots`, to be added up, that by `share`. silu'(x) = σ(x) + silu(x) · (1 − σ(x))."""

    def codegen(context, builder, signature, args):
        hidden, width, slope, share, active, out, dots = args
        code = Vectors(builder)
        factor = code.spread(share)
        one = code.each(1.0)
        ups = code.at(hidden, width)
        outs = code.at(out, width)

        def put(n, sums):
            at = builder.mul(n, code.number(LANES))
            gate = code.load(code.at(hidden, at))
            up_ = code.load(code.at(ups, at))
            d = code.load(code.at(slope, at))
            sigmoid = _sigmoid(code, gate)
            silu = builder.fmul(gate, sigmoid)
            whole = builder.fmul(silu, up_)
            total = code.call("fma", whole, d, sums[0])
            code.store(builder.fmul(whole, factor), code.at(active, at))
            d = builder.fmul(d, factor)
            steep = code.call("fma", silu, builder.fsub(one, sigmoid), sigmoid)
            code.store(builder.fmul(builder.fmul(d, up_), steep), code.at(out, at))
            code.store(builder.fmul(d, silu), code.at(outs, at))
            return [total]

        (total,) = code.loop(builder.udiv(width, code.number(LANES)), [code.each(0.0)], put)
        code.store(total, dots)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3, types.float32, *[types.intp] * 3), codegen


@jit
def _at(x, n):
    """Address of a row."""
    return x.ctypes.data + 4 * n * x.shape[1]


@jit
def _taken(x, order, top_k, first, count, block):
    """The tokens of these pairs, and zeros up to the next whole tile."""
    size = x.shape[1]
    for i in range(count):
        row(x, order[first + i] // top_k * size, 1, block, i * size, size, 1)
    block[count : up(count, ROWS)] = 0


_X = "float32[:, ::1]"
_ORDER = "int64[::1]"
_BOUNDS = "int64[:, ::1]"
_WEIGHT = "float32[:, :, ::1]"


@entry(_X, _X, _ORDER, _BOUNDS, _WEIGHT, _WEIGHT, _X, _X)
def forward(x, weights, order, bounds, gate_up, down, hidden, out):
    """Adds to `out [N, D]` what experts make of `x [N, D]`, each token's by its weights.

    `weights [N, K]`; `order [N · K]` sorts (token, slot) pairs by expert. `bounds [B, 4]`: expert, its first pair and the one behind its
    last, and the row of `hidden` from which on their [gate | up] is kept, for whole tiles. `gate_up [E, 2W, D]`, `down [E, D, W]`; D and
    W are multiples of COLUMNS.
    """
    size = x.shape[1]
    width = down.shape[2]
    top_k = weights.shape[1]
    wide = aligned(size, 2 * width)
    back = aligned(width, size)
    rows = aligned(BLOCK, size)
    active = aligned(BLOCK, width)
    made = aligned(BLOCK, size)
    for n in range(len(bounds)):
        expert, begin, end, place = bounds[n]
        turn(gate_up[expert], wide)
        turn(down[expert], back)
        for first in range(begin, end, BLOCK):
            count = min(BLOCK, end - first)
            kept = hidden[place + first - begin :]
            _taken(x, order, top_k, first, count, rows)
            product(rows, size, 1, wide, kept, count, size, 1)
            for i in range(up(count, ROWS)):
                _gate(_at(kept, i), width, _at(active, i))
            product(active, width, 1, back, made, count, width, 1)
            for i in range(count):
                token, slot = divmod(order[first + i], top_k)
                row(made, i * size, weights[token, slot], out, token * size, size, 0)


@entry(_X, _X, _X, _ORDER, _BOUNDS, _WEIGHT, _WEIGHT, _X, _X, _X, _WEIGHT, _WEIGHT)
def backward(g, x, weights, order, bounds, gate_up, down, hidden, d_x, d_weights, d_gate_up, d_down):
    """Gradients of `forward`, whose result has gradient `g [N, D]`: written to `d_weights [N, K]`, added to `d_x [N, D]`, and to
    `d_gate_up` and `d_down`, of which there are none for experts that do not learn."""
    size = x.shape[1]
    width = down.shape[2]
    top_k = weights.shape[1]
    rows = aligned(BLOCK, size)
    grads = aligned(BLOCK, size)
    active = aligned(BLOCK, width)
    slopes = aligned(BLOCK, width)
    steep = aligned(BLOCK, 2 * width)
    made = aligned(BLOCK, size)
    dots = np.empty(LANES, np.float32)
    for n in range(len(bounds)):
        expert, begin, end, place = bounds[n]
        for first in range(begin, end, BLOCK):
            count = min(BLOCK, end - first)
            whole = up(count, ROWS)
            kept = hidden[place + first - begin :]
            _taken(g, order, top_k, first, count, grads)
            product(grads, size, 1, down[expert], slopes, count, size, 1)
            for i in range(whole):
                token, slot = divmod(order[first + min(i, count - 1)], top_k)
                share = weights[token, slot]
                total = dots.ctypes.data
                _gate_backward(_at(kept, i), width, _at(slopes, i), share, _at(active, i), _at(steep, i), total)
                if i < count:
                    d_weights[token, slot] = dots.sum()
            if len(d_down):
                _taken(x, order, top_k, first, count, rows)
                product(grads, 1, size, active, d_down[expert], size, whole, 0)
                product(steep, 1, 2 * width, rows, d_gate_up[expert], 2 * width, whole, 0)
            product(steep, 2 * width, 1, gate_up[expert], made, count, 2 * width, 1)
            for i in range(count):
                row(made, i * size, 1, d_x, order[first + i] // top_k * size, size, 0)


@entry(_X, _BOUNDS, _WEIGHT, _X)
def grouped(x, bounds, weight, out):
    """`out [P, M]` = rows of `x [P, D]`, sorted by expert, times their expert's `weight [E, M, D]`; the bits of `forward`, as those below."""
    size = x.shape[1]
    width = weight.shape[1]
    turned = aligned(size, width)
    rows = aligned(BLOCK, size)
    made = aligned(BLOCK, width)
    for n in range(len(bounds)):
        expert, begin, end, _ = bounds[n]
        turn(weight[expert], turned)
        for first in range(begin, end, BLOCK):
            count = min(BLOCK, end - first)
            rows[:count] = x[first : first + count]
            rows[count : up(count, ROWS)] = 0
            product(rows, size, 1, turned, made, count, size, 1)
            out[first : first + count] = made[:count]


@entry(_X, _X)
def gated(hidden, out):
    """`out [P, W]` = silu(gate) · up of `hidden [P, 2W]`."""
    for n in range(len(hidden)):
        _gate(_at(hidden, n), out.shape[1], _at(out, n))


@entry(_X, _X, _ORDER, _BOUNDS, _X)
def combined(rows, weights, order, bounds, out):
    """Adds to `out [N, D]` the `rows [P, D]` of these experts, which are sorted, each times the weight of its pair."""
    size = rows.shape[1]
    for n in range(len(bounds)):
        for pair in range(bounds[n, 1], bounds[n, 2]):
            token, slot = divmod(order[pair], weights.shape[1])
            row(rows, pair * size, weights[token, slot], out, token * size, size, 0)
