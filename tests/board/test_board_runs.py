"""Someone who watches a run decides by these curves: a peak that is thinned away, or a row shown twice, misleads them.

Truth is counted by hand or read off the whole series. Not covered: the page (test_board_page.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from board_kit import run_folder
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rollkeel.board.runs import Run, Runs, curves, differing, metrics_of, thin
from rollkeel.errors import BadInput
from rollkeel.events import write_atomic
from rollkeel.record.lock import RunLock
from rollkeel.report.charts import smooth


def row(step: int, **values: object) -> dict[str, object]:
    return {"step": step, "reward/mean": step / 10, **values}


def append(run: Path, text: str) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(text)


def rewards(run: Run) -> tuple[list[float], list[float]]:
    steps, columns = run.columns(["reward/mean"])
    return steps.tolist(), columns["reward/mean"].tolist()


# -- thinning ------------------------------------------------------------------------------------------------------------


def test_few_values_are_all_kept() -> None:
    assert thin(np.array([3.0, 1.0, 2.0]), 3).tolist() == [0, 1, 2]


def test_of_each_stretch_first_last_least_and_largest_are_kept() -> None:
    values = np.array([5, 1, 6, 9, 5, 5, 5, 0, 5, 5, 5, 5.0])
    # Two stretches of six: of 5 1 6 9 5 5 the places 0, 1, 3 and 5, of 5 0 5 5 5 5 the places 6, 7 and 11.
    assert thin(values, 8).tolist() == [0, 1, 3, 5, 6, 7, 11]


@given(
    arrays.arrays(float, st.integers(1, 300), elements=st.floats(-1e6, 1e6)),
    st.integers(8, 60),
)
def test_thinning_loses_no_peak_and_keeps_its_bound(values: np.ndarray, most: int) -> None:
    kept = thin(values, most)
    assert len(kept) <= most
    assert (np.diff(kept) > 0).all()
    assert {0, len(values) - 1} <= set(kept.tolist())
    assert values[kept].max() == values.max()
    assert values[kept].min() == values.min()


def test_a_part_of_a_curve_has_a_neighbour_on_each_side_and_the_mean_of_the_whole(tmp_path: Path) -> None:
    values = [float((7 * i) % 11) for i in range(1, 41)]
    rows = [{"step": i, "policy/entropy": value} for i, value in enumerate(values, 1)]
    run = Run(0, "a", run_folder(tmp_path / "a", rows))
    found = curves([run], ["policy/entropy", "nothing"], 600, 10, 12)
    assert found["nothing"] == {}
    curve = found["policy/entropy"]["0"]
    assert curve["x"] == [9, 10, 11, 12, 13]
    assert curve["y"] == values[8:13]
    assert curve["m"] == smooth(np.array(values))[8:13].tolist()


# -- following -----------------------------------------------------------------------------------------------------------


def test_a_row_counts_once_and_only_when_its_line_is_whole(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "a", [row(1)])
    run = Run(0, "a", path)
    assert rewards(run) == ([1], [0.1])
    text = json.dumps(row(2, **{"loss/total": 3.0})) + "\n"
    append(path, text[:20])
    assert rewards(run) == ([1], [0.1])
    append(path, text[20:] + json.dumps({"step": 3}) + "\n")
    steps, columns = run.columns(["reward/mean", "loss/total"])
    assert steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(columns["reward/mean"], [0.1, 0.2, np.nan])
    np.testing.assert_array_equal(columns["loss/total"], [np.nan, 3.0, np.nan])
    assert rewards(run)[0] == [1, 2, 3]


def test_a_resumed_run_drops_the_rows_that_its_files_dropped(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "a", [row(i) for i in range(1, 6)])
    run = Run(0, "a", path)
    assert rewards(run)[0] == [1, 2, 3, 4, 5]
    kept = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:3]
    write_atomic(path / "metrics.jsonl", b"".join(kept))
    assert rewards(run)[0] == [1, 2, 3]
    write_atomic(
        path / "metrics.jsonl", b"".join([kept[0], *(json.dumps(row(i)).encode() + b"\n" for i in range(12, 19))])
    )
    assert rewards(run)[0] == [1, 12, 13, 14, 15, 16, 17, 18]  # longer than what was read, and another file
    with (path / "metrics.jsonl").open("r+b") as file:
        file.truncate(len(kept[0]))
    assert rewards(run)[0] == [1]


def test_what_is_no_finite_number_is_left_out_and_damage_is_told(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "a", [row(1, text="x", many=[1, 2], flag=True, none=None)])
    append(path, 'not json\n{"step": 2, "reward/mean": NaN}\n[1]\n')
    run = Run(0, "a", path)
    assert run.names() == {"reward/mean"}
    np.testing.assert_array_equal(run.columns(["reward/mean"])[1]["reward/mean"], [0.1, np.nan])
    assert run.summary()["problems"] == ["metrics.jsonl: 2 damaged lines left out"]


def test_files_that_lead_out_of_the_run_are_not_read(tmp_path: Path) -> None:
    outside = run_folder(tmp_path / "outside", [row(1)])
    path = run_folder(tmp_path / "runs" / "a")
    for name in ("metrics.jsonl", "config.yaml"):
        (path / name).unlink()
        (path / name).symlink_to(outside / name)
    run = Run(0, "a", path)
    assert run.names() == set()
    assert run.settings() == {}
    summary = run.summary()
    assert (summary["step"], summary["last"]) == (0, {})
    assert summary["problems"] == ["metrics.jsonl is a link out of the run folder: not read"]


# -- the list ------------------------------------------------------------------------------------------------------------


def test_a_summary_says_how_far_the_run_is(tmp_path: Path) -> None:
    begun = [
        {"event": "run_created", "steps": 5},
        {"event": "stage", "stage": "rollout"},
        {"event": "alarm", "step": 2},
        {"event": "config_changed", "changed": {"run.steps": [5, 9], "train.lr": [1, 2]}},
    ]
    path = run_folder(tmp_path / "a", [row(0, **{"eval/sum/avg@k": 0.25}), row(1), row(2)], begun)
    run = Run(3, "a", path)
    first = run.summary()
    assert {key: first[key] for key in ("run", "name", "step", "steps", "alarms", "status")} == {
        "run": 3, "name": "a", "step": 2, "steps": 9, "alarms": 1, "status": "killed"
    }  # fmt: skip
    assert first["last"] == {"reward/mean": 0.2, "eval/sum/avg@k": 0.25}
    with (path / "events.jsonl").open("a") as file:
        file.write('{"event": "run_end", "status": "done"}\n')
    append(path, json.dumps(row(3)) + "\n")
    second = run.summary()
    assert (second["status"], second["step"], second["rows"] > first["rows"]) == ("done", 3, True)


def test_a_run_that_is_held_goes_on(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "a", [row(1)], [{"event": "run_created", "steps": 5}])
    lock = RunLock(path)
    assert Run(0, "a", path).summary()["status"] == "running"
    lock.release()
    assert Run(0, "a", path).summary()["status"] == "killed"


def test_a_folder_without_events_or_rows_is_shown_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "bare"
    path.mkdir()
    (path / "metrics.jsonl").write_text("")
    summary = Run(0, "bare", path).summary()
    assert (summary["status"], summary["step"], summary["steps"], summary["problems"]) == ("trace", 0, None, [])


def test_runs_are_found_below_what_was_named_and_once(tmp_path: Path) -> None:
    root, outside = tmp_path / "runs", run_folder(tmp_path / "outside")
    for name in ("b", "a", "lab/kpop/seed0"):
        run_folder(root / name)
    run_folder(root / "a" / "warm_start")  # a run is not looked into
    (root / ".hidden").mkdir()
    run_folder(root / ".hidden" / "c")
    (root / "newest").symlink_to(root / "b")
    (root / "elsewhere").symlink_to(outside)
    runs = Runs([root, root / "a"])
    assert [run.name for run in runs.look()] == ["runs/a", "runs/b", "runs/lab/kpop/seed0"]
    numbers = {run.name: run.number for run in runs.look()}
    run_folder(root / "aa")
    later = {run.name: run.number for run in runs.look()}
    assert later.pop("runs/aa") not in numbers.values()
    assert later == numbers
    assert runs.get(numbers["runs/b"]).path.samefile(root / "b")
    with pytest.raises(BadInput, match="run 99: no such run"):
        runs.get(99)


def test_a_run_that_is_named_itself_has_its_folders_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_folder(tmp_path / "mine"))
    assert [run.name for run in Runs([Path(".")]).look()] == ["mine"]


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"board .*/none: no such folder; name run folders or folders of runs$"):
        Runs([tmp_path / "none"])


def test_a_folder_that_may_not_be_entered_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder(tmp_path / "b")
    (tmp_path / "a").mkdir()
    real = Path.iterdir

    def refused(path: Path) -> Iterator[Path]:
        if path.name == "a":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "iterdir", refused)
    assert [run.name for run in Runs([tmp_path]).look()] == ["b"]


def test_metrics_come_in_the_reports_order_with_their_meaning(tmp_path: Path) -> None:
    rows = [{"step": 1, "zzz": 1, "policy/entropy": 1, "reward/mean": 0, "mask/kpop/dropped": 0.5, "aaa": 2}]
    found = metrics_of([Run(0, "a", run_folder(tmp_path / "a", rows))])
    assert [one["key"] for one in found] == ["reward/mean", "mask/kpop/dropped", "policy/entropy", "aaa", "zzz"]
    assert found[1]["scale"] == 100
    assert found[1]["unit"] == "tokens (%)"
    assert found[0]["meaning"].startswith("Mean reward")
    assert set(found[3]) == {"key", "meaning"}


def test_settings_that_differ_are_told_and_no_others(tmp_path: Path) -> None:
    paths = [run_folder(tmp_path / name) for name in "ab"]
    (paths[1] / "config.yaml").write_text("run: {name: b, steps: 9}\ntrain: {lr: 0.1, clip: null}\nobjective: <b>\n")
    found = differing([Run(i, path.name, path) for i, path in enumerate(paths)])
    assert found == [
        {"key": "run.name", "values": ["a", "b"]},
        {"key": "objective", "values": ["none", "<b>"]},
    ]
    for broken in ("{", "[" * 100_000, "- " * 100_000):
        (paths[0] / "config.yaml").write_text(broken)
        assert Run(0, "a", paths[0]).settings() == {}
