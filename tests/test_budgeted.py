"""C3PO++ with real parts: a step ends with its budget, nothing sampled is lost or trained twice, a killed run continues.

Not covered: the pool's decisions (tests/rollout/test_pool.py), the rollout phase by hand (tests/rollout/test_budgeted_phase.py),
speed (benchmarks/c3po.py).
"""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import (
    DEADLINE_S,
    STEPS,
    TINY,
    assert_same,
    cli,
    events,
    files,
    killed_in,
    rows,
    start,
    twenty_kills,
    wait_for,
    weights,
)

from rollkeel.cluster.audit import audit
from rollkeel.errors import BadInput, GraderFailure, RunStopped
from rollkeel.loop.job import train
from rollkeel.recipe import load
from rollkeel.record.rollout_store import per_token, read_step, to_rollouts
from rollkeel.types import Rollout

BUDGETED = [
    *TINY,
    "run.loop=budgeted",
    "sampling.max_new_tokens=8",
    "rollout.budget={tokens: 36, capacity: 30, retention: 1}",
    "engine.slots=12",
    "checkpoint.every=2",
]
"""More rollouts than slots, and lengths that differ: some are parked, some purged and issued again, prompts return."""
SHORT = ["run.steps=4", "eval.every=0", "checkpoint.every=0"]


