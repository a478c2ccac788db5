"""A task of long answers for the corpus alone: runs of letters written out. `a3c5b2:` → `aaacccccbb`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import takewhile
from typing import final

from pydantic import Field

from benchmarks.doctor.spelling import misspelled
from rollkeel.tasks.base import ASCII_SPACE, Task, TaskItem, TaskOptions, excerpt

_LETTERS = "abcdefgh"


class UnpackingOptions(TaskOptions):
    fewest: int = Field(3, ge=1, le=9, description="runs of the shortest prompt")
    most: int = Field(6, ge=1, le=9)
    longest: int = Field(7, ge=2, le=9, description="letters of the longest run")


@final
class Unpacking(Task[UnpackingOptions]):
    """The reward is the share of the answer up to the first wrong letter: most lie between 0 and 1."""

    name = "unpacking"
    summary = "runs of letters written out"
    options_type = UnpackingOptions

    def draw(self, rng: random.Random) -> TaskItem:
        o = self.options
        runs = [(rng.choice(_LETTERS), rng.randint(2, o.longest)) for _ in range(rng.randint(o.fewest, o.most))]
        return TaskItem(text="".join(f"{a}{n}" for a, n in runs) + ":", answer="".join(a * n for a, n in runs))

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        read = response.strip(ASCII_SPACE)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(read, item.answer, strict=False)))
        return right / max(len(read), len(item.answer)), excerpt(read)

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        return ("k" + item.answer,)

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """A wrong step writes another letter."""
        return misspelled(item.answer, _LETTERS, rng, label_noise)
