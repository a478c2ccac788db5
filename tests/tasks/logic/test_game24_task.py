"""Hands without a solution starve a run of reward, and a wrong expression that is paid poisons it.

Covers which hands are solvable (the count known from the literature, famous hard ones) and that gold answers are worth the target
by an independent evaluator. What responses are read is covered by test_countdown_task.py.
"""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import Any

import pytest

from rollkeel import tasks
from rollkeel.tasks.base import TaskItem
from rollkeel.tasks.logic.game24 import search


def value(expression: str) -> Fraction:
    """Python's own reading of an expression of our making, over exact rationals."""
    digits = "".join(c if not c.isdigit() else f"<{c}>" for c in expression).replace("><", "")
    return eval(digits.replace("<", "F(").replace(">", ")"), {"F": Fraction})


@pytest.mark.parametrize("hand", [(3, 3, 8, 8), (1, 5, 5, 5), (1, 3, 4, 6), (3, 3, 7, 7), (4, 4, 10, 10), (1, 2, 7, 7)])
def test_hands_that_need_fractions_or_luck(hand: tuple[int, ...]) -> None:
    tree, merges = search(hand, 24)
    assert tree is not None
    assert 3 <= merges <= 4572  # 36 first merges, 18 second and 6 last ones under each


@pytest.mark.parametrize("hand", [(1, 1, 1, 1), (1, 1, 1, 2), (7, 7, 7, 7), (13, 13, 13, 13), (1, 1, 2, 2)])
def test_hands_without_a_solution(hand: tuple[int, ...]) -> None:
    assert search(hand, 24)[0] is None


@pytest.mark.slow
def test_as_many_hands_are_solvable_as_is_known() -> None:
    hands = list(combinations_with_replacement(range(1, 14), 4))
    assert len(hands) == 1820
    assert sum(search(hand, 24)[0] is not None for hand in hands) == 1362


@pytest.mark.parametrize("options", [{}, {"cards": 3, "max_card": 9}, {"cards": 5, "target": 77}, {"max_card": 50}])
def test_gold_by_an_independent_evaluator(options: dict[str, int]) -> None:
    task = tasks.get("game24", options)
    for i in range(20):
        item = task.item(0, "train", i)
        assert value(item.answer) == options.get("target", 24)
        used = sorted(int(t) for t in "".join(c if c.isdigit() else " " for c in item.answer).split())
        assert used == sorted(item.metadata["numbers"])


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("8/(3-8/3)", 1.0),
        ("8 ÷ (3 − 8 ÷ 3)", 1.0),
        ("(8/(3-8/3))", 1.0),
        ("8/(3-8/3)=24", 0.0),
        ("8*3", 0.0),
        ("8*3*(8-8+3/3)", 0.0),
        ("8*3+8-8", 0.0),
        ("3*8", 0.0),
        ("24", 0.0),
        ("8**3-488", 0.0),
    ],
)
def test_scores(response: str, reward: float) -> None:
    item = TaskItem(text="8,3,8,3->24:", answer="", metadata={"numbers": [8, 3, 8, 3], "target": 24})
    assert tasks.get("game24").score(item, response)[0] == reward


def test_the_order_of_cards_is_no_new_problem() -> None:
    task = tasks.get("game24")
    hands = [TaskItem(text="", answer="", metadata={"numbers": n, "target": 24}) for n in ([1, 2, 3, 4], [4, 2, 1, 3])]
    assert task.identity(hands[0]) == task.identity(hands[1])


def responses(rng: random.Random, task: tasks.Task, item: TaskItem) -> list[str]:
    """Right and wrong expressions, and texts made of the pieces of one."""
    pieces = [
        *map(str, item.metadata["numbers"]),
        *"+-*/()",
        "0",
        "01",
        "×",
        "÷",
        "−",
        " ",
        "\t",
        "\n",
        "\v",
        ".",
        "**",
        "//",
        "24",
    ]
    drawn = ["".join(rng.choice(pieces) for _ in range(rng.randint(0, 12))) for _ in range(60)]
    cut = [
        item.answer[: rng.randrange(len(item.answer))]
        + rng.choice(pieces)
        + item.answer[rng.randrange(len(item.answer)) :]
        for _ in range(60)
    ]
    brackets = ["(" * n + item.answer + ")" * n for n in (1, 15, 16, 17, 100, 124)]
    return [item.answer, f" {item.answer}\r\n", *task.near_misses(item), *drawn, *cut, *brackets]


def test_the_judge_for_the_sandbox_gives_the_same_rewards() -> None:
    names: dict[str, Any] = {}
    task, rng, right = tasks.get("game24"), random.Random(0), 0
    exec(tasks.get("game24", {"sandbox": True}).grader(task.item(0, "train", 0)).options["judge"], names)
    for i in range(40):
        item = task.item(0, "train", i)
        for text in responses(rng, task, item):
            reward = task.score(item, text)[0]
            assert float(names["judge"](text, dict(item.metadata))[0]) == reward, repr(text)
            right += int(reward)
    assert right > 200


def test_with_the_sandbox_the_items_are_the_same() -> None:
    here, there = tasks.get("game24"), tasks.get("game24", {"sandbox": True})
    assert [here.item(3, "eval", i) for i in range(20)] == [there.item(3, "eval", i) for i in range(20)]
    item = there.item(0, "train", 0)
    assert (here.grader(item).name, there.grader(item).name) == ("task", "judge")
    assert there.grader(item).options["given"] == dict(item.metadata)
