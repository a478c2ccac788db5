"""The replayer's verdict rests on these comparisons: one flipped bit must be found, and named where it is.

Not covered: replays of real runs (tests/test_replay_command.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rollkeel.diagnose.replay.view import _effects
from rollkeel.diagnose.replayed import (
    SAMPLED,
    TRAINED,
    MetricChange,
    effects,
    first_difference,
    metric_changes,
)
from rollkeel.record.rollout_store import read_step, write_step
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan


def rollout(id: int, tokens: list[int], **more: Any) -> Rollout:
    n = len(tokens)
    prompt = Prompt(
        id="p", index=0, text="1+1", token_ids=np.array([1, 2]), answer="2", grader=GraderSpec(name="exact"), task="t"
    )
    span = TokenSpan(
        token_ids=np.array(tokens),
        logprobs=np.full(n, -0.5, np.float32),
        kept_mass=np.ones(n, np.float32),
        versions=np.zeros(n, np.int64),
        kv_versions=np.zeros(n, np.int64),
        experts=np.arange(n * 6, dtype=np.int16).reshape(n, 3, 2),
    )
    base = Rollout(
        id=id,
        group=0,
        member=id,
        prompt=prompt,
        span=span,
        status=Status.FINISHED,
        sampling=SamplingParams(),
        engine="local",
        dtype="fp32",
        reward=1.0,
    )
    return replace(base, **more)


ROLLOUTS = [rollout(0, [5, 6, 7]), rollout(1, [8, 9])]


def table(path: Path, rollouts: list[Rollout], **changes: Any) -> pa.Table:
    columns: dict[str, Any] = {
        "train_logprobs": {r.id: np.full(len(r.span), -0.7, np.float32) for r in rollouts},
        "keep": {r.id: np.ones(len(r.span), bool) for r in rollouts},
        "advantages": {r.id: np.full(len(r.span), 2.0, np.float32) for r in rollouts},
        "train_version": {r.id: 3 for r in rollouts},
    }
    write_step(path, rollouts, step=1, piece=str, **(columns | changes))
    return read_step(path)


def with_span(r: Rollout, **changes: Any) -> Rollout:
    return replace(r, span=replace(r.span, **changes))


def test_equal_files_are_equal(tmp_path: Path) -> None:
    one, two = (table(tmp_path / name, ROLLOUTS) for name in "ab")
    assert first_difference(one, two, (*SAMPLED, *TRAINED)) is None


@pytest.mark.parametrize(
    ("other", "column", "id", "token"),
    [
        (with_span(ROLLOUTS[1], logprobs=np.array([-0.5, -0.50000006], np.float32)), "logprobs", 1, 1),
        (with_span(ROLLOUTS[1], token_ids=np.array([8, 1])), "token_ids", 1, 1),
        (with_span(ROLLOUTS[1], versions=np.array([1, 0])), "versions", 1, 0),
        (with_span(ROLLOUTS[1], experts=np.arange(12, dtype=np.int16).reshape(2, 3, 2)[::-1]), "experts", 1, 0),
        (with_span(ROLLOUTS[1], experts=None), "experts", 1, None),
        (replace(ROLLOUTS[1], reward=0.0), "reward", 1, None),
        (replace(ROLLOUTS[1], status=Status.LENGTH), "status", 1, None),
        (rollout(1, [8, 9, 9]), "token_ids", 1, None),
        (rollout(2, [8, 9]), "ids", None, None),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_first_difference_is_named(
    tmp_path: Path, other: Rollout, column: str, id: int | None, token: int | None
) -> None:
    one, two = table(tmp_path / "a", ROLLOUTS), table(tmp_path / "b", [ROLLOUTS[0], other])
    place = first_difference(one, two, (*SAMPLED, *TRAINED))
    assert place is not None
    assert (place.column, place.rollout, place.token) == (column, id, token)
    assert column in str(place)


def test_one_bit_of_the_trainers_columns_counts(tmp_path: Path) -> None:
    one = table(tmp_path / "a", ROLLOUTS)
    changed = {0: np.array([-0.7, -0.7, np.nextafter(np.float32(-0.7), np.float32(0))], np.float32)}
    changed[1] = np.full(2, -0.7, np.float32)
    two = table(tmp_path / "b", ROLLOUTS, train_logprobs=changed)
    place = first_difference(one, two, (*SAMPLED, *TRAINED))
    assert place is not None
    assert (place.column, place.rollout, place.token) == ("train_logprobs", 0, 2)
    assert first_difference(one, two, SAMPLED) is None


def test_metric_changes_are_sorted_and_leave_the_machine_out() -> None:
    recorded = {"step": 3, "a": 1.0, "b": 2.0, "c": 5.0, "time/step_s": 1.0, "eval/x/avg@k": 0.5, "version": 6}
    found = metric_changes(recorded, {"a": 1.0, "b": 2.2, "d": 1.0, "time/step_s": 2.0})
    assert [c.name for c in found] == ["d", "b"]
    assert found[1].difference == pytest.approx(0.2)
    assert [c.name for c in metric_changes(recorded, {"a": 1.0, "b": 2.0}, whole=True)] == ["c"]
    assert metric_changes(recorded, {"a": 1.0, "b": 2.0}) == []
    assert MetricChange(name="x", recorded=0.0, replayed=0.0).relative == 0
    assert MetricChange(name="x", recorded=-1.0, replayed=1.0).relative == 2


def test_effects_by_hand(tmp_path: Path) -> None:
    one = table(tmp_path / "a", ROLLOUTS)
    dropped = {0: np.array([True, False, False]), 1: np.array([False, False, False])}
    other = [ROLLOUTS[0], rollout(1, [8, 4, 4])]
    found = effects(one, table(tmp_path / "b", other, keep=dropped))
    assert (found["rollouts"], found["rollouts_equal"], found["first_change_mean"]) == (2, 1, 1.0)
    assert found["keep_differs"] == 2
    assert [(e["id"], e["token"], e["piece"]) for e in found["examples"]] == [(0, 1, "6"), (0, 2, "7")]
    assert (found["examples"][0]["recorded"], found["examples"][0]["replayed"]) == ("kept", "dropped")
    assert found["recorded"]["dropped"] == 0
    assert found["replayed"]["dropped"] == 5
    gap = -0.2
    assert found["recorded"]["logprob_gap"] == pytest.approx(0.2, rel=1e-6)
    assert found["recorded"]["kl_k3"] == pytest.approx(np.exp(gap) - 1 - gap, rel=1e-5)


def test_an_example_shows_what_changed_and_not_only_the_record(tmp_path: Path) -> None:
    """A token that q and o of the record agree on would never be dropped: the replayed ones say why it was."""
    one = table(tmp_path / "a", ROLLOUTS)
    moved = [with_span(ROLLOUTS[0], logprobs=np.array([-0.5, -3.0, -0.5], np.float32)), ROLLOUTS[1]]
    dropped = {0: np.array([True, False, True]), 1: np.ones(2, bool)}
    found = effects(one, table(tmp_path / "b", moved, keep=dropped))
    (example,) = found["examples"]
    assert example["q"] == pytest.approx([np.exp(-0.5), np.exp(-3.0)])
    assert example["o"] == pytest.approx([np.exp(-0.7)] * 2, rel=1e-6)
    text = [str(line) for line in _effects({"effects": found, "distance": {}})]
    assert "  rollout 0 token 1 '6': q 0.607 → 0.050, o 0.497, A +2.00: kept → dropped" in text


def test_only_what_a_step_measures_counts() -> None:
    recorded = {
        "step": 12,
        "loss": 1.0,
        "reward/mean": 0.5,
        "eval/x/avg@k": 0.5,
        "checks/no_signal": 1.0,
        "time/step_s": 2.0,
    }
    assert metric_changes(recorded, {"loss": 1.0, "reward/mean": 0.5}, whole=True) == []
    assert [c.name for c in metric_changes(recorded, {"loss": 1.0}, whole=True)] == ["reward/mean"]
