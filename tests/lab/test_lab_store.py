"""An experiment of an hour is only bearable if nothing is computed twice: what is kept, shared, missing, and what a run that
breaks leaves behind.

Measurements stand in for training runs, each in a real process. Not covered: training runs, see `test_lab_interrupted.py`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import tiny_lab
from tiny_lab import heard, measured

from rollkeel.errors import BadInput, RunStopped
from rollkeel.lab import runs
from rollkeel.lab.command import run_preset
from rollkeel.lab.preset import Arm
from rollkeel.lab.runs import code_digest, execute, plan


@pytest.fixture(autouse=True)
def _listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tiny_lab.HEARD, str(tmp_path / "heard"))


def test_a_finished_experiment_makes_nothing_and_more_seeds_only_those(tmp_path: Path) -> None:
    said: list[str] = []
    first = run_preset(measured(), out=tmp_path / "a", store=tmp_path / "store", jobs=2, say=said.append)
    assert sorted(map(str, heard())) == sorted(
        map(str, [["less", 0], ["less", 1], ["less", "more", 0], ["less", "more", 1]])
    )
    assert len(said) == 4
    assert all("done" in line for line in said)
    again = run_preset(measured(), out=tmp_path / "b", store=tmp_path / "store", jobs=2, say=said.append)
    assert len(heard()) == 4
    assert all("found" in line for line in said[4:])
    assert {k: v.tolist() for k, v in again.readings["value"].items()} == {"low": [1.0, 1.01], "high": [2.0, 2.01]}
    assert first.readings["value"]["low"].tolist() == [1.0, 1.01]
    run_preset(measured(), out=tmp_path / "c", store=tmp_path / "store", jobs=2, seeds=3)
    assert [line[-1] for line in heard()[4:]] == [2, 2]


def test_an_arm_asked_for_twice_is_made_once(tmp_path: Path) -> None:
    preset = measured()
    twice = dataclasses.replace(preset, arms=(preset.arms[0], Arm(name="again", words=preset.arms[0].words)))
    found = run_preset(twice, out=tmp_path, store=tmp_path / "store", jobs=2, seeds=1)
    assert len(heard()) == 1
    assert found.readings["value"]["again"].tolist() == found.readings["value"]["low"].tolist()


def test_training_runs_are_named_by_what_they_compute(tmp_path: Path) -> None:
    one, other = tiny_lab.TRAINED, dataclasses.replace(tiny_lab.TRAINED, name="other", seeds=3)
    assert [run.folder for run in plan(one, [0], tmp_path)] == [run.folder for run in plan(other, [0], tmp_path)]
    moved = dataclasses.replace(one, words=one.arms[0].words, arms=(Arm(name="x", words=one.words),))
    assert plan(moved, [0], tmp_path)[0].folder == plan(one, [0], tmp_path)[0].folder
    changed = dataclasses.replace(one, words=(*one.words, "train.lr=2e-3"))
    folders = {run.folder for preset in (one, changed) for run in plan(preset, [0, 1], tmp_path)}
    assert len(folders) == 4


def test_a_run_that_dies_or_fails_is_named_in_one_line_and_the_others_are_kept(tmp_path: Path) -> None:
    for word, reason in (("die", "its process ended with code -9"), ("fail", "ValueError: nothing to see")):
        preset = measured(less=f"before {word}", more=word)
        with pytest.raises(RunStopped) as stopped:
            run_preset(preset, out=tmp_path / word, store=tmp_path / "store", jobs=1, seeds=1)
        assert str(stopped.value).startswith("lab run high, seed 0 (")
        assert str(stopped.value).endswith(reason)
        assert "\n" not in str(stopped.value)
        assert not (tmp_path / word / "lab.json").exists(), "no verdict on half of the runs"
        low, high = plan(preset, [0], tmp_path / "store")
        assert low.done
        assert not high.done


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("objective.name=nosuch", "objective.name 'nosuch': unknown"),
        ("train.lrr=1", "config train.lrr: unknown key; did you mean train.lr?"),
        ("data.options.digitz=3", "task runsum: unknown option 'digitz'"),
        ("sampling.temperature=0", "sampling.temperature: expected > 0"),
    ],
)
def test_an_arm_that_cannot_be_is_refused_before_any_run(word: str, said: str, tmp_path: Path) -> None:
    bad = dataclasses.replace(tiny_lab.TRAINED, arms=(*tiny_lab.TRAINED.arms, Arm(name="bad", words=(word,))))
    with pytest.raises(BadInput) as refused:
        run_preset(bad, out=tmp_path / "out", store=tmp_path / "store")
    assert str(refused.value).startswith(f"lab arm bad: {said}")
    assert list((tmp_path / "store").iterdir()) == []


def test_a_run_that_refuses_its_input_is_no_run_that_broke(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^lab run high, seed 0 \(\S+\): expected another word, got refuse$"):
        run_preset(measured(more="refuse"), out=tmp_path / "out", store=tmp_path / "store", jobs=1, seeds=1)


def test_a_run_that_a_rule_stopped_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise RunStopped("loss is nan; weights left untouched")

    monkeypatch.setattr("rollkeel.loop.job.train", stopped)
    preset = dataclasses.replace(tiny_lab.TRAINED, charts=())
    (run,) = plan(preset, [0], tmp_path / "store")
    run.folder.mkdir(parents=True)
    monkeypatch.setattr("shutil.rmtree", lambda _: None)
    (run.folder / runs.METRICS).write_text('{"step": 1, "reward/mean": 0.25}\n')
    assert runs._make(run) == "stopped: loss is nan; weights left untouched"
    found = run_preset(preset, out=tmp_path / "out", store=tmp_path / "store")
    assert found.stopped == {("kpop", 0): "loss is nan; weights left untouched"}
    assert found.readings["value"]["kpop"].tolist() == [0.25]
    assert "loss is nan" in (tmp_path / "out" / "lab.html").read_text()


def test_two_experiments_at_once_do_not_make_one_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run, *_) = plan(measured(), [0], tmp_path)
    monkeypatch.setattr(runs, "WAIT_S", -1.0)
    with runs._only_here(run.folder), pytest.raises(RunStopped, match="another process has been making it"):
        runs._make(run)
    assert heard() == []
    assert runs._make(run) == "done"
    assert runs._make(run) == "done"
    assert len(heard()) == 1


def test_the_name_follows_the_code_that_computes_and_not_the_one_that_shows() -> None:
    assert code_digest() != code_digest("lab")
    assert code_digest() != code_digest("report")
    assert {"lab", "report", "record", "diagnose", "analyzer"} <= set(runs._NOT_COMPUTING)


def test_nothing_to_do_is_nothing_started(tmp_path: Path) -> None:
    execute([], 1, lambda run, what: pytest.fail("nothing was planned"))
    assert list(tmp_path.iterdir()) == []
