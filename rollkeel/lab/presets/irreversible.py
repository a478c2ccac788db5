"""Is a collapse a state of the weights, or of the setting they are trained in?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rollkeel.lab.claims import over_last
from rollkeel.lab.preset import UNDECIDED, Arm, Finding, Preset, Readings, apart, compared, shown
from rollkeel.lab.presets import bases

_ARM = "grpo, restarted"
_READ = ("first run", "first run: best", "early restart", "late restart", "cured restart", "cured restart: best")
_EARLY, _LATE, _FALLEN = 20, 40, 0.5


def measure(words: Sequence[str], seed: int) -> Mapping[str, float]:
    """One row of an arm."""
    from rollkeel.lab.restart import restarts  # with torch, which listing the presets does without

    return restarts(words, seed, collapse="grpo", cure="dppo_binary_tv", early=_EARLY, late=_LATE)


def _judge(readings: Readings) -> Sequence[Finding]:
    value = {name: readings[name][_ARM] for name in _READ}
    fell = value["first run: best"] * _FALLEN
    found = [
        Finding(
            claim=f"{what} loses more than half of the first run's best reward",
            source=source,
            numbers=f"{shown(value[name])} against a best of {shown(value['first run: best'])}",
            verdict=apart(fell, value[name]),
        )
        for name, what, source in (
            ("first run", "GRPO", "rollkeel, prototype"),
            ("early restart", f"a restart from step {_EARLY} with other data", "stability study §5.3"),
            ("late restart", f"a restart from step {_LATE} with other data", "stability study §5.3"),
        )
    ]
    cured, again = value["cured restart"], value["late restart"]
    return [
        *found,
        Finding(
            claim=f"from the same weights of step {_LATE} DPPO-TV ends above GRPO: what cannot be undone is the setting",
            source="rollkeel: the control that the study lacks",
            numbers=compared(cured, again),
            verdict=apart(cured, again) if np.isfinite(cured).all() else UNDECIDED,
        ),
    ]


IRREVERSIBLE = Preset(
    name="irreversible",
    question="Does going back to an earlier checkpoint, with other data, prevent a collapse?",
    paper="stability study §5.3",
    expected="It does not: the restarted run collapses as well.",
    arms=(Arm(name=_ARM),),
    words=(
        *bases.ASYNC_FP8,
        "checkpoint.every=20",
        "checkpoint.keep=10",
        "eval.every=0",
        "eval.items=16",
        "eval.samples=1",
        "report.rollouts=false",
        "report.samples=0",
        "run.name=lab",
    ),
    measure=measure,
    readings={name: over_last(name, 1) for name in _READ},
    judge=_judge,
    seeds=3,
    charts=(),
    notes=(
        "A restart takes weights, a new seed, a fresh optimizer and a fresh queue of rollouts; the study does not say what it kept.",
        "One measurement trains four runs, two minutes on a core.",
    ),
)
PRESETS = (IRREVERSIBLE,)
