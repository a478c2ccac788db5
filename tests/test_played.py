"""A whole run on an environment: the same to the bit after a kill, replayable, and what the environment said never counted.

Real processes, files and readers on the smallest Sudoku. Not covered: learning (rollkeel/recipes/sudoku_turns.yaml has its numbers).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import assert_same, cli, killed_in, rows, weights

from rollkeel.diagnose.replay.step import replay_step
from rollkeel.diagnose.replayed import first_difference
from rollkeel.loop.job import train
from rollkeel.models.presets import EOS, build_tokenizer
from rollkeel.recipe import load
from rollkeel.record.rollout_store import per_token, read_step, to_rollouts
from rollkeel.tasks import get
from rollkeel.tasks.base import TaskItem
from rollkeel.tasks.environment import Environment, play
from rollkeel.types import Rollout
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


BUDGETED = ["run.loop=budgeted", "rollout.budget={tokens: 150, capacity: 20, retention: 9}", "engine.slots=9"]
ASYNC = [
    "run.loop=async",
    "rollout.overlap.max_staleness=4",
    "engine.processes=1",
    "engine.slots=1",
    "engine.forward=fast",
    "engine.deadline_s=60",
]


def run(path: Path, *words: str) -> list[dict[str, Any]]:
    train(load(None, [*PLAYED, *words, f"run.dir={path}"]))
    return rows(path)


def episodes(path: Path) -> dict[int, Rollout]:
    """Those that were trained, by id: group × samples + member in every loop, while nothing is issued again."""
    files = sorted((path / "rollouts").iterdir())
    return {r.id: r for file in files for r in to_rollouts(read_step(file))}


def turns_cut(path: Path) -> int:
    """Episodes that weights of several versions sampled."""
    return sum(len(set(r.span.versions[r.span.own].tolist())) > 1 for r in episodes(path).values())


@pytest.mark.usually("async")
@pytest.mark.parametrize("loop", ["budgeted", "generated", "async"])
def test_every_loop_samples_the_tokens_of_the_synchronous_one(loop: str, tmp_path: Path) -> None:
    """Weights that hardly move, so that the version that samples a token is all that differs."""
    steps = 4 if loop == "async" else 6
    still = ["train.lr=1e-8", "train.kl_coefficient=0", f"run.steps={steps}", "checkpoint.every=2", "eval.every=2"]
    whole, other = tmp_path / "sync", tmp_path / loop
    run(whole, *still)
    words = {"async": ASYNC, "budgeted": BUDGETED, "generated": [*BUDGETED, "rollout.budget.count=generated"]}[loop]
    found = run(other, *still, *words)
    one, two = episodes(whole), episodes(other)
    assert len(two) > 40
    if loop != "async":  # where time decides which weights sample a turn
        assert turns_cut(other) > 10
        assert sum(row["pool/resumed"] for row in found[1:]) > 10
        assert len({r.span.own_count for r in two.values()}) > 3
    for i in one.keys() & two.keys():
        a, b = one[i], two[i]
        assert a.span.token_ids.tolist() == b.span.token_ids.tolist(), i
        assert a.span.own.tolist() == b.span.own.tolist()
        assert np.abs(a.span.logprobs - b.span.logprobs).max() < 1e-4
        assert (a.status, a.reward, a.text, a.detail) == (b.status, b.reward, b.text, b.detail)
    assert len(one.keys() & two.keys()) > 40


@pytest.mark.slow
def test_a_killed_budgeted_run_plays_parked_episodes_again(tmp_path: Path) -> None:
    run(tmp_path / "whole", *BUDGETED)
    assert turns_cut(tmp_path / "whole") > 5
    killed = killed_in(tmp_path, [*PLAYED, *BUDGETED], "rollout", 2, 0.0)
    train(load(killed / "config.yaml"), resume=killed)
    assert_same(killed, tmp_path / "whole")


@pytest.mark.slow
def test_an_asynchronous_run_replays_its_turns_bit_for_bit(tmp_path: Path) -> None:
    """With an evaluation and checkpoints between, at which episodes are parked."""
    words = [*ASYNC, "engine.processes=2", "run.steps=5", "eval.every=2"]
    run(tmp_path / "a", *words)
    lines = [json.loads(line) for line in (tmp_path / "a" / "schedule.jsonl").read_text().splitlines()]
    kinds = [call["call"] for line in lines for call in line["calls"]]
    assert kinds.count("turns") > 10
    assert kinds.count("interrupt") == 5
    run(tmp_path / "b", *words, f"experiment.schedule={tmp_path / 'a' / 'schedule.jsonl'}")
    assert_same(tmp_path / "b", tmp_path / "a")
