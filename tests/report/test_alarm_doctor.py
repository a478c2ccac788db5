"""An alarm says that something is wrong and the doctor what: his word must stand in the alarm, and his troubles may not be the run's.

Real tiny runs, and a doctor that is slow or breaks. Not covered: whether he is right (tests/doctor).
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_report import make_run, page
from tiny_run import TINY, cli, events

from benchmarks.doctor import alterations as alter
from benchmarks.doctor import silent
from rollkeel import report
from rollkeel.diagnose import alarmed
from rollkeel.diagnose.alarmed import AlarmDoctor
from rollkeel.loop import watch
from rollkeel.report import render, verdict
from rollkeel.report.run_files import read_run

FAST = [
    "run.steps=3",
    "eval.every=0",
    "eval.items=2",
    "checkpoint.every=0",
    "rollout.prompts=64",
    "train.updates_per_step=1",
]
FAST += ["train.kl_coefficient=0"]


def test_a_run_that_is_stopped_ends_with_the_doctor_s_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "render", lambda folder: None)
    run = tmp_path / "run"
    with silent.each(lambda rollout, rng: alter.prompt_in_mask(rollout, 1), 0, first=2):
        code, out, err = cli(capsys, "train", "default", *TINY, *FAST, f"run.dir={run}")
    assert (code, err.count("\n")) == (3, 1)
    (word,) = [e["verdict"] for e in events(run) if e["event"] == "doctor"]
    assert word.startswith("mask (bug)")
    assert err.rstrip().endswith(f"Doctor: {word}")
    assert "doctor: mask (bug)" in out


def test_the_word_stands_in_the_alarm_and_on_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 12)
    about = {"evidence": ["TV 0.3 (over 0.02)"], "advice": "Lower the rate."}
    run.events.emit("alarm", step=7, alarm="gap", **about, doctor="temperature (bug): as it were.")
    run.events.emit("doctor", step=9, verdict="policy_lag (dynamics): late.")
    run.end("done")
    (word,) = [w for w in verdict.verdict(read_run(run.path)) if w.about == "Alarms"]
    assert word.more[0].endswith("Lower the rate. Doctor: temperature (bug): as it were.")
    assert word.more[1] == "Doctor, asked before step 9 ended: policy_lag (dynamics): late."
    text = page(render(run.path)).text
    assert text.index("Doctor: temperature (bug)") < text.index("Training reward")


def test_a_doctor_that_breaks_says_so_and_one_that_is_slow_is_heard_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor, goes_on = AlarmDoctor(tmp_path), threading.Event()

    def broken(run: Path, *, alone: bool) -> str:
        raise ZeroDivisionError

    def slow(run: Path, *, alone: bool) -> str:
        goes_on.wait(30)
        return "healthy"

    monkeypatch.setattr(alarmed, "verdict", broken)
    assert doctor.ask(30.0) == "could not say: ZeroDivisionError"
    assert doctor.hear() == ""
    monkeypatch.setattr(alarmed, "verdict", slow)
    assert doctor.ask(0.0) == ""
    assert doctor.ask(0.0) == doctor.hear() == ""  # one question at a time
    goes_on.set()
    assert doctor.hear(30.0) == "healthy"
    assert doctor.hear() == ""
    assert AlarmDoctor(None).ask(30.0) == ""
    monkeypatch.undo()
    assert alarmed.verdict(tmp_path, alone=False) == ""


def test_the_alarm_of_a_running_job_carries_the_word_or_is_followed_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "render", lambda folder: None)
    asked: list[Any] = []

    def said(run: Path, *, alone: bool) -> str:
        time.sleep(0.3)
        asked.append(sorted(file.name for file in (run / "rollouts").iterdir())[-1])
        return "reward_failures (bug): by hand."

    monkeypatch.setattr(alarmed, "verdict", said)
    for patience, told in ((30.0, "check"), (0.0, "doctor")):
        monkeypatch.setattr(watch, "PATIENCE_S", patience)
        run = tmp_path / told
        with silent.each(lambda rollout, rng: silent.paid(rollout, rng, 1.0), 0, first=2):
            words = [*TINY, *FAST, "run.steps=2", "alarms.on_impossible=warn", f"run.dir={run}"]
            code, out, _ = cli(capsys, "train", "default", *words)
        assert code == 0
        assert out.count("doctor: reward_failures (bug): by hand.") == 1
        assert {e["event"] for e in events(run) if "by hand" in str(e)} == {told}
    assert asked == ["step_000002.parquet"] * 2
