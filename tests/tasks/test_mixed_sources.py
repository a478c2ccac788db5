"""Several sources in one run: a share that drifts, or an order that a resume does not repeat, would change what is learnt unseen.

The order by itself, on prompts without a model; whole runs are in tests/test_mixed_run.py. Not covered: whether a mixture
learns better than its parts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout.test_budgeted_phase import SAMPLING, Counting, Letters

from rollkeel.errors import BadInput, Interrupted
from rollkeel.recipe import from_tree
from rollkeel.rollout.budgeted import BudgetedRollouts
from rollkeel.rollout.dynamic import draw_varied, varied_groups
from rollkeel.rollout.pool import PoolRules
from rollkeel.tasks.mixed import MixedProblems, due
from rollkeel.tasks.source import problems_of
from rollkeel.types import Prompt, Rollout, SamplingParams, Status, TokenSpan


def mixture(*sources: dict[str, Any]) -> MixedProblems:
    problems = problems_of(from_tree({"data": {"task": None, "sources": list(sources)}}).data, 0, "train")
    assert isinstance(problems, MixedProblems)
    return problems


def shares(*sizes: float) -> MixedProblems:
    return mixture(*({"task": "runsum", "name": f"s{i}", "share": size} for i, size in enumerate(sizes)))


def group(mixed: MixedProblems, slot: int, rewards: Sequence[float]) -> list[Rollout]:
    problem = mixed.problem(slot)
    prompt = Prompt(
        id=str(slot), index=slot, text=problem.text, token_ids=np.ones(1, np.int64), answer=problem.answer,
        grader=problem.grader, task=mixed.source(slot), metadata=problem.metadata,
    )  # fmt: skip
    return [
        Rollout(
            id=10 * slot + member, group=slot, member=member, prompt=prompt, span=TokenSpan.empty(), status=Status.FINISHED,
            sampling=SamplingParams(), engine="scripted", dtype="fp32", reward=reward,
        )
        for member, reward in enumerate(rewards)
    ]  # fmt: skip


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7))
def test_no_source_is_ever_a_whole_group_from_its_share(sizes: list[int]) -> None:
    wanted = [size / sum(sizes) for size in sizes]
    counts = [0] * len(sizes)
    for total in range(1, 300):
        counts[due(wanted, counts)] += 1
        assert max(abs(total * share - count) for share, count in zip(wanted, counts, strict=True)) < 1


def test_slots_take_each_sources_prompts_in_their_order() -> None:
    mixed = shares(3, 1)
    found = [mixed.problem(slot).text for slot in range(40)]
    for number, part in enumerate(mixed.parts):
        mine = [text for slot, text in enumerate(found) if mixed.number(slot) == number]
        assert mine == [part.problem(place).text for place in range(len(mine))]


def dynamic(mixed: MixedProblems, useful: list[float], steps: int, size: int, rounds: int) -> tuple[Counter[int], int]:
    """Groups trained of each source, and groups sampled, where so many of each source's groups vary."""
    rng, first, trained = np.random.default_rng(0), 0, Counter[int]()

    def draw(start: int, count: int) -> list[Rollout]:
        varied = [rng.random() < useful[mixed.number(slot)] for slot in range(start, start + count)]
        return [r for i, v in enumerate(varied) for r in group(mixed, start + i, (0.0, 1.0) if v else (1.0, 1.0))]

    for _ in range(steps):
        drawn = draw_varied(draw, first, size, rounds, mixed)
        first += drawn.consumed
        trained.update(mixed.number(slot) for slot in varied_groups(drawn.batch))
        assert len({r.group for r in drawn.batch}) <= size
    return trained, first


def test_dynamic_sampling_fills_every_source_share_however_many_of_its_groups_are_of_no_use() -> None:
    trained, sampled = dynamic(shares(5, 3, 2), [0.9, 0.5, 0.25], steps=100, size=10, rounds=8)
    total = trained.total()
    assert [abs(trained[n] - total * share) < 2 for n, share in enumerate((0.5, 0.3, 0.2))] == [True] * 3, trained
    assert total > 980
    assert sampled > 1.5 * total  # the third source was asked again and again


