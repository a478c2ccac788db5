"""Recorded tensors must not touch the run they record, must survive a kill, and must say what the weights of that step say.

Whole tiny runs, one of them killed. Not covered: a power cut, recording on CUDA, runs with several trainer processes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiny_run import TINY, cli, files, kill_at, rows, weights

from rollkeel.analyzer.capture import load_capture
from rollkeel.analyzer.record import check_layers
from rollkeel.analyzer.sides import TrainerSide
from rollkeel.config import ModelConfig
from rollkeel.errors import BadInput
from rollkeel.loop.job import train
from rollkeel.models.loading import load_policy
from rollkeel.recipe import load
from rollkeel.record.rollout_store import read_step
from rollkeel.record.runfolder import RunFolder, tensor_files

SHORT = [*TINY, "run.steps=4", "checkpoint.keep=9", "eval.every=0"]
TRACED = [*SHORT, "trace.tensors_every=2"]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("traced") / "run"
    train(load(None, [*TRACED, f"run.dir={run}"]))
    return run


def test_a_recorded_run_is_the_same_run(traced: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    train(load(None, [*SHORT, f"run.dir={plain}"]))
    assert weights(plain) == weights(traced)
    assert rows(plain) == rows(traced)
    assert not (plain / "tensors").exists()
    assert [step for step, _ in tensor_files(traced)] == [2, 4]
    assert any("time/trace_s" in row for row in rows(traced, volatile=True))


def test_tensors_are_those_of_the_weights_that_began_the_step(traced: Path) -> None:
    found = load_capture(traced / "tensors" / "step_000004.safetensors")
    assert found.facts["step"] == "4"
    assert found.facts["version"] == "6"
    assert len(found.tokens.sequences) == 2
    before = traced / "checkpoints" / "step_000003" / "model"
    again = TrainerSide(load_policy(ModelConfig(path=str(before))).model.eval()).capture(found.tokens)
    assert again.values.keys() == found.values.keys()
    assert all(torch.equal(again.values[key], value) for key, value in found.values.items())
    table = read_step(traced / "rollouts" / "step_000004.parquet")
    by_id = {row["id"]: row for row in table.select(["id", "token_ids", "train_logprobs"]).to_pylist()}
    for at, name in enumerate(found.facts["rollouts"].split(",")):
        row, prompt = by_id[int(name)], found.tokens.prompt_lengths[at]
        assert found.tokens.sequences[at][prompt:].tolist() == row["token_ids"]


def test_the_analyzer_reads_them_with_the_weights_of_that_step(
    traced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(traced / "tensors" / "step_000004.safetensors")
    right, wrong = (str(traced / "checkpoints" / f"step_00000{i}" / "model") for i in (3, 2))
    assert cli(capsys, "analyze", right, "--against", file)[0] == 0
    code, out, _ = cli(capsys, "analyze", wrong, "--against", file)
    assert code == 1
    assert "trainer fp32 of step 4 parts first at embedding" in " ".join(out.split())
    assert "those are other weights" in " ".join(out.split())


def test_a_resume_drops_later_tensors(traced: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(traced, tmp_path / "copy"))
    (run / "tensors" / ".step_000004.safetensors.1.tmp").write_bytes(b"half")
    with RunFolder.open(run) as folder:
        folder.truncate_after(3)
        folder.clean()
    assert [step for step, _ in tensor_files(run)] == [2]
    assert [p.name for p in (run / "tensors").iterdir()] == ["step_000002.safetensors"]


@pytest.mark.slow
def test_a_killed_run_records_the_same(traced: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kill_at(run, TRACED, "trace", 4, 0.0)
    train(load(run / "config.yaml"), resume=run)
    assert weights(run) == weights(traced)
    assert files(run / "tensors") == files(traced / "tensors")


def test_a_layer_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    code, _, err = cli(capsys, "train", *SHORT, "trace.layers=[7]", f"run.dir={run}")
    assert code == 2
    assert "trace.layers: expected layers from 0 to 1, got 7" in err
    assert not run.exists()
    policy = load_policy(ModelConfig())
    check_layers([0, 1], policy.model.config)
    with pytest.raises(BadInput):
        check_layers([-1], policy.model.config)
