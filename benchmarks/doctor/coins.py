"""A task of several turns for the corpus alone: an amount is paid out coin by coin. `A57:` → `40` → `A17:` → `12` → `A5:` → `5`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import final

from pydantic import Field

from rollkeel.tasks.base import ASCII_SPACE, TaskItem, excerpt
from rollkeel.tasks.environment import Environment, EnvironmentOptions, Step

COINS = {"A": (1, 5, 12, 40), "B": (1, 4, 9, 30), "C": (1, 7, 10, 26)}


class CoinsOptions(EnvironmentOptions):
    least: int = Field(8, ge=1, le=999, description="smallest amount")
    largest: int = Field(99, ge=1, le=999, description="largest amount")
    more: int = Field(2, ge=0, le=9, description="coins above the fewest that still earn a half")


@final
class Coins(Environment[CoinsOptions]):
    """The fewest coins earn 1, a few more a half; a coin that the land has not, or above what is left, ends it with nothing."""

    name = "coins"
    summary = "an amount paid out in few coins, one per turn"
    options_type = CoinsOptions

    def draw(self, rng: random.Random) -> TaskItem:
        land, amount = rng.choice("ABC"), rng.randint(self.options.least, self.options.largest)
        return TaskItem(text=f"{land}{amount}:", answer=str(fewest(land, amount)[0]))

    def reset(self, item: TaskItem) -> str:
        self._land, self._left, self._paid = item.text[0], int(item.text[1:-1]), 0
        self._fewest = fewest(self._land, self._left)[0]
        return item.text

    def step(self, action: str) -> Step:
        coin = action.strip(ASCII_SPACE)
        self._paid += 1
        if coin not in map(str, COINS[self._land]) or int(coin) > self._left:
            return Step(done=True, detail=f"no coin for {self._land}{self._left}: {excerpt(action)}")
        self._left -= int(coin)
        over = self._paid - self._fewest
        if self._left and over < self.options.more:
            return Step(text=f"\n{self._land}{self._left}:")
        reward = 0.0 if self._left else 1.0 if over == 0 else 0.5
        return Step(reward=reward, done=True, detail=f"{self._paid} coins of {self._fewest}, {self._left} left")

    def actions(self, item: TaskItem) -> Sequence[str]:
        return self._paying(item, random.Random(0), 0.0)

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """A wrong step pays any coin that fits, and goes on from there."""
        return "\n".join(self._paying(item, rng, label_noise))

    def _paying(self, item: TaskItem, rng: random.Random, share: float) -> list[str]:
        land, left, out = item.text[0], int(item.text[1:-1]), list[str]()
        most = fewest(land, left)[0] + self.options.more
        while left and len(out) < most:
            fitting = [coin for coin in COINS[land] if coin <= left]
            coin = rng.choice(fitting) if rng.random() < share else fewest(land, left)[1]
            out.append(str(coin))
            left -= coin
        return out


@cache
def fewest(land: str, amount: int) -> tuple[int, int]:
    """How many coins pay `amount`, and the largest to begin with."""
    if amount == 0:
        return 0, 0
    count, coin = min((fewest(land, amount - coin)[0] + 1, -coin) for coin in COINS[land] if coin <= amount)
    return count, -coin
