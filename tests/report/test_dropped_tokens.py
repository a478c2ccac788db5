"""Which tokens an objective drops is read off the report: a token counted under the wrong sign, or not at all, tells another story.

Run folders made by hand with counts that a person can check, and one real run of GRPO whose clip cuts. Not covered: how the table looks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import TINY, cli

from rollkeel.recipe import load
from rollkeel.record.rollout_store import read_step, write_step
from rollkeel.record.runfolder import RunFolder, rollout_files
from rollkeel.report import render
from rollkeel.report.dropped_tokens import MOST, Dropped, dropped_tokens
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan

WAIT, ONE, NEWLINE = 7, 8, 9
TEXTS = {WAIT: "Wait", ONE: "<b>1", NEWLINE: "\n"}


def rollout(id: int, tokens: list[int]) -> Rollout:
    n = len(tokens)
    span = TokenSpan(
        token_ids=np.array(tokens),
        logprobs=np.full(n, -0.5, np.float32),
        kept_mass=np.ones(n, np.float32),
        versions=np.zeros(n, int),
        kv_versions=np.zeros(n, int),
    )
    prompt = Prompt(
        id="p", index=0, text="?", token_ids=np.array([1]), answer="!", grader=GraderSpec(name="exact"), task="t"
    )
    return Rollout(
        id=id, group=0, member=id, prompt=prompt, span=span, status=Status.FINISHED, sampling=SamplingParams(), engine="e",
        dtype="fp32", reward=0.0,
    )  # fmt: skip


# id, tokens, advantage (None: not trained on), kept by masks, cut by the clip
Row = tuple[int, list[int], float | None, list[int], list[int]]
STEP_1: list[Row] = [
    (0, [WAIT, ONE, WAIT, NEWLINE], 1.5, [1, 1, 1, 1], [1, 0, 1, 0]),
    (1, [WAIT, ONE, ONE], -0.5, [1, 0, 1], [0, 0, 1]),
    (2, [ONE, ONE], 0.0, [0, 0], [1, 1]),
    (3, [WAIT], None, [], []),
]
STEP_2: list[Row] = [(4, [WAIT, NEWLINE], 1.0, [0, 1], [1, 1]), (5, [WAIT], -1.0, [1], [0])]


def write(run: RunFolder, step: int, rows: list[Row], **changes: Any) -> None:
    trained = [row for row in rows if row[2] is not None]
    columns: dict[str, Any] = {
        "keep": {i: np.array(keep, bool) for i, _, _, keep, _ in trained},
        "cut": {i: np.array(cut, bool) for i, _, _, _, cut in trained},
        "advantages": {i: np.full(len(tokens), a, np.float32) for i, tokens, a, _, _ in trained},
        "piece": TEXTS.__getitem__,
        **changes,
    }
    write_step(run.rollouts(step), [rollout(i, tokens) for i, tokens, *_ in rows], step=step, **columns)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", load(overrides=["run.steps=2"]))


def test_counts_by_hand(run: RunFolder) -> None:
    write(run, 1, STEP_1)
    write(run, 2, STEP_2)
    assert dropped_tokens(run.path, 60) == (
        # Both by the mask and by the clip counts once.
        [Dropped(WAIT, "Wait", 3, 1.0), Dropped(NEWLINE, "↵", 1, 0.5)],
        [Dropped(ONE, "<b>1", 2, 1.0)],
    )
    assert dropped_tokens(run.path, 1)[0] == [Dropped(WAIT, "Wait", 2, 1.0)]
    page = render(run.path).read_text()
    assert "A &gt; 0: token" in page
    assert "<td>Wait</td><td>7</td><td>3</td><td>100.0 %</td>" in page
    assert "<td>&lt;b&gt;1</td><td>8</td><td>2</td><td>100.0 %</td>" in page


def test_what_a_file_lacks_is_left_out(run: RunFolder) -> None:
    write(run, 1, STEP_1, cut=None, piece=None)
    assert dropped_tokens(run.path, 60) == ([], [Dropped(ONE, "⟨8⟩", 1, 0.5)])
    write(run, 2, STEP_2, keep=None)
    run.rollouts(3).write_bytes(b"no parquet")
    assert dropped_tokens(run.path, 60) == ([], [Dropped(ONE, "⟨8⟩", 1, 0.5)])
    write(run, 1, STEP_1, advantages=None)
    assert dropped_tokens(run.path, 60) == ([], [])
    assert "Most dropped tokens" not in render(run.path).read_text()


def test_an_environments_tokens_are_nobody_s(run: RunFolder) -> None:
    nan = {0: np.array([1.0, np.nan, 1.0, np.nan], np.float32)}
    keep = {0: np.array([False, True, False, True])}
    write(run, 1, STEP_1[:1], advantages=nan, keep=keep, cut=None)
    assert dropped_tokens(run.path, 60) == ([Dropped(WAIT, "Wait", 2, 1.0)], [])


def test_the_most_frequent_come_first_and_are_not_too_many(run: RunFolder) -> None:
    tokens = [t for t in range(10, 40) for _ in range(t)]
    row = (0, tokens, 1.0, [0] * len(tokens), [0] * len(tokens))
    write(run, 1, [row], piece=str)
    assert [(d.token, d.count) for d in dropped_tokens(run.path, 60)[0]] == [(t, t) for t in range(39, 39 - MOST, -1)]


def test_a_run_records_what_its_clip_cuts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grpo = "objective={name: grpo, clip_low: 0.0001, clip_high: 0.0001}"
    short = ["run.steps=1", "eval.every=0", f"run.dir={tmp_path / 'run'}", "train.lr=0.01", "train.warmup_steps=0"]
    code, _, _ = cli(capsys, "train", *TINY, *short, grpo, "train.updates_per_step=4")
    assert code == 0
    [(_, file)] = rollout_files(tmp_path / "run")
    cut = np.concatenate([c for c in read_step(file)["cut"].to_pylist() if c is not None])
    metrics = RunFolder.open(tmp_path / "run").metrics()[-1]
    assert cut.mean() == pytest.approx(metrics["clip/high"] + metrics["clip/low"])
    assert cut.sum() >= 3
    assert sum(d.count for side in dropped_tokens(tmp_path / "run", 60) for d in side) == cut.sum()
