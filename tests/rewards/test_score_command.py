"""`rollkeel score` grades again what a run recorded: with a deadline of the user's own, or a slow grader fails every one of its rollouts.

The command in this process, its workers for real. Not covered: what graders say (their own tests), a score in a
chain of stages (tests/test_cli.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_graders import rollout
from tiny_run import cli

from rollkeel import rewards
from rollkeel.record.rollout_store import read_step, to_rollouts, write_step
from rollkeel.rewards import graders
from rollkeel.types import GraderSpec, Status

CODE = GraderSpec(name="code", options={"mode": "stdin", "tests": [{"input": "", "output": "1"}]})


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two rollouts whose grading takes half a second, that of their gold answer too, and one that is graded at once."""
    monkeypatch.setattr(graders, "_GRADERS", dict(graders._GRADERS))
    rewards.register("slow", "grader_fakes:by_command")
    path, asked = tmp_path / "raw.parquet", [("slow", "sleep 0.5"), ("slow", "sleep 0.5"), ("exact", "4")]
    write_step(path, [rollout("sleep 0.5", a, g, id=i) for i, (g, a) in enumerate(asked)], step=1)
    return path


def test_the_deadline_is_the_users(raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["reward.graders.deadline_s=0.1", "reward.graders.workers=1", "rollout.failure_budget=0.7"]
    code, out, err = cli(capsys, "score", raw, *short, "--out", tmp_path / "short.parquet", "--json")
    assert (code, err) == (0, "")
    assert (json.loads(out)["failures/grader"], json.loads(out)["reward/mean"]) == (2.0, 0.0)
    found = to_rollouts(read_step(tmp_path / "short.parquet"))
    assert [r.status for r in found] == [Status.GRADER_FAILURE, Status.GRADER_FAILURE, Status.FINISHED]
    assert found[0].detail == "grader slow: no answer in 0.1 s"

    code, out, err = cli(capsys, "score", raw, "reward.graders.deadline_s=30", "--out", tmp_path / "long.parquet")
    assert (code, err) == (0, "")
    assert [r.reward for r in to_rollouts(read_step(tmp_path / "long.parquet"))] == [1.0, 1.0, 0.0]


def test_a_recipe_says_it_too_and_the_budget_on_the_command_line_goes_first(
    raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("reward: {graders: {deadline_s: 0.1}}\nrollout: {failure_budget: 0.7}\n")
    out = tmp_path / "out.parquet"
    code, _, err = cli(capsys, "score", raw, recipe, "--out", out, "--failure-budget", "0.5")
    assert code == 3
    assert "2 of 3 rollouts failed" in err
    assert not out.exists()
    assert cli(capsys, "score", raw, recipe, "--out", out)[0] == 0


def test_code_goes_to_the_sandbox_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROLLKEEL_SANDBOX_TOKEN", raising=False)
    path, out = tmp_path / "code.parquet", tmp_path / "out.parquet"
    write_step(path, [rollout("print(1)", grader=CODE)], step=1)
    code, _, err = cli(capsys, "score", path, "reward.graders.sandbox=http://127.0.0.1:9", "--out", out)
    assert code == 3
    assert "ROLLKEEL_SANDBOX_TOKEN" in err  # asked for before the server is
    assert not out.exists()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("reward.graders.deadlines=3", "reward.graders.deadlines: unknown key; did you mean reward.graders.deadline_s?"),
        ("reward.graders.deadline_s=0", "config reward.graders.deadline_s: expected > 0, got 0"),
        ("reward.graders=3", "expected a section of keys, got 3"),
        ("workers", "recipe 'workers': no such file"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_in_one_line(
    word: str, message: str, raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = cli(capsys, "score", raw, word, "--out", tmp_path / "out.parquet")
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not (tmp_path / "out.parquet").exists()
