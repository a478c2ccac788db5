"""Most people who need KPop train with TRL: the plug-in must give a real TRL the gradients of rollkeel's trainer, let it
learn, and leave a trace in which the doctor finds what is wrong.

TRL runs in its own interpreter, `.venv-bench` (`make .venv-bench/.done`); without it these tests are skipped. Not covered:
several processes, vLLM and images.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rollkeel.cli import main
from rollkeel_doctor.traces.read import read_trace
from rollkeel_doctor.verdict import diagnose

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-bench" / "bin" / "python"
SIDE = Path(__file__).with_name("trl_side.py")
WARM = ["data.options.digits=2", "sft.steps=150", "sft.batch_size=64", "sft.lr=1e-2", "sampling.max_new_tokens=4"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="TRL's interpreter is missing: make .venv-bench/.done"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts that answers one in four problems."""
    folder = tmp_path_factory.mktemp("warm") / "model"
    with pytest.raises(SystemExit) as ended:
        main(["sft", "default", *WARM, "--out", str(folder)])
    assert not ended.value.code
    return folder


def trl(what: str, model: Path, out: Path, objective: str = "") -> dict[str, Any]:
    words = [str(PYTHON), str(SIDE), what, str(model), str(out), *([objective] if objective else [])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("objective", ["grpo", "kpop", "dppo_binary_tv", "ac_mis_po"])
def test_gradients_are_those_of_rollkeels_trainer(model: Path, tmp_path: Path, objective: str) -> None:
    """Of an optimizer batch of two micro-batches, whose engine and old policy disagree with the trainer. By a token's
    log-prob they are equal; by a parameter up to what float32 loses between TRL's padded passes and rollkeel's packed ones,
    relative to the whole gradient."""
    came = trl("gradients", model, tmp_path, objective)
    assert came["same"]
    assert came["steps"] == 1
    assert came["tokens"] <= 1e-6
    assert came["gap"] <= 2e-6
    assert came["size"] > 0.1
    assert objective == "grpo" or 0.2 < came["kept"] < 0.98


@pytest.mark.parametrize("objective", ["kpop", "dppo_binary_tv", "ac_mis_po"])
def test_reward_rises_and_the_trace_is_healthy(model: Path, tmp_path: Path, objective: str) -> None:
    came = trl("learn", model, tmp_path, objective)
    assert rises(came["reward"])
    assert came["last"]["mismatch/ratio_std"] < 1e-4  # one model, in fp32, samples and trains
    assert "objective/kept" in came["last"]
    trace = read_trace(tmp_path / "trace")
    assert len(set(trace.step.tolist())) == 30
    causes = [cause.id for cause in diagnose(trace).causes]
    assert not {"temperature", "truncation", "alignment", "stale_version"} & set(causes)


def test_trl_itself_learns_from_the_same_start(model: Path, tmp_path: Path) -> None:
    assert rises(trl("plain", model, tmp_path)["reward"])


def rises(rewards: list[float]) -> bool:
    third = len(rewards) // 3
    return sum(rewards[-third:]) / third > sum(rewards[:third]) / third + 0.05


def test_the_doctor_finds_a_temperature_that_the_trainer_does_not_know(model: Path, tmp_path: Path) -> None:
    came = trl("fault", model, tmp_path, "kpop")
    assert came["last"]["mismatch/ratio_std"] > 0.1
    causes = diagnose(read_trace(tmp_path / "trace")).causes
    assert causes
    assert causes[0].id == "temperature"
