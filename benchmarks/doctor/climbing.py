"""A task of long answers, right or wrong as a whole, for the corpus alone: steps of one height. `7+4*5:` → `7,11,15,19,23`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import final

from pydantic import Field

from rollkeel.tasks.base import Task, TaskItem, TaskOptions


class ClimbingOptions(TaskOptions):
    fewest: int = Field(4, ge=2, le=20, description="numbers of the shortest answer")
    most: int = Field(9, ge=2, le=20)
    highest: int = Field(9, ge=1, le=99, description="largest step")
    start: int = Field(20, ge=1, le=99, description="largest first number")


@final
class Climbing(Task[ClimbingOptions]):
    """Prompt: first number, step, how many. Answer: the numbers, a comma between them. Exact match."""

    name = "climbing"
    summary = "numbers at equal distances"
    options_type = ClimbingOptions

    def draw(self, rng: random.Random) -> TaskItem:
        o = self.options
        start, step, count = rng.randint(1, o.start), rng.randint(1, o.highest), rng.randint(o.fewest, o.most)
        return TaskItem(text=f"{start}+{step}*{count}:", answer=",".join(str(start + step * n) for n in range(count)))

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        return item.answer[:-1], item.answer + ",1", item.answer.replace(",", "", 1)

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """A wrong step is one too high or too low, and the climb goes on from there."""
        numbers, height, out = [int(n) for n in item.answer.split(",")], 0, list[str]()
        for number in numbers:
            height += rng.choice((-1, 1)) if rng.random() < label_noise else 0
            out.append(str(number + height))
        return ",".join(out)
