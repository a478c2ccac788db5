"""Arithmetic of small float32 matrices inside of numba kernels, as fast as the processor computes: loops that are left to the compiler
reach a third of that, and a BLAS costs a call for each.

An element is one chain of operations in one order, whatever the processor's vectors hold; those of `dots` are sums of as many chains as a
vector has lanes. What calls an intrinsic is `strict`: its caller's freedom would be its own.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from rollkeel.models.jit import WIDE, carray, intrinsic, ir, jit, pointer, strict, types
from rollkeel.models.vectors import LANES, QUERIES, Vectors

ROWS, COLUMNS = (8 if WIDE else 4), 2 * LANES
"""Of what `_tile` computes at a time: as much as registers hold."""
DOTS = 4
"""Columns of what `_dots` computes at a time, with as many rows as their sums fill a vector."""


def _tile_of(rows: int) -> Any:
    @intrinsic
    def tile(context, a, a_row, a_step, b, b_step, c, c_row, count, fresh):
        """c[i, j] (fresh ≠ 0: =, else +=) Σ a[i · a_row + k · a_step] · b[k · b_step + j] over k < count, of `rows` × COLUMNS elements.

        `a`, `b`, `c` are addresses, the others numbers of floats; count > 0."""

        def codegen(context, builder, signature, args):
            a, a_row, a_step, b, b_step, c, c_row, count, fresh = args
            code = Vectors(builder)
            wide = [code.number(j) for j in range(0, COLUMNS, LANES)]
            each = [code.number(i) for i in range(rows)]
            places = [code.at(c, builder.mul(c_row, i), j) for i in each for j in wide]
            anew = builder.icmp_signed("!=", fresh, code.number(0))
            sums = [builder.select(anew, code.each(0.0), code.load(place)) for place in places]

            def add(k, sums):
                factors = [code.load(code.at(b, builder.mul(k, b_step), j)) for j in wide]
                column = builder.mul(k, a_step)
                made = []
                for n, i in enumerate(each):
                    address = builder.inttoptr(code.at(a, column, builder.mul(a_row, i)), code.single.as_pointer())
                    one = code.spread(builder.load(address))
                    made += [code.call("fma", one, f, sums[n * len(wide) + m]) for m, f in enumerate(factors)]
                return made

            for place, value in zip(places, code.loop(count, sums, add), strict=True):
                code.store(value, place)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9), codegen

    return tile


_tile, _strip = _tile_of(ROWS), _tile_of(1)


@intrinsic
def _turned(context, a, a_row, b, b_row):
    """b = aᵀ of LANES × LANES floats: rows are shuffled into each other until they are columns."""

    def codegen(context, builder, signature, args):
        a, a_row, b, b_row = args
        code = Vectors(builder)
        order = [[n // 2 + LANES * (n % 2) + half for n in range(LANES)] for half in (0, LANES // 2)]
        masks = [ir.VectorType(code.index, LANES)(each) for each in order]
        rows = [code.load(code.at(a, builder.mul(a_row, code.number(i)))) for i in range(LANES)]
        for _ in range(LANES.bit_length() - 1):
            pairs = zip(rows[: LANES // 2], rows[LANES // 2 :], strict=True)
            rows = [builder.shuffle_vector(one, other, mask) for one, other in pairs for mask in masks]
        for i, value in enumerate(rows):
            code.store(value, code.at(b, builder.mul(b_row, code.number(i))))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), codegen


def _rows_of(lanes: int) -> Any:
    @intrinsic
    def rows(context, a, factor, b, vectors, fresh):
        """b (fresh ≠ 0: =, else +=) factor · a of so many vectors, of `lanes` floats each."""

        def codegen(context, builder, signature, args):
            a, factor, b, vectors, fresh = args
            code = Vectors(builder, lanes)
            scale, anew = code.spread(factor), builder.icmp_signed("!=", fresh, code.number(0))

            def put(n, _):
                at = builder.mul(n, code.number(lanes))
                place = code.at(b, at)
                before = builder.select(anew, code.each(0.0), code.load(place))
                code.store(code.call("fma", scale, code.load(code.at(a, at)), before), place)
                return []

            code.loop(vectors, [], put)
            return context.get_dummy_value()

        return types.void(types.intp, types.float32, *[types.intp] * 3), codegen

    return rows


_vectors, _singles = _rows_of(LANES), _rows_of(1)


@intrinsic
def _largest(context, scores, seen, sure, top):
    """`top [QUERIES]` receives the largest of scores [seen, QUERIES] that each query sees."""

    def codegen(context, builder, signature, args):
        scores, seen, sure, top = args
        code = Vectors(builder)
        least = code.each(float("-inf"))

        def larger(t, best):
            made = []
            for place, sees, most in zip(code.columns(scores, t), code.visible(t, sure), best, strict=True):
                score = builder.select(sees, code.load(place), least)
                made.append(builder.select(builder.fcmp_ordered(">", score, most), score, most))
            return made

        best = code.loop(seen, [least] * (QUERIES // LANES), larger)
        code.keep(best, top)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), codegen


@intrinsic
def _weighed(context, scores, seen, sure, top, share, total):
    """scores → exp(score − top) · share, 0 where a query does not see, and their sums; `top`, `share`, `total [QUERIES]`."""

    def codegen(context, builder, signature, args):
        scores, seen, sure, top, share, total = args
        code = Vectors(builder)
        nothing = code.each(0.0)
        known = [[code.load(place) for place in code.columns(each, code.number(0))] for each in (top, share)]

        def weigh(t, sums):
            made = []
            for place, sees, most, part, one in zip(
                code.columns(scores, t), code.visible(t, sure), *known, sums, strict=True
            ):
                weight = builder.fmul(code.exp(builder.fsub(code.load(place), most)), part)
                weight = builder.select(sees, weight, nothing)
                code.store(weight, place)
                made.append(builder.fadd(one, weight))
            return made

        code.keep(code.loop(seen, [nothing] * (QUERIES // LANES), weigh), total)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), codegen


@intrinsic
def _sloped(context, weights, slopes, seen):
    """slopes → weights · (slopes − Σ weights · slopes of the column): the backward of a softmax."""

    def codegen(context, builder, signature, args):
        weights, slopes, seen = args
        code = Vectors(builder)

        def add(t, sums):
            both = zip(code.columns(weights, t), code.columns(slopes, t), sums, strict=True)
            return [code.call("fma", code.load(weight), code.load(slope), total) for weight, slope, total in both]

        pull = code.loop(seen, [code.each(0.0)] * (QUERIES // LANES), add)

        def put(t, _):
            for weight, slope, total in zip(code.columns(weights, t), code.columns(slopes, t), pull, strict=True):
                code.store(builder.fmul(code.load(weight), builder.fsub(code.load(slope), total)), slope)
            return []

        code.loop(seen, [], put)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), codegen


def _dots_of(rows: int) -> Any:
    @intrinsic
    def dots(context, a, b, width, c, c_row, fresh):
        """c[i, j] (fresh ≠ 0: =, else +=) a[i] · b[j], rows of `width` ≥ LANES floats, of `rows` rows of a and DOTS of b.

        Each lane's sum is kept by itself, and all are added up at the end in one order."""

        def codegen(context, builder, signature, args):
            a, b, width, c, c_row, fresh = args
            code, part = Vectors(builder), Vectors(builder, DOTS)
            ours = [code.at(a, builder.mul(width, code.number(i))) for i in range(rows)]
            theirs = [code.at(b, builder.mul(width, code.number(j))) for j in range(DOTS)]

            def add(at, sums, only=lambda value: value):
                factors = [code.load(code.at(place, at)) for place in theirs]
                ones = [only(code.load(code.at(place, at))) for place in ours]
                pairs = itertools.product(ones, factors)
                return [code.call("fma", *pair, total) for pair, total in zip(pairs, sums, strict=True)]

            lanes = code.number(LANES)
            vectors, left = builder.udiv(width, lanes), builder.urem(width, lanes)
            nothing = [code.each(0.0)] * (rows * DOTS)
            sums = code.loop(vectors, nothing, lambda k, sums: add(builder.mul(k, lanes), sums))
            before, ragged = builder.block, builder.icmp_signed(">", left, code.number(0))
            with builder.if_then(ragged):  # the last LANES floats of a row, without those that were there already
                seen = code.spread(builder.trunc(builder.sub(lanes, left), code.index))
                unseen = builder.icmp_signed(">=", ir.VectorType(code.index, LANES)(list(range(LANES))), seen)
                more = add(builder.sub(width, lanes), sums, lambda v: builder.select(unseen, v, code.each(0.0)))
                inside = builder.block
            total = [builder.phi(code.vector) for _ in sums]
            for place, without, also in zip(total, sums, more, strict=True):
                place.add_incoming(without, before)
                place.add_incoming(also, inside)
            summed, anew = code.summed(total), builder.icmp_signed("!=", fresh, code.number(0))
            for i in range(rows):
                order = ir.VectorType(code.index, DOTS)(list(range(i * DOTS, (i + 1) * DOTS)))
                place = part.at(c, builder.mul(c_row, part.number(i)))
                had = builder.select(anew, part.each(0.0), part.load(place))
                part.store(builder.fadd(had, builder.shuffle_vector(summed, summed, order)), place)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), codegen

    return dots


