"""Another task for the corpus alone: letters moved along a ring of letters. `face3:` → each letter three further."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import final

from pydantic import Field

from benchmarks.doctor.spelling import LETTERS, misspelled
from rollkeel.tasks.base import ASCII_SPACE, Task, TaskItem, TaskOptions, excerpt


class ShiftingOptions(TaskOptions):
    letters: int = Field(9, ge=2, le=26, description="size of the ring, from a on")
    shortest: int = Field(4, ge=1, le=20)
    longest: int = Field(9, ge=1, le=20)
    furthest: int = Field(3, ge=1, le=9, description="longest move")


@final
class Shifting(Task[ShiftingOptions]):
    """Prompt: a word, a digit, a colon. Answer: the word with every letter moved that far, round the ring. Exact match."""

    name = "shifting"
    summary = "letters moved along a ring"
    options_type = ShiftingOptions

    def draw(self, rng: random.Random) -> TaskItem:
        o = self.options
        ring = LETTERS[: o.letters]
        word = "".join(rng.choices(ring, k=rng.randint(o.shortest, o.longest)))
        by = rng.randint(1, o.furthest)
        return TaskItem(
            text=f"{word}{by}:", answer="".join(ring[(ring.index(letter) + by) % o.letters] for letter in word)
        )

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        read = response.strip(ASCII_SPACE)
        return float(read == item.answer), excerpt(read)

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        answer = item.answer
        return answer + answer[0], answer[:-1], answer[1:] + "z"

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """A wrong step writes another letter of the ring."""
        ring = LETTERS[: self.options.letters]
        return misspelled(item.answer, ring, rng, label_noise)
