"""A run over a cluster is the run of one process, and one that loses an actor goes on as if nothing had happened.

Matters because a rank that trains other numbers, an engine that serves other weights or a checkpoint that lacks a rank's part would not
be seen in any single metric. Real actors on a local Ray. Not covered: GPUs, several hosts, and what tests marked slow show: two nodes,
kills of ranks, engines and the controller, kills at random moments.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_kit import ONE, TWO, kill_when, run_of
from tiny_run import assert_same, events, rows, weights

from rollkeel.analyzer.capture import load_capture
from rollkeel.errors import RunStopped
from rollkeel.loop.job import train
from rollkeel.recipe import load
from rollkeel.train import checkpoint

ALONE = ("cluster.trainers=null", "cluster.engines=null", "train.mesh={}")
OTHERWISE = ("optimizer/changed_share", "mismatch/beyond_dtypes_max")
"""Measured on a sample of the weights, which is another one where they lie in parts, and rounding alone."""


@pytest.fixture(scope="module")
def alone(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process from the start weights of two ranks: their warm start adds gradients in another order."""
    return alone_from_start(whole, tmp_path_factory.mktemp("alone") / "run")


def alone_from_start(whole: Path, run: Path) -> Path:
    shutil.copytree(whole, run)
    checkpoint.drop_after(run / "checkpoints", 0)
    return train(load(run / "config.yaml", ALONE), resume=run)


