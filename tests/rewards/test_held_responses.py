"""Whole responses, as models write them, against every grader that reads prose: none that is wrong may pay, none that is right be refused.

The table was decided by hand before the graders had read it; an undecided answer scores 0 and stands there as wrong. Not covered: pairs of bare
answers (math_pairs.txt), hostile ones (test_hostile_answers.py).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_graders import rollout

from rollkeel.config import GradersConfig
from rollkeel.rewards import Graders
from rollkeel.types import GraderSpec, Rollout, Status

_LINES = (Path(__file__).parent / "held_responses.txt").read_text(encoding="utf-8").splitlines()
HELD = [(*line.split(" | "), "")[:5] for line in _LINES if line and not line.startswith("# ")]


def _unescaped(text: str) -> str:
    return re.sub(r"<U\+([0-9A-F]{4,6})>", lambda m: chr(int(m[1], 16)), text.replace("⏎", "\n"))


def asked(name: str, gold: str, response: str) -> Rollout:
    options: dict[str, Any] = {
        "constraints": lambda: {"constraints": [json.loads(gold)]},
        "code": lambda: {"tests": [{"input": "21\n", "output": gold}]},
    }.get(name, dict)()
    return rollout(_unescaped(response), "" if options else gold, GraderSpec(name=name, options=options))


@pytest.fixture(scope="module")
def made() -> Iterator[Graders]:
    with Graders(GradersConfig(deadline_s=20.0), regrade=0.0) as one:
        yield one


@pytest.mark.parametrize("name", sorted({line[0] for line in HELD}))
def test_held_responses(made: Graders, name: str) -> None:
    if name == "math":
        pytest.importorskip("math_verify")
    rows = [row for row in HELD if row[0] == name]
    found = made.grade([asked(*row[:3]) for row in rows])
    missed = [
        f"{row[1]} | {row[2]} | is {row[3]}, got {r.reward} ({r.detail})"
        for row, r in zip(rows, found, strict=True)
        if r.status is Status.GRADER_FAILURE or r.reward != {"right": 1.0, "wrong": 0.0}[row[3]]
    ]
    assert missed == []


def test_the_table_has_enough_of_both() -> None:
    counts = Counter(row[3] for row in HELD)
    assert set(counts) == {"right", "wrong"}
    assert min(counts.values()) >= 180
    assert len({row[:3] for row in HELD}) == len(HELD)
