"""The forms that most claims have: one setting above another, no difference, within a range; each becomes a finding by numbers.

Two standard errors over seeds decide everywhere, of differences seed by seed where two settings are compared. A reading that a run
does not have is NaN and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rollkeel.lab.preset import Finding, Readings, Rows, apart, between, compared, equivalent, over_steps, shown, within

Claim = Callable[[Readings], Finding]
REWARD, BEST, MEAN = "reward, last 20 steps", "reward, best 10 steps", "reward, all steps"
GAP, GROWTH, K3 = "gap (ratio std), last 20 steps", "gap, last 20 steps over first 20", "gap (k3), last 20 steps"
DRIFT = "mean |p − q|, last 20 steps"
ENTROPY = "entropy, last 20 steps"
WINDOW = 20


def over_last(key: str, count: int = WINDOW) -> Callable[[Rows], float]:
    """Mean of a metric over the last `count` steps that have it, however early the run ended; NaN without any."""

    def read(rows: Rows) -> float:
        values = [row[key] for row in rows if key in row][-count:]
        return float(np.mean(values)) if values else float("nan")

    return read


def growth(key: str, count: int = WINDOW) -> Callable[[Rows], float]:
    """A metric's mean over its last `count` steps by that over its first; NaN for fewer than twice as many."""

    def read(rows: Rows) -> float:
        values = [row[key] for row in rows if key in row]
        if len(values) < 2 * count:
            return float("nan")
        first = float(np.mean(values[:count]))
        return float(np.mean(values[-count:])) / first if first else float("nan")

    return read


def best(key: str, count: int = 10) -> Callable[[Rows], float]:
    """Highest mean over `count` steps in a row; NaN for a run with fewer."""

    def read(rows: Rows) -> float:
        values = np.array([row[key] for row in rows if key in row and row["step"] > 0])
        if len(values) < count:
            return float("nan")
        return float(np.convolve(values, np.ones(count) / count, "valid").max())

    return read


def any_of(keys: Sequence[str], read: Callable[[str], Callable[[Rows], float]] = over_last) -> Callable[[Rows], float]:
    """The reading of the first of `keys` that a run has: recipes name their masks differently."""

    def find(rows: Rows) -> float:
        return next((value for key in keys if np.isfinite(value := read(key)(rows))), float("nan"))

    return find


COMMON: dict[str, Callable[[Rows], float]] = {
    REWARD: over_last("reward/mean"),
    BEST: best("reward/mean"),
    MEAN: over_steps("reward/mean", 1, 10**9),
    GAP: over_last("mismatch/ratio_std"),
    GROWTH: growth("mismatch/ratio_std"),
    K3: over_last("mismatch/kl_k3"),
    DRIFT: over_last("mismatch/prob_abs_diff"),
    ENTROPY: over_last("policy/entropy"),
}
"""Readings that every experiment with training shows."""


def above(
    high: str, low: str, *, claim: str, source: str, reading: str = REWARD, margin: float = 0.0, form: str = "{:.3f}"
) -> Claim:
    """Arm `high` exceeds arm `low` in `reading`, by `margin` at least."""

    def judge(readings: Readings) -> Finding:
        a, b = readings[reading][high], readings[reading][low]
        numbers = f"{reading}: {compared(a, b, form)}"
        return Finding(claim=claim, source=source, numbers=numbers, verdict=apart(a, b, margin))

    return judge


def alike(one: str, other: str, *, claim: str, source: str, reading: str = REWARD, margin: float = 0.1) -> Claim:
    """Arms `one` and `other` differ in `reading` by less than `margin`."""

    def judge(readings: Readings) -> Finding:
        a, b = readings[reading][one], readings[reading][other]
        numbers = f"{reading}: {compared(a, b)}"
        return Finding(claim=claim, source=source, numbers=numbers, verdict=equivalent(a, b, margin))

    return judge


def inside(
    arm: str,
    low: float,
    high: float,
    *,
    claim: str,
    source: str,
    reading: str = REWARD,
    form: str = "{:.3f}",
    banded: bool = False,
) -> Claim:
    """An arm's `reading` lies in [low, high]; `banded`: its mean over seeds must, or the experiment's exit code is 1."""

    def judge(readings: Readings) -> Finding:
        values = readings[reading][arm]
        met = within(values, low, high)
        numbers = f"{reading}: {shown(values, form)}"
        return Finding(
            claim=claim,
            source=source,
            numbers=numbers,
            verdict=between(values, low, high),
            met=met if banded else None,
        )

    return judge


def judged(*claims: Claim) -> Callable[[Readings], Sequence[Finding]]:
    """`judge` of a preset whose findings are these claims."""
    return lambda readings: [claim(readings) for claim in claims]
