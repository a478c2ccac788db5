"""A task of several turns for the corpus alone: a balance and what is paid in. `342+57:` → `399` → `399+80:` → `479` → …"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import final

from pydantic import Field

from benchmarks.doctor.spelling import DIGITS
from rollkeel.tasks.base import ASCII_SPACE, TaskItem, excerpt
from rollkeel.tasks.environment import Environment, EnvironmentOptions, Step


class LedgerOptions(EnvironmentOptions):
    entries: int = Field(4, ge=1, le=8, description="sums to be written, a turn each")
    largest: int = Field(60, ge=1, le=99, description="largest amount that is paid in")


@final
class Ledger(Environment[LedgerOptions]):
    """Every right balance earns its share of 1, and a wrong one is corrected before the next: rewards lie between 0 and 1."""

    name = "ledger"
    summary = "running balances, a sum per turn"
    options_type = LedgerOptions

    def draw(self, rng: random.Random) -> TaskItem:
        amounts = [rng.randint(1, self.options.largest) for _ in range(self.options.entries)]
        start = rng.randint(100, 999 - sum(amounts))
        return TaskItem(text=f"{start}+{amounts[0]}:", answer=",".join(map(str, amounts)))

    def _amounts(self, item: TaskItem) -> list[int]:
        return [int(amount) for amount in item.answer.split(",")]

    def reset(self, item: TaskItem) -> str:
        self._left = self._amounts(item)
        self._balance = int(item.text.split("+")[0])
        return item.text

    def step(self, action: str) -> Step:
        self._balance += self._left.pop(0)
        right = action.strip(ASCII_SPACE) == str(self._balance)
        text = f"\n{self._balance}+{self._left[0]}:" if self._left else ""
        return Step(
            text=text, reward=right / self.options.entries, done=not self._left, detail=f"{right}: {excerpt(action)}"
        )

    def actions(self, item: TaskItem) -> Sequence[str]:
        balance, out = int(item.text.split("+")[0]), list[str]()
        for amount in self._amounts(item):
            balance += amount
            out.append(str(balance))
        return out

    def mistakes(self, item: TaskItem) -> Sequence[Sequence[str]]:
        return [[""] * self.options.entries]

    def slip(self, item: TaskItem, action: str, rng: random.Random) -> str:
        """Another last digit."""
        return action[:-1] + rng.choice(DIGITS.replace(action[-1], ""))

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """A wrong balance costs its turn: it stands in place of the right one."""
        return "\n".join(self.slip(item, a, rng) if rng.random() < label_noise else a for a in self.actions(item))
