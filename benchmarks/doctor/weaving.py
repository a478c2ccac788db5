"""Another task for the corpus alone: two words woven into one. `abc,xy:` → `axbyc`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import zip_longest
from typing import final

from pydantic import Field

from benchmarks.doctor.spelling import misspelled
from rollkeel.tasks.base import ASCII_SPACE, Task, TaskItem, TaskOptions, excerpt

_LETTERS = "klmnopqrstuv"


class WeavingOptions(TaskOptions):
    shortest: int = Field(5, ge=1, le=20, description="letters of the shortest word")
    longest: int = Field(11, ge=1, le=20)


@final
class Weaving(Task[WeavingOptions]):
    """Prompt: two words, a colon. Answer: their letters in turn, the longer word's rest behind. Exact match."""

    name = "weaving"
    summary = "two words woven into one"
    options_type = WeavingOptions

    def draw(self, rng: random.Random) -> TaskItem:
        o = self.options
        one, other = ("".join(rng.choices(_LETTERS, k=rng.randint(o.shortest, o.longest))) for _ in range(2))
        woven = zip_longest(one, other, fillvalue="")
        return TaskItem(text=f"{one},{other}:", answer="".join(a + b for a, b in woven))

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        read = response.strip(ASCII_SPACE)
        return float(read == item.answer), excerpt(read)

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        answer = item.answer
        return answer + "k", answer[:-1], answer[1:]

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """A wrong step writes another letter."""
        return misspelled(item.answer, _LETTERS, rng, label_noise)
