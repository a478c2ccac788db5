"""A task that rollkeel does not ship, for the corpus alone: `fcab:` → `abcf`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import final

from pydantic import Field

from benchmarks.doctor.spelling import LETTERS, misspelled
from rollkeel.tasks.base import ASCII_SPACE, Task, TaskItem, TaskOptions, excerpt


class SortingOptions(TaskOptions):
    letters: int = Field(10, ge=2, le=26, description="letters in use, from a on")
    shortest: int = Field(5, ge=1, le=100)
    longest: int = Field(8, ge=1, le=100)


@final
class Sorting(Task[SortingOptions]):
    """Prompt `d₁…dₙ:`, answer the same letters in order. Exact match of the whole response; answers of several lengths."""

    name = "sorting"
    summary = "letters of a word in order"
    options_type = SortingOptions

    def draw(self, rng: random.Random) -> TaskItem:
        o = self.options
        word = rng.choices(LETTERS[: o.letters], k=rng.randint(o.shortest, o.longest))
        return TaskItem(text="".join(word) + ":", answer="".join(sorted(word)))

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        read = response.strip(ASCII_SPACE)
        return float(read == item.answer), excerpt(read)

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        answer = item.answer
        return answer + "a", answer[:-1], answer + answer[-1]

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """A wrong step writes another letter."""
        letters = LETTERS[: self.options.letters]
        return misspelled(item.answer, letters, rng, label_noise)
