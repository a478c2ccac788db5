"""From the runs of an experiment to its readings, findings and the curves that are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollkeel.lab.preset import NOT_REPRODUCED, REPRODUCED, UNDECIDED, Finding, Preset
from rollkeel.lab.runs import Planned
from rollkeel.report.bands import Band, bands_of


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an experiment came to."""

    preset: Preset
    seeds: tuple[int, ...]
    readings: dict[str, dict[str, np.ndarray]]
    """Reading → arm → `[seeds]`."""
    findings: tuple[Finding, ...]
    bands: tuple[Band, ...]
    stopped: dict[tuple[str, int], str]
    """Runs that a rule ended, by arm and seed, with the reason."""
    seconds: float
    """Wall time of this call, without the runs that the store had."""

    @property
    def met(self) -> bool:
        """Whether every stated band was met."""
        return all(finding.met is not False for finding in self.findings)

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        return verdict(self.findings)


def verdict(findings: Sequence[Finding]) -> str:
    """How many claims came out how, with the claims that did not."""
    by = {kind: [f for f in findings if f.verdict == kind] for kind in (REPRODUCED, NOT_REPRODUCED, UNDECIDED)}
    if len(by[REPRODUCED]) == len(findings):
        return (
            f"Reproduced: {findings[0].numbers}." if len(findings) == 1 else f"Reproduced: all {len(findings)} claims."
        )
    parts = [f"{len(claims)} {kind}" for kind, claims in by.items() if claims]
    against = by[NOT_REPRODUCED] or by[UNDECIDED]
    head = {True: "Not reproduced", False: "Undecided at this scale"}[bool(by[NOT_REPRODUCED])]
    return f"{head}: {against[0].claim} ({against[0].numbers}); of {len(findings)} claims {', '.join(parts)}."


def outcome(preset: Preset, runs: Sequence[Planned], stopped: dict[tuple[str, int], str], seconds: float) -> Outcome:
    """Read, judge and collect curves of finished `runs`."""
    seeds = tuple(dict.fromkeys(run.seed for run in runs))
    rows = {(run.arm, run.seed): run.rows for run in runs}
    readings = {
        name: {arm.name: np.array([read(rows[arm.name, seed]) for seed in seeds]) for arm in preset.arms}
        for name, read in preset.readings.items()
    }
    by_arm = {arm.name: [rows[arm.name, seed] for seed in seeds] for arm in preset.arms}
    return Outcome(
        preset=preset,
        seeds=seeds,
        readings=readings,
        findings=tuple(preset.judge(readings)),
        bands=tuple(bands_of(by_arm, preset.charts)),
        stopped=stopped,
        seconds=seconds,
    )
