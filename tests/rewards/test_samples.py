"""Rejection sampling teaches what it keeps: a wrong, cut or repeated response among the demonstrations is learnt like a right one.

Which graded rollouts `rollkeel data samples` keeps, and that SFT reads them. Not covered: how well a model learns from them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_graders import rollout
from tiny_run import cli

from rollkeel.config import DataConfig
from rollkeel.evals.benchmarks import Item
from rollkeel.evals.record import append, record_of
from rollkeel.record.rollout_store import write_step
from rollkeel.tasks.source import FileProblems
from rollkeel.types import GraderSpec, Rollout, Status


def graded(text: str, reward: float | None, prompt: str = "2+2=", **changes: Status) -> Rollout:
    one = rollout(text, "4", reward=reward, **changes)
    return replace(one, prompt=replace(one.prompt, text=prompt))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    steps = [
        [graded("It is 4.", 1.0), graded("5", 0.0), graded("It  is 4. ", 1.0), graded("It goes on", 1.0, status=Status.LENGTH)],
        [graded("Four: 4", 1.0), graded("so so", 0.5), graded(" ", 1.0), graded("?", None, status=Status.GRADER_FAILURE), graded("4 + 5 is 9", 2.0, "4+5=")],
    ]  # fmt: skip
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    for number, rollouts in enumerate(steps, 1):
        write_step(tmp_path / "run" / "rollouts" / f"step_{number:06d}.parquet", rollouts, step=number)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ((), ["It is 4.", "4 + 5 is 9"]),
        (("--per-prompt", "2"), ["It is 4.", "Four: 4", "4 + 5 is 9"]),
        (("--per-prompt", "9", "--passed", "0.5"), ["It is 4.", "Four: 4", "so so", "4 + 5 is 9"]),
    ],
)
def test_finished_responses_that_earned_it_are_kept_once(
    run: Path, words: tuple[str, ...], kept: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "sft.jsonl"
    code, said, _ = cli(capsys, "data", "samples", run, "--out", out, *words)
    assert code == 0
    assert [json.loads(line)["solution"] for line in out.read_text().splitlines()] == kept
    assert f"{len(kept)} of 8 graded samples" in said
    config = DataConfig(task=None, path=str(out), solution_column="solution", eval_fraction=0.0)
    problems = FileProblems(config, 0, "sft")
    assert sorted(problems.response(i, 0.0) for i in range(len(kept))) == sorted(kept)


def test_answers_to_a_benchmark_are_kept_too(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    item = Item(key="1", text="4+5", answer="9", grader=GraderSpec(name="math"))
    sampled = [graded("9!", 1.0, "4+5="), graded("8", 0.0, "4+5="), graded("9 or", 1.0, "4+5=", status=Status.LENGTH)]
    items, out = tmp_path / "items.jsonl", tmp_path / "sft.jsonl"
    append(
        items, record_of(item, [*sampled, graded("?", None, "4+5=", status=Status.GRADER_FAILURE)], sampled[0], None)
    )
    code, said, _ = cli(capsys, "data", "samples", items, run, "--out", out)
    assert code == 0
    first, *_ = [json.loads(line) for line in out.read_text().splitlines()]
    assert first == {"prompt": "4+5=", "answer": "9", "solution": "9!", "reward": 1.0}
    assert "3 of 11 graded samples" in said
    append(items, {"key": "2", "samples": []})
    code, _, told = cli(capsys, "data", "samples", items, "--out", tmp_path / "other.jsonl")
    assert (code, told.count("\n")) == (2, 1)
    assert "with prompts; run `rollkeel eval` again" in told


def test_rollouts_that_earned_nothing_write_nothing(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, told = cli(capsys, "data", "samples", run, "--passed", "3", "--out", tmp_path / "sft.jsonl")
    assert (code, told.count("\n")) == (2, 1)
    assert "none of 8 graded rollouts finished with a reward of 3 or more" in told
    assert not (tmp_path / "sft.jsonl").exists()
    code, _, told = cli(capsys, "data", "samples", tmp_path / "nothing", "--out", tmp_path / "sft.jsonl")
    assert (code, told.count("\n")) == (2, 1)
