"""A run whose memory moves is the run whose memory stays: the same numbers, to the bit, also after a kill, and its page says what it planned
and what it held.

Whole runs on a CPU. Not covered: a GPU; a run over several ranks (tests/cluster/test_colocated.py).
"""

from __future__ import annotations

import math
from itertools import groupby
from pathlib import Path

import pytest
from tiny_run import TINY, assert_same, events, killed_in, rows, start

from rollkeel.loop.job import train
from rollkeel.loop.resident import Resident
from rollkeel.memory.residency import PHASES
from rollkeel.recipe import load
from rollkeel.record.glossary import meaning
from rollkeel.report.memory import memory

SHORT = [*TINY, "run.steps=5", "eval.every=2"]
RUNS = {
    "two copies": ["engine.dtype=bf16"],
    "one copy": ["run.loop=budgeted", "rollout.budget.tokens=60", "rollout.budget.capacity=24", "engine.kv=keep"],
    "dense, int8 moments": ["model.path=preset:tiny-qwen3", "train.moments=int8", "engine.dtype=int8"],
    "adapters": ["model.path=preset:tiny-qwen3", "train.lora.rank=64", "engine.dtype=bf16", "reward.overlong.buffer=4"],
    "bfloat16": ["model.path=preset:tiny-qwen3", "model.dtype=bfloat16", "engine.processes=1"],
}


def run_of(folder: Path, *words: str) -> Path:
    return train(load("default", [*SHORT, *words, f"run.dir={folder}"]))


@pytest.mark.parametrize(
    "name", [name if name == "two copies" else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_the_run_is_the_same_to_the_bit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, enter = list[str](), Resident.enter
    monkeypatch.setattr(Resident, "enter", lambda self, phase: entered.append(phase) or enter(self, phase))
    stayed = run_of(tmp_path / "stayed", *RUNS[name])
    moved = run_of(tmp_path / "moved", *RUNS[name], "memory.offload=all")
    assert_same(moved, stayed)
    step = ["rollout", "score", "update", "publish"]
    order = ["publish", "evaluate", "checkpoint", *step, "checkpoint", *step, "evaluate", "checkpoint"]
    assert [phase for phase, _ in groupby(entered)][: len(order)] == order
    assert any(row.get("optimizer/grad_norm", 0) > 0 for row in rows(moved))
    keys = {key for row in rows(moved, volatile=True) for key in row}
    assert [key for key in sorted(keys) if not meaning(key)] == []
    for phase in PHASES:
        assert {f"memory/{phase}/{what}" for what in ("held_mb", "peak_mb", "moved_mb", "moved_s", "waited_s")} <= keys
    assert {key for row in rows(stayed, volatile=True) for key in row if key.startswith("memory/")} == {"memory/rss_mb"}
    total = sum(row.get("memory/update/moved_mb", 0.0) for row in rows(moved, volatile=True))
    assert total > 0
    assert "Memory by phase" in (moved / "report.html").read_text()
    assert "Memory by phase" not in (stayed / "report.html").read_text()
    assert [e["offload"] for e in events(moved) if e["event"] == "residency"] == ["all"]
    assert list(moved.glob("tmp*")) == []


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    words = [*SHORT, "engine.dtype=bf16", "memory.offload=all"]
    whole = run_of(tmp_path / "whole", "engine.dtype=bf16")
    for stage in ("rollout", "update", "checkpoint"):
        run = killed_in(tmp_path / stage, words, stage, 3, 0.0)
        resumed = start("train", "--resume", run)
        assert resumed.communicate()[1] == ""
        assert resumed.returncode == 0
        assert_same(run, whole)


def test_the_table_of_the_page() -> None:
    plan = {
        "rollout": {"device": {"KV blocks": 100.0, "x": 0.1}, "host": {"moments": 40.0}},
        "update": {"device": {"moments": 40.0}},
    }
    row = {
        "memory/rollout/peak_mb": 90.0,
        "memory/update/peak_mb": 65.0,
        "memory/update/moved_mb": 40.0,
        "memory/update/moved_s": 0.5,
        "memory/update/waited_s": 0.25,
    }
    found = memory([{"event": "residency", "offload": "all", "phases": plan}], [row, {"memory/update/peak_mb": 50.0}])
    assert found is not None
    rollout, update = found.phases
    assert (rollout.device, rollout.away, rollout.planned, rollout.peak) == ("KV blocks 100", "moments 40", 100.1, 90.0)
    assert (update.planned, update.peak, update.moved, update.seconds, update.waited) == (40.0, 65.0, 40.0, 0.5, 0.25)
    assert found.beside == 25.0
    assert math.isnan(rollout.moved)
    assert memory([], [row]) is None
    unknown = memory([{"event": "residency", "offload": "all"}], [row])
    assert unknown is not None
    assert math.isnan(unknown.phases[0].planned)
    damaged = memory([{"event": "residency", "phases": {"update": {"device": []}}}], [{"memory/update/peak_mb": "x"}])
    assert damaged is not None
    assert list(damaged.phases) == []
