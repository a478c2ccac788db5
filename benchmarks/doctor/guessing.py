"""A task of several turns for the corpus alone: a hidden number is found by halving. `3-30:` → `16` → `17-30:` → `23` → …"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import final

from pydantic import Field

from rollkeel.tasks.base import ASCII_SPACE, TaskItem, excerpt
from rollkeel.tasks.environment import Environment, EnvironmentOptions, Step


class GuessingOptions(EnvironmentOptions):
    largest: int = Field(40, ge=3, le=99, description="largest number that can be hidden")


@final
class Guessing(Environment[GuessingOptions]):
    """Found in as many turns as halving needs at most it earns 1, in one more a half; a guess outside the range ends it."""

    name = "guessing"
    summary = "a hidden number, found by halving what is left"
    options_type = GuessingOptions

    def draw(self, rng: random.Random) -> TaskItem:
        low = rng.randint(1, self.options.largest - 2)
        high = rng.randint(low + 2, self.options.largest)
        return TaskItem(text=f"{low}-{high}:", answer=str(rng.randint(low, high)))

    def identity(self, item: TaskItem) -> str:
        return item.text + item.answer

    def reset(self, item: TaskItem) -> str:
        self._low, self._high = _range(item)
        self._hidden, self._left = int(item.answer), (self._high - self._low + 1).bit_length() + 1
        return item.text

    def step(self, action: str) -> Step:
        read = action.strip(ASCII_SPACE)
        self._left -= 1
        if not (read.isdecimal() and len(read) < 4 and self._low <= int(read) <= self._high):
            return Step(done=True, detail=f"no number of {self._low}-{self._high}: {excerpt(action)}")
        guess = int(read)
        if guess == self._hidden:
            return Step(reward=1.0 if self._left else 0.5, done=True, detail=f"found, {self._left} turns left")
        if not self._left:
            return Step(done=True, detail="not found")
        self._low, self._high = (guess + 1, self._high) if guess < self._hidden else (self._low, guess - 1)
        return Step(text=f"\n{self._low}-{self._high}:")

    def actions(self, item: TaskItem) -> Sequence[str]:
        return self._guesses(item, random.Random(0), 0.0)

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """A wrong step guesses any number of the range."""
        return "\n".join(self._guesses(item, rng, label_noise))

    def _guesses(self, item: TaskItem, rng: random.Random, share: float) -> list[str]:
        low, high = _range(item)
        out, left = list[str](), (high - low + 1).bit_length() + 1
        while len(out) < left and item.answer not in out:
            guess = rng.randint(low, high) if rng.random() < share else (low + high) // 2
            out.append(str(guess))
            low, high = (guess + 1, high) if guess < int(item.answer) else (low, guess - 1)
        return out


def _range(item: TaskItem) -> tuple[int, int]:
    low, high = item.text[:-1].split("-")
    return int(low), int(high)
