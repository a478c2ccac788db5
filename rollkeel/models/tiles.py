"""Arithmetic of small float32 matrices inside of numba kernels, as fast as the processor computes: loops that are left to the compiler
reach a third of that, and a BLAS costs a call for each.

An element is one chain of operations in one order, whatever the processor's vectors hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollkeel.models.jit import WIDE, cgutils, intrinsic, ir, jit, types

LANES = 16 if WIDE else 8
"""Floats in a vector."""
ROWS, COLUMNS = (8 if WIDE else 4), 2 * LANES
"""Of what `_tile` computes at a time: as much as registers hold."""
QUERIES = 32
"""Columns of a matrix of scores; its rows are keys."""


class _Vectors:
    """Code of vectors for one function. Addresses are int64 and need not be aligned."""

    def __init__(self, builder: Any, lanes: int = LANES) -> None:
        self.builder, self.lanes = builder, lanes
        self.number, self.index, self.single = ir.IntType(64), ir.IntType(32), ir.FloatType()
        self.vector = ir.VectorType(self.single, self.lanes)

    def at(self, base: Any, *floats: Any) -> Any:
        for n in floats:
            base = self.builder.add(base, self.builder.mul(n, self.number(4)))
        return base

    def load(self, address: Any) -> Any:
        value = self.builder.load(self.builder.inttoptr(address, self.vector.as_pointer()))
        value.align = 4
        return value

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, self.vector.as_pointer())).align = 4

    def each(self, value: float) -> Any:
        return self.vector([value] * self.lanes)

    def spread(self, value: Any) -> Any:
        """A vector of this one value."""
        one = self.builder.insert_element(ir.VectorType(value.type, self.lanes)(ir.Undefined), value, self.index(0))
        return self.builder.shuffle_vector(one, one, ir.VectorType(self.index, self.lanes)([0] * self.lanes))

    def call(self, name: str, *arguments: Any) -> Any:
        kind = ir.FunctionType(self.vector, [self.vector] * len(arguments))
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.{name}.v{self.lanes}f32")
        return self.builder.call(function, arguments)

    def loop(self, count: Any, carried: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """What `body(k, carried)` has made of `carried` after k = 0, …, count − 1; count > 0."""
        builder, before = self.builder, self.builder.block
        inside, behind = builder.append_basic_block(), builder.append_basic_block()
        builder.branch(inside)
        builder.position_at_end(inside)
        k, held = builder.phi(self.number), [builder.phi(value.type) for value in carried]
        made, following = body(k, held), builder.add(k, self.number(1))
        for place, first, next_ in zip([k, *held], [self.number(0), *carried], [following, *made], strict=True):
            place.add_incoming(first, before)
            place.add_incoming(next_, inside)
        builder.cbranch(builder.icmp_signed("<", following, count), inside, behind)
        builder.position_at_end(behind)
        return made

    def exp(self, x: Any) -> Any:
        """As `jit.exp`, of which it is the vector."""
        builder, index = self.builder, ir.VectorType(self.index, self.lanes)
        least = self.each(-87.0)
        x = builder.select(builder.fcmp_ordered("<", x, least), least, x)  # what is no number stays
        e = self.call("floor", self.call("fma", x, self.each(1.44269504), self.each(0.5)))
        r = self.call("fma", e, self.each(-0.693359375), x)
        r = self.call("fma", e, self.each(2.12194440e-4), r)
        p = self.each(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = self.call("fma", p, r, self.each(c))
        p = builder.fadd(self.call("fma", builder.fmul(p, r), r, r), self.each(1.0))
        power = builder.shl(builder.add(builder.fptosi(e, index), index([127] * self.lanes)), index([23] * self.lanes))
        return builder.fmul(p, builder.bitcast(power, self.vector))

    def columns(self, base: Any, row: Any) -> list[Any]:
        """Addresses of the vectors of a row of scores."""
        return [
            self.at(base, self.builder.mul(row, self.number(QUERIES)), self.number(j)) for j in range(0, QUERIES, LANES)
        ]

    def keep(self, values: Sequence[Any], base: Any) -> None:
        """Store a row of columns."""
        for place, value in zip(self.columns(base, self.number(0)), values, strict=True):
            self.store(value, place)

    def visible(self, key: Any, sure: Any) -> list[Any]:
        """Which queries see this key: of those after the first `sure`, query i sees i + 1."""
        ahead = self.spread(self.builder.trunc(self.builder.sub(key, sure), self.index))
        kind = ir.VectorType(self.index, LANES)
        places = [kind(list(range(j, j + LANES))) for j in range(0, QUERIES, LANES)]
        return [self.builder.icmp_signed(">=", place, ahead) for place in places]


@intrinsic
def _tile(context, a, a_row, a_step, b, b_step, c, c_row, count, fresh):
    """c[i, j] (fresh ≠ 0: =, else +=) Σ a[i · a_row + k · a_step] · b[k · b_step + j] over k < count, of ROWS × COLUMNS elements.

    `a`, `b`, `c` are addresses, the others numbers of floats; count > 0."""

    def codegen(context, builder, signature, args):
        a, a_row, a_step, b, b_step, c, c_row, count, fresh = args
        code = _Vectors(builder)
        wide = [code.number(j) for j in range(0, COLUMNS, LANES)]
        rows = [code.number(i) for i in range(ROWS)]
        places = [code.at(c, builder.mul(c_row, i), j) for i in rows for j in wide]
        anew = builder.icmp_signed("!=", fresh, code.number(0))
        sums = [builder.select(anew, code.each(0.0), code.load(place)) for place in places]

        def add(k, sums):
            factors = [code.load(code.at(b, builder.mul(k, b_step), j)) for j in wide]
            column = builder.mul(k, a_step)
            made = []
            for n, i in enumerate(rows):
                address = builder.inttoptr(code.at(a, column, builder.mul(a_row, i)), code.single.as_pointer())
                one = code.spread(builder.load(address))
                made += [code.call("fma", one, f, sums[n * len(wide) + m]) for m, f in enumerate(factors)]
            return made

        for place, value in zip(places, code.loop(count, sums, add), strict=True):
            code.store(value, place)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 9), codegen


@intrinsic
def _turned(context, a, a_row, b, b_row):
    """b = aᵀ of LANES × LANES floats: rows are shuffled into each other until they are columns."""

    def codegen(context, builder, signature, args):
        a, a_row, b, b_row = args
        code = _Vectors(builder)
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
            code = _Vectors(builder, lanes)
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
        code = _Vectors(builder)
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
        code = _Vectors(builder)
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
        code = _Vectors(builder)

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


@jit
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


@jit
def row(a, a_at, factor, b, b_at, width, fresh):
    """b (=, +=) factor · a of `width` floats from `a_at` and `b_at` on, whatever the shapes of the arrays."""
    whole = width // LANES
    left = width - whole * LANES
    if whole:
        _vectors(a.ctypes.data + 4 * a_at, np.float32(factor), b.ctypes.data + 4 * b_at, whole, fresh)
    if left:
        done = 4 * whole * LANES
        _singles(a.ctypes.data + 4 * a_at + done, np.float32(factor), b.ctypes.data + 4 * b_at + done, left, fresh)


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
