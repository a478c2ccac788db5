"""Countdown: reach a target with the given numbers and + - * /: `3,5,7->22:` → `3*5+7`."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, final

from pydantic import Field, model_validator

from rollkeel.errors import BadInput
from rollkeel.tasks.base import Task, TaskItem, TaskOptions, excerpt
from rollkeel.tasks.expression import evaluate, judge

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


O = TypeVar("O", bound=TaskOptions)  # noqa: E741 - reads as ExpressionTask[O]


class ExpressionTask(Task[O]):
    """Items whose answer is any expression of `rollkeel.tasks.expression` over `metadata["numbers"]` worth `["target"]`.

    The whole response is the expression: anything else in it, an `= 22` too, scores 0.
    """

    use_all = True
    """Each number exactly once; False: at most once."""

    def identity(self, item: TaskItem) -> str:
        """Order of the numbers does not make a new problem."""
        return f"{sorted(item.metadata['numbers'])}->{item.metadata['target']}"

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        right, detail = judge(response, {**item.metadata, "use_all": self.use_all})
        return float(right), excerpt(response) if right else detail

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


@final
class Countdown(ExpressionTask[CountdownOptions]):
    """The gold answer is one solution of many; it is built forward from the numbers, so a solution exists."""

    summary = "reach a target with the given numbers and + - * /"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self.use_all = self.options.use_all

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


def _combine(numbers: Sequence[int], rng: random.Random) -> tuple[int, str]:
    """Merge random pairs with operators that keep values positive integers; value and expression of the last one left."""
    pool = [(n, (str(n), 3)) for n in numbers]
    while len(pool) > 1:
        (a, left), (b, right) = (pool.pop(rng.randrange(len(pool))) for _ in range(2))
        if a < b:
            (a, left), (b, right) = (b, right), (a, left)
        op = rng.choice(["+", "*"] + ["-"] * (a > b) + ["/"] * (a % b == 0))
        pool.append(({"+": a + b, "-": a - b, "*": a * b, "/": a // b}[op], join(op, left, right)))
    return pool[0][0], pool[0][1][0]


def join(op: str, left: tuple[str, int], right: tuple[str, int]) -> tuple[str, int]:
    """Text and binding strength of two joined expressions, with the brackets that are needed; a number binds with 3."""
    level = _PRECEDENCE[op]
    first = f"({left[0]})" if left[1] < level else left[0]
    bracket = right[1] < level or (right[1] == level and op in "-/")
    return first + op + (f"({right[0]})" if bracket else right[0]), level


def _swaps(expression: str) -> list[str]:
    at = [i for i, char in enumerate(expression) if char in OPERATORS]
    return [expression[:i] + op + expression[i + 1 :] for i in at for op in OPERATORS if op != expression[i]]


def _differs(expression: str, target: int) -> bool:
    try:
        return evaluate(expression)[0] != target
    except ValueError:  # a division by zero
        return False
