"""Vector code for numba kernels, written as LLVM instructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollkeel.models.jit import WIDE, cgutils, ir

LANES = 16 if WIDE else 8
"""Floats in a vector."""
QUERIES = 32
"""Columns of a matrix of scores; its rows are keys."""


class Vectors:
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

    def summed(self, vectors: Sequence[Any]) -> Any:
        """The sum of vector i in lane i."""
        kind, values = ir.VectorType(self.index, self.lanes), list(vectors)
        masks = [kind(list(range(half, 2 * self.lanes, 2))) for half in (0, 1)]
        for _ in range(self.lanes.bit_length() - 1):
            pairs = zip(values[::2], values[1::2] or values, strict=True)
            halves = [[self.builder.shuffle_vector(*pair, mask) for mask in masks] for pair in pairs]
            values = [self.builder.fadd(*both) for both in halves]
        return values[0]

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
