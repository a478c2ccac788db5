"""A task of partly paid answers for the corpus alone: how often each letter stands in a word. `cabacb:` → `a2b2c2`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import final

from pydantic import Field

from benchmarks.doctor.spelling import DIGITS, LETTERS, misspelled
from rollkeel.tasks.base import ASCII_SPACE, Task, TaskItem, TaskOptions, excerpt


class TallyingOptions(TaskOptions):
    letters: int = Field(6, ge=2, le=26, description="letters in use, from a on")
    shortest: int = Field(4, ge=1, le=30)
    longest: int = Field(11, ge=1, le=30)


@final
class Tallying(Task[TallyingOptions]):
    """The reward is the share of right counts among those that are asked for or given, in any order."""

    name = "tallying"
    summary = "how often each letter stands in a word"
    options_type = TallyingOptions

    def draw(self, rng: random.Random) -> TaskItem:
        o = self.options
        word = rng.choices(LETTERS[: o.letters], k=rng.randint(o.shortest, o.longest))
        return TaskItem(text="".join(word) + ":", answer="".join(f"{a}{n}" for a, n in sorted(Counter(word).items())))

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        read = response.strip(ASCII_SPACE)
        one, other = _counts(read), _counts(item.answer)
        return (one & other).total() / (one | other).total(), excerpt(read)

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        return item.answer.translate(str.maketrans(DIGITS, "x" * 10)), item.answer.upper()

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """A wrong step counts one anew."""
        return "".join(a if a.isalpha() else misspelled(a, "123", rng, label_noise) for a in item.answer)


def _counts(text: str) -> Counter[str]:
    return Counter(text[at : at + 2] for at in range(0, len(text), 2))
