"""Another task for the corpus alone: a word without one of its letters. `-bcabdb:` → `cad`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import final

from pydantic import Field

from benchmarks.doctor.spelling import LETTERS, misspelled
from rollkeel.tasks.base import ASCII_SPACE, Task, TaskItem, TaskOptions, excerpt


class DroppingOptions(TaskOptions):
    letters: int = Field(8, ge=3, le=26, description="letters in use, from a on")
    shortest: int = Field(6, ge=3, le=20)
    longest: int = Field(10, ge=3, le=20)


@final
class Dropping(Task[DroppingOptions]):
    """Prompt: a word that begins with the letter to drop, a colon. Answer: its other letters in order. Exact match."""

    name = "dropping"
    summary = "a word without one of its letters"
    options_type = DroppingOptions

    def draw(self, rng: random.Random) -> TaskItem:
        letters = LETTERS[: self.options.letters]
        word = "".join(rng.choices(letters, k=rng.randint(self.options.shortest, self.options.longest)))
        while not (answer := word.replace(word[0], "")):
            word = word[:-1] + rng.choice(letters)
        return TaskItem(text=f"-{word}:", answer=answer)

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        read = response.strip(ASCII_SPACE)
        return float(read == item.answer), excerpt(read)

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        answer = item.answer
        return answer + answer[0], answer[:-1], answer + "z"

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """A wrong step writes another letter."""
        letters = LETTERS[: self.options.letters]
        return misspelled(item.answer, letters, rng, label_noise)
