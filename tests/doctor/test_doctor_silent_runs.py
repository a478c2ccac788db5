"""A cause that only simulated traces show is a guess: one small real run of each silent fault, and the doctor on it.

Not covered: how often it is right, which `python -m benchmarks.doctor score` counts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.doctor.cases import build, told_cases
from benchmarks.doctor.score import ask
from benchmarks.doctor.silent import SILENT


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus")


@pytest.mark.slow
@pytest.mark.parametrize("name", SILENT)
def test_a_silent_fault_is_named(name: str, corpus: Path) -> None:
    (case,) = told_cases("full", 1, 1, [f"silent {name}"])
    build(case, corpus)
    answer = ask(case, corpus)
    assert answer.right, answer
