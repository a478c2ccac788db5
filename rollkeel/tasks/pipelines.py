"""The small language from which the family `programs` draws: arithmetic in `x`, and pipelines of steps over lists of integers.

One value has three faces that are written apart from each other: what it computes (`evaluate`, `run`), its Python source and its
English. The interpreter is the judge of the source: nothing is executed here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

Node = list[Any]
"""`["x"]`, `["n", 3]` or `[operator, left, right]`; `abs` has one operand. JSON, so that items can travel."""
Step = list[Any]
"""`[name]` or `[name, argument]`."""
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "//": 2, "%": 2}
REDUCERS = ("sum", "max", "min", "count", "spread")


_VALUES: dict[str, Callable[..., int]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "//": lambda a, b: (a - a % b) // b, "%": lambda a, b: a % b,
    "abs": lambda a: max(a, -a), "max": max, "min": min,
}  # fmt: skip


def evaluate(node: Node, x: int) -> int:
    """Value at `x`; `//` and `%` round down as in Python, their right side is a positive constant."""
    op, *operands = node
    if op in ("x", "n"):
        return x if op == "x" else operands[0]
    return _VALUES[op](*(evaluate(o, x) for o in operands))


def source(node: Node, above: int = 0) -> str:
    """Python expression with no parentheses that can be left out; `above` is the precedence around it."""
    op, *operands = node
    if op in ("x", "n"):
        return "x" if op == "x" else str(operands[0])
    if op not in _PRECEDENCE:
        return f"{op}({','.join(source(o) for o in operands)})"
    level = _PRECEDENCE[op]
    text = f"{source(operands[0], level)}{op}{source(operands[1], level + (op != '+'))}"
    return f"({text})" if level < above else text


def affine(a: int, b: int) -> Node:
    """`a*x+b`, with a minus where `b` is negative."""
    return ["+" if b >= 0 else "-", ["*", ["n", a], ["x"]], ["n", abs(b)]]


def draw_expression(rng: random.Random, level: int) -> Node:
    """Level 1: `a*x+b` with small numbers. Level 2: a second operation, a quadratic, a remainder, a larger or smaller of two."""
    line = affine(rng.randint(2, 9), rng.choice([-1, 1]) * rng.randint(1, 9))
    if level == 1:
        return line
    k, other = ["n", rng.randint(2, 9)], affine(rng.randint(2, 9), rng.choice([-1, 1]) * rng.randint(1, 9))
    shifted: Node = ["-", ["x"], k]
    return rng.choice(
        [
            ["+", ["*", ["x"], ["x"]], line],
            ["%", line, ["n", rng.randint(5, 9)]],
            ["+", ["*", k, ["abs", shifted]], ["n", rng.randint(1, 9)]],
            ["max", line, ["-", k, ["*", ["n", rng.randint(2, 5)], ["x"]]]],
            ["min", ["*", ["x"], ["x"]], other],
            ["+", ["//", ["x"], k], line],
            ["*", ["+", ["x"], k], ["-", ["x"], ["n", rng.randint(1, 9)]]],
        ]
    )


def draw_steps(rng: random.Random, count: int) -> list[Step]:
    """`count` steps over a list, the last one a reduction to a number in half of all draws."""
    reduce = rng.random() < 0.5
    steps = []
    for _ in range(count - reduce):
        taken = {s[0] for s in steps[-1:]}
        steps.append(rng.choice([s for s in _choices(rng) if s[0] not in taken]))
    return [*steps, [rng.choice(REDUCERS)]] if reduce else steps


def _choices(rng: random.Random) -> list[Step]:
    k = rng.randint(2, 5)
    return [
        ["map", affine(k, rng.choice([-1, 1]) * rng.randint(1, 9))],
        ["map", ["*", ["x"], ["x"]]],
        ["keep", [rng.choice(["<", ">"]), rng.randint(-3, 8)]],
        ["keep", ["divisible", k]],
        ["sort"], ["fall"], ["reverse"], ["first", k], ["skip", rng.randint(1, 2)], ["unique"], ["running"], ["differences"],
    ]  # fmt: skip


def run(steps: Sequence[Step], xs: Sequence[int]) -> list[int] | int:
    """What the pipeline makes of `xs`."""
    value: Any = list(xs)
    for name, *argument in steps:
        value = _STEPS[name][0](value, *argument)
    return value


def function(steps: Sequence[Step]) -> str:
    """Source of `def f(xs)`."""
    lines = [f"    {_worded(_STEPS[name][1], argument)}" for name, *argument in steps]
    return "\n".join(["def f(xs):", *lines, *([] if steps[-1][0] in REDUCERS else ["    return xs"])])


def describe(step: Step) -> str:
    """The step as an instruction."""
    return _worded(_STEPS[step[0]][2], step[1:])


def _worded(text: str | Callable[[Any], str], argument: Sequence[Any]) -> str:
    return text(argument[0]) if callable(text) else text.format(*argument)


def _kept(xs: list[int], test: Step) -> list[int]:
    op, k = test
    return [x for x in xs if (x % k == 0 if op == "divisible" else x > k if op == ">" else x < k)]


def _test(test: Step) -> str:
    return f"%{test[1]}==0" if test[0] == "divisible" else f"{test[0]}{test[1]}"


def _told(test: Step) -> str:
    return {"divisible": "multiples of {}", ">": "numbers above {}", "<": "numbers below {}"}[test[0]].format(test[1])


_STEPS: dict[str, tuple[Callable[..., Any], str | Callable[[Any], str], str | Callable[[Any], str]]] = {
    "map": (lambda xs, a: [evaluate(a, x) for x in xs], lambda a: f"xs = [{source(a)} for x in xs]", lambda a: f"replace each number x by {source(a)}"),
    "keep": (_kept, lambda a: f"xs = [x for x in xs if x{_test(a)}]", lambda a: f"keep only the {_told(a)}"),
    "sort": (lambda xs: sorted(xs), "xs = sorted(xs)", "sort in rising order"),
    "fall": (lambda xs: sorted(xs, key=lambda x: -x), "xs = sorted(xs, reverse=True)", "sort in falling order"),
    "reverse": (lambda xs: list(reversed(xs)), "xs = xs[::-1]", "reverse the order"),
    "first": (lambda xs, k: [x for i, x in enumerate(xs) if i < k], "xs = xs[:{}]", "keep only the first {}"),
    "skip": (lambda xs, k: [x for i, x in enumerate(xs) if i >= k], "xs = xs[{}:]", "leave out the first {}"),
    "unique": (lambda xs: [x for i, x in enumerate(xs) if x not in xs[:i]], "xs = list(dict.fromkeys(xs))", "keep only the first of equal numbers"),
    "running": (lambda xs: list(accumulate(xs)), "xs = [sum(xs[:i+1]) for i in range(len(xs))]", "replace each number by the sum of all up to it, itself included"),
    "differences": (lambda xs: [b - a for a, b in pairwise(xs)], "xs = [b-a for a, b in zip(xs, xs[1:])]", "replace the list by the differences, each number minus the one before it"),
    "sum": (lambda xs: sum(xs), "return sum(xs)", "give the sum"),
    "max": (lambda xs: max(xs, default=0), "return max(xs, default=0)", "give the largest number (0 for an empty list)"),
    "min": (lambda xs: min(xs, default=0), "return min(xs, default=0)", "give the smallest number (0 for an empty list)"),
    "count": (lambda xs: len(xs), "return len(xs)", "give how many there are"),
    "spread": (lambda xs: max(xs, default=0) - min(xs, default=0), "return max(xs)-min(xs) if xs else 0", "give the largest number minus the smallest (0 for an empty list)"),
}  # fmt: skip
"""What each step computes, its source and its English, with its argument in place of `{}`."""
