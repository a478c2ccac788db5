"""Multi-digit addition: `37+85=` → `122`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import final

from pydantic import Field

from rollkeel.tasks.base import Task, TaskItem, TaskOptions


class AdditionOptions(TaskOptions):
    digits: int = Field(4, ge=1, le=100, description="digits of every term; no leading zeros")
    terms: int = Field(2, ge=2, le=10, description="how many numbers are added")


@final
class Addition(Task[AdditionOptions]):
    """Prompt `a+b=`, answer the decimal sum without leading zeros. Exact match of the whole response."""

    summary = "sum of multi-digit numbers"

    def draw(self, rng: random.Random) -> TaskItem:
        digits = self.options.digits
        low = 0 if digits == 1 else 10 ** (digits - 1)
        terms = [rng.randrange(low, 10**digits) for _ in range(self.options.terms)]
        return TaskItem(text="+".join(map(str, terms)) + "=", answer=str(sum(terms)))

    def identity(self, item: TaskItem) -> str:
        """The multiset of terms: a+b and b+a are one problem."""
        return "+".join(sorted(item.text[:-1].split("+")))

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        value = int(item.answer)
        return (
            str(value + 1),
            str(value + 10),
            "0" + item.answer,
            item.answer + "0",
            item.answer[:-1],
            item.answer + ".0",
        )

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """Column addition from the right; a wrong column adds 1…9 to its total, so the carry can be wrong as well."""
        terms = [t[::-1] for t in item.text[:-1].split("+")]
        carry, out = 0, []
        for column in range(len(item.answer)):
            total = carry + sum(int(t[column]) for t in terms if column < len(t))
            if rng.random() < label_noise:
                total += rng.randint(1, 9)
            carry, digit = divmod(total, 10)
            out.append(str(digit))
        return str(int("".join(reversed(out))))
