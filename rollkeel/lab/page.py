"""An experiment's report: verdict, findings, readings, curves with bands over seeds. HTML for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from html import escape
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from rollkeel.lab.measure import Curve, Outcome
from rollkeel.lab.preset import NOT_REPRODUCED, REPRODUCED, shown
from rollkeel.report.charts import SERIES, Chart, drawing, log_scale, smooth
from rollkeel.report.standalone import document, figures_of, table_of

MAX_BYTES = 3_000_000
_WIDE = 1000.0
"""Readings beyond this, or below its inverse, are shown with an exponent."""


def page(found: Outcome) -> str:
    """The HTML report, under 3 MB."""
    preset = found.preset
    runs = len(preset.arms) * len(found.seeds)
    about = (
        f"<p><b>{escape(found.sentence)}</b></p><p>{escape(preset.question)} ({escape(preset.paper)})</p>"
        f"<p>Expected: {escape(preset.expected)}</p>"
        f"<p>{runs} runs: {len(preset.arms)} settings × {len(found.seeds)} seed{'s' * (len(found.seeds) > 1)}.</p>"
        + "".join(f"<p>{escape(note)}</p>" for note in preset.notes)
    )
    stopped = [(arm, str(seed), why) for (arm, seed), why in found.stopped.items()]
    return document(
        f"Lab: {preset.name}",
        f'<div class="panel">{about}</div>'
        + table_of(("claim", "source", "measured", "verdict", "band"), finding_rows(found), words=True)
        + figures_of(charts(found.curves))
        + table_of(("reading", *(arm.name for arm in preset.arms)), reading_rows(found))
        + (table_of(("run", "seed", "stopped by"), stopped, words=True) if stopped else ""),
    )


def finding_rows(found: Outcome) -> list[tuple[str, ...]]:
    """Claim, source, numbers, verdict, band of each finding."""
    words = {True: "met", False: "MISSED", None: ""}
    return [(f.claim, f.source, f.numbers, f.verdict, words[f.met]) for f in found.findings]


def reading_rows(found: Outcome) -> list[tuple[str, ...]]:
    """Mean ± standard error of each reading by arm; nothing where no run has it."""
    rows = []
    for name, by_arm in found.readings.items():
        cells = []
        for values in by_arm.values():
            there = values[np.isfinite(values)]
            cells.append(shown(there, _form(there)) if len(there) else "")
        rows.append((name, *cells))
    return rows


def _form(values: np.ndarray) -> str:
    size = float(np.abs(values).max())
    return "{:.3f}" if size == 0 or 0.01 <= size < _WIDE else "{:.2e}"


def charts(curves: Sequence[Curve]) -> list[Chart]:
    """One chart per metric: each arm's mean over seeds as a line in a band from its lowest to its highest run."""
    keys = dict.fromkeys(curve.key for curve in curves)
    return [
        drawing(
            key, "Running mean over seeds; the band reaches from the lowest run to the highest.", partial(_bands, of=of)
        )
        for key in keys
        if (of := [curve for curve in curves if curve.key == key])
    ]


def _bands(axes: Axes, of: Sequence[Curve]) -> None:
    for i, curve in enumerate(of):
        color = SERIES[i % len(SERIES)]
        runs = np.array([_smooth_part(run) for run in curve.values])
        there = np.isfinite(runs).any(0)
        steps, runs = curve.steps[there], runs[:, there]
        axes.plot(steps, np.nanmean(runs, 0), color=color, lw=1.5, label=curve.arm)
        if len(runs) > 1:
            axes.fill_between(steps, np.nanmin(runs, 0), np.nanmax(runs, 0), color=color, alpha=0.15, lw=0)
    axes.set_xlabel("step")
    if of[0].key.startswith("mismatch/"):
        log_scale(axes)


def _smooth_part(values: np.ndarray) -> np.ndarray:
    """Running mean of what a run has; NaN elsewhere."""
    out, there = np.full(len(values), np.nan), np.isfinite(values)
    if there.any():
        out[there] = smooth(values[there])
    return out


def as_json(found: Outcome) -> dict[str, Any]:
    """What programs read."""
    return {
        "preset": found.preset.name,
        "paper": found.preset.paper,
        "verdict": found.sentence,
        "met": found.met,
        "seeds": list(found.seeds),
        "seconds": round(found.seconds, 1),
        "findings": [
            {"claim": f.claim, "source": f.source, "numbers": f.numbers, "verdict": f.verdict, "met": f.met}
            for f in found.findings
        ],
        "readings": {
            name: {arm: [None if not np.isfinite(v) else float(v) for v in values] for arm, values in by_arm.items()}
            for name, by_arm in found.readings.items()
        },
        "stopped": [{"arm": arm, "seed": seed, "why": why} for (arm, seed), why in found.stopped.items()],
    }


def lines(found: Outcome) -> list[str]:
    """The findings for a terminal of 80 columns, the verdict last."""
    marks = {REPRODUCED: "+", NOT_REPRODUCED: "-"}
    out = []
    for f in found.findings:
        band = {True: "", False: "  BAND MISSED", None: ""}[f.met]
        out += [f" {marks.get(f.verdict, '?')} {f.claim}", f"     {f.numbers}  [{f.verdict}; {f.source}]{band}"]
    return [*out, found.sentence]