def test_a_source_with_nothing_to_teach_leaves_the_others_their_place() -> None:
    trained, _ = dynamic(shares(1, 1), [1.0, 0.0], steps=50, size=8, rounds=4)
    assert trained[1] == 0
    assert trained[0] > 50 * 8 / 4


class Lengths(dict[int, int]):
    """Of each rollout, 1 to 12 tokens."""

    def __missing__(self, id: int) -> int:
        return 1 + id * 7919 % 97 % 12


@dataclass
class Budgeted:
    """Steps of C3PO++ on a mixture, with an engine whose rollouts have known lengths; a share of each source's groups varies."""

    mixed: MixedProblems
    useful: Sequence[float]
    rounds: int = 4
    dropped: list[Rollout] = field(default_factory=list)
    trained: Counter[str] = field(default_factory=Counter)
    consumed: int = 0

    def __post_init__(self) -> None:
        rules = PoolRules(budget=160, capacity=24, retention=2, samples=2, count="generated")
        self.pooled = BudgetedRollouts(rules, lambda slot: group(self.mixed, slot, [0.0])[0].prompt, self.useless)

    def useless(self, rollouts: Sequence[Rollout]) -> None:
        self.dropped += rollouts
        self.mixed.useless(rollouts)

    def grade(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        slots = [r.prompt.index for r in rollouts]
        varied = [np.random.default_rng(slot).random() < self.useful[self.mixed.number(slot)] for slot in slots]
        return [replace(r, reward=float(r.member) * v) for r, v in zip(rollouts, varied, strict=True)]

    def step(self, should_stop: Callable[[], bool] = lambda: False) -> list[int]:
        """Sources of the slots so far."""
        self.mixed.begin(self.consumed)
        partition = self.pooled.sample(
            Counting(Lengths()), SAMPLING, Letters(), deadline_s=60, grader=self, rounds=self.rounds, should_stop=should_stop
        )  # fmt: skip
        done = [r for r in partition.ended if r.id in partition.graded]
        chosen = self.pooled.settle(done + self.grade([r for r in partition.ended if r.id not in partition.graded]))
        useful = set(varied_groups(chosen))
        self.mixed.useless([r for r in chosen if r.group not in useful])
        self.mixed.end(len(useful))
        self.trained.update({r.group: r.prompt.task for r in chosen if r.group in useful}.values())
        self.consumed = self.pooled.pool.counts["prompts_consumed"]
        return [self.mixed.number(slot) for slot in range(self.consumed)]

    def waiting(self) -> Counter[str]:
        """Groups in the pool."""
        slots = {m.group: m.prompt for m in self.pooled.pool.members.values()}
        return Counter(self.mixed.source(slot) for slot in slots.values())


def test_a_budget_is_refilled_from_the_sources_that_lost_groups() -> None:
    """What is trained or waits in the pool has its share to within a group, once the next slots have made up for the last step."""
    sizes = {"s0": 5, "s1": 3, "s2": 2}
    run = Budgeted(shares(*sizes.values()), useful=[0.9, 0.6, 0.4])
    assert run.mixed.number(2000) in (0, 1, 2)  # looked at before the first step, to see how long prompts are
    for _ in range(100):
        run.step()
    kept = run.trained + run.waiting()
    asked = Counter(run.mixed.source(slot) for slot in range(run.consumed))
    owed = (run.mixed._taken[n] - kept[name] for n, name in enumerate(sizes))  # pyright: ignore[reportPrivateUsage]
    assert asked["s2"] > 1.6 * run.trained["s2"]
    for slot in range(run.consumed, run.consumed + sum(owed)):
        whole = kept.total()
        if all(abs(kept[name] - whole * size / 10) < 1 for name, size in sizes.items()):
            break
        kept[run.mixed.source(slot)] += 1
    else:
        pytest.fail(f"{kept} of {asked}")
    assert slot - run.consumed < 12
    assert run.trained.total() > 300
    assert len(run.dropped) > 300


def test_a_source_without_use_costs_a_budget_no_more_than_its_rounds() -> None:
    run = Budgeted(shares(1, 1), useful=[1.0, 0.0])
    for _ in range(40):
        run.step()
    assert run.trained["s1"] == 0
    assert run.trained["s0"] > 40 * 3


def test_a_budgeted_step_that_was_stopped_or_resumed_asks_for_the_same_prompts() -> None:
    whole, other = (Budgeted(shares(5, 3, 2), useful=[0.5, 0.3, 0.2]) for _ in range(2))
    stopped = 0
    for _ in range(12):
        other.dropped.clear()
        try:
            found = other.step(lambda: bool(other.dropped))  # behind the first refill
        except Interrupted:
            stopped += 1
            again = Budgeted(other.mixed, other.useful, trained=other.trained.copy(), consumed=other.consumed)
            again.mixed = shares(5, 3, 2)
            again.mixed.load_state_dict(other.mixed.state_dict())
            again.pooled.load_state_dict(other.pooled.state_dict())
            assert again.step() == (found := other.step())
            assert again.trained == other.trained
        assert found == whole.step()
    assert other.trained == whole.trained
    assert stopped > 6


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return write(
        tmp_path / "rows.jsonl",
        [
            {"prompt": f"{i} + 1 =", "answer": str(i + 1), "level": i % 2, "by": "numeric" if i % 3 else "exact"}
            for i in range(60)
        ],
    )


def test_rows_name_their_own_graders(rows: str) -> None:
    mixed = mixture(
        {"path": rows, "grader_column": "by"}, {"task": "addition", "grader": "numeric"}, {"task": "knights"}
    )
    graders = {slot: mixed.problem(slot).grader.name for slot in range(60)}
    of_file = [name for slot, name in graders.items() if mixed.source(slot) == "rows"]
    assert Counter(of_file).keys() == {"numeric", "exact"}
    assert {name for slot, name in graders.items() if mixed.source(slot) == "addition"} == {"numeric"}
    assert {name for slot, name in graders.items() if mixed.source(slot) == "knights"} == {"task"}


def test_prompts_of_a_settled_level_are_drawn_less_often(rows: str) -> None:
    """Level 0 is always solved, level 1 sometimes."""
    mixed = mixture({"path": rows, "draw": "pass_rate", "draw_by": "level"})
    levels = []
    for step in range(40):
        drawn = [r for slot in range(8 * step, 8 * step + 8) for r in group(mixed, slot, ())]
        assert drawn == []
        for slot in range(8 * step, 8 * step + 8):
            level = mixed.problem(slot).metadata["level"]
            levels.append(level)
            drawn += group(mixed, slot, (1.0, 1.0) if level == "0" else (0.0, 1.0))
        mixed.observe(drawn)
    assert 0.1 < np.mean([level == "0" for level in levels[16:]]) < 0.3  # 1/4 against 1 is a fifth
    again = mixture({"path": rows, "draw": "pass_rate", "draw_by": "level"})
    again.load_state_dict(mixed.state_dict())
    assert [again.problem(slot).text for slot in range(400)] == [mixed.problem(slot).text for slot in range(400)]


@pytest.mark.parametrize(
    ("sources", "line"),
    [
        ([{"task": "runsum", "share": 0}], "data.sources.0.share"),
        ([{"task": "runsum"}, {"task": "runsum"}], "two sources are called 'runsum'"),
        ([{"task": "runsum", "path": "x.jsonl"}], "exactly one of task and path"),
        ([{"task": "runsum", "shares": 1}], "unknown key; did you mean"),
        ([{"task": "runsum", "name": "mean"}], "set another name"),
        ([{"task": "runsum", "name": "a/b"}], "data.sources.0.name"),
        ([{"task": "runsum", "chat_template": True}], "set data.chat_template"),
        ([{"task": "runsum", "grader_column": "g"}], "leave it out"),
        ([], "or data.sources alone"),
    ],
)
def test_what_cannot_be_mixed_is_refused_in_one_line(sources: list[dict[str, Any]], line: str) -> None:
    with pytest.raises(BadInput) as refused:
        from_tree({"data": {"task": None, "sources": sources}})
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_key_that_no_prompt_has_is_refused() -> None:
    with pytest.raises(BadInput, match="draw_by=level is nothing that its prompts have"):
        mixture({"task": "runsum", "draw": "pass_rate", "draw_by": "level"})
