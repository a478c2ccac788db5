"""The 24 game: `8,3,8,3->24:` → `8/(3-8/3)`. Fractions on the way are allowed; a solution is proven by exact search."""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from pydantic import Field

from rollkeel.tasks import expression
from rollkeel.tasks.base import LIMITS, TaskItem, TaskOptions
from rollkeel.tasks.countdown import ExpressionTask, join
from rollkeel.types import GraderSpec

Tree = Any
"""A number, or `(operator, left, right)`."""


class Game24Options(TaskOptions):
    beside = frozenset({"sandbox"})
    cards: int = Field(4, ge=3, le=5, description="how many cards are dealt")
    max_card: int = Field(13, ge=2, le=100, description="cards are drawn from 1 to this")
    target: int = Field(24, ge=1, le=1000, description="what the expression must be worth")
    sandbox: bool = Field(False, description="responses are evaluated in the sandbox, by the grader judge")


@final
class Game24(ExpressionTask[Game24Options]):
    """Any expression that uses every card exactly once and is worth the target scores 1 (`ExpressionTask`)."""

    summary = "make 24 of all cards with + - * /"

    def draw(self, rng: random.Random) -> TaskItem:
        o = self.options
        cards = [rng.randint(1, o.max_card) for _ in range(o.cards)]
        text = f"{','.join(map(str, cards))}->{o.target}:"
        return TaskItem(text=text, answer="", metadata={"numbers": cards, "target": o.target})

    def finish(self, item: TaskItem, rng: random.Random) -> TaskItem | None:
        """Hands without a solution are dealt again."""
        tree, _ = search(item.metadata["numbers"], item.metadata["target"])
        return None if tree is None else replace(item, answer=_write(tree)[0])

    def grader(self, item: TaskItem) -> GraderSpec:
        if not self.options.sandbox:
            return super().grader(item)
        given = {key: item.metadata[key] for key in ("numbers", "target")}
        return GraderSpec(
            name="judge", options={"judge": inspect.getsource(expression), "given": given, "limits": LIMITS}
        )

    def effort(self, item: TaskItem) -> float:
        """Merges of two values that depth-first search makes until its first solution."""
        return float(search(item.metadata["numbers"], item.metadata["target"])[1])


def search(numbers: Sequence[int], target: int) -> tuple[Tree | None, int]:
    """First expression of all `numbers` worth `target`, or None when there is none; and the merges made.

    Depth first over every pair and operator, with exact rationals as (numerator, denominator).
    """
    merges = 0

    def reach(pool: list[tuple[int, int, Tree]]) -> Tree | None:
        nonlocal merges
        if len(pool) == 1:
            return pool[0][2] if pool[0][0] == target * pool[0][1] else None
        for j in range(1, len(pool)):
            for i in range(j):
                rest = [v for k, v in enumerate(pool) if k not in (i, j)]
                for merged in _merge(pool[i], pool[j]):
                    merges += 1
                    if (found := reach([*rest, merged])) is not None:
                        return found
        return None

    return reach([(n, 1, n) for n in numbers]), merges


def _merge(left: tuple[int, int, Tree], right: tuple[int, int, Tree]) -> list[tuple[int, int, Tree]]:
    (a, b, x), (c, d, y) = left, right
    out = [
        (a * d + c * b, b * d, ("+", x, y)),
        (a * c, b * d, ("*", x, y)),
        (a * d - c * b, b * d, ("-", x, y)),
        (c * b - a * d, b * d, ("-", y, x)),
    ]
    if c:
        out.append((a * d, b * c, ("/", x, y)))
    if a:
        out.append((c * b, d * a, ("/", y, x)))
    return out


def _write(tree: Tree) -> tuple[str, int]:
    return (str(tree), 3) if isinstance(tree, int) else join(tree[0], _write(tree[1]), _write(tree[2]))
