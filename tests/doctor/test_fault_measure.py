"""Which injected faults count, those that left something in the record, and how the doctor's answers are counted.

Not covered: the numbers of real runs (`python -m benchmarks.doctor measure`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.doctor.measure import real
from benchmarks.doctor.score import Answer, matrix, report

HARMLESS = {"k3": 0.0, "ratio": 1.0, "surprise": 0.5, "entropy": 0.5, "bf16": 0.0, "far": 0.0, "cut": 0.0, "flips": 0.0}
HARMLESS |= {"reward_first": 0.4, "reward_last": 0.5, "reward_best": 0.5, "reward_cut": 0.5, "reward_rest": 0.5}
HARMLESS |= {"entropy_first": 0.5, "entropy_last": 0.4}


@pytest.mark.parametrize(
    ("fault", "effect"),
    [
        ("wrong_weights", {"k3": 3e-5}),
        ("wrong_weights", {"k3": 1.1e-3, "bf16": 1.0}),
        ("truncation", {"surprise": 0.4}),
        ("temperature", {"ratio": 1.01}),
        ("policy_lag", {"far": 0.03}),
        ("entropy_collapse", {"entropy_last": 0.2}),
        ("length_truncation", {"cut": 0.1, "reward_cut": 0.2}),
        ("learning_rate", {"reward_last": 0.1}),
    ],
)
def test_a_fault_without_effect_is_none(fault: str, effect: dict[str, float]) -> None:
    assert not real(fault, HARMLESS)
    assert real(fault, HARMLESS | effect)


def test_a_gap_below_honest_bfloat16_is_nothing_where_that_is_stated() -> None:
    assert not real("wrong_weights", HARMLESS | {"k3": 5e-4, "bf16": 1.0})


def answer(fault: str, named: str, bug: str = "", left: bool = True) -> Answer:
    return Answer(
        split="test",
        fault=fault,
        kind="k",
        base="plain",
        model="moe",
        seed=0,
        named=named,
        causes=(named,),
        bug=bug,
        real=left,
        score=0.5,
        seconds=0.1,
        tokens=10,
        path="p",
    )


def test_matrix_counts_injected_by_named() -> None:
    rows = matrix([answer("mask", "mask"), answer("mask", "alignment"), answer("healthy", "healthy")]).splitlines()
    assert rows[1].split() == ["mask", "1", "1", ".", "1/2"]  # columns: alignment, mask, healthy
    assert rows[2].split() == ["healthy", ".", ".", "1", "1/1"]


@pytest.mark.parametrize(
    ("wrong", "alarm", "met"), [(0, "", True), (1, "", True), (2, "", False), (0, "mask", False)], ids=str
)
def test_targets_are_95_percent_and_no_alarm(
    wrong: int, alarm: str, met: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [answer("mask", "alignment" if n < wrong else "mask") for n in range(20)]
    answers.append(answer("healthy", "policy_lag", alarm))  # a word about staleness is no alarm of a bug
    assert report(answers, tmp_path / "scores") is met
    assert (tmp_path / "scores.csv").read_text().count("\n") == 22
    assert "named first" in capsys.readouterr().out


def test_faults_that_left_nothing_are_named_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = [answer("mask", "mask"), answer("mask", "healthy", left=False)]
    assert report(answers, tmp_path / "scores")
    assert "1 real faults: 100.0% named first (target 95%), with 1 that are not real 50.0%" in capsys.readouterr().out
