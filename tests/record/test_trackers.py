"""A tracker that is missing must say how to get it, and one that breaks must not end a run unheard.

trackio and W&B are stood in for by fakes with known behaviour; TensorBoard is real where it is installed. Not covered:
their network.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from rollkeel.errors import BadInput
from rollkeel.record.trackers import COLUMNS, numbers, open_trackers

ROW = {"step": 3, "reward/mean": 0.5, "mismatch/source": "old", "flag": True, "nan": float("nan"), "none": None}


class FakeRun:
    def __init__(self, **options: Any) -> None:
        self.options = options
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finished = False
        self.broken = False

    def log(self, metrics: dict[str, float], step: int) -> None:
        if self.broken:
            raise ConnectionError("network\nis down")
        self.rows.append((step, metrics))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """Both packages, keeping the runs they started."""
    runs: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        runs.append(FakeRun(**options))
        return runs[-1]

    for name in ("wandb", "trackio"):
        module = types.ModuleType(name)
        module.init = init  # type: ignore[attr-defined]
        module.Table = lambda columns, data: (columns, data)  # type: ignore[attr-defined]
        module.log = lambda metrics, step: runs[-1].log(metrics, step)  # type: ignore[attr-defined]
        module.finish = lambda: runs[-1].finish()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    return runs


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_numbers_reach_the_tracker_under_their_step(tmp_path: Path, fake: list[FakeRun], name: str) -> None:
    (tracker,) = open_trackers([name], tmp_path, {"run": {"seed": 1}})
    tracker.log(3, ROW)
    tracker.texts(3, [("1+1=", "2", "2", "1.0", "finished")])
    tracker.close()
    table = ([*COLUMNS], [["1+1=", "2", "2", "1.0", "finished"]])
    assert fake[0].rows == [(3, {"reward/mean": 0.5, "flag": 1.0}), (3, {"samples": table})]
    assert fake[0].finished
    assert fake[0].options["config"] == {"run": {"seed": 1}}


def test_wandb_is_offline_without_a_key_and_keeps_its_id(
    tmp_path: Path, fake: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_trackers(["wandb"], tmp_path, {})
    assert (fake[0].options["mode"], fake[0].options["resume"]) == ("offline", "never")
    assert fake[0].options["dir"] == str(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "k")
    open_trackers(["wandb"], tmp_path, {}, resume_step=7)
    assert (fake[1].options["mode"], fake[1].options["resume"]) == ("online", "allow")
    assert fake[1].options["id"] == fake[0].options["id"]
    (tmp_path / "other").mkdir()
    open_trackers(["wandb"], tmp_path / "other", {})
    assert fake[2].options["id"] != fake[0].options["id"]


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_missing_package_names_the_extra(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BadInput, match=rf"pip install rollkeel\[{name}\]"):
        open_trackers([name], tmp_path, {})


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="mlflow"):
        open_trackers(["mlflow"], tmp_path, {})


def test_a_tracker_that_breaks_is_reported_once_and_left_out(tmp_path: Path, fake: list[FakeRun]) -> None:
    messages: list[str] = []
    (tracker,) = open_trackers(["wandb"], tmp_path, {}, on_failure=messages.append)
    tracker.log(1, {"a": 1.0})
    fake[0].broken = True
    tracker.log(2, {"a": 1.0})
    tracker.log(3, {"a": 1.0})
    tracker.close()
    assert len(messages) == 1
    assert "tracker wandb: stopped after ConnectionError: network is down" in messages[0]
    assert fake[0].rows == [(1, {"a": 1.0})]
    (loud,) = open_trackers(["wandb"], tmp_path, {})
    fake[1].broken = True
    with pytest.raises(ConnectionError):
        loud.log(1, {"a": 1.0})


def test_a_tracker_of_ones_own_may_take_numbers_alone(tmp_path: Path) -> None:
    lines = [
        "class Log:",
        "    def __init__(self, *_): self.steps = []",
        "    def log(self, step, row): self.steps += [step]",
    ]
    (tmp_path / "half.py").write_text("\n".join(lines))
    with pytest.raises(BadInput, match=r"expected a class \(with log and close\) or function of \(run folder"):
        open_trackers([f"{tmp_path}/half.py:Log"], tmp_path, {})
    (tmp_path / "mine.py").write_text("\n".join([*lines, "    def close(self): pass", ""]))
    messages: list[str] = []
    (tracker,) = open_trackers([f"{tmp_path}/mine.py:Log"], tmp_path, {}, on_failure=messages.append)
    tracker.log(1, ROW)
    tracker.texts(1, [("1+1=", "2", "2", "1.0", "finished")])
    tracker.log(2, ROW)
    assert messages == []
    assert tracker._tracker.steps == [1, 2]  # type: ignore[attr-defined]


def test_numbers_leaves_out_what_is_not_a_finite_number() -> None:
    assert numbers(ROW) == {"reward/mean": 0.5, "flag": 1.0}


def test_tensorboard_files_hold_what_was_logged_and_resume_purges(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = open_trackers(["tensorboard"], tmp_path, {"a": 1})
    for step in (1, 2, 3):
        tracker.log(step, {"step": step, "reward/mean": step / 4})
    tracker.close()
    (tracker,) = open_trackers(["tensorboard"], tmp_path, {"a": 1}, resume_step=2)
    tracker.log(3, {"reward/mean": 0.875})
    tracker.close()
    seen = EventAccumulator(str(tmp_path / "tensorboard"))
    seen.Reload()
    assert [(e.step, e.value) for e in seen.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.875)]


def test_tensorboard_adapter_writes_scalars_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Writer:
        def __init__(self, log_dir: str, purge_step: int | None) -> None:
            seen.append((log_dir, purge_step))

        def add_text(self, *args: Any) -> None:
            seen.append(args)

        def add_scalar(self, *args: Any) -> None:
            seen.append(args)

        def flush(self) -> None: ...

        def close(self) -> None:
            seen.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    (tracker,) = open_trackers(["tensorboard"], tmp_path, {}, resume_step=4)
    tracker.log(5, ROW)
    tracker.texts(5, [("a|b\nc", "2", "2", "1.0", "finished")])
    tracker.close()
    scalars = [("reward/mean", 0.5, 5), ("flag", 1.0, 5)]
    assert seen[:3] == [(str(tmp_path / "tensorboard"), 5), *scalars]
    name, text, step = seen[3]
    assert (name, text.splitlines()[2], step) == ("samples", "| a\\|b c | 2 | 2 | 1.0 | finished |", 5)
    assert seen[4:] == ["closed"]
