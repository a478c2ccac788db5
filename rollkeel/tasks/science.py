"""Numeric problems of physics, chemistry, biology and earth science whose answers carry a unit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from decimal import Decimal
from types import SimpleNamespace
from typing import final

from pydantic import Field

from rollkeel.tasks.base import Task, TaskItem, TaskOptions
from rollkeel.tasks.quantity import compare, convert
from rollkeel.tasks.science_topics import TOPICS, Stage


class ScienceOptions(TaskOptions):
    steps: int = Field(2, ge=1, le=3, description="formulas that must be chained")
    conversions: int = Field(
        1, ge=0, le=6, description="quantities given or asked for in other than the coherent units, as far as there are"
    )
    tolerance: float = Field(0.01, ge=1e-4, le=0.03, description="relative tolerance of the answer")


@final
class Science(Task[ScienceOptions]):
    """A short text with givens, one quantity asked for in a named unit. The response is a number with a unit and nothing else.

    Any unit of the right dimension is accepted (`rollkeel.tasks.quantity`); what cannot be decided there scores 0 and says so.
    """

    summary = "numeric problems of four sciences, answers with units"
    junk = (" 0", "x", " x", "=", "\n1", "\x00", "٣", "²")  # more zeros and a full stop change nothing

    def draw(self, rng: random.Random) -> TaskItem:
        topic = rng.choice(list(TOPICS))
        stages = TOPICS[topic][: self.options.steps]
        places = [(name, g[2]) for stage in stages for name, g in stage.givens.items()] + [("", stages[-1].units)]
        changeable = [name for name, units in places if "," in units]
        changed = set(rng.sample(changeable, min(self.options.conversions, len(changeable))))
        values, shown = SimpleNamespace(), dict[str, str]()
        for stage in stages:
            for name, (low, high, units) in stage.givens.items():
                shown[name], value = _given(rng, low, high, units.split(","), name in changed)
                setattr(values, name, value)
            setattr(values, stage.name, stage.formula(values))
        unit, answer = _result(rng, stages[-1], getattr(values, stages[-1].name), "" in changed)
        told = " ".join(stage.text.format(**shown) for stage in stages if stage.text)
        text = f"{told}\nWhat is {stages[-1].ask}{f' in {unit}' if unit else ''}? Answer with {'a number and its unit' if unit else 'a number'}."
        return TaskItem(
            text=text,
            answer=answer,
            metadata={"topic": topic, "steps": len(stages), "conversions": len(changed), "unit": unit},
        )

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        verdict = compare(item.answer, response, relative=self.options.tolerance)
        return float(verdict.right is True), ("undecided: " if verdict.right is None else "") + verdict.detail

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        unit = item.metadata["unit"]
        number = float(item.answer.removesuffix(f" {unit}"))
        other = "s" if unit in ("m", "cm", "mm", "km", "ft") else "m"
        wrong = [f"{_digits(number * factor)} {unit}".strip() for factor in (1000, 0.001, 1.05, 0.95, -1)]
        return (*wrong, f"{_digits(number)} {other}", *([_digits(number)] if unit else []))

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """Each formula and each conversion goes wrong with probability `label_noise`; the answer is then one of the near misses."""
        wrong = any(rng.random() < label_noise for _ in range(int(self.effort(item))))
        return rng.choice(self.near_misses(item)) if wrong else item.answer

    def effort(self, item: TaskItem) -> float:
        """Formulas and unit conversions."""
        return float(item.metadata["steps"] + item.metadata["conversions"])


def _given(rng: random.Random, low: float, high: float, units: Sequence[str], change: bool) -> tuple[str, float]:
    """How a quantity is shown, and its value in the first unit: of what is shown, not of what was drawn."""
    unit = rng.choice(units[1:]) if change else units[0]
    shown = _digits(_convert(float(f"{low * (high / low) ** rng.random():.2e}"), units[0], unit))
    return f"{shown} {unit}", _convert(float(shown), unit, units[0])


def _result(rng: random.Random, stage: Stage, value: float, change: bool) -> tuple[str, str]:
    """Unit asked for, and the gold answer."""
    units = stage.units.split(",")
    unit = rng.choice(units[1:]) if change else units[0]
    return unit, f"{_digits(_convert(value, units[0], unit), 4)} {unit}".strip()


def _convert(value: float, unit: str, other: str) -> float:
    return value if unit == other else float(convert(value, unit, other))


def _digits(value: float, significant: int = 3) -> str:
    """Rounded; without an exponent where it can be read without counting zeros."""
    text = f"{value:.{significant - 1}e}"
    return format(Decimal(text), "f") if 1e-3 <= abs(value) < 1e6 else text
