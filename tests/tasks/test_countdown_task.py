"""Countdown evaluates text written by a policy that is paid to find holes: credit must be exact and nothing may crash or hang.

Covers the expression grammar and the scorer against an independent evaluator (Python's own, over exact rationals) and a list
of attacks. Does not cover how hard the problems are.
"""

from __future__ import annotations

import random
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkeel import tasks
from rollkeel.tasks.base import TaskItem, excerpt
from rollkeel.tasks.expression import evaluate


def _value(expression: str) -> Fraction:
    """Independent evaluation: Python's own, over exact rationals."""
    return eval(re.sub(r"\d+", r"F(\g<0>)", expression), {"F": Fraction})


class TestCountdown:
    task = tasks.get("countdown")
    item = TaskItem(text="3,5,7->22:", answer="3*5+7", metadata={"numbers": [3, 5, 7], "target": 22})

    @pytest.mark.parametrize("options", [{}, {"numbers": 6, "max_number": 50, "target_max": 500}, {"numbers": 2}])
    def test_gold_by_an_independent_evaluator(self, options: dict[str, Any]) -> None:
        task = tasks.get("countdown", options)
        for i in range(200):
            item = task.item(0, "train", i)
            assert _value(item.answer) == item.metadata["target"]
            used = sorted(int(t) for t in "".join(c if c.isdigit() else " " for c in item.answer).split())
            assert used == sorted(item.metadata["numbers"])

    def test_near_misses_fail_for_the_reason_they_were_made_for(self) -> None:
        for i in range(100):
            item = self.task.item(0, "eval", i)
            wrong, reuse, *_ = self.task.near_misses(item)
            assert _value(wrong) != item.metadata["target"]
            assert _value(reuse) == item.metadata["target"]
            assert "more often" in self.task.score(item, reuse)[1]

    @pytest.mark.parametrize(
        "response", ["3*5+7", "7+5*3", " 7 + ( 3 * 5 )\n", "((((3))*5))+7", "3×5+7", "5*3+7", "(3*5)+7"]
    )
    def test_solutions(self, response: str) -> None:
        assert self.task.score(self.item, response) == (1.0, excerpt(response))

    @pytest.mark.parametrize(
        ("numbers", "target", "response"),
        [
            ([3, 3, 8, 8], 24, "8/(3-8/3)"),  # the classic that needs a fraction on the way
            ([6, 4], 2, "6−4"),
            ([6, 3], 2, "6÷3"),
            ([5, 5], 10, "5+5"),
            ([10, 2, 5], 1, "10/2/5"),  # left to right
            ([9, 4, 3], 2, "9-4-3"),
        ],
    )
    def test_exact_arithmetic(self, numbers: list[int], target: int, response: str) -> None:
        item = TaskItem(text="", answer="", metadata={"numbers": numbers, "target": target})
        assert tasks.get("countdown").score(item, response)[0] == 1.0

    @pytest.mark.parametrize(
        "response",
        [
            "",
            "22",
            "3*5+7=22",
            "22=3*5+7",
            "3*5+7 3*5+7",
            "3*5+7)",
            "(3*5+7",
            "()",
            "3*5+",
            "*3*5+7",
            "3*5++7",
            "3*5+-(-7)",
            "3*(5)7",
            "3(5)+7",
            "3**5+7",
            "3*5//1+7",
            "3^5+7",
            "9**9**9**9",
            "3e1*5+7",
            "3.0*5+7",
            "03*5+7",
            "3*5+7+0",
            "3*5+7*1",
            "3*5+7+3-3",
            "3*5+(7-7)+7",
            "3 * 5 + 7 # ok",
            "３*５+７",
            "٣*5+7",
            "³*5+7",
            "3*5+7\x00",
            "3*5+7\u200b",
            "3*5+7\ud83d",
            "3*5\u00a0+7",
            "__import__('os').system('true')",
            "3*5+7;3*5+7",
            "3,5,7->22:3*5+7",
            "15+7",
            "3*5",
            "3/(5-5)+7",
            "3/(7-5-2)",
            "(" * 5000 + "3*5+7" + ")" * 5000,
            "(" * 60 + "3*5+7" + ")" * 60,
            "3*5+7" + " " * 300,
            "3" * 250,
            "9999999999*5+7",
            "3*5+7" * 50,
        ],
    )
    def test_attacks_score_zero(self, response: str) -> None:
        reward, detail = self.task.score(self.item, response)
        assert reward == 0.0
        assert "\n" not in detail
        detail.encode()

    def test_digits_may_not_be_joined_by_space(self) -> None:
        item = TaskItem(text="", answer="", metadata={"numbers": [10, 1, 0], "target": 11})
        assert self.task.score(item, "10+1+0")[0] == 1.0
        assert self.task.score(item, "1 0+1+0")[0] == 0.0

    def test_division_by_zero_on_the_way_is_zero(self) -> None:
        item = TaskItem(text="", answer="", metadata={"numbers": [5, 5, 7], "target": 0})
        assert self.task.score(item, "7/(5-5)")[0] == 0.0

    def test_unused_numbers_need_the_option(self) -> None:
        item = TaskItem(text="", answer="", metadata={"numbers": [3, 5, 7], "target": 15})
        assert self.task.score(item, "3*5")[0] == 0.0
        loose = tasks.get("countdown", {"use_all": False})
        assert loose.score(item, "3*5")[0] == 1.0
        assert loose.score(item, "3*5+7-7")[0] == 0.0

    @given(st.text(alphabet="357+-*/() \n×0", max_size=24))
    @settings(max_examples=400, deadline=None)
    def test_credit_only_where_python_agrees(self, response: str) -> None:
        if self.task.score(self.item, response)[0] == 1.0:
            assert _value(response.strip().replace("×", "*")) == 22

    def test_noise_swaps_operators_only(self) -> None:
        outputs = {self.task.demonstration(self.item, random.Random(s), 1.0) for s in range(100)}
        assert all(o[0] == "3" and o[1] in "+-/" and o[2] == "5" and o[3] in "-*/" and o[4] == "7" for o in outputs)
        assert len(outputs) == 9


@pytest.mark.parametrize(
    "text", ["03", "00", "1234567890", "1_0", "1.5", "a", "2²", "1\x0b+1", "-3", "2**3", "7//2", "()", "3(5)"]
)
def test_what_is_no_expression_has_no_value(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        evaluate(text)


@given(st.text(alphabet="0123456789+-*/() ", max_size=30))
@settings(max_examples=500, deadline=None)
def test_whatever_evaluates_has_the_value_python_gives_it(text: str) -> None:
    try:
        value, used = evaluate(text)
    except ValueError:
        return
    assert value == _value(text.strip())
    assert used == [int(number) for number in re.findall(r"\d+", text)]
