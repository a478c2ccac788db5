"""Running sums modulo 10: `481=` → `423`. Every digit depends on all before it, like a chain of thought in miniature."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import final

from pydantic import Field

from rollkeel.tasks.base import Task, TaskItem, TaskOptions


class RunsumOptions(TaskOptions):
    digits: int = Field(12, ge=1, le=200, description="digits of the prompt, and of the answer")


@final
class Runsum(Task[RunsumOptions]):
    """Prompt `d₁…dₙ=`, answer `s₁…sₙ` with s_i = (d₁ + … + d_i) mod 10. Exact match of the whole response."""

    summary = "running sums of a digit string modulo 10"

    def draw(self, rng: random.Random) -> TaskItem:
        digits = rng.choices(range(10), k=self.options.digits)
        return TaskItem(text=_join(digits) + "=", answer=_join(_sums(digits)))

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        answer = item.answer
        flipped_last = answer[:-1] + _other(answer[-1])
        slipped = _join(_sums([int(answer[0]) + 1, *(int(d) for d in item.text[1:-1])]))
        return flipped_last, slipped, answer[:-1], answer + answer[-1], item.text + answer

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """A wrong step adds 1…9 to the running sum, and the following sums inherit it."""
        total, out = 0, []
        for digit in item.text[:-1]:
            total = (total + int(digit)) % 10
            if rng.random() < label_noise:
                total = (total + rng.randint(1, 9)) % 10
            out.append(total)
        return _join(out)


def _sums(digits: Sequence[int]) -> list[int]:
    return [total % 10 for total in accumulate(digits)]


def _join(digits: Sequence[int]) -> str:
    return "".join(map(str, digits))


def _other(digit: str) -> str:
    return str((int(digit) + 1) % 10)
