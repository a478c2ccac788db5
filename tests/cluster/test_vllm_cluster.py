"""A real vLLM server as an engine of a cluster, beside ranks that shard the model: the run that a team with several cards makes, on a CPU.

Matters because it is two engines' worth of disagreement: ranks that no one of has the model, and another program's kernels. Run by
`make test-vllm`. Not covered: CUDA, several devices of one server, several hosts; none of them has run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_kit import TWO, assert_audited, kill_when, run_of
from tiny_run import events, rows

pytestmark = pytest.mark.vllm
SERVED = ["engine.kind=vllm", "engine.kv_memory_gb=1", "engine.deadline_s=300"]
GAP = 1e-4
"""Of float32 on both sides; 1e-6 is usual."""


@pytest.mark.parametrize("loop", ["sync", "budgeted", "async"])
def test_ranks_train_what_vllm_samples(ray_cluster: None, tmp_path: Path, loop: str) -> None:
    words = {"budgeted": ["rollout.budget.tokens=60", "rollout.budget.capacity=24"]}.get(loop, [])
    words += ["sync.kind=delta"] if loop == "sync" else []
    run = run_of(tmp_path / "run", *TWO, *SERVED, *words, f"run.loop={loop}")
    told = rows(run)
    assert [row["step"] for row in told] == [0, 1, 2, 3]
    assert all(row["sync/probe_gap_median"] < GAP and row["sync/probe_retries"] == 0 for row in told)
    assert all(row.get("mismatch/equal_version/ratio_std", 0.0) < GAP for row in told[1:])
    assert sum(row["rollout/tokens"] for row in told[1:]) > 100
    if loop == "sync":
        assert [row["sync/deltas"] for row in told] == [0, 1, 1, 1]
    assert_audited(run)
    assert (run / "actors" / "engine-0.server.log").stat().st_size > 0


def test_a_killed_engine_is_replaced_by_one_with_a_server_of_its_own(ray_cluster: None, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kill_when(run, "engine-0", "rollout", 2)
    run_of(run, *TWO, *SERVED)
    told = [e["event"] for e in events(run)]
    assert told.count("engine_lost") == 1
    assert told.count("engine_renewed") + told.count("engine_joined") == 1
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3]
    assert_audited(run)
