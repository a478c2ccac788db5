"""Countdown: reach a target with the given numbers and + - * /: `3,5,7->22:` → `3*5+7`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import final

from pydantic import Field, model_validator

from rollkeel.errors import BadInput
from rollkeel.tasks.base import Task, TaskItem, TaskOptions, excerpt
from rollkeel.tasks.expression import NotArithmetic, evaluate, tokenize

OPERATORS = "+-*/"
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_ATTEMPTS = 2000


class CountdownOptions(TaskOptions):
    numbers: int = Field(3, ge=2, le=6, description="how many numbers are given")
    max_number: int = Field(20, ge=2, le=1000, description="numbers are drawn from 1 to this")
    target_min: int = Field(1, ge=0, le=1_000_000, description="smallest target")
    target_max: int = Field(100, ge=1, le=1_000_000, description="largest target")
    use_all: bool = Field(True, description="each number exactly once; false: at most once")

    @model_validator(mode="after")
    def _ordered(self) -> CountdownOptions:
        if self.target_min > self.target_max:
            raise ValueError(f"expected target_min ≤ target_max, got {self.target_min} > {self.target_max}")
        return self


@final
class Countdown(Task[CountdownOptions]):
    """Any expression of `rollkeel.tasks.expression` whose exact rational value is the target scores 1.

    Every given number is used exactly once (`use_all=False`: at most once; a number given twice may be used twice).
    The whole response is the expression: anything beside it, an `= 22` too, scores 0. The gold answer is one solution of many;
    it is built forward from the numbers, so a solution exists.
    """

    name = "countdown"
    summary = "reach a target with the given numbers and + - * /"
    options_type = CountdownOptions

    def draw(self, rng: random.Random) -> TaskItem:
        o = self.options
        for _ in range(_ATTEMPTS):
            numbers = [rng.randint(1, o.max_number) for _ in range(o.numbers)]
            value, answer = _combine(numbers, rng)
            if o.target_min <= value <= o.target_max:
                text = f"{','.join(map(str, numbers))}->{value}:"
                return TaskItem(text=text, answer=answer, metadata={"numbers": numbers, "target": value})
        raise BadInput(
            f"task countdown: no target in [{o.target_min}, {o.target_max}] from {o.numbers} numbers up to {o.max_number} "
            f"in {_ATTEMPTS} draws; widen target_min and target_max"
        )

    def identity(self, item: TaskItem) -> str:
        """Order of the numbers does not make a new problem."""
        return f"{sorted(item.metadata['numbers'])}->{item.metadata['target']}"

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        try:
            tokens = tokenize(response)
            # Before evaluating: with each given number at most once, no value can grow out of hand.
            fault = self._misuse(item.metadata["numbers"], tokens)
            if fault:
                return 0.0, fault
            value = evaluate(tokens)
        except NotArithmetic as error:
            return 0.0, f"not an expression: {error}"
        if value != item.metadata["target"]:
            return 0.0, f"{excerpt(response)} is {value}, not {item.metadata['target']}"
        return 1.0, excerpt(response)

    def _misuse(self, numbers: Sequence[int], tokens: Sequence[int | str]) -> str:
        given, used = Counter(numbers), Counter(t for t in tokens if isinstance(t, int))
        if used - given:
            return f"uses {min((used - given).elements())} more often than it is given"
        if self.options.use_all and given - used:
            return f"leaves {min((given - used).elements())} unused"
        return ""

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        first = item.metadata["numbers"][0]
        reuse = f"{item.answer}+{first}-{first}"  # right value, wrong numbers
        wrong = next((c for c in _swaps(item.answer) if _differs(c, item.metadata["target"])), f"{item.answer}+{first}")
        return wrong, reuse, str(item.metadata["target"]) + "+0", f"{item.answer}={item.metadata['target']}"

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """Each operator is replaced by another with probability `label_noise`."""
        out = []
        for char in item.answer:
            wrong = char in OPERATORS and rng.random() < label_noise
            out.append(rng.choice([op for op in OPERATORS if op != char]) if wrong else char)
        return "".join(out)


def _combine(numbers: Sequence[int], rng: random.Random) -> tuple[int, str]:
    """Merge random pairs with operators that keep values positive integers; value and expression of the last one left."""
    pool = [(n, str(n), 3) for n in numbers]
    while len(pool) > 1:
        left, right = (pool.pop(rng.randrange(len(pool))) for _ in range(2))
        if left[0] < right[0]:
            left, right = right, left
        choices = ["+", "*"] + ["-"] * (left[0] > right[0]) + ["/"] * (left[0] % right[0] == 0)
        pool.append(_join(rng.choice(choices), left, right))
    return pool[0][0], pool[0][1]


def _join(op: str, left: tuple[int, str, int], right: tuple[int, str, int]) -> tuple[int, str, int]:
    a, b, level = left[0], right[0], _PRECEDENCE[op]
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[op]
    first = f"({left[1]})" if left[2] < level else left[1]
    bracket = right[2] < level or (right[2] == level and op in "-/")
    return value, first + op + (f"({right[1]})" if bracket else right[1]), level


def _swaps(expression: str) -> list[str]:
    return [
        expression[:i] + op + expression[i + 1 :]
        for i, char in enumerate(expression)
        if char in OPERATORS
        for op in OPERATORS
        if op != char
    ]


def _differs(expression: str, target: int) -> bool:
    try:
        return evaluate(tokenize(expression)) != target
    except NotArithmetic:
        return False
