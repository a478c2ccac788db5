"""A whole run on an environment: the same to the bit after a kill, replayable, and what the environment said never counted.

Real processes, files and readers on the smallest Sudoku. Not covered: learning (rollkeel/recipes/sudoku_turns.yaml has its numbers).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import cli, killed_in, rows, weights

from rollkeel.diagnose.replay.step import replay_step
from rollkeel.diagnose.replayed import first_difference
from rollkeel.loop.job import train
from rollkeel.models.presets import EOS, build_tokenizer
from rollkeel.recipe import load
from rollkeel.record.rollout_store import per_token, read_step, to_rollouts
from rollkeel.tasks import get
from rollkeel.tasks.base import TaskItem
from rollkeel.tasks.environment import Environment, play
from rollkeel_doctor.traces.run import read_run_trace

STEPS = 3
PLAYED = [
    f"run.steps={STEPS}",
    "data.task=sudoku_turns",
    "data.options={holes: 2, turns: 3}",
    "sft.steps=30",
    "sft.batch_size=32",
    "sft.lr=1e-2",
    "sampling.max_new_tokens=14",
    "rollout.environment.turn_tokens=5",
    "rollout.prompts=6",
    "rollout.samples=4",
    "train.updates_per_step=2",
    "train.micro_batch_tokens=300",
    "train.lr=1e-3",
    "train.kl_coefficient=0.01",
    "eval.every=0",
    "eval.items=4",
    "eval.samples=1",
    "checkpoint.every=1",
    "report.samples=1",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    train(load(None, [*PLAYED, f"run.dir={run}"]))
    return run


@pytest.mark.slow
def test_a_killed_run_continues_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    run = killed_in(tmp_path, PLAYED, "rollout", 2, 0.0)
    train(load(run / "config.yaml"), resume=run)
    assert rows(run) == rows(whole)
    assert weights(run) == weights(whole)
    for file in sorted((whole / "rollouts").iterdir()):
        one, two = (read_step(path / "rollouts" / file.name) for path in (run, whole))
        assert first_difference(one, two, two.column_names) is None


def test_every_reader_leaves_the_environment_out(whole: Path) -> None:
    table = read_step(whole / "rollouts" / "step_000001.parquet")
    rollouts, seen = to_rollouts(table), {n: per_token(table, n) for n in ("train_logprobs", "entropy", "advantages")}
    row = rows(whole)[1]
    assert any(r.span.sampled is not None and not r.span.sampled.all() for r in rollouts)
    for r in rollouts:
        own = r.span.own
        other = np.setdiff1d(np.arange(len(r.span)), own)
        for values in seen.values():
            assert np.isfinite(values[r.id][own]).all()
            assert np.isnan(values[r.id][other]).all()
    sampled = [r.span.own for r in rollouts]
    assert row["rollout/tokens"] == sum(map(len, sampled)) < sum(len(r.span) for r in rollouts)
    gap = np.concatenate([(seen["train_logprobs"][r.id] - r.span.logprobs)[r.span.own] for r in rollouts])
    assert row["mismatch/logprob_abs_diff"] == pytest.approx(np.abs(gap).mean(), abs=1e-7)
    assert np.abs(gap).max() < 1e-3  # engine and trainer agree behind what the environment said
    trace = read_run_trace(whole)
    assert trace.mask is not None
    assert np.isnan(trace.rollout_logprobs[~trace.mask]).all()
    assert 1 < row["rollout/turns_mean"] <= 3
    assert "written by the environment" in (whole / "report.html").read_text()


def test_a_recorded_episode_can_be_played_again_from_its_actions(whole: Path) -> None:
    tokenizer: Any = build_tokenizer()
    for r in to_rollouts(read_step(whole / "rollouts" / f"step_{STEPS:06d}.parquet")):
        options = r.prompt.grader.options
        environment = get(options["task"], options["options"])
        assert isinstance(environment, Environment)
        own = r.span.own
        turns = np.split(own, np.flatnonzero(np.diff(own) > 1) + 1)
        actions = [tokenizer.decode([i for i in r.span.token_ids[turn] if i != EOS]) for turn in turns]
        steps = play(environment, TaskItem.from_json(options["item"]), actions)
        assert sum(s.reward for s in steps) == r.reward


def test_a_step_can_be_replayed_and_the_doctor_sees_no_leak(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay_step(whole, 2).parting is None
    _, out, _ = cli(capsys, "doctor", whole, "--json")
    causes = {cause["id"] for cause in json.loads(out)["causes"]}
    assert not causes & {"mask", "alignment", "retokenised"}


@pytest.mark.parametrize("loop", ["budgeted", "async"])
def test_loops_that_cannot_play_say_so(loop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = cli(capsys, "train", *PLAYED, f"run.loop={loop}", f"run.dir={tmp_path / 'run'}")
    assert (code, err.count("\n")) == (2, 1)
    assert "run.loop: expected sync with data.task=sudoku_turns" in err
