"""Dynamic sampling decides which prompts a run sees; a prompt used twice or skipped on resume would go unnoticed.

A source whose groups' rewards are known. Not covered: real engines, kills in the middle (tests/test_loop.py, test_resume.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollkeel.rollout.dynamic import draw_once, draw_varied, varied_groups
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan

PROMPT = Prompt(
    id="p", index=0, text="", token_ids=np.ones(1, np.int64), answer="", grader=GraderSpec(name="x"), task="t"
)


def rollout(group: int, member: int, reward: float | None) -> Rollout:
    status = Status.FINISHED if reward is not None else Status.GRADER_FAILURE
    return Rollout(
        id=2 * group + member, group=group, member=member, prompt=PROMPT, span=TokenSpan.empty(), status=status,
        sampling=SamplingParams(), engine="scripted", dtype="fp32", reward=reward,
    )  # fmt: skip


class Source:
    """Groups of two; those in `varied` have rewards 0 and 1, the others 1 and 1."""

    def __init__(self, varied: set[int]) -> None:
        self.varied = varied
        self.asked: list[tuple[int, int]] = []

    def __call__(self, first: int, count: int) -> Sequence[Rollout]:
        self.asked.append((first, count))
        return [
            rollout(g, m, 1.0 if m else float(g not in self.varied))
            for g in range(first, first + count)
            for m in (0, 1)
        ]


def groups(rollouts: Sequence[Rollout]) -> list[int]:
    return list(dict.fromkeys(r.group for r in rollouts))


def test_enough_in_the_first_round_is_one_round() -> None:
    source = Source(set(range(100)))
    drawn = draw_varied(source, 8, 4, rounds=5)
    assert source.asked == [(8, 4)]
    assert (groups(drawn.batch), drawn.consumed, drawn.metrics["rollout/dynamic_rounds"]) == ([8, 9, 10, 11], 4, 1)
    assert drawn.metrics == {"rollout/dynamic_rounds": 1.0, "rollout/dynamic_discarded": 0.0}


def test_missing_groups_are_replaced_by_later_prompts() -> None:
    """Of 0…3 only 1 and 3 vary: half of them, so 2 missing groups take 4 more prompts; 4 and 6 vary there, in time."""
    source = Source({1, 3, 4, 6, 7})
    drawn = draw_varied(source, 0, 4, rounds=5)
    assert source.asked == [(0, 4), (4, 4)]
    assert groups(drawn.batch) == [1, 3, 4, 6]  # 7 is surplus
    assert groups(drawn.rollouts) == list(range(8))
    assert drawn.consumed == 8
    assert drawn.metrics == {"rollout/dynamic_rounds": 2.0, "rollout/dynamic_discarded": 4.0}


def test_a_later_round_asks_only_for_what_is_missing() -> None:
    source = Source({0, 1, 2, 4, 5})
    draw_varied(source, 0, 4, rounds=3)
    assert source.asked == [(0, 4), (4, 2)]  # one missing, three of four useful: two


def test_rounds_are_bounded_and_nothing_varied_is_an_empty_batch() -> None:
    source = Source(set())
    drawn = draw_varied(source, 0, 4, rounds=3)
    assert source.asked == [(0, 4), (4, 4), (8, 4)]
    assert (list(drawn.batch), drawn.consumed, drawn.metrics["rollout/dynamic_rounds"]) == ([], 12, 3)


def test_failures_neither_count_nor_train() -> None:
    found = [rollout(0, 0, 1.0), rollout(0, 1, None), rollout(1, 0, 0.0), rollout(1, 1, 1.0), rollout(1, 2, None)]
    assert varied_groups(found) == [1]
    drawn = draw_varied(lambda first, count: found, 0, 1, rounds=1)
    assert [r.member for r in drawn.batch] == [0, 1]
    assert len(drawn.rollouts) == 5
    assert groups(draw_once(lambda first, count: found, 0, 2).batch) == [0, 1]
    assert groups(draw_once(lambda first, count: found, 0, 2, varied_only=True).batch) == [1]


@given(st.sets(st.integers(0, 200)), st.integers(0, 50), st.integers(1, 8), st.integers(1, 6))
def test_prompts_are_consumed_once_and_in_order(varied: set[int], first: int, wanted: int, rounds: int) -> None:
    source = Source(varied)
    drawn = draw_varied(source, first, wanted, rounds)
    assert groups(drawn.rollouts) == list(range(first, first + drawn.consumed))
    assert groups(drawn.batch) == [g for g in range(first, first + drawn.consumed) if g in varied][:wanted]
    assert len(source.asked) == drawn.metrics["rollout/dynamic_rounds"] <= rounds
    again = draw_varied(Source(varied), first, wanted, rounds)
    assert [r.id for r in again.batch] == [r.id for r in drawn.batch]
