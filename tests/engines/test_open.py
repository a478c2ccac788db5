"""What an inference server cannot do is said before a warm start is trained for it, in one line that names the key.

Not covered: servers themselves (test_served.py, test_vllm.py).
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import folder_checksum

from rollkeel.config import Config, EngineConfig
from rollkeel.engines.open import check_engine, server_python
from rollkeel.engines.vllm import _words
from rollkeel.engines.vllm_worker import tensor_checksum as worker_checksum
from rollkeel.engines.weight_folder import write_weights
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.loop.check import validate
from rollkeel.models.checksum import tensor_checksum
from rollkeel.models.names import checkpoint_views
from rollkeel.models.presets import build_preset
from rollkeel.recipe import load
from rollkeel.sync.publish import full_update
from rollkeel.types import SamplingParams, WeightUpdate

LISTENS = socket.create_server(("127.0.0.1", 0))
URL = f"http://127.0.0.1:{LISTENS.getsockname()[1]}"


def engine(**fields: Any) -> EngineConfig:
    """Of a server that seems to run already, so that none has to be installed here."""
    return EngineConfig.model_validate({"kind": "vllm", "server": {"url": URL}, **fields})


@pytest.mark.parametrize(
    ("config", "sampling", "says"),
    [
        (engine(dtype="int8"), SamplingParams(), "engine.dtype: vllm serves fp32 or bf16 or fp16, got int8"),
        (engine(), SamplingParams(top_p=0.9), "top_p"),
        (engine(), SamplingParams(top_k=5), "top_k"),
        (engine(), SamplingParams(return_topk=500), "at most 127, got 500"),
        (engine(server={"url": "localhost:8000"}), SamplingParams(), "engine.server.url: expected http://host:port"),
        (
            engine(server={"url": "http://127.0.0.1:x"}),
            SamplingParams(),
            "engine.server.url: expected http://host:port",
        ),
        (
            engine(server={"url": "http://127.0.0.1:1"}),
            SamplingParams(),
            "nothing listens at http://127.0.0.1:1 (Connection",
        ),
    ],
)
def test_refused_in_one_line(config: EngineConfig, sampling: SamplingParams, says: str) -> None:
    with pytest.raises(BadInput) as refused:
        check_engine(config, sampling)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_welcome() -> None:
    check_engine(engine(), SamplingParams())
    check_engine(engine(dtype="bf16"), SamplingParams(temperature=0.0))
    check_engine(EngineConfig(), SamplingParams(top_p=0.5))


def test_a_run_is_refused_before_it_begins() -> None:
    words = ["engine.kind=vllm", f"engine.server.url={URL}"]
    validate(load("default", words))
    with pytest.raises(BadInput, match="mass"):
        validate(load("default", [*words, "sampling.top_p=0.5"]))
    validate(load("default", [*words, "run.loop=budgeted"]))
    assert Config().engine.kind == "local"


def test_the_parked_engine_is_refused_with_where_it_is() -> None:
    with pytest.raises(BadInput) as refused:
        load("default", ["engine.kind=sglang"])
    said = str(refused.value)
    assert "engine.kind: expected local or vllm; SGLang's client" in said
    assert "branch parked-sglang" in said
    assert "\n" not in said


def test_an_environment_beside_the_working_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nexit "$FOUND"\n')
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOUND", "0")
    assert server_python(EngineConfig(kind="vllm")) == str(python)
    monkeypatch.setenv("FOUND", "1")
    with pytest.raises(BadInput, match="has no package vllm"):
        server_python(EngineConfig(kind="vllm"))


@pytest.mark.parametrize(
    ("python", "says"), [("/no/such/python", "cannot run /no/such"), (sys.executable, "has no package vllm; ")]
)
def test_an_interpreter_that_cannot_serve_is_refused(python: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLKEEL_SERVER_PYTHON", python)
    with pytest.raises(BadInput, match=says):
        server_python(EngineConfig(kind="vllm"))


def test_options_become_words() -> None:
    words = _words({"a": 1, "b": True, "c": False, "d": None, "e": {"x": [1]}, "f": "y"})
    assert words == ["--a", "1", "--b", "--e", '{"x": [1]}', "--f", "y"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_the_server_computes_the_same_checksum(dtype: torch.dtype) -> None:
    tensor = (torch.arange(35.0).view(5, 7) * 3.7).to(dtype).t()
    assert worker_checksum("a.b", tensor) == tensor_checksum("a.b", tensor)


@pytest.mark.parametrize("file_bytes", [2**30, 20_000])
@pytest.mark.parametrize("preset", ["tiny-qwen3-moe", "tiny-qwen3-tied"])
def test_a_folder_is_what_transformers_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str, file_bytes: int
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("rollkeel.engines.weight_folder.FILE_BYTES", file_bytes)
    model, _ = build_preset(preset, 3)
    update = full_update(checkpoint_views(model).items(), 1)
    write_weights(update, model.config, tmp_path / "w")
    assert folder_checksum(tmp_path / "w") == update.checksum
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "w")
    assert type(again) is type(model)
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_damaged_update_is_not_written(tmp_path: Path) -> None:
    model, _ = build_preset("tiny-qwen3", 0)
    update = full_update(checkpoint_views(model).items(), 1)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(EngineFailure, match="wrong checksum"):
        write_weights(update, model.config, tmp_path / "a")
    delta = WeightUpdate(kind="delta", base_version=0, version=1, slices=[], checksum=0)
    with pytest.raises(EngineFailure, match="full updates"):
        write_weights(delta, model.config, tmp_path / "b")
