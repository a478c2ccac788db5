"""Sampling beside training: the bound holds for every token, nothing is lost or trained twice, and a recorded run replays bit for bit.

Real runs with worker processes: compared with the synchronous loop, stopped with Ctrl-C, killed with SIGKILL, resumed, replayed.
Not covered: the gate by itself (tests/rollout/test_overlap.py), the feeder's failures (tests/rollout/test_feeder.py), servers,
speed (benchmarks/overlap.py).
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from forked import Command
from tiny_run import DEADLINE_S, STEPS, TINY, assert_same, cli, events, rows, start, wait_for, weights

from rollkeel.errors import BadInput, EngineFailure, GraderFailure
from rollkeel.loop.job import train
from rollkeel.recipe import load
from rollkeel.record.rollout_store import read_step, to_rollouts
from rollkeel.types import Rollout

BOUND, UPDATES = 4, 2
ASYNC = [
    *TINY,
    "run.loop=async",
    f"rollout.overlap.max_staleness={BOUND}",
    "sampling.max_new_tokens=8",
    "engine.processes=1",
    "engine.slots=32",
    "engine.deadline_s=60",
    "checkpoint.every=5",
]
VARIED = [
    "sft.steps=0",
    "sampling.max_new_tokens=32",
    "reward.overlong={buffer: 32}",
    "engine.forward=fast",
    "engine.slots=2",
]
"""Long answers of random tokens, decoded more slowly than they are trained, so that publications and interruptions find
rollouts in flight; short ones have the greater reward."""
SHORTER = ["sampling.max_new_tokens=16", "reward.overlong.buffer=16"]


def run(path: Path, *words: str) -> list[dict[str, Any]]:
    train(load(None, [*ASYNC, *words, f"run.dir={path}"]))
    return rows(path)


def stored(path: Path, step: int) -> list[Rollout]:
    return to_rollouts(read_step(path / "rollouts" / f"step_{step:06d}.parquet"))


def calls(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (path / "schedule.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    return [call for line in lines for call in line["calls"]]


def check(path: Path, steps: int = STEPS, bound: int = BOUND) -> int:
    """Every rollout trained once, in order, no token older than the bound; number of rollouts that span versions."""
    spans, versions = 0, [row["version"] for row in rows(path)]
    for step in range(1, steps + 1):
        members = stored(path, step)
        assert [r.id for r in members] == list(range((step - 1) * 32, step * 32))
        lag = 0
        for r in members:
            assert r.status.complete
            assert r.reward is not None
            seen = r.span.versions
            assert sorted(seen.tolist()) == seen.tolist()
            assert (r.span.kv_versions == seen).all()
            assert set(seen.tolist()) <= set(versions)
            lag = max(lag, versions[step - 1] - int(seen.min()))
            spans += len(set(seen.tolist())) > 1
        assert rows(path)[step]["staleness/max"] == lag <= bound
    return spans


def replayed(path: Path, of: Path, words: Sequence[str] = ()) -> None:
    run(path, *words, f"experiment.schedule={of / 'schedule.jsonl'}")
    assert_same(path, of)
    assert not (path / "schedule.jsonl").exists()


@pytest.mark.slow
def test_a_run_overlaps_within_the_bound_and_replays_bit_for_bit(tmp_path: Path) -> None:
    words = [*VARIED, "engine.processes=2", "engine.slots=1", "sampling.max_new_tokens=96", "reward.overlong.buffer=96"]
    found = run(tmp_path / "a", *words)
    assert [row["step"] for row in found] == list(range(STEPS + 1))
    assert check(tmp_path / "a") > 0
    assert 0 < max(row["staleness/max"] for row in found[1:]) <= BOUND
    assert {row["async/ahead"] for row in found[1:-2]} == {BOUND // UPDATES}
    kinds = [call["call"] for call in calls(tmp_path / "a")]
    assert kinds.count("publish") == STEPS
    assert kinds.count("interrupt") == len({4, 8, 5, 10, 12})
    assert all(row["time/step_s"] >= row["time/update_s"] for row in rows(tmp_path / "a", volatile=True)[1:])
    replayed(tmp_path / "b", tmp_path / "a", words)


def test_without_staleness_it_is_the_synchronous_run(tmp_path: Path) -> None:
    words = ["rollout.overlap.max_staleness=1", "run.steps=4", "eval.every=0"]
    found = run(tmp_path / "a", *words)
    train(load(None, [*ASYNC, *words, "run.loop=sync", "engine.processes=0", f"run.dir={tmp_path / 'b'}"]))
    plain = [{k: v for k, v in row.items() if not k.startswith("async/")} for row in found]
    assert plain == rows(tmp_path / "b")
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    assert {row["async/ahead"] for row in found[1:]} == {0.0}


def test_kept_kv_is_stamped_and_survives_parking(tmp_path: Path) -> None:
    words = [*VARIED, *SHORTER, "engine.kv=keep", "run.steps=5", "checkpoint.every=2"]
    run(tmp_path / "a", *words)
    older = 0
    for step in range(1, 6):
        for r in stored(tmp_path / "a", step):
            assert (r.span.kv_versions <= r.span.versions).all()
            older += bool((r.span.kv_versions < r.span.versions).any())
    assert older > 0
    replayed(tmp_path / "b", tmp_path / "a", words)


def resume(path: Path) -> None:
    process = start("train", "--resume", path)
    assert process.communicate(timeout=DEADLINE_S)[1] == ""
    assert process.returncode == 0


@pytest.mark.slow
def test_ctrl_c_and_kill_lose_nothing_and_the_whole_run_replays(tmp_path: Path) -> None:
    """Stopped in the middle of a step, resumed, killed, resumed; then replayed in one go."""
    load(None, ASYNC)
    whole, words = tmp_path / "run", [*ASYNC, *VARIED, "eval.every=0", "run.steps=8"]
    process = start("train", *words, f"run.dir={whole}")
    wait_for(whole, process, "rollout", 5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    assert err.count("\n") == 1
    done = rows(whole)[-1]["step"]
    assert 4 <= done < 8
    saved = whole / "checkpoints" / f"step_{done:06d}"
    assert (saved / "manifest.json").is_file()
    assert events(whole)[-1]["status"] == "interrupted"
    tree = (saved / "state" / "tree.json").read_text()
    assert '"parked"' in tree
    before = rows(whole)
    process = start("train", "--resume", whole)
    wait_for(whole, process, "update", min(done + 2, 8))
    process.kill()
    process.communicate()
    resume(whole)
    assert rows(whole)[: done + 1] == before
    check(whole, 8)
    assert any(call["call"] == "interrupt" for call in calls(whole))
    replayed(tmp_path / "again", whole, words)


@pytest.mark.slow
def test_a_killed_replay_goes_on_with_the_schedule(tmp_path: Path) -> None:
    run(tmp_path / "a", *VARIED)
    words = [*ASYNC, *VARIED, f"experiment.schedule={tmp_path / 'a' / 'schedule.jsonl'}", "sft.steps=0"]
    process = start("train", *words, f"run.dir={tmp_path / 'b'}")
    wait_for(tmp_path / "b", process, "update", 7)
    process.kill()
    process.communicate()
    resume(tmp_path / "b")
    assert_same(tmp_path / "b", tmp_path / "a")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine.processes=0"], r"engine\.processes: expected at least 1 with run\.loop=async, got 0"),
        (["rollout.zero_variance=2"], r"rollout\.zero_variance: expected keep or drop with run\.loop=async, .*, got 2"),
        (["experiment.lag=2"], r"experiment\.lag: expected 0 with run\.loop=async"),
        (
            ["experiment.schedule=/nowhere/schedule.jsonl"],
            r"experiment\.schedule=/nowhere/schedule\.jsonl: cannot be read",
        ),
        (["run.loop=sync", "experiment.schedule=x"], r"experiment\.schedule: expected run\.loop=async"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message) as refused:
        run(tmp_path / "run", *words)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_another_schedule_and_another_bound_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*VARIED, "run.steps=6", "eval.every=0", *SHORTER]
    run(tmp_path / "a", *words)
    schedule = f"experiment.schedule={tmp_path / 'a' / 'schedule.jsonl'}"
    for other in (["checkpoint.every=4"], ["engine.processes=2"]):
        name = tmp_path / other[0]
        code, _, err = cli(capsys, "train", *ASYNC, *words, schedule, *other, f"run.dir={name}")
        assert (code, err.count("\n")) == (2, 1), (other, err)
        assert "experiment.schedule" in err
    shutil.rmtree(tmp_path / "a" / "checkpoints" / "step_000006")  # as if killed behind step 5
    bounds = ["rollout.overlap.max_staleness=1", "run.loop=sync", "rollout.samples=5"]
    for bound, message in zip(
        bounds,
        ("max_staleness: the checkpoint's rollout 160 may be", "got one of async", "rollout.samples"),
        strict=True,
    ):
        code, _, err = cli(capsys, "train", "--resume", tmp_path / "a", bound)
        assert (code, err.count("\n")) == (2, 1), err
        assert message in err


def test_a_worker_that_dies_stops_the_run_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollkeel.loop import steps as loop

    learn = loop.learn

    def kill(run: Any, drawn: Any, clock: Any) -> dict[str, float]:
        if clock.step == 3:
            run.engine.parts[0].process.kill()
            run.engine.parts[0].process.join()
        return learn(run, drawn, clock)

    monkeypatch.setattr(loop, "learn", kill)
    with pytest.raises(EngineFailure, match=r"worker 0 died with exit code -9|no worker process is left") as stopped:
        run(tmp_path / "run", *VARIED)
    assert "\n" not in str(stopped.value)
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2]


@pytest.mark.slow
def test_broken_graders_stop_the_run_or_are_counted(tmp_path: Path) -> None:
    from rollkeel import rewards

    def grade(rollout: Rollout) -> float:
        if rollout.prompt.metadata["split"] == "train" and rollout.id % 4 == 1:
            raise ValueError("the judge is gone")
        return float(rollout.id % 2)

    rewards.register("breaks_async", grade)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{i:02d}", "answer": "{i % 2}"}}\n' for i in range(60)))
    words = [
        "data.task=null",
        "data.options={}",
        f"data.path={data}",
        "data.grader=breaks_async",
        *VARIED,
        "run.steps=2",
    ]
    with pytest.raises(GraderFailure, match="the judge is gone"):
        run(tmp_path / "run", *words)
    found = run(tmp_path / "free", *words, "rollout.failure_budget=0.25")
    assert all(row["failures/grader"] == 8 and row["rollout/count"] == 24 for row in found[1:])


@pytest.mark.slow
def test_the_recipe_learns(tmp_path: Path) -> None:
    train(load("async", [f"run.dir={tmp_path / 'run'}"]))
    found = rows(tmp_path / "run")
    assert found[-1]["eval/runsum/avg@k"] > 0.75 > 0.5 > found[0]["eval/runsum/avg@k"]
    assert max(row["staleness/max"] for row in found[1:]) == 4


def wait_for_rows(path: Path, process: Command, count: int) -> None:
    """Until the metrics have `count` rows."""
    file, end = path / "metrics.jsonl", time.monotonic() + 1800
    while not file.is_file() or file.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, f"no row {count} within 1800 s"
        time.sleep(0.02)


@pytest.mark.slow
def test_five_hundred_steps_with_three_kills_never_break_the_bound(tmp_path: Path) -> None:
    path, draw = tmp_path / "run", random.Random(500)
    words = [*ASYNC, *VARIED, "run.steps=500", "checkpoint.every=20", "eval.every=100", "train.lr=1e-4"]
    words += SHORTER
    process = start("train", *words, f"run.dir={path}")
    for step in sorted(draw.sample(range(40, 480), 3)):
        wait_for_rows(path, process, step)
        time.sleep(draw.uniform(0, 0.2))  # anywhere in the step
        process.kill()
        process.communicate()
        process = start("train", "--resume", path)
    assert process.communicate()[1] == ""
    assert process.returncode == 0
    assert sum(e["event"] == "resumed" for e in events(path)) == 3
    spans, found = check(path, 500), rows(path)
    print(
        f"{spans} of {500 * 32} rollouts span versions, largest staleness {max(r['staleness/max'] for r in found[1:])}"
    )
    assert spans > 100
