"""Where graders run must not change what is learnt: whole runs with a grader in workers and with the same one in this process.

Bitwise, in the synchronous and the budgeted loop; in the asynchronous one a recorded schedule is replayed with the other grader. Not
covered: what graders say (their own tests).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TINY, events, rows, weights

from rollkeel import rewards
from rollkeel.loop.job import train
from rollkeel.recipe import load
from rollkeel.rewards import graders
from rollkeel.types import Rollout

LOOPS = {
    "sync": [],
    "budgeted": ["run.loop=budgeted", "rollout.budget={tokens: 36, capacity: 30, retention: 1}", "engine.slots=12"],
    "async": ["run.loop=async", "rollout.overlap.max_staleness=4", "engine.processes=1", "engine.deadline_s=60"],
}


def digits(rollout: Rollout) -> tuple[float, str]:
    return float(sum(map(ord, rollout.text)) % 3 == 0), rollout.text[:9]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(graders, "_GRADERS", dict(graders._GRADERS))
    monkeypatch.setattr("rollkeel.rewards.grading.REGRADE", 0.5)
    rewards.register("here", digits)
    rewards.register("there", "grader_fakes:patient")
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i:02d}", "answer": str(i)}) + "\n" for i in range(80)))
    short = ["run.steps=3", "eval.every=0", "checkpoint.every=0", "sft.steps=0", "sampling.max_new_tokens=8"]
    return [*TINY, *short, "data.task=null", "data.options={}", f"data.path={file}"]


def run(path: Path, *words: str) -> list[dict[str, Any]]:
    train(load(None, [*words, f"run.dir={path}"]))
    return rows(path)


@pytest.mark.parametrize(
    "loop", ["sync", *(pytest.param(name, marks=pytest.mark.slow) for name in LOOPS if name != "sync")]
)
def test_a_grader_in_workers_gives_the_run_of_the_same_one_here(loop: str, words: list[str], tmp_path: Path) -> None:
    words = [*words, *LOOPS[loop]]
    there = run(tmp_path / "there", *words, "data.grader=there")
    replay = [f"experiment.schedule={tmp_path / 'there' / 'schedule.jsonl'}"] if loop == "async" else []
    here = run(tmp_path / "here", *words, *replay, "data.grader=here")
    assert here == there
    assert weights(tmp_path / "here") == weights(tmp_path / "there")
    assert len({row.get("reward/mean") for row in there[1:]}) > 1
    assert all(row["failures/grader_nondeterministic"] == row["failures/grader"] == 0 for row in there[1:])
    timed = rows(tmp_path / "there", volatile=True)[1:]
    # An asynchronous step may train on what was graded before it began.
    spent = [row["time/grader_there_p99_seconds"] for row in timed if "time/grader_there_p99_seconds" in row]
    assert spent
    assert min(spent) > 0
    assert sum(row["time/reward_overlapped_seconds"] for row in timed) > 0


def test_a_grader_at_odds_with_itself_is_in_metrics_and_events(words: list[str], tmp_path: Path) -> None:
    count = iter(range(10**6))
    rewards.register("dice", lambda r: float(next(count) % 7 == 0))
    found = run(tmp_path / "run", *words, "data.grader=dice", "run.steps=1")
    named = [e for e in events(tmp_path / "run") if e["event"] == "grader_nondeterministic"]
    assert found[1]["failures/grader_nondeterministic"] == len(named) > 0
    assert {(e["grader"], e["step"], len(e["values"])) for e in named} == {("dice", 1, 2)}
