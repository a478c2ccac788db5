"""`rollkeel analyze` as people type it: a run, two checkpoints, other tokens, wrong input. Exit codes are part of the contract.

Not covered: a real inference server; one that does not answer stands for it.
"""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
import torch
from tiny_run import TINY, cli

from rollkeel.config import ModelConfig
from rollkeel.loop.job import train
from rollkeel.models.loading import load_policy, save_policy
from rollkeel.recipe import load


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    train(load(None, [*TINY, "run.steps=2", "engine.dtype=fp8", f"run.dir={path}"]))
    return path


def test_a_run_is_its_trainer_against_its_engine(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = cli(capsys, "analyze", run, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["healthy"]
    assert (found["a"], found["b"]) == ("trainer fp32", "engine fp8")
    assert found["tokens"] > 0
    assert len(found["operations"]) == 35
    assert found["flips"]["explained"] == found["flips"]["count"]


def test_the_table_fits_80_columns(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in ((), ("--all",)):
        code, out, _ = cli(capsys, "analyze", run, "--dtype", "int4", *words)
        assert code == 0
        assert max(map(len, out.splitlines())) <= 80
        assert "q_rope" in out
        assert "flips" in out
        assert "…" not in out.split("gap")[0]
        said = " ".join(out.split())
        assert "Healthy: trainer fp32 and engine int4 differ as int4 explains: log-prob gap rms 0." in said
        assert re.search(r"[1-9][\d.]*% of tokens at other experts", said)
        assert "They differ first at layer 0 q_proj (A–B 0." in said, "its input is the same on both sides"
        assert re.search(r"q_proj ← +0 ", out)
        assert "no operation is beyond its dtype (35 operations, 2 layers)" in said


def test_sides_that_agree_differ_nowhere(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = cli(capsys, "analyze", run, "--dtype", "fp32", "--json")
    found = json.loads(out)
    assert (code, found["opens"]) == (0, None)
    assert found["verdict"].startswith("Healthy: trainer fp32 and engine fp32 agree; no operation is beyond")


def test_two_checkpoints_part_at_the_first_weight_that_differs(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = load_policy(ModelConfig(path=str(run / "model")))
    with torch.no_grad():
        policy.model.model.layers[1].self_attn.k_proj.weight.mul_(1.1)  # type: ignore[union-attr]
    save_policy(policy, tmp_path / "other")
    code, out, _ = cli(capsys, "analyze", run, "--against", tmp_path / "other", "--json")
    found = json.loads(out)
    assert code == 1
    assert found["first"] == {"layer": 1, "operation": "k_proj"}
    assert found["side"] == f"trainer fp32 of {tmp_path / 'other'}"
    assert cli(capsys, "analyze", run, "--against", run / "model")[0] == 0


def test_a_model_samples_its_own_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("analyze", "preset:tiny-qwen3", "data.task=addition", "--prompts", "2", "--json")
    code, out, _ = cli(capsys, *words, "--sides", "prefill:bf16,engine:bf16")
    found = json.loads(out)
    assert code == 0
    assert (found["a"], found["b"]) == ("prefill bf16", "engine bf16")
    assert found["flips"] is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("preset:tiny-qwen",), "did you mean preset:tiny-qwen3"),
        (("preset:tiny-qwen3", "--dtype", "fp9"), "--dtype fp9: expected one of fp32"),
        (("preset:tiny-qwen3", "--sides", "trainer,engin"), "expected trainer, engine or prefill"),
        (("preset:tiny-qwen3", "--sides", "trainer"), "expected two sides"),
        (("preset:tiny-qwen3", "--tokens", "nowhere.parquet"), "no such file or folder"),
        (("preset:tiny-qwen3", "--against", "nowhere.safetensors"), "no such file"),
        (("preset:tiny-qwen3", "--against", "preset:tiny-qwen3-moe"), "of the same names and shapes"),
        (("preset:tiny-qwen3", "engine.dtyp=fp8"), "did you mean engine.dtype"),
        (("./nowhere",), "expected a Hugging Face folder"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = cli(capsys, "analyze", *words)
    assert code == 2
    assert says in err
    assert out == ""
    assert len(err.strip().splitlines()) == 1


def test_a_server_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("httpx2")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    code, _, err = cli(capsys, "analyze", "preset:tiny-qwen3", "--prompts", "1", "--against", address)
    assert code == 3
    assert "no answer" in err
