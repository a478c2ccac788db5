"""The first lines of a report decide what a reader believes: they must be right, and quiet where there is nothing to see.

Not covered: how a browser paints the page; whether the doctor itself is right (tests/doctor).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from test_report import make_run, page, rollouts

from rollkeel.record.trackers import text_rows
from rollkeel.report import render, verdict
from rollkeel.report.charts import least_height, log_axis
from rollkeel.report.page import cards
from rollkeel.report.panels import Curve, merged, panels
from rollkeel.report.run_files import read_run
from rollkeel.report.samples import MAX_STEPS, _order


def evaluated(*values: tuple[int, float, float]) -> list[dict[str, Any]]:
    return [{"step": s, "eval/x/avg@k": value, "eval/x/avg@k_se": error} for s, value, error in values]


def test_learned_lost_and_neither_by_hand() -> None:
    (up,) = verdict.changes(evaluated((0, 0.30, 0.03), (9, 0.50, 0.04)))
    assert up.word == "learned"  # 1.96 · 0.05 = 0.098 < 0.2
    assert up.line == "x avg@k 0.300 → 0.500, +0.200 (95 % interval +0.102 to +0.298), step 0 to step 9"
    (flat,) = verdict.changes(evaluated((0, 0.30, 0.03), (9, 0.39, 0.04)))
    assert flat.word == "did not learn"
    (down,) = verdict.changes(evaluated((0, 0.30, 0.01), (4, 0.60, 0.01), (9, 0.10, 0.01)))
    assert down.word == "got worse"
    assert down.line.endswith("; best 0.600 at step 4")
    assert verdict.changes(evaluated((0, 0.3, 0.01))) == []


def test_without_evaluations_the_training_reward_counts() -> None:
    rows = [{"step": i, "reward/mean": value} for i, value in enumerate([0.0, 0.2, 0.5, 0.8, 1.0], 1)]
    (change,) = verdict.changes(rows)  # two steps at each end: 0.1 ± 0.1 against 0.9 ± 0.1
    assert (change.first, change.last, change.word) == (pytest.approx(0.1), pytest.approx(0.9), "learned")
    assert change.half == pytest.approx(1.96 * np.hypot(0.1, 0.1))
    assert (change.start, change.end) == ("steps 1–2", "steps 4–5")
    assert verdict.changes(rows[:3]) == []


def test_alarms_stand_at_the_top_and_a_failing_doctor_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", 12)
    run.events.emit("alarm", step=7, alarm="gap", evidence=["TV 0.3 (over 0.02)"], advice="Lower the rate.")
    run.end("done")

    def fails(trace: Any) -> None:
        raise ZeroDivisionError("no tokens at all")

    monkeypatch.setattr(verdict, "diagnose", fails)
    words = {word.about: word for word in verdict.verdict(read_run(run.path))}
    assert words["Alarms"].text == "1: gap at step 7."
    assert words["Alarms"].more == ("Step 7: TV 0.3 (over 0.02). Lower the rate.",)
    assert words["Doctor"].text.startswith("Could not say: no tokens at all.")
    text = page(render(run.path)).text
    assert text.index("gap at step 7") < text.index("Doctor Could not say") < text.index("Training reward")


def test_the_doctor_reads_no_more_than_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", 3)
    for step in (1, 2):
        run.rollouts(step).write_bytes(run.rollouts(3).read_bytes())
    size = run.rollouts(3).stat().st_size
    for limit, steps in ((10, "the last 1 steps"), (2 * size, "the last 2 steps"), (3 * size, "")):
        monkeypatch.setattr(verdict, "MAX_ROLLOUT_BYTES", limit)
        (word,) = verdict._doctor(run.path)
        assert steps in word.text
        assert ("rollkeel doctor" in word.text) == bool(steps)


AGREE = {"mismatch/ratio_std": 1.3e-6, "mismatch/kl_k3": 8e-13, "mismatch/pearson": 1 - 1e-9, "staleness/mean": 0.0}


def test_engines_that_agree_are_one_line_each_and_no_charts() -> None:
    rows = [
        {"step": i, "policy/entropy": 0.4, **{k: v * i if v < 0.5 else v for k, v in AGREE.items()}} for i in (1, 2)
    ]
    drawn, quiet = panels(rows)
    assert [c.title for c in drawn] == ["Entropy"]
    assert dict(quiet) == {
        "Mismatch: spread of the ratio": "within 3e-06 of 0",
        "Mismatch: divergence": "within 2e-12 of 0",
        "Mismatch: correlation": "within 1e-09 of 1",
        "Staleness": "0 in every step",
    }
    drawn, _ = panels([{**row, "mismatch/ratio_std": 0.05} for row in rows])
    assert "Mismatch: spread of the ratio" in [c.title for c in drawn]


def test_an_axis_is_never_finer_than_its_panel_says() -> None:
    for values, limits in (
        ([0.999999, 1.0], (0.99, 1.01)),
        ([0.001, 0.0011], (0.0, 0.02)),
        ([0.0, 5.0], (0.0, 5.0)),
    ):
        axes = Figure().add_subplot()
        axes.plot(values)
        least_height(axes, 0.02)
        low, high = axes.get_ylim()
        assert high - low >= 0.02
        assert (low, high) == pytest.approx(limits, abs=0.3 if high > 1.1 else 2e-3)


def test_a_line_under_another_becomes_its_second_name() -> None:
    steps, values = np.arange(3.0), np.array([0.1, 0.2, 0.3])
    found = merged(
        [
            Curve(label="all", steps=steps, values=values),
            Curve(label="other", steps=steps, values=values + 0.01),
            Curve(label="same", steps=steps, values=values + 1e-15),
        ]
    )
    assert [curve.label for curve in found] == ["all = same", "other"]


def test_log_axes_print_numbers_and_no_tex() -> None:
    figure = Figure()
    axes = figure.add_subplot()
    axes.plot([1, 10, 1000], [1, 2, 3])
    log_axis(axes, "x")
    figure.canvas.draw()  # type: ignore[attr-defined]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert {"1", "10", "100", "1,000"} <= set(labels)


def test_head_numbers_fill_one_row() -> None:
    row = {"step": 1, "eval/a/avg@k": 0.5, "eval/b/avg@k": 0.5, "reward/mean": 0.1, "mismatch/ratio_std": 0.1}
    row |= {"policy/entropy": 0.1, "mask/k/dropped": 0.1, "time/step_s": 0.1, "memory/rss_mb": 1.0}
    assert [label for label, _, _ in cards([row])] == [
        "a avg@k",
        "b avg@k",
        "Training reward",
        "Ratio std",
        "Entropy",
        "Masked",
    ]


def test_steps_to_choose_from_cover_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 9)
    for step in range(1, 9):
        run.rollouts(step).write_bytes(run.rollouts(9).read_bytes())
    run.rollouts(5).write_bytes(b"PAR1 broken")
    run.end("done")
    shown = page(render(run.path))
    steps = [attrs for tag, attrs in shown.tags if tag == "details" and attrs.get("name") == "step"]
    assert len(steps) == 8
    assert "open" in steps[-1]
    assert not any("open" in attrs for attrs in steps[:-1])
    assert "Step 1 · reward 0.500 · 4 of 8 rollouts" in shown.text
    assert "step_000005.parquet" in shown.text
    titles = {attrs.get("title") for tag, attrs in shown.tags if tag == "td"}
    assert "Mean entropy of the trainer's distribution. (nats)" in titles


def test_few_steps_of_many_are_the_ends_and_middles() -> None:
    files = [(i, Path(str(i))) for i in range(1, 101)]
    chosen = [step for step, _ in _order(files)]
    assert chosen[:5] == [100, 1, 50, 25, 75]
    assert sorted(chosen) == list(range(1, 101))
    assert len(set(chosen[:MAX_STEPS])) == MAX_STEPS
    assert _order([]) == []
    assert _order(files[:1]) == files[:1]


def test_the_best_and_the_worst_rollout_are_shown_first() -> None:
    made = rollouts(3)[0]  # rewards 0, 1, 0, 1, …
    rows = text_rows(made, 3)
    assert [row[3] for row in rows] == ["1.0", "0.0", "1.0"]
    assert rows[0][0] == made[0].prompt.text
    assert len(text_rows(made, 99)) == len(made)
    assert text_rows([], 3) == []
