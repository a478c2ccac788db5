"""What an experiment is: arms that are run over seeds, readings of the runs, and findings about the readings.

A finding answers a claim of a paper (`reproduced`, `not reproduced`, `undecided`) and may hold a band of ours that a run
must meet; the two are apart, because a result that contradicts a paper is a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

REPRODUCED, NOT_REPRODUCED, UNDECIDED = "reproduced", "not reproduced", "undecided at this scale"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting that is compared with others."""

    name: str
    words: tuple[str, ...] = ()
    """Overrides behind those of the preset."""


Rows = Sequence[Mapping[str, float]]
"""Metrics of one run, by step."""
Readings = Mapping[str, Mapping[str, np.ndarray]]
"""Reading → arm → `[seeds]` one number per run, in the order of the seeds."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One claim and what came out."""

    claim: str
    """What is expected, in one sentence."""
    source: str
    """Paper and place, or `rollkeel` for a control of ours."""
    numbers: str
    """What was measured, with errors."""
    verdict: str
    """`REPRODUCED`, `NOT_REPRODUCED` or `UNDECIDED`."""
    met: bool | None = None
    """Whether a stated band was met; None where there is none."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """An experiment made of training runs, or with `measure` of measurements without training.

    `judge` gets the readings of all arms and returns the findings, each with its numbers.
    """

    name: str
    question: str
    """What it asks, in one sentence."""
    paper: str
    expected: str
    """What the paper (or the prototype) leads one to expect."""
    arms: tuple[Arm, ...]
    judge: Callable[[Readings], Sequence[Finding]]
    readings: Mapping[str, Callable[[Rows], float]]
    words: tuple[str, ...] = ()
    """Overrides of the default recipe for every arm."""
    measure: Callable[[Sequence[str], int], Mapping[str, float]] | None = None
    """`(words of preset and arm, seed)` → one row of numbers, in the place of a training run. A function of a module."""
    seeds: int = 5
    """Runs of each arm, unless asked for otherwise."""
    first_seed: int = 0
    """Lowest seed, unless asked for otherwise; not 0 where a rule was set by looking at the lower ones."""
    charts: tuple[str, ...] = ("reward/mean", "mismatch/ratio_std", "mismatch/kl_k3", "policy/entropy")
    """Metrics drawn over steps, one band over seeds per arm."""
    notes: tuple[str, ...] = field(default=())
    """What the reader must know: differences from the paper's setting."""


def over_steps(key: str, first: int, last: int) -> Callable[[Rows], float]:
    """Mean of a metric over steps `first` … `last`; NaN where the run has none of them."""

    def read(rows: Rows) -> float:
        values = [row[key] for row in rows if first <= row["step"] <= last and key in row]
        return float(np.mean(values)) if values else float("nan")

    return read


def shown(values: np.ndarray, form: str = "{:.3f}") -> str:
    """Mean ± standard error over seeds `[n]`; the plain value of one."""
    mean = form.format(float(np.mean(values)))
    return mean if len(values) < 2 else f"{mean} ± {form.format(_standard_error(values))}"


def compared(high: np.ndarray, low: np.ndarray, form: str = "{:.3f}") -> str:
    """Both means, and what `apart` decides by: the mean difference of runs of one seed ± its standard error."""
    text = f"{shown(high, form)} against {shown(low, form)}"
    return f"{text}, apart by {shown(high - low, form)}" if len(high) == len(low) > 1 else text


def apart(high: np.ndarray, low: np.ndarray, margin: float = 0.0) -> str:
    """Verdict on "mean of `high` exceeds that of `low` by `margin`": two standard errors of the mean difference decide.

    Differences are taken seed by seed: runs of one seed share warm start and prompts, and with these most of their spread.
    One seed decides nothing, and neither do arms of other seeds.
    """
    lower, upper = interval(_differences(high, low) - margin)
    return REPRODUCED if lower > 0 else NOT_REPRODUCED if upper < 0 else UNDECIDED


def equivalent(one: np.ndarray, other: np.ndarray, margin: float) -> str:
    """Verdict on "the means differ by less than `margin`", an equivalence test on differences seed by seed."""
    return between(_differences(one, other), -margin, margin)


def between(values: np.ndarray, low: float, high: float) -> str:
    """Verdict on "the mean lies in [low, high]": all of mean ± 2 standard errors lies inside, or all of it outside."""
    lower, upper = interval(values)
    if low <= lower and upper <= high:
        return REPRODUCED
    return NOT_REPRODUCED if upper < low or lower > high else UNDECIDED


def interval(values: np.ndarray) -> tuple[float, float]:
    """Mean ± 2 standard errors over seeds; NaN, which decides nothing, for fewer than two."""
    if len(values) < 2:
        return float("nan"), float("nan")
    mean, error = float(np.mean(values)), _standard_error(values)
    return mean - 2 * error, mean + 2 * error


def _standard_error(values: np.ndarray) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def _differences(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Seed by seed; none where the arms have other seeds."""
    return one - other if len(one) == len(other) else np.zeros(0)


def held(holds: bool | np.bool_, *values: np.ndarray) -> str:
    """Verdict on a claim that `values` settle by themselves: undecided where a run does not have one (NaN)."""
    if any(np.isnan(v).any() for v in values):
        return UNDECIDED
    return REPRODUCED if holds else NOT_REPRODUCED


def within(values: np.ndarray, low: float, high: float) -> bool:
    """Whether the mean over seeds lies in [low, high]; NaN does not."""
    return bool(low <= float(np.mean(values)) <= high)
