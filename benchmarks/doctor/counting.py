"""Another task for the corpus alone: `45+9:` → `546372819099`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import final
from unittest import mock

from pydantic import Field

from rollkeel.tasks import TASKS
from rollkeel.tasks.base import ASCII_SPACE, Task, TaskItem, TaskOptions, excerpt

LAST = 99
DIGITS = "0123456789"


class CountingOptions(TaskOptions):
    smallest: int = Field(3, ge=2, le=9, description="smallest step")
    largest: int = Field(9, ge=2, le=9, description="largest step")
    fewest: int = Field(2, ge=1, le=9, description="numbers in the shortest answer")
    most: int = Field(
        6, ge=1, le=9, description="numbers in the longest answer; start and step stay two digits and one"
    )


@final
class Counting(Task[CountingOptions]):
    """Prompt `start+step:`, answer the numbers from start + step on by `step`, up to 99, without anything between them.

    When to stop is part of it: answers have 2 · `fewest` to 2 · `most` digits. Exact match of the whole response.
    """

    name = "counting"
    summary = "counting up to 99 by a step"
    options_type = CountingOptions

    def draw(self, rng: random.Random) -> TaskItem:
        o = self.options
        step, count = rng.randint(o.smallest, o.largest), rng.randint(o.fewest, o.most)
        start = LAST - rng.randrange(step) - count * step
        return TaskItem(text=f"{start}+{step}:", answer="".join(f"{n}" for n in range(start + step, LAST + 1, step)))

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        read = response.strip(ASCII_SPACE)
        return float(read == item.answer), excerpt(read)

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        answer = item.answer
        return answer[:-2], answer + "99", answer[:-1]

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """A wrong step writes another digit."""
        return "".join(rng.choice(DIGITS) if rng.random() < label_noise else digit for digit in item.answer)


def registered() -> AbstractContextManager[object]:
    """The task has its name inside, and rollkeel's own stay what they are outside."""
    return mock.patch.dict(TASKS, {Counting.name: Counting})
