"""A run with adapters from its recipe to the model that people load: killed and resumed bit for bit, no base in any checkpoint, folders
that chat, eval and merge take, and rewards that rise.

Real runs, in processes of their own where they are killed. Not covered: CUDA, several engine processes (tests/engines/test_adapters.py).
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import STEPS, TINY, assert_same, cli, killed_in, rows, start

from rollkeel.loop.job import train
from rollkeel.loop.stages import sft_stage
from rollkeel.recipe import load
from rollkeel.train.checkpoint import load_state

GREEDY = "eval/runsum/greedy"
LORA = ["train.lora.rank=4", "train.lora.experts=true", "sft.steps=5", "train.lr=5e-3"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model that gets some answers right."""
    folder = tmp_path_factory.mktemp("base") / "model"
    sft_stage(load(None, TINY), folder)
    return folder


@pytest.fixture(scope="module")
def words(base: Path) -> list[str]:
    return [*TINY, *LORA, f"model.path={base}"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> Path:
    """The uninterrupted run; it also fills the cache of warm starts."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(load(None, [*words, f"run.dir={run}"]))
    assert len({row.get("reward/mean") for row in rows(run)}) > 3
    assert all(row["optimizer/grad_norm"] > 0 for row in rows(run)[1:])
    return run


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "step", "delay_s"), [("update", 8, 0.002), ("checkpoint", 3, 0.01)])
def test_a_killed_run_ends_as_if_nothing_had_happened(
    whole: Path, words: list[str], tmp_path: Path, stage: str, step: int, delay_s: float
) -> None:
    run = killed_in(tmp_path, words, stage, step, delay_s)
    resumed = start("train", "--resume", run)
    assert resumed.communicate()[1] == ""
    assert resumed.returncode == 0
    assert_same(run, whole)


def test_checkpoints_hold_adapters_and_no_base(whole: Path, base: Path) -> None:
    large = (base / "model.safetensors").stat().st_size
    saved = [whole / "model", *(whole / "checkpoints").glob("*/model")]
    assert len(saved) == 3
    for folder in saved:
        assert not (folder / "model.safetensors").exists()
        assert (folder / "adapter_model.safetensors").stat().st_size < large / 5
    state = load_state(whole / "checkpoints" / f"step_{STEPS:06d}" / "state")["trainer"]
    kept = {name for part in ("weights", "reference") for name in state[part]}
    assert all(".lora." in name for name in kept)
    assert state["base"]["path"] == str(base)


def test_resume_with_another_base_is_refused(
    whole: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = Path(shutil.copytree(whole, tmp_path / "run")), Path(shutil.copytree(base, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][3] += 0.5
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    code, _, err = cli(capsys, "train", "--resume", run, f"model.path={other}", f"run.steps={STEPS + 2}")
    assert code == 2
    assert "resume with the same base" in err
    assert len(err.strip().splitlines()) == 1
    code, _, err = cli(capsys, "train", "--resume", run, f"run.steps={STEPS + 2}")
    assert code == 0, err


def test_chat_eval_and_merge_take_the_folder(
    whole: Path,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def accuracy(model: Path) -> float:
        code, out, err = cli(capsys, "eval", *words, f"model.path={model}", "--json")
        assert code == 0, err
        return next(value for key, value in json.loads(out).items() if key.endswith("greedy"))

    code, _, err = cli(capsys, "merge", *words, f"model.path={whole / 'model'}", "--out", tmp_path / "merged")
    assert code == 0, err
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(t.dtype == torch.float32 for t in tensors.values())
    assert accuracy(whole / "model") == accuracy(tmp_path / "merged")
    assert accuracy(whole / "model") == pytest.approx(rows(whole)[-1][GREEDY], abs=1e-6)
    said = []
    for model in (whole, tmp_path / "merged"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("12=\n"))
        code, out, err = cli(capsys, "chat", model, "--plain", "sampling.temperature=0", "sampling.max_new_tokens=4")
        assert code == 0, err
        said.append(out)
    assert said[0] == said[1] != ""
    code, _, err = cli(capsys, "merge", *words, "--out", tmp_path / "again")
    assert code == 2
    assert "expected a folder of adapters" in err


def test_a_run_can_start_from_adapters(whole: Path, words: list[str], tmp_path: Path) -> None:
    """They become part of the base, and the new ones begin at zero."""
    small = [*words, f"model.path={whole / 'model'}", "sft.steps=0", "run.steps=1", f"run.dir={tmp_path / 'run'}"]
    run = train(load(None, small))
    assert rows(run)[0][GREEDY] == pytest.approx(rows(whole)[-1][GREEDY], abs=1e-6)
    told = json.loads((run / "model" / "rollkeel.json").read_text())
    assert told["base"]["path"] == str(whole / "model")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (["train.lora.targets=[q_prj]"], "it has k_proj, o_proj, q_proj, v_proj"),
        (["engine.kind=vllm"], "engine.kind"),
    ],
)
def test_what_cannot_be_is_one_line(
    words: list[str], bad: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = cli(capsys, "train", *words, *bad, f"run.dir={tmp_path / 'run'}")
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_default_recipe_learns_with_adapters_alone(tmp_path: Path) -> None:
    """As tests/test_learning.py judges, from the same warm start; measured: 0.31 → 0.71."""
    sft_stage(load("default"), tmp_path / "base")
    words = [f"model.path={tmp_path / 'base'}", "sft.steps=0", f"run.dir={tmp_path / 'run'}"]
    train(load("default", [*words, "train.lora.rank=8", "train.lora.experts=true", "train.lr=1e-3"]))
    start, end = (rows(tmp_path / "run")[i]["eval/runsum/avg@k"] for i in (0, -1))
    print(f"held-out accuracy {start:.3f} → {end:.3f}")
    assert start < 0.5
    assert end > start + 0.2
