"""Ranks and engines in one place take turns: what one does not need is away while the other computes, and the run has the same bits.

Real actors on a local Ray, one machine without GPUs. Not covered: NCCL's communicators, but for who is asked to suspend them.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_kit import TWO, kill_when, run_of
from tiny_run import assert_same, events, rows

from benchmarks.residency import measure
from rollkeel.loop.resident import Resident, _suspendable
from rollkeel.memory.residency import PHASES
from rollkeel.recipe import load
from rollkeel.train.mesh import Mesh

MOVED = [*TWO, "cluster.placement=colocated", "memory.offload=all"]


@pytest.mark.slow
def test_ranks_whose_memory_moves_have_the_same_bits(whole: Path, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", *MOVED)
    assert_same(run, whole)
    assert [e["offload"] for e in events(run) if e["event"] == "residency"] == ["all"]
    found = {key: value for row in rows(run, volatile=True) for key, value in row.items()}
    for phase in PHASES:
        assert found[f"memory/{phase}/peak_mb"] >= found[f"memory/{phase}/held_mb"] * 0.9 > 0
    assert found["memory/update/moved_mb"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["rollout", "update"])
def test_an_engine_that_dies_gets_weights_that_are_away(stage: str, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    killer = kill_when(run, "engine-0", stage, 2)
    run_of(run, *MOVED)
    killer.join()
    assert_same(run, whole)
    seen = [e["event"] for e in events(run) if e.get("name") == "engine-0"]
    assert seen[:2] == ["actor", "engine_lost"]


@pytest.mark.slow
def test_a_wide_run_holds_its_largest_phase_and_not_the_sum(ray_cluster: None, tmp_path: Path) -> None:
    about: dict[str, Any] = {"prompts": 16, "tokens": 16, "micro": 1024, "kv": 0.1, "steps": 3}
    small = measure(Namespace(model="tiny", prompts=4, tokens=8, micro=64, kv=0.01, steps=2), "all", tmp_path / "tiny")
    stayed, moved = (measure(Namespace(model="wide", **about), level, tmp_path / level) for level in ("none", "all"))
    assert moved["rows"] == stayed["rows"]
    assert all(row["optimizer/grad_norm"] > 0 for row in moved["rows"][1:])
    sizes = {name: mb for places in moved["plan"]["update"].values() for name, mb in places.items()}
    assert sizes["moments"] > 200  # MB
    assert stayed["trainer"] - moved["trainer"] >= 0.9 * (sizes["moments"] + sizes["gradients"])
    largest, beside = (max(p.planned for p in one["table"].phases) for one in (moved, small))
    beside = small["peak"] - beside
    assert moved["peak"] - beside <= 1.1 * largest < sum(sizes.values())


class Backend:
    """NCCL's, as torch shows it."""

    def __init__(self, log: list[str], offers: bool = True) -> None:
        self.log, self.offers = log, offers

    def memory_stats(self) -> dict[str, int]:
        if not self.offers:
            raise RuntimeError("Backend gloo does not support getMemoryStats")
        return {}

    def suspend(self) -> None:
        self.log.append("suspend")

    def resume(self) -> None:
        self.log.append("resume")


class Group:
    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def _get_backend(self, device: torch.device) -> Backend:
        return self.backend


def test_communicators_rest_while_ranks_do(tmp_path: Path) -> None:
    log = list[str]()
    nccl, gloo = Group(Backend(log)), Group(Backend(log, offers=False))
    mesh = Mesh(replicate=2, shard=2, groups={("replicate",): nccl, ("replicate", "shard"): nccl, ("shard",): gloo})
    found = _suspendable(mesh, torch.device("cpu"))
    assert found == [nccl.backend]
    trainer: Any = type("Trainer", (), {"mesh": mesh, "device": torch.device("cpu"), "held": lambda self: {}})()
    config = load(None, ["memory.offload=all"])
    resident = Resident(config, trainer, tmp_path)
    resident._movable = []
    for phase, expected in (
        ("publish", []),
        ("rollout", ["suspend"]),
        ("evaluate", ["suspend"]),
        ("score", ["suspend", "resume"]),
        ("checkpoint", ["suspend", "resume"]),
        ("rollout", ["suspend", "resume", "suspend"]),
    ):
        resident.enter(phase)
        assert log == expected, phase
    resident.close()
    assert log == ["suspend", "resume"] * 2
