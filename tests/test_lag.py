"""Fixed staleness must be exactly what was asked for: experiments read conclusions off it.

Not covered: what stale data does to learning.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from tiny_run import DEADLINE_S, STEPS, TINY, assert_same, cli, events, kill_at, rows, start, wait_for, weights

from rollkeel.errors import BadInput, Interrupted
from rollkeel.events import EventLog
from rollkeel.loop.feeds import Lagged, Whole
from rollkeel.loop.job import train
from rollkeel.recipe import load
from rollkeel.record import checks
from rollkeel.record.clock import Clock
from rollkeel.record.rollout_store import read_step, to_rollouts
from rollkeel.rollout.lag import LaggedBatches
from rollkeel.types import StepRollouts

LAG, UPDATES = 3, 2
LAGGED = [*TINY, f"experiment.lag={LAG}"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run."""
    path = tmp_path_factory.mktemp("whole") / "run"
    train(load(None, [*LAGGED, f"run.dir={path}"]))
    return path


def run(path: Path, *words: str) -> list[dict[str, Any]]:
    train(load(None, [*TINY, *words, f"run.dir={path}"]))
    return rows(path)


def test_staleness_is_exactly_the_lag_after_the_ramp(whole: Path) -> None:
    for step, row in enumerate(rows(whole)[1:], 1):
        lag = UPDATES * min(step - 1, LAG)
        assert row["optimizer/updates"] == UPDATES
        assert row["staleness/mean"] == row["staleness/max"] == lag
        assert row["staleness/span"] == 0
        members = to_rollouts(read_step(whole / "rollouts" / f"step_{step:06d}.parquet"))
        assert [r.id for r in members] == list(range((step - 1) * 32, step * 32))
        assert {int(v) for r in members for v in r.span.versions} == {UPDATES * max(0, step - 1 - LAG)}


@pytest.mark.slow
def test_the_first_batches_are_those_of_the_start_model(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a step size of nothing the weights stay, which would stop any other run, and so do the rollouts of every batch."""
    monkeypatch.setattr(checks, "CHECKS", tuple(c for c in checks.CHECKS if c.name != "unchanged"))
    still = ["train.lr=1e-30", "run.steps=6", "eval.every=0"]
    plain, lagged = run(tmp_path / "a", *still), run(tmp_path / "b", *still, "experiment.lag=5")
    for one, two in zip(plain, lagged, strict=True):
        names = [k for k in one if k.startswith(("reward/", "rollout/", "failures/"))]
        assert {k: one[k] for k in names} == {k: two[k] for k in names}


def test_no_lag_is_the_plain_run_bit_for_bit(tmp_path: Path) -> None:
    from rollkeel.loop import assemble as runs

    words = ["run.steps=4", "eval.every=0"]
    run(tmp_path / "a", *words)
    with pytest.MonkeyPatch.context() as patch:  # the queue in use, with nothing in it
        open_feed = runs.open_feed

        def queued(config: Any, sampler: Any, source: Any, *rest: Any) -> Any:
            whole = open_feed(config, sampler, source, *rest)
            return runs.Lagged(whole, runs.LaggedBatches(0, config.run.steps, source.prompt), print)

        patch.setattr(runs, "open_feed", queued)
        run(tmp_path / "b", *words)
    assert_same(tmp_path / "b", tmp_path / "a")


@pytest.mark.parametrize(("stage", "step"), [pytest.param("rollout", 1, marks=pytest.mark.slow), ("update", 9)])
def test_killed_run_continues_bit_for_bit(stage: str, step: int, whole: Path, tmp_path: Path) -> None:
    killed = tmp_path / "run"
    kill_at(killed, LAGGED, stage, step, 0.002)
    train(load(killed / "config.yaml"), resume=killed)
    assert_same(killed, whole)


@pytest.mark.slow
def test_ctrl_c_while_the_queue_fills_starts_over(whole: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "run"
    process = start("train", *LAGGED, f"run.dir={stopped}")
    wait_for(stopped, process, "rollout", 1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    assert events(stopped)[-1]["status"] == "interrupted"
    train(load(stopped / "config.yaml"), resume=stopped)
    assert_same(stopped, whole)


def test_a_queue_saved_half_full_fills_behind_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checkpoints on the way, what is saved on Ctrl-C is the state at that moment."""
    words = ["experiment.lag=3", "checkpoint.every=0", "run.steps=5", "eval.every=0"]
    expected = run(tmp_path / "whole", *words)
    draw, calls = Whole.draw, iter(range(100))

    def stopped(*args: Any) -> Any:
        if next(calls) == 2:
            raise Interrupted("stopped while sampling")
        return draw(*args)

    monkeypatch.setattr(Whole, "draw", stopped)
    with pytest.raises(Interrupted):
        run(tmp_path / "run", *words)
    train(load(tmp_path / "run" / "config.yaml"), resume=tmp_path / "run")
    assert rows(tmp_path / "run") == expected
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_tokens_of_a_step_are_those_sampled_in_it() -> None:
    """Throughput is these by the step's seconds: step 1 fills the queue, the last steps only empty it."""

    class Ten:
        consumed = 0

        def draw(self, clock: Clock, version: int) -> StepRollouts:
            return StepRollouts(rollouts=(), batch=(), generated=10)

    feed = Lagged(Ten(), LaggedBatches(2, 6, lambda index: None), print)  # type: ignore[arg-type]
    drawn = [feed.draw(Clock(EventLog(None), step), 0) for step in range(1, 7)]
    assert [step.generated for step in drawn] == [30, 10, 10, 10, 0, 0]


@pytest.mark.slow
def test_dynamic_sampling_draws_its_prompts_when_it_samples(tmp_path: Path) -> None:
    words = ["rollout.zero_variance=3", "experiment.lag=2", "run.steps=6", "eval.every=0", "checkpoint.keep=9"]
    found = run(tmp_path / "a", *words)
    seen: list[int] = []
    for step in range(1, 7):
        members = to_rollouts(read_step(tmp_path / "a" / "rollouts" / f"step_{step:06d}.parquet"))
        seen += sorted({r.group for r in members})
        assert found[step]["staleness/max"] <= UPDATES * 2
    assert seen == list(range(len(seen)))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for step in (4, 5, 6):
        shutil.rmtree(tmp_path / "b" / "checkpoints" / f"step_{step:06d}", ignore_errors=True)
    shutil.rmtree(tmp_path / "b" / "model")
    train(load(tmp_path / "b" / "config.yaml"), resume=tmp_path / "b")
    assert rows(tmp_path / "b") == found
    assert weights(tmp_path / "b") == weights(tmp_path / "a")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["experiment.lag=2"], "experiment.lag: the checkpoint has 3, got 2"),
        (["experiment.lag=0"], "got one of sync with experiment.lag"),
        (["run.steps=20"], "the checkpoint has batches up to step 12, got 20"),
    ],
)
def test_resume_that_could_not_keep_the_lag_changes_nothing(
    words: list[str], message: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    shutil.rmtree(copy / "checkpoints" / f"step_{STEPS:06d}")
    code, _, err = cli(capsys, "train", "--resume", copy, *words)
    assert (code, err.count("\n")) == (2, 1), err
    assert message in err


@pytest.mark.parametrize("loop", ["budgeted", "async"])
def test_other_loops_refuse_a_lag(loop: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"experiment.lag: expected 0 with run.loop={loop}, got 3"):
        run(tmp_path / "run", "experiment.lag=3", f"run.loop={loop}", "engine.processes=1")
    assert not (tmp_path / "run").exists()
