"""Experiments small enough for a test: a measurement without torch, and training runs of a few steps."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tiny_run import TINY

from rollkeel.errors import BadInput
from rollkeel.lab.claims import over_last
from rollkeel.lab.preset import Arm, Finding, Preset, Readings, apart, compared, over_steps

HEARD = "ROLLKEEL_TEST_HEARD"
"""Environment variable: the file to which a measurement adds a line, so that a test can count them."""


def count(words: Sequence[str], seed: int) -> Mapping[str, float]:
    """A measurement that says it was made."""
    with Path(os.environ[HEARD]).open("a") as file:
        file.write(json.dumps([*words, seed]) + "\n")
    if "die" in words:
        os.kill(os.getpid(), signal.SIGKILL)
    if "hang" in words:
        signal.pause()
    if "refuse" in words:
        raise BadInput("expected another word, got refuse")
    if "fail" in words:
        raise ValueError("nothing\nto see")
    return {"value": float(len(words)) + seed / 100}


def heard() -> list[list[str | int]]:
    """The measurements made so far."""
    file = Path(os.environ[HEARD])
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def judge(readings: Readings) -> Sequence[Finding]:
    value = readings["value"]
    low, *_, high = (*value, *value)
    met = bool(np.all(value[high] >= value[low]))
    return [
        Finding(
            claim="more is more",
            source="rollkeel",
            numbers=compared(value[high], value[low]),
            verdict=apart(value[high], value[low]),
            met=met,
        )
    ]


def measured(name: str = "measured", less: str = "less", more: str = "more") -> Preset:
    """Two arms; the second has one word more."""
    return Preset(
        name=name,
        question="Is more more?",
        paper="none",
        expected="It is.",
        arms=(Arm(name="low", words=(less,)), Arm(name="high", words=(less, more))),
        judge=judge,
        readings={"value": over_last("value", 1)},
        measure=count,
        seeds=2,
        charts=(),
    )


STEPS = 4
TRAINED = Preset(
    name="trained",
    question="Does it run?",
    paper="none",
    expected="It does.",
    arms=tuple(Arm(name=name, words=(f"objective.name={name}",)) for name in ("kpop",)),
    words=(*TINY, f"run.steps={STEPS}", "report.samples=0"),
    judge=judge,
    readings={"value": over_steps("reward/mean", 1, STEPS)},
    seeds=1,
)


def main(words: Sequence[str]) -> None:
    """`rollkeel WORDS` with the presets of this file."""
    from rollkeel.cli import main as cli
    from rollkeel.lab.presets import PRESETS

    PRESETS.update({preset.name: preset for preset in (measured(), measured("hanging", more="hang"), TRAINED)})
    cli(list(words))


if __name__ == "__main__":
    main(sys.argv[1:])
