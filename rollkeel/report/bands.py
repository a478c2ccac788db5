"""Settings compared over seeds: a line for the mean of each in a band from its lowest run to its highest, or dots per run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.axes import Axes

from rollkeel.report.charts import SERIES, Chart, Rows, drawing, is_number, least_height, log_scale, matching, smooth
from rollkeel.report.panels import SPECS


@dataclass(frozen=True, kw_only=True)
class Band:
    """One metric of one setting over steps, over its seeds."""

    arm: str
    key: str
    steps: np.ndarray
    """`[n]`"""
    values: np.ndarray
    """`[seeds, n]`, NaN where a run has no such row."""


def bands_of(runs: Mapping[str, Sequence[Rows]], keys: Sequence[str]) -> list[Band]:
    """Every metric of `keys` that some run of a setting has; `runs`: setting → the rows of each of its runs."""
    found = []
    for key in keys:
        for arm, each in runs.items():
            values = [{row["step"]: row[key] for row in rows if is_number(row.get(key))} for rows in each]
            steps = sorted(set().union(*values))
            if steps:
                table = np.array([[run.get(step, np.nan) for step in steps] for run in values])
                found.append(Band(arm=arm, key=key, steps=np.array(steps), values=table))
    return found


def band_charts(bands: Sequence[Band]) -> list[Chart]:
    """One chart per metric."""
    caption = "Running mean over seeds; the band reaches from the lowest run to the highest."
    several = any(len(band.values) > 1 for band in bands)
    by_key: dict[str, list[Band]] = {}
    for band in bands:
        by_key.setdefault(band.key, []).append(band)
    return [drawing(key, caption if several else "", partial(_paint, of=of)) for key, of in by_key.items()]


def _paint(axes: Axes, of: Sequence[Band]) -> None:
    spec = next((spec for spec in SPECS if matching([{of[0].key: 1.0}], spec.keys)), None)
    least = spec.least / spec.scale if spec else 0.0
    gap = of[0].key.startswith("mismatch/") and spec is not None and spec.calm == 0
    for i, band in enumerate(of):
        color = SERIES[i % len(SERIES)]
        runs = np.array([_smooth_part(run) for run in band.values])
        runs = np.maximum(runs, least / 100) if gap else runs
        there = np.isfinite(runs).any(0)
        steps, runs = band.steps[there], runs[:, there]
        axes.plot(
            steps, np.nanmean(runs, 0), color=color, lw=1.5, label=band.arm, marker="o" if len(steps) < 3 else None
        )
        if len(runs) > 1:
            axes.fill_between(steps, np.nanmin(runs, 0), np.nanmax(runs, 0), color=color, alpha=0.15, lw=0)
    axes.set_xlabel("step")
    if not (gap and log_scale(axes)):
        least_height(axes, least)


def _smooth_part(values: np.ndarray) -> np.ndarray:
    """Running mean of what a run has; NaN elsewhere."""
    out, there = np.full(len(values), np.nan), np.isfinite(values)
    if there.any():
        out[there] = smooth(values[there])
    return out


def dots(title: str, by_arm: Mapping[str, np.ndarray]) -> Chart:
    """One reading of each setting: a dot per run, mean ± standard error as a cross beside them. NaN is left out."""

    def paint(axes: Axes) -> None:
        for i, values in enumerate(by_arm.values()):
            there, color = values[np.isfinite(values)], SERIES[i % len(SERIES)]
            if len(there):
                axes.plot(np.full(len(there), i - 0.1), there, "o", ms=4, alpha=0.55, color=color)
                error = np.std(there, ddof=1) / len(there) ** 0.5 if len(there) > 1 else 0.0
                axes.errorbar(i + 0.1, there.mean(), yerr=error, fmt="D", ms=5, capsize=4, color=color)
        axes.set_xticks(range(len(by_arm)), [arm[:24] for arm in by_arm], rotation=20 if len(by_arm) > 4 else 0)
        axes.set_xlim(-0.6, len(by_arm) - 0.4)

    return drawing(title, "A dot per run; diamond: their mean ± one standard error.", paint)
