"""A task of partly paid answers for the corpus alone: a grid of letters turned about its diagonal. `abc/def:` → `ad/be/cf`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import final

from pydantic import Field

from benchmarks.doctor.spelling import LETTERS, misspelled
from rollkeel.tasks.base import ASCII_SPACE, Task, TaskItem, TaskOptions, excerpt


class TurningOptions(TaskOptions):
    letters: int = Field(9, ge=2, le=25, description="letters in use, from a on")
    rows: int = Field(3, ge=1, le=9, description="most rows; there are two at least")
    columns: int = Field(5, ge=1, le=9, description="most columns; there are two at least")


@final
class Turning(Task[TurningOptions]):
    """The reward is the share of lines that are right where they stand."""

    name = "turning"
    summary = "a grid of letters with rows for columns"
    options_type = TurningOptions

    def draw(self, rng: random.Random) -> TaskItem:
        o = self.options
        rows, columns = rng.randint(2, o.rows), rng.randint(2, o.columns)
        grid = ["".join(rng.choices(LETTERS[: o.letters], k=columns)) for _ in range(rows)]
        return TaskItem(text="/".join(grid) + ":", answer="/".join(map("".join, zip(*grid, strict=True))))

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        read, lines = response.strip(ASCII_SPACE).split("/"), item.answer.split("/")
        right = sum(a == b for a, b in zip(read, lines, strict=False))
        return right / max(len(read), len(lines)), f"{right} of {len(lines)}: {excerpt(response)}"

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        return "z/" + item.answer.replace("/", "z/z"), item.answer.replace("/", "")

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """A wrong step writes another letter."""
        lines = item.answer.split("/")
        return "/".join(misspelled(line, LETTERS[: self.options.letters], rng, label_noise) for line in lines)