_dots, _few = _dots_of(LANES // DOTS), _dots_of(1)


@jit
def aligned(rows, columns):
    """`[rows, columns]` at the beginning of a line of the cache."""
    memory = np.empty(rows * columns + 16, np.float32)
    skip = (64 - memory.ctypes.data % 64) % 64 // 4
    return memory[skip : skip + rows * columns].reshape(rows, columns)


@jit
def up(n, size):
    """The next multiple."""
    return (n + size - 1) // size * size


@strict
def product(a, a_row, a_step, b, c, rows, count, fresh):
    """c [rows, b's columns] (=, +=) a @ b of `count` rows of b; element (i, k) of a lies at i · a_row + k · a_step.

    `rows` are rounded up to whole tiles, so far all arrays have memory; columns are a multiple of COLUMNS."""
    for j in range(0, b.shape[1], COLUMNS):
        for i in range(0, rows, ROWS):
            _tile(
                a.ctypes.data + 4 * i * a_row,
                a_row,
                a_step,
                b.ctypes.data + 4 * j,
                b.shape[1],
                c.ctypes.data + 4 * (i * c.shape[1] + j),
                c.shape[1],
                count,
                fresh,
            )


@strict
def _row(a, factor, b, width, fresh):
    whole = width // LANES
    done = 4 * whole * LANES
    if whole:
        _vectors(a, factor, b, whole, fresh)
    if width % LANES:
        _singles(a + done, factor, b + done, width % LANES, fresh)


@strict
def row(a, a_at, factor, b, b_at, width, fresh):
    """b (=, +=) factor · a of `width` floats from `a_at` and `b_at` on, whatever the shapes of the arrays."""
    _row(a.ctypes.data + 4 * a_at, np.float32(factor), b.ctypes.data + 4 * b_at, width, fresh)


@jit
def turn(a, b):
    """b = aᵀ; both sides are multiples of LANES."""
    for i in range(0, a.shape[0], LANES):
        for j in range(0, a.shape[1], LANES):
            _turned(
                a.ctypes.data + 4 * (i * a.shape[1] + j),
                a.shape[1],
                b.ctypes.data + 4 * (j * b.shape[1] + i),
                b.shape[1],
            )


@jit
def largest(scores, seen, sure, top):
    _largest(scores.ctypes.data, seen, sure, top.ctypes.data)


@jit
def weighed(scores, seen, sure, top, share, total):
    _weighed(scores.ctypes.data, seen, sure, top.ctypes.data, share.ctypes.data, total.ctypes.data)


@jit
def sloped(weights, slopes, seen):
    _sloped(weights.ctypes.data, slopes.ctypes.data, seen)


@strict
def dots_at(a, rows, b, columns, width, c, c_row, fresh):
    """c [rows, columns] (=, +=) a [rows, width] @ b [columns, width]ᵀ, by addresses; c's rows begin `c_row` floats apart.

    An element has the same bits whatever the others are and however many."""
    if width < LANES or columns < DOTS:
        first, second = carray(pointer(a), (rows, width)), carray(pointer(b), (columns, width))
        out = carray(pointer(c), (rows, c_row))
        for i in range(rows):
            for j in range(columns):
                total = np.float32(0)
                for k in range(width):
                    total += first[i, k] * second[j, k]
                out[i, j] = total if fresh else out[i, j] + total
        return
    some = LANES // DOTS
    whole, most = rows - rows % some, columns - columns % DOTS
    for j in range(0, most, DOTS):
        for i in range(0, whole, some):
            _dots(a + 4 * i * width, b + 4 * j * width, width, c + 4 * (i * c_row + j), c_row, fresh)
        for i in range(whole, rows):
            _few(a + 4 * i * width, b + 4 * j * width, width, c + 4 * (i * c_row + j), c_row, fresh)
    if most < columns:
        first, kept, out = columns - DOTS, np.empty(DOTS, np.float32), carray(pointer(c), (rows, c_row))
        for i in range(rows):
            _few(a + 4 * i * width, b + 4 * first * width, width, kept.ctypes.data, DOTS, 1)
            for j in range(most, columns):
                out[i, j] = kept[j - first] if fresh else out[i, j] + kept[j - first]


@strict
def dots(a, b, out, fresh):
    """out [M, N] (=, +=) a [M, K] @ b [N, K]ᵀ."""
    dots_at(a.ctypes.data, len(a), b.ctypes.data, len(b), a.shape[1], out.ctypes.data, len(b), fresh)


@strict
def mix(weights, values, count, width, out, fresh):
    """out [width] (=, +=) Σ weights[k] · values[k] over `count` rows, by addresses."""
    whole = width - width % COLUMNS
    for j in range(0, whole, COLUMNS):
        _strip(weights, 0, 1, values + 4 * j, width, out + 4 * j, 0, count, fresh)
    if whole < width:
        factors = carray(pointer(weights), (count,))
        for k in range(count):
            _row(values + 4 * (k * width + whole), factors[k], out + 4 * whole, width - whole, fresh and not k)