def close(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return all(map(close, a, b))
    return a == b or (isinstance(a, float) and a == pytest.approx(b, rel=1e-5, abs=2e-6))


def assert_close(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        assert [key for key in a if key not in OTHERWISE and not close(a[key], b[key])] == []


def test_two_ranks_come_to_the_numbers_of_one_process(alone: Path, whole: Path) -> None:
    assert len(rows(whole)) == 4
    assert all(row["optimizer/grad_norm"] > 0 for row in rows(whole)[1:])
    assert_close(rows(whole), rows(alone))


def test_every_actor_has_a_log_and_a_line(whole: Path) -> None:
    names = [e["name"] for e in events(whole) if e["event"] == "actor"]
    assert names == ["trainer-0", "trainer-1", "engine-0"]
    assert sorted(file.stem for file in (whole / "actors").iterdir()) == sorted(names)


@pytest.mark.slow
def test_a_run_goes_on_without_a_killed_rank_as_if_it_had_not_been(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    killer = kill_when(run, "trainer-1", "update", 2)
    run_of(run, *TWO)
    killer.join()
    assert_same(run, whole)
    (told,) = [e for e in events(run) if e["event"] == "ranks_restarted"]
    assert "trainer rank 1 (node" in told["reason"]
    names = [e["name"] for e in events(run) if e["event"] == "actor"]
    assert names == ["trainer-0", "trainer-1", "engine-0", "trainer-0", "trainer-1"]  # the engine was none of theirs


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["rollout", "sync"])
def test_ranks_that_are_killed_again_and_again_begin_again_from_memory(stage: str, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    killers = [kill_when(run, f"trainer-{rank}", stage, step) for rank, step in ((0, 2), (1, 3))]
    run_of(run, *TWO, "checkpoint.every=0", "cluster.restarts=2")
    for killer in killers:
        killer.join()
    assert sum(e["event"] == "ranks_restarted" for e in events(run)) == 2
    assert not any(e["event"] == "restarted" for e in events(run))
    assert rows(run) == rows(whole)
    assert weights(run) == weights(whole)


@pytest.mark.slow
def test_without_copies_ranks_begin_again_from_the_checkpoint(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    killer = kill_when(run, "trainer-1", "update", 2)
    run_of(run, *TWO, "cluster.peer_copies=false")
    killer.join()
    assert_same(run, whole)
    (told,) = [e for e in events(run) if e["event"] == "restarted"]
    assert "trainer rank 1 (node" in told["reason"]
    pids = [(e["name"], e["pid"]) for e in events(run) if e["event"] == "actor"]
    assert len(pids) == 6
    assert len(set(pids)) == 5  # the engine is the one that was there


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_resumed_run_is_the_undisturbed_one(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    killer = kill_when(run, "trainer-1", "update", 2)
    with pytest.raises(RunStopped, match=r"trainer rank 1 \(node \S+, process \d+\) died while it did .*--resume$"):
        run_of(run, *TWO, "cluster.restarts=0")
    killer.join()
    assert events(run)[-1]["status"] == "stopped"
    train(load(run / "config.yaml"), resume=run)
    assert_same(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["rollout", "update", "sync"])
def test_a_killed_engine_is_replaced_and_the_run_is_the_undisturbed_one(
    stage: str, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    killer = kill_when(run, "engine-0", stage, 2)
    run_of(run, *TWO)
    killer.join()
    assert_same(run, whole)
    seen = [e for e in events(run) if e.get("name") == "engine-0"]
    assert [e["event"] for e in seen[:3]] == ["actor", "engine_lost", "actor"]
    assert seen[3]["event"] in ("engine_renewed", "engine_joined")
    assert seen[0]["pid"] != seen[2]["pid"]


@pytest.mark.slow
def test_one_process_goes_on_with_what_two_ranks_saved(whole: Path, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", *TWO, "run.steps=2")
    train(load(run / "config.yaml", ["run.steps=3", *ALONE]), resume=run)
    assert_close(rows(run)[-1:], rows(whole)[-1:])
    run = run_of(tmp_path / "other", "run.steps=2")
    train(load(run / "config.yaml", ["run.steps=3", *TWO]), resume=run)
    assert_close(rows(run)[-1:], rows(run_of(tmp_path / "one"))[-1:])


@pytest.mark.slow
def test_adapters_on_two_ranks_come_to_the_numbers_of_one_process(whole: Path, tmp_path: Path) -> None:
    words = [f"model.path={whole}/model", "sft.steps=5", "train.lora.rank=4", "train.lora.experts=true"]
    run = run_of(tmp_path / "run", *TWO, *words, "trace.tensors_every=2")
    assert all(row["optimizer/grad_norm"] > 0 for row in rows(run)[1:])
    alone = alone_from_start(run, tmp_path / "alone")
    assert_close(rows(run), rows(alone))
    assert (run / "model" / "adapter_model.safetensors").is_file()
    ours, theirs = (load_capture(folder / "tensors" / "step_000002.safetensors") for folder in (run, alone))
    assert ours.values.keys() == theirs.values.keys()
    assert torch.allclose(ours.logprobs, theirs.logprobs, atol=1e-4, equal_nan=True)


def test_one_rank_and_one_engine_have_the_bits_of_one_process(ray_cluster: None, tmp_path: Path) -> None:
    words = ["run.loop=budgeted", "rollout.budget.tokens=60", "rollout.budget.capacity=24", "run.steps=2"]
    alone, run = run_of(tmp_path / "alone", *words), tmp_path / "run"
    actors = ["cluster.placement=colocated", "memory.offload=all", "cluster.graders=1", "reward.graders.workers=1"]
    run_of(run, *words, *ONE, *actors)
    assert_same(run, alone)
    assert (run / "actors" / "grader-0.log").is_file()
    assert sum(row.get("memory/update/moved_mb", 0.0) for row in rows(run, volatile=True)) > 0


@pytest.mark.slow
def test_sampling_overlaps_with_training(ray_cluster: None, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "run.loop=async", *ONE)
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3]
    assert weights(run)
    assert max(row["staleness/max"] for row in rows(run)[1:] if "staleness/max" in row) > 0
    assert json.loads((run / "events.jsonl").read_text().splitlines()[-1])["status"] == "done"


@pytest.mark.slow
def test_what_weights_travel_through_changes_no_number(whole: Path, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", *TWO, "sync.transport=ray", "sync.buffer_mb=0.1")
    assert rows(run) == rows(whole)
    assert weights(run) == weights(whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["delta", "auto"])
def test_changes_alone_change_no_number(whole: Path, tmp_path: Path, kind: str) -> None:
    run = run_of(tmp_path / "run", *TWO, f"sync.kind={kind}", "train.lr=1e-3")
    ours = rows(run)
    assert [{k: v for k, v in row.items() if not k.startswith("sync/")} for row in ours] == rows(whole)
    assert weights(run) == weights(whole)
    assert sum(row.get("sync/deltas", 0) for row in ours) > (1 if kind == "delta" else 0)
    assert sum(row.get("sync/deltas_refused", 0) for row in ours) == 0


@pytest.mark.slow
def test_four_ranks_in_parts_and_two_engines_that_round_come_to_the_numbers_of_one_process(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "run",
        "train.mesh={shard: 2, tensor: 2}",
        "cluster.engines=2",
        "engine.dtype=int8",
        "checkpoint.every=1",
    )
    assert_close(rows(run)[:2], rows(alone_from_start(run, tmp_path / "alone"))[:2])
