"""An experiment's report: verdict, findings, readings, curves with bands over seeds. HTML for people, JSON for programs."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from rollkeel.lab.measure import Outcome
from rollkeel.lab.preset import NOT_REPRODUCED, REPRODUCED, shown
from rollkeel.report.bands import band_charts, dots
from rollkeel.report.standalone import Cell, document, figures_of, table_of

MAX_BYTES = 3_000_000
_WIDE = 1000.0
"""Readings beyond this, or below its inverse, are shown with an exponent."""


def page(found: Outcome) -> str:
    """The HTML report, under 3 MB."""
    preset = found.preset
    runs = len(preset.arms) * len(found.seeds)
    about = f"{runs} runs: {len(preset.arms)} settings × {len(found.seeds)} seed{'s' * (len(found.seeds) > 1)}."
    lines = (f"{preset.question} ({preset.paper})", f"Expected: {preset.expected}", about, *preset.notes)
    stopped = [(arm, str(seed), why) for (arm, seed), why in found.stopped.items()]
    tone = worst(found)
    return document(
        f"Lab: {preset.name}",
        f'<div class="verdict"><div class="{tone}"><b>Verdict</b>{escape(found.sentence)}</div></div>'
        + f'<div class="panel">{"".join(f"<p>{escape(line)}</p>" for line in lines)}</div>'
        + table_of(("claim", "source", "measured", "verdict", "band"), finding_rows(found), words=True)
        + figures_of([*(dots(name, found.readings[name]) for name in drawn(found)), *band_charts(found.bands)])
        + table_of(("reading", *(arm.name for arm in preset.arms)), reading_rows(found))
        + (table_of(("run", "seed", "stopped by"), stopped, words=True) if stopped else ""),
    )


_TONES = {REPRODUCED: "good", NOT_REPRODUCED: "bad"}


def worst(found: Outcome) -> str:
    """Colour of the whole: that of a missed band or of the claim that came out worst."""
    tones = {_TONES.get(f.verdict, "warn") for f in found.findings} | {"bad" for f in found.findings if f.met is False}
    return next((tone for tone in ("bad", "warn") if tone in tones), "good")


def drawn(found: Outcome) -> list[str]:
    """Readings that a finding is about, or the first two; those of a number for at least one run."""
    told = " ".join(f.numbers for f in found.findings)
    there = [name for name, by_arm in found.readings.items() if any(np.isfinite(v).any() for v in by_arm.values())]
    return [name for name in there if f"{name}:" in told] or there[:2]


def finding_rows(found: Outcome) -> list[tuple[Cell, ...]]:
    """Claim, source, numbers, verdict, band of each finding."""
    bands: dict[bool | None, Cell] = {True: ("met", "good"), False: ("MISSED", "bad"), None: ""}
    return [
        (f.claim, f.source, f.numbers, (f.verdict, _TONES.get(f.verdict, "warn")), bands[f.met]) for f in found.findings
    ]


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