@pytest.fixture(scope="module", params=["recompute", "keep"])
def kv(request: pytest.FixtureRequest) -> str:
    """What becomes of the KV of parked rollouts, as an override."""
    return f"engine.kv={request.param}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, kv: str) -> Path:
    """The uninterrupted run."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(load(None, [*BUDGETED, kv, f"run.dir={run}"]))
    return run


def run(path: Path, *words: str) -> list[dict[str, Any]]:
    train(load(None, [*BUDGETED, *SHORT, *words, f"run.dir={path}"]))
    return rows(path)


def stored(path: Path, step: int) -> list[Rollout]:
    return to_rollouts(read_step(path / "rollouts" / f"step_{step:06d}.parquet"))


def test_everything_that_a_resume_must_bring_back_happens(whole: Path) -> None:
    found = rows(whole)[1:]
    for name in ("parked", "held", "resumed", "purged", "reissued", "returned"):
        assert sum(row[f"pool/{name}"] for row in found[:-1]) > 0, name
    assert len({row["reward/mean"] for row in found if "reward/mean" in row}) > 3
    assert max(row["staleness/span"] for row in found) > 0
    assert any(k.startswith("pool/purge_rate_by_length/") for row in found for k in row)


def test_a_step_ends_with_its_budget(whole: Path) -> None:
    for row in rows(whole)[1:]:
        assert row["rollout/budget_tokens"] == 36 + row["rollout/overshoot"]
        assert row["rollout/overshoot"] < 12 * 8  # the rollouts of one decode step
        assert row["pool/age_max"] <= 2
        assert row["rollout/generated_tokens"] <= 12 * row["rollout/decode_steps"]
        assert row["rollout/issued_length_mean"] > 0


def test_no_rollout_is_trained_twice_and_groups_are_whole(whole: Path, kv: str) -> None:
    seen: Counter[int] = Counter()
    groups: dict[int, int] = {}
    spans = older = 0
    for step in range(1, STEPS + 1):
        members = stored(whole, step)
        seen.update(r.id for r in members)
        for r in members:
            assert groups.setdefault(r.group, step) == step
            versions = r.span.versions.tolist()
            assert versions == sorted(versions)
            assert versions[-1] <= 2 * (step - 1)
            # KV computed again under the weights that go on is never older than the token; kept KV is that of the first.
            expected = versions if kv.endswith("recompute") else [versions[0]] * len(versions)
            assert r.span.kv_versions.tolist() == expected
            older += expected != versions
            assert r.status.complete
            assert r.reward is not None
            spans += len(set(versions)) > 1
        for group in {r.group for r in members}:
            size = sum(r.group == group for r in members)
            assert 2 <= size <= 4
    assert max(seen.values()) == 1
    told = audit(whole, load(whole / "config.yaml"))
    assert (told.trained, told.fits) == (len(seen), True)
    assert spans > 0
    assert bool(older) == kv.endswith("keep")


def test_a_resumed_rollout_keeps_log_probs_of_the_weights_that_sampled_it(whole: Path) -> None:
    """Tokens of the newest version agree with the trainer; those of older ones may not, and are not touched."""
    old = 0.0
    for step in range(2, STEPS + 1):
        trained = per_token(read_step(whole / "rollouts" / f"step_{step:06d}.parquet"), "train_logprobs")
        for r in stored(whole, step):
            fresh = r.span.kv_versions == 2 * (step - 1)  # then the token is of those weights too
            gap = np.abs(trained[r.id] - r.span.logprobs)
            assert gap[fresh].max(initial=0) < 1e-4
            old = max(old, float(gap[~fresh].max(initial=0)))
    assert old > 1e-3


@pytest.mark.slow
def test_the_same_twice_and_with_worker_processes_too(tmp_path: Path) -> None:
    assert run(tmp_path / "a", "rollout.budget.count=generated") == run(
        tmp_path / "b", "rollout.budget.count=generated"
    )
    words = ["engine.processes=2", "engine.slots=6", "run.steps=3"]
    assert run(tmp_path / "c", *words) == run(tmp_path / "d", *words)
    assert weights(tmp_path / "c") == weights(tmp_path / "d")


def test_a_generated_budget_counts_every_token_once(tmp_path: Path) -> None:
    for row in run(tmp_path / "run", "rollout.budget.count=generated")[1:]:
        assert row["rollout/budget_tokens"] == row["rollout/generated_tokens"]
        assert 0 <= row["rollout/overshoot"] < 12


def test_partial_groups_are_trained_at_once_with_a_leave_one_out_baseline(tmp_path: Path) -> None:
    found = run(tmp_path / "run", "rollout.budget.group=partial", "run.steps=6")
    assert sum(row["pool/reissued"] + row["pool/returned"] + row["pool/held"] for row in found[1:]) == 0
    split: Counter[int] = Counter()
    for step in range(1, 7):
        members = stored(tmp_path / "run", step)
        split.update({r.group for r in members})
        credit = per_token(read_step(tmp_path / "run" / "rollouts" / f"step_{step:06d}.parquet"), "advantages")
        for r in members:
            others = [o.reward for o in members if o.group == r.group and o.id != r.id]
            assert r.reward is not None
            expected = r.reward - np.mean([x for x in others if x is not None]) if others else 0.0
            assert credit[r.id][0] == pytest.approx(expected, abs=1e-6)
    assert max(split.values()) > 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["rollout.zero_variance=2", "rollout.budget.group=partial"],
            r"rollout\.zero_variance: expected keep or drop with rollout\.budget\.group=partial, .*, got 2",
        ),
        (["rollout.budget.train_capacity=3"], "train_capacity must be 0"),
        (["rollout.budget.group=whole"], "rollout.budget.group"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message) as refused:
        run(tmp_path / "run", *words)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("count", ["finished", "generated"])
def test_refill_spends_the_budget_on_groups_that_teach(tmp_path: Path, count: str) -> None:
    words = [f"rollout.budget.count={count}", "rollout.zero_variance=3", "run.steps=5"]
    refilled = run(tmp_path / "run", *words)[1:]
    assert {row["rollout/dynamic_rounds"] for row in refilled} <= {1.0, 2.0, 3.0}
    assert max(row["rollout/dynamic_rounds"] for row in refilled) > 1
    assert sum(row["rollout/dynamic_discarded"] for row in refilled) > 0
    for step, row in enumerate(refilled, 1):
        assert row["rollout/budget_tokens"] >= 36 - row["rollout/overshoot"]
        rewards: dict[int, set[float | None]] = {}
        for r in stored(tmp_path / "run", step):
            rewards.setdefault(r.group, set()).add(r.reward)
        assert sum(len(seen) == 1 for seen in rewards.values()) == row["rollout/dynamic_discarded"]


def test_broken_graders_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollkeel import rewards

    def grade(rollout: Rollout) -> float:
        if rollout.prompt.metadata["split"] == "train" and rollout.engine != "trial":
            raise ValueError("the judge is gone")
        return 0.0

    rewards.register("breaks_budgeted", grade)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{i:02d}", "answer": "{i % 2}"}}\n' for i in range(60)))
    words = ["data.task=null", "data.options={}", f"data.path={data}", "data.grader=breaks_budgeted"]
    with pytest.raises(GraderFailure, match="the judge is gone"):
        run(tmp_path / "run", *words, "sft.steps=0")
    with pytest.raises(RunStopped, match="steps made an update"):
        run(tmp_path / "free", *words, "sft.steps=0", "rollout.failure_budget=1")
    found = rows(tmp_path / "free")
    assert all(row["pool/failed"] == row["failures/grader"] == row["pool/finished"] > 0 for row in found[1:])
    assert all(row["optimizer/updates"] == 0 for row in found[1:])
    assert sum(row["pool/returned"] for row in found[1:]) > 0  # lost prompts are asked again


# -- kill -9 -------------------------------------------------------------------------------------------------------------


@pytest.mark.usually("keep-rollout-6-0.002")
@pytest.mark.parametrize(
    ("stage", "step", "delay_s"),
    [
        ("rollout", 6, 0.002),
        pytest.param("update", 9, 0.002, marks=pytest.mark.slow),
        pytest.param("checkpoint", 4, 0.01, marks=pytest.mark.slow),
    ],
)
def test_killed_run_continues_bit_for_bit(
    stage: str, step: int, delay_s: float, whole: Path, kv: str, tmp_path: Path
) -> None:
    killed = killed_in(tmp_path, [*BUDGETED, kv], stage, step, delay_s)
    train(load(killed / "config.yaml"), resume=killed)
    assert_same(killed, whole)


@pytest.mark.slow
def test_twenty_kills_at_random_moments(whole: Path, kv: str, tmp_path: Path) -> None:
    twenty_kills(tmp_path, [*BUDGETED, kv], whole, each=4, every=2)


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_sampling_repeats_the_step(whole: Path, kv: str, tmp_path: Path) -> None:
    stopped = tmp_path / "run"
    process = start("train", *BUDGETED, kv, "checkpoint.every=5", f"run.dir={stopped}")
    wait_for(stopped, process, "rollout", 7)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    done = rows(stopped)[-1]["step"]
    assert 6 <= done < STEPS
    assert (stopped / "checkpoints" / f"step_{done:06d}" / "manifest.json").is_file()
    assert events(stopped)[-1]["status"] == "interrupted"
    train(load(stopped / "config.yaml"), resume=stopped)
    assert_same(stopped, whole)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.loop=sync"], "expected one of run.loop=sync, got one of budgeted"),
        (["rollout.samples=5"], "resume with the same samples"),
        (["rollout.budget.group=partial"], "resume with the same group"),
        (["run.seed=7"], "run.seed: the run has 0, got 7; resume with the same seed"),
    ],
)
def test_resume_under_other_rules_changes_nothing(
    words: list[str], message: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    before = files(copy, ".lock")
    code, _, err = cli(capsys, "train", "--resume", copy, "run.steps=20", *words)
    assert (code, err.count("\n")) == (2, 1), err
    assert message in err
    assert files(copy, ".lock") == before
