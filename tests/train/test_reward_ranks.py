"""A reward model trained on several ranks is the reward model that one process trains.

Matters because pairs that are counted twice or by nobody, or a part that is written at the wrong place, give a model that ranks a
little wrongly, and no error. Ranks are processes over gloo. Not covered: GPUs (NCCL has not run), several machines, Ray
(tests/cluster/test_cluster_stages.py), memory in the middle of a pass or while the model is loaded.
"""

from __future__ import annotations

import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from rollkeel.train.preferences import RewardModel
from rollkeel.train.reward_training import METRICS, _batch, train_reward_model
from tests.train.reward_ranks import TRAINING, Rewarded, drawn, start
from tests.train.test_mesh import Found, distance, run

MESHES = [
    Rewarded(replicate=2, model="tiny-qwen3"),
    Rewarded(shard=2, parts=True),
    Rewarded(2, 2, model="tiny-qwen3", parts=True),
]
FAULTS = [replace(MESHES[0], fault="own alone"), replace(MESHES[2], fault="others count")]
BROKEN = replace(MESHES[2], fault="margin")
ALL = [*MESHES, *FAULTS, BROKEN]
NAME = attrgetter("name")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    return run(ALL, folder)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    """Folder of what one process trains."""

    def of(model: str) -> Path:
        out = folder / model
        if not out.exists():
            train_reward_model(lambda: start(model), drawn(9), drawn(4, 1), TRAINING, out)
        return out

    return of


def weights(out: Path) -> dict[str, torch.Tensor]:
    return dict(sorted(load_file(out / "model" / "model.safetensors").items()))


def rows(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / METRICS).read_text().splitlines()]


@pytest.mark.parametrize("case", MESHES, ids=NAME)
def test_weights_and_metrics_are_those_of_one_process(case: Rewarded, found: Found, folder: Path, alone: Any) -> None:
    metrics, one = found(case)["metrics"], alone(case.model)
    assert distance(weights(folder / case.name), weights(one)) < 1e-5
    ours, theirs = rows(folder / case.name), rows(one)
    assert metrics == ours[-1]
    assert [r.keys() for r in ours] == [r.keys() for r in theirs]
    assert ["eval/loss" in r for r in theirs] == [False, True, True]
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)
    assert {f.name for f in (folder / case.name / "model").iterdir()} == {f.name for f in (one / "model").iterdir()}
    told = [json.loads((out / "model" / "config.json").read_text()) for out in (folder / case.name, one)]
    assert told[0] == told[1]
    assert len(RewardModel.load(folder / case.name / "model").score(["7", "8"])) == 2


def test_loss_and_gradient_are_those_of_float64(folder: Path, alone: Any) -> None:
    """Text by text, without padding, batches and passes."""
    model = start("tiny-qwen3")
    model.model.double()
    losses = []
    for pair in _batch(drawn(9), range(4), 0):
        chosen, rejected = (
            model.model(input_ids=torch.tensor([model.encode(pair.prompt + side)])).logits[0, 0]
            for side in (pair.chosen, pair.rejected)
        )
        losses.append(-F.logsigmoid(chosen - rejected - pair.margin))
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.model.parameters() if p.grad is not None]).norm()
    first = rows(alone("tiny-qwen3"))[0]
    assert first["train/loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert first["optimizer/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize("case", MESHES, ids=NAME)
def test_stopped_and_gone_on_with_is_the_same_bit_for_bit(case: Rewarded, found: Found, folder: Path) -> None:
    for rank in range(case.size):
        told = found(case, rank)
        assert told["stopped"] == "stopped after 2 of 3 steps; the same command goes on"
        assert told["again"] == told["metrics"] == found(case)["metrics"]
    for name in ("model/model.safetensors", METRICS):
        assert (folder / f"{case.name}-cut" / name).read_bytes() == (folder / case.name / name).read_bytes()


def test_what_ranks_began_one_process_ends(found: Found, folder: Path, alone: Any) -> None:
    case = MESHES[-1]
    out = folder / f"{case.name}-one"
    assert "stopped" in found(case)
    assert len(rows(out)) == 2
    train_reward_model(lambda: start(case.model), drawn(9), drawn(4, 1), TRAINING, out)
    assert rows(out)[:2] == rows(folder / case.name)[:2]
    assert distance(weights(out), weights(alone(case.model))) < 1e-5


def test_ranks_hold_their_part_of_the_model_and_its_moments(found: Found, folder: Path) -> None:
    for case in MESHES:
        whole = sum(p.nbytes for p in start(case.model).model.parameters())
        held = [found(case, rank)["bytes"] for rank in range(case.size)]
        assert sum(held) == whole * case.replicate
        assert max(held) <= whole / case.shard * 1.1
        parts = sorted((folder / case.name / "checkpoints").glob("*/trainer/part-*.safetensors"))
        assert len(parts) == case.size  # of weights and two moments
        assert max(p.stat().st_size for p in parts) <= 3 * whole / case.size * 1.3


@pytest.mark.parametrize("case", FAULTS, ids=NAME)
def test_mistakes_are_seen(case: Rewarded, found: Found, folder: Path, alone: Any) -> None:
    assert "metrics" in found(case)
    assert distance(weights(folder / case.name), weights(alone(case.model))) > 1e-3


def test_a_loss_that_is_not_finite_is_refused_by_all_ranks(found: Found, folder: Path) -> None:
    for rank in range(BROKEN.size):
        assert "the loss is not finite; weights left untouched" in found(BROKEN, rank)["error"]
    assert not (folder / BROKEN.name / "model").exists()
