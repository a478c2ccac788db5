"""Another task for the corpus alone: a table that has to be known by heart. `kqx:` → the digits of `k`, then those of `q`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import final

from pydantic import Field

from benchmarks.doctor.spelling import DIGITS, LETTERS, misspelled
from rollkeel.tasks.base import ASCII_SPACE, Task, TaskItem, TaskOptions, excerpt, keyed_rng


class LookupOptions(TaskOptions):
    entries: int = Field(16, ge=2, le=26, description="letters in the table, from a on")
    shortest: int = Field(2, ge=1, le=20, description="digits of the shortest entry")
    longest: int = Field(5, ge=1, le=20)


@final
class Lookup(Task[LookupOptions]):
    """Prompt: two letters of the table, a third that says nothing, a colon. Answer: both entries. Exact match of the response."""

    name = "lookup"
    summary = "entries of a table known by heart"
    options_type = LookupOptions

    def entry(self, letter: str) -> str:
        """Digits of a letter: the same for every seed."""
        o, rng = self.options, keyed_rng("lookup", letter)
        return "".join(rng.choices(DIGITS, k=o.shortest + rng.randrange(o.longest - o.shortest + 1)))

    def draw(self, rng: random.Random) -> TaskItem:
        one, other = rng.choices(LETTERS[: self.options.entries], k=2)
        return TaskItem(text=f"{one}{other}{rng.choice(LETTERS)}:", answer=self.entry(one) + self.entry(other))

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        read = response.strip(ASCII_SPACE)
        return float(read == item.answer), excerpt(read)

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        answer = item.answer
        return answer + "0", answer[:-1], answer[1:]

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """A wrong step writes another digit."""
        return misspelled(item.answer, DIGITS, rng, label_noise)
