"""Ranks that hold parts publish all of the weights, each byte once, and none of them ever asks another for its part.

Matters because gathering the model on one rank is what a model that needs many ranks cannot do. Trainers on gloo, whose buckets go
through files. Not covered: Ray (tests/cluster), other meshes and faults (test_boxes_of_plans.py), GPUs, several hosts.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))

from engine_kit import engine_of

from rollkeel.engines.intake import Intake
from rollkeel.errors import EngineFailure
from rollkeel.models.presets import build_preset
from rollkeel.sync.files import Files
from rollkeel.sync.publish import full_update
from rollkeel.types import WeightUpdate
from tests.sync.mesh_publications import BUCKET, MODEL, Publication, in_a_group, shape_of
from tests.train.test_mesh import Found, run

MOE, DENSE, TIED = "tiny-qwen3-moe", "tiny-qwen3", "tiny-qwen3-tied"
QUICK = [
    Publication(shard=2, model=TIED, mode="fp32", overrides=MODEL),
    Publication(tensor=2, shard=2, model=MOE, overrides=MODEL),
    Publication(replicate=2, expert=2, model=MOE, mode="fp32", overrides=MODEL),
]
ALL = [
    Publication(**sizes, model=model, mode=mode, overrides=MODEL)
    for sizes in ({"shard": 2}, {"tensor": 2}, {"expert": 2}, {"replicate": 2}, {"tensor": 2, "shard": 2})
    for model in (MOE, DENSE, TIED)
    for mode in ("fp32", "int8", "fp8", "bf16")
    if model == MOE or "expert" not in sizes
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("publications")


@pytest.fixture(scope="module")
def quick(folder: Path) -> Found:
    return run(QUICK, folder)


def model_of(case: Publication, seed: int) -> Any:
    return build_preset(case.model, seed, case.overrides)[0].eval()


def assert_published(case: Publication, found: Found, folder: Path) -> None:
    engine = engine_of(model_of(case, 7), dtype=case.mode, max_length=32)
    files = Files(case.files(folder), 0, case.size, 5.0)
    head = WeightUpdate(kind="full", base_version=None, version=3, slices=(), checksum=0, mode=case.mode)
    intake, nbytes = Intake(head, engine.memory, case.mode, engine.retire()), 0
    for bucket in files:
        intake.take(bucket)
        nbytes += sum(s.tensor.nbytes for s in bucket)
    engine.serve(3, *intake.finish(files.checksum))
    alone, weights = engine_of(model_of(case, 7), dtype=case.mode, max_length=32), found(case)["weights"]
    alone.update_weights(full_update(weights.items(), 3, case.mode))
    for name, view in engine.weights.items():
        assert torch.equal(view.view(torch.uint8), alone.weights[name].view(torch.uint8)), name
    whole = shape_of(weights)
    for rank in range(case.size):
        seen = found(case, rank)
        assert seen["calls"] == []
        assert seen["most"] <= 4 * BUCKET < 0.2 * whole
        if case.size > case.replicate:  # both would see ranks that gather
            assert seen["gathering"]
            assert seen["gathered"] > 0.9 * whole
        assert seen["planned"] == found(case)["planned"]
    assert nbytes == sum(found(case)["planned"])
    assert nbytes == shape_of(alone.weights)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_a_mesh_publishes_what_one_process_publishes(case: Publication, quick: Found, folder: Path) -> None:
    assert_published(case, quick, folder)


@pytest.mark.slow
def test_every_mesh_and_mode(tmp_path: Path) -> None:
    found = run(ALL, tmp_path)
    for case in ALL:
        assert_published(case, found, tmp_path)


def group(folder: Path, stops: int) -> list[int | None]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.sync.mesh_publications"])
    args = str(folder), Publication(tensor=2, model=MOE, overrides=MODEL), stops
    ranks = [context.Process(target=in_a_group, args=(rank, *args)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
    return [rank.exitcode for rank in ranks]


def test_ranks_of_one_process_group_send_to_each_other(tmp_path: Path) -> None:
    assert group(tmp_path, 0) == [0, 0, 0]
    sent, came = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 2))
    assert came["version"] == 3
    assert (
        came["live"] > 0
    )  # parts that lay in one piece on both sides were written to the engine's memory as they came
    alone = engine_of(build_preset(MOE, 7, MODEL)[0], dtype="int8", max_length=32)
    alone.update_weights(full_update(sent["weights"].items(), 3, "int8"))
    assert all(torch.equal(view, alone.weights[name]) for name, view in came["memory"].items())


@pytest.mark.slow
def test_a_rank_that_dies_in_the_middle_is_named_and_nothing_is_served(tmp_path: Path) -> None:
    assert group(tmp_path, 3)[1] == 3
    came = torch.load(tmp_path / "2.pt", weights_only=False)
    assert came["error"].startswith("weights: waited at most 20 s for weights of rank 1 (")
    assert "\n" not in came["error"]
    assert came["version"] == -1


def test_a_sender_that_stops_is_named_within_a_deadline(quick: Found, folder: Path) -> None:
    case = QUICK[0]
    (case.files(folder) / "00001.json").rename(case.files(folder) / "taken.json")
    try:
        started, count = time.monotonic(), len(list(case.files(folder).glob("00001-*.safetensors")))
        with pytest.raises(EngineFailure, match=f"waited 0.2 s for bucket {count} of trainer rank 1 in "):
            list(Files(case.files(folder), 0, 2, 0.2))
        assert time.monotonic() - started > 0.2
    finally:
        (case.files(folder) / "taken.json").rename(case.files(folder) / "00001.json")
    assert json.loads((case.files(folder) / "00001.json").read_text())["buckets"] == count
