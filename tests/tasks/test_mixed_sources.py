"""Several sources in one run: a share that drifts, or an order that a resume does not repeat, would change what is learnt unseen.

The order by itself, on prompts without a model; whole runs are in tests/test_mixed_run.py. Not covered: whether a mixture
learns better than its parts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollkeel.errors import BadInput
from rollkeel.recipe import from_tree
from rollkeel.rollout.dynamic import draw_varied, varied_groups
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
