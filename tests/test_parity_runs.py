"""A run under `run.parity` has no mismatch at all: one token off is a fault, and the run must stop at it.

Whole tiny runs of every loop, and one whose engine adds up in another order; the default recipe's 150 steps, where they may take minutes.
Not covered: CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import TINY, cli, rows

from rollkeel.errors import BadInput, RunStopped
from rollkeel.loop.check import validate
from rollkeel.loop.job import train
from rollkeel.models import kernels_parity
from rollkeel.recipe import load

STEPS = 4
PARITY = [*TINY, f"run.steps={STEPS}", "run.parity=true", "run.device=cpu", "eval.every=0", "checkpoint.every=0"]
BF16 = ["model.dtype=bfloat16", "engine.dtype=bf16"]
DENSE = ["model.path=preset:tiny-qwen3"]
WAYS = {
    "moe": ["sampling.temperature=0.8", "engine.slots=7", "trace.tensors_every=2"],
    "dense": DENSE,
    "moe bf16": [*BF16, "rollout.routing=replay"],
    "dense bf16": [*DENSE, *BF16, "train.checkpointing=layer", "train.processes=2"],
    "topk": ["objective.name=dppo_topk_kl"],
    "budgeted": ["run.loop=budgeted", "rollout.budget={tokens: 60, capacity: 32, retention: 3}"],
    "async": ["run.loop=async", "engine.processes=1", "rollout.overlap.max_staleness=4"],
}


@pytest.mark.usually("moe", "async")
@pytest.mark.parametrize("way", WAYS)
def test_every_ratio_of_fresh_tokens_is_one(way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train(load("default", [*PARITY, *WAYS[way], f"run.dir={run}"]))
    assert "parity: on" in capsys.readouterr().out
    seen = [row for row in rows(run) if row["step"] > 0]
    assert len(seen) == STEPS
    # Budgeted and asynchronous batches hold tokens of older weights too.
    prefix = "mismatch/equal_version" if way in ("budgeted", "async") else "mismatch"
    fresh = [row for row in seen if row[f"{prefix}/tokens"]]
    assert len(fresh) >= 1
    for row in fresh:
        gap = {row[f"{prefix}/{name}"] for name in ("ratio_std", "logprob_abs_diff", "prob_abs_diff_max", "kl_k3")}
        assert gap == {0.0}
        assert row[f"{prefix}/ratio_max"] == row[f"{prefix}/ratio_mean"] == 1.0
        if prefix == "mismatch":
            assert row.get("routing/flip_rate", 0.0) == 0.0
    assert max(row["optimizer/grad_norm"] for row in seen) > 0
    if way == "moe":
        code, out, _ = cli(capsys, "analyze", run)
        assert code == 0
        assert "Healthy: trainer fp32 and engine fp32 agree" in out
        assert "They differ" not in out


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [[], BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recipe", ["default", "dense"])
def test_the_default_recipe_learns_without_any_gap(
    recipe: str, numbers: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of its steps: weights that have learnt give sharper log-probs, and longer answers, than those that are drawn."""
    run = tmp_path / "run"
    train(load(recipe, [*numbers, "run.parity=true", "run.device=cpu", f"run.dir={run}"]))
    seen = [row for row in rows(run) if row["step"] > 0]
    assert len(seen) == 150
    assert {row["mismatch/ratio_std"] for row in seen} == {0.0}
    assert np.mean([row["reward/mean"] for row in seen[-10:]]) > 0.6 > np.mean([row["reward/mean"] for row in seen[:3]])
    code, out, _ = cli(capsys, "analyze", run)
    assert code == 0
    assert "Healthy" in out


def test_an_engine_that_adds_up_in_another_order_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels_parity.matmul

    def backwards(x: np.ndarray, weight: np.ndarray, starts: np.ndarray, out: np.ndarray) -> None:
        if len(x) > 40:  # more tokens than a decode step has here
            right(x, weight, starts, out)
        else:
            right(np.ascontiguousarray(x[:, ::-1]), np.ascontiguousarray(weight[:, :, ::-1]), starts, out)

    monkeypatch.setattr(kernels_parity, "matmul", backwards)
    with pytest.raises(
        RunStopped, match=r"check at step 1: parity: log-probs of fresh tokens differ by .*rollkeel analyze RUN"
    ):
        train(load("default", [*PARITY, *DENSE, f"run.dir={tmp_path / 'run'}"]))


REFUSED = {
    "engine.dtype=bf16": "engine.dtype=fp32",
    "engine.dtype=int8": "engine.dtype=fp32",
    "model.dtype=float16": "engine.dtype=bf16",
    "engine.kv=keep": "engine.kv=recompute",
    "engine.forward=compiled": "engine.forward=parity",
    "sampling.top_p=0.9": "sampling.top_p=1.0",
    "sampling.top_k=5": "sampling.top_k=0",
    "sampling.min_p=0.1": "sampling.min_p=0.0",
    "experiment.rounding=int8": "experiment.rounding=none",
    "train.lora.rank=4": "train.lora.rank=0",
    "train.checkpointing=selective": "train.checkpointing=none",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_would_part_is_refused_in_one_line(override: str) -> None:
    with pytest.raises(BadInput, match=f"run.parity=true: expected {REFUSED[override]}") as refused:
        validate(load("default", ["run.parity=true", "run.device=cpu", override]))
    assert "\n" not in str(refused.value)


def test_the_engine_alone_is_refused() -> None:
    with pytest.raises(BadInput, match=r"set that instead"):
        validate(load("default", ["engine.forward=parity"]))


@pytest.mark.slow
def test_it_learns_what_the_ordinary_arithmetic_learns(tmp_path: Path) -> None:
    def last(*more: str) -> dict[str, Any]:
        run = tmp_path / str(len(more))
        train(load("default", [*TINY, "eval.every=0", "checkpoint.every=0", *more, f"run.dir={run}"]))
        return rows(run)[-1]

    with_parity, without = last("run.parity=true", "run.device=cpu"), last()
    assert with_parity["mismatch/ratio_std"] == 0
    assert without["mismatch/ratio_std"] > 0
    assert with_parity["reward/mean"] == pytest.approx(without["reward/mean"], abs=0.15)
