"""Whoever has another trainer gets a diagnosis from one call a step: what was given must be what the doctor reads.

Not covered: the other trainers themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import cli

from rollkeel_doctor.errors import BadInput
from rollkeel_doctor.traces.own import save_batch, save_trace
from rollkeel_doctor.traces.read import read_trace


def batch(rng: np.random.Generator, count: int = 64, width: int = 24, temperature: float = 1.0) -> dict[str, Any]:
    """Responses of 8 to 24 tokens over a vocabulary of 16, sampled at 1 and scored at `temperature`."""
    logits = 2 * rng.standard_normal((count, width, 16))
    scores = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (logits, logits / temperature)]
    ids = (scores[0] + rng.gumbel(size=logits.shape)).argmax(-1)
    q, o = (np.take_along_axis(x, ids[..., None], 2)[..., 0] for x in scores)
    mask = np.arange(width) < rng.integers(8, width + 1, count)[:, None]
    return {"token_ids": ids, "mask": mask, "rollout_logprobs": q, "train_logprobs": o}


def test_what_is_given_is_what_is_read(tmp_path: Path) -> None:
    tensors = {
        "token_ids": torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0]]),
        "mask": torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0]]),  # token 6 came from a tool
        "rollout_logprobs": torch.tensor([[-0.5, 0.0, -1.0, 0.0], [-0.25, -2.0, 0.0, 0.0]], dtype=torch.bfloat16),
        "train_logprobs": torch.tensor([[-0.5, 0.0, -1.5, 0.0], [-0.25, -2.0, 0.0, 0.0]], requires_grad=True),
        "advantages": torch.tensor([1.0, -1.0]),
    }
    save_batch(tmp_path / "t", 3, **tensors, rewards=[1.0, 0.0], groups=["a", "a"], text=["x y", "z"])
    save_batch(tmp_path / "t", 4, **tensors, sampling={"temperature": 0.7}, dtype="fp8", metrics={"kl": 0.5})
    trace = read_trace(tmp_path / "t")
    assert trace.token_ids.tolist() == [5, 6, 7, 8, 9] * 2
    assert trace.mask is not None
    assert trace.mask.tolist() == [True, False, True, True, True] * 2
    assert np.isnan(trace.rollout_logprobs).tolist() == [False, True, False, False, False] * 2
    assert trace.train_logprobs is not None
    assert trace.train_logprobs[2] == -1.5
    assert trace.advantages is not None
    assert trace.advantages.tolist() == [1, 1, 1, -1, -1] * 2
    assert (trace.step.tolist(), trace.reward.tolist()[:2]) == ([3, 3, 4, 4], [1.0, 0.0])
    assert np.isnan(trace.reward[2:]).all()
    assert trace.group[0] == trace.group[1]
    assert len(set(trace.group[1:].tolist())) == 3
    assert (trace.facts.temperature, trace.facts.engine_dtype) == (0.7, "fp8")
    assert trace.metrics[1]["kl"] == 0.5


@pytest.mark.parametrize(("temperature", "code", "word"), [(1.0, 0, "healthy"), (0.6, 1, "temperature")])
def test_doctor_and_report_read_it(
    temperature: float, code: int, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    for step in range(1, 5):
        rewards = rng.integers(0, 2, 64).astype(float)
        save_batch(tmp_path / "t", step, **batch(rng, temperature=temperature), rewards=rewards)
    got, out, err = cli(capsys, "doctor", tmp_path / "t", "--no-recompute")
    assert (got, err) == (code, "")
    assert word in out
    got, _, err = cli(capsys, "report", tmp_path / "t")
    assert (got, err) == (0, "")
    assert "Reward and accuracy" in (tmp_path / "t" / "report.html").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": 1}, "unknown column 'logprobs'"),
        ({"train_logprobs": None}, "column train_logprobs is missing"),
        ({"entropy": [[1.0]]}, r"entropy: expected \[64, 24\] like mask, got \[1, 1\]"),
        ({"mask": [1, 0]}, r"mask: expected \[responses, tokens\]"),
        ({"rewards": [1.0]}, "rewards: expected one for each of 64 responses, got 1"),
    ],
)
def test_a_wrong_batch_is_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        save_batch(tmp_path / "t", 1, **batch(np.random.default_rng(0)) | change)
    assert not (tmp_path / "t").exists()


def test_what_a_reader_made_is_written_as_it_was_read(tmp_path: Path) -> None:
    made = batch(np.random.default_rng(2), count=6)
    made["mask"][2] = False
    for step in (3, 5):
        save_batch(tmp_path / "one", step, **made, advantages=np.arange(6.0), rewards=np.arange(6.0) / 6)
    first = read_trace(tmp_path / "one")
    save_trace(tmp_path / "two", first)
    second = read_trace(tmp_path / "two")
    for name in ("step", "id", "group", "reward", "starts", "token_ids", "mask"):
        assert getattr(second, name).tolist() == getattr(first, name).tolist()
    for name in ("rollout_logprobs", "train_logprobs", "advantages"):
        assert np.array_equal(getattr(second, name), getattr(first, name), equal_nan=True)
    with pytest.raises(BadInput, match="no log-probs of the trainer"):
        save_trace(tmp_path / "three", first.with_(train_logprobs=None))
