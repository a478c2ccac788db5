"""A list that is complete in another order is right, one that guesses a member more is wrong: otherwise naming everything would pay.

Pairs labelled by hand, and open forms of kind `set` through their own grader. Not covered: mathematics in braces, which `math` grades,
and synonyms of members.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_graders import grade, rollout
from tiny_run import cli

from rollkeel.config import DataConfig
from rollkeel.rewards import get, graders
from rollkeel.tasks.graded import load_graded
from rollkeel.tasks.members import MAX_MEMBERS, members
from rollkeel.tasks.open_form import open_form
from rollkeel.types import GraderSpec, Status

COLOURS = "blue, green, red"
RIGHT = [
    (COLOURS, "blue, green, red"),
    (COLOURS, "red, blue, green"),
    (COLOURS, "Red, green and blue."),
    (COLOURS, "the colours are blue, green, red"),
    (COLOURS, "red, green, and blue"),
    (COLOURS, "red;green;blue"),
    (COLOURS, "red & green & blue"),
    (COLOURS, "red、green，blue"),
    (COLOURS, "{red, green, blue}"),
    (COLOURS, r"$\{\text{red},\,\text{green},\ \text{blue}\}$"),
    (COLOURS, "[(red, green, blue)]"),
    (COLOURS, "- red\n- green\n- blue"),
    (COLOURS, "1. red\n2. green\n3. blue"),
    (COLOURS, "**red**, **green** and `blue`"),
    (COLOURS, "It cannot be yellow.\nAnswer: green, red, blue"),
    (COLOURS, r"First \boxed{red}, no: \boxed{green, red, blue}"),
    (COLOURS, "<think>yellow, red</think>blue, red, green"),
    ("the heart, a lung", "Heart and lung"),
    ("A, D", "vitamin? Answer: D and A"),
    ("Tobago, Trinidad", "Trinidad and Tobago"),
    ("R&D, sales", "sales and R&D"),
    ("caf\u00e9, tea", "Tea, cafe\u0301"),
    ("1/2, 3", "3.0 and 0.5"),
    ("red", "Red."),
]
WRONG = [
    (COLOURS, "blue, green"),
    (COLOURS, "red"),
    (COLOURS, "blue, green, red, yellow"),
    (COLOURS, "blue, green, red, etc"),
    (COLOURS, "blue, green, red, red"),
    (COLOURS, "blue, green, red, the Red"),
    (COLOURS, "blue, green, green"),
    (COLOURS, "blue, green, yellow"),
    (COLOURS, "blue green red"),
    (COLOURS, "bluegreenred"),
    (COLOURS, "blue, green or red"),
    (COLOURS, "not blue, green, red"),
    (COLOURS, "the colours are not blue, green, red"),
    (COLOURS, "red, gréen, blue"),
    ("1, 2", "1, 2, 2.0"),
    ("1, 2", "1, 3"),
    ("sand, salt", "s and, salt"),
]
UNREADABLE = [
    ("", "no answer: nothing there (stated)"),
    (",;. ", "no list: ,;"),
    (r"\boxed{red, green", "no answer: the last box is not closed"),
    ("<think>red, green, blue", "no answer: the thought is not closed"),
    (", ".join(map(str, range(MAX_MEMBERS + 1))), "no list: 0, 1, 2"),
    ("red, green, blue" + " " * 9 + "," * 4000 + "x", "no list: red, green"),
]


@pytest.mark.parametrize(("gold", "text"), RIGHT)
def test_the_same_members_are_right(gold: str, text: str) -> None:
    assert grade(rollout(text, gold, "set")).reward == 1.0


@pytest.mark.parametrize(("gold", "text"), WRONG)
def test_a_near_miss_is_wrong(gold: str, text: str) -> None:
    out = grade(rollout(text, gold, "set"))
    assert (out.reward, out.status) == (0.0, Status.FINISHED)


@pytest.mark.parametrize(("text", "detail"), UNREADABLE)
def test_what_cannot_be_read_is_wrong_and_says_why(text: str, detail: str) -> None:
    out = grade(rollout(text, COLOURS, "set"))
    assert (out.reward, out.status) == (0.0, Status.FINISHED)
    assert out.detail.startswith(detail)


def test_a_member_named_twice_is_said() -> None:
    assert grade(rollout("red, blue, Red, green", COLOURS, "set")).detail == "names red twice: red, blue, Red, green"


@pytest.mark.parametrize("gold", ["", " , ", "red, Red", "1, 1.0"])
def test_a_gold_answer_that_is_no_set_is_a_failure_and_no_zero(gold: str) -> None:
    out = grade(rollout("red", gold, "set"))
    assert (out.reward, out.status) == (None, Status.GRADER_FAILURE)
    assert "no list without repetition" in out.detail


def test_options() -> None:
    last = GraderSpec(name="set", options={"extract": "boxed"})
    assert grade(rollout("red, green, blue", COLOURS, last)).reward == 0.0
    odd = grade(rollout("red", "red", GraderSpec(name="set", options={"ordered": True})))
    assert odd.detail == "grader set: ValueError: unknown option 'ordered'; known: extract"


@pytest.mark.parametrize(
    ("right", "others", "name"),
    [
        ("blue, red and green", ["cyan, red and black"], "set"),
        ("Paris", ["Rome"], "set"),
        ("9.8 m/s", ["4.9 m/s"], "quantity"),
    ],
)
def test_every_kind_of_open_form_has_a_grader_that_knows_its_answer(right: str, others: list[str], name: str) -> None:
    form = open_form("What is it?", [right, *others], "A")
    assert form.grader == name
    assert get(name).lane is graders.Lane.INLINE
    assert [grade(rollout(text, form.answer, form.grader)).reward for text in (form.answer, *others)] == [1.0, 0.0]
    assert grade(rollout(f"I think so.\nThe answer is **{form.answer}**.", form.answer, form.grader)).reward == 1.0


def test_the_command_writes_rows_whose_answers_are_graded_as_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"q": "What is the capital of France?", "c": ["Rome", "Paris"], "a": "B"},
        {"q": "Which of the following floats?", "c": ["wood", "iron"], "a": "A"},
        {"q": "How long is it?", "c": ["5 m", "6 m"], "a": 0},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ["--question", "q", "--choices", "c", "--answer", "a"]
    code, out, _ = cli(capsys, "data", "open", tmp_path / "in.jsonl", "--out", tmp_path / "open.jsonl", *columns)
    assert code == 0
    assert "1 left out: refers to the choices, as 'Which of the following floats?'" in out
    assert f"2 questions: data.path={tmp_path / 'open.jsonl'} data.grader=row" in out
    made = load_graded(DataConfig(path=str(tmp_path / "open.jsonl"), grader="row"))
    for row, name, asked, response in zip(
        made, ("set", "quantity"), (rows[0], rows[2]), ("It is Paris.", "500 cm"), strict=True
    ):
        assert row.grader is not None
        assert (row.grader.name, row.prompt) == (name, asked["q"])
        assert grade(rollout(response, row.answer, name)).reward == 1.0
    for name, wanted in (("none.jsonl", "no such file"), ("in.jsonl", "most often since: malformed: no question")):
        code, _, err = cli(capsys, "data", "open", tmp_path / name, "--out", tmp_path / "other")
        assert (code, err.count("\n")) == (2, 1)
        assert wanted in err
    assert not (tmp_path / "other").exists()


@given(
    st.lists(
        st.sampled_from(["iron", "zinc", "tin", "lead", "gold", "(ore)", "café", "x-ray"]),
        min_size=2,
        max_size=5,
        unique=True,
    )
)
@settings(deadline=None, max_examples=60)
def test_any_order_is_right_and_any_other_number_of_members_wrong(metals: list[str]) -> None:
    form = open_form("What are they?", [" and ".join(metals), "clay"], "A")
    assert form.kind == "set"
    random.Random(0).shuffle(metals)
    texts = [", ".join(metals), ", ".join(metals[1:]), ", ".join([*metals, "clay"]), ", ".join([*metals, metals[0]])]
    assert [grade(rollout(text, form.answer, form.grader)).reward for text in texts] == [1.0, 0.0, 0.0, 0.0]


@given(st.text(alphabet="ab1.-*(){}[]\\,;&$ \nand", max_size=60))
@settings(deadline=None, max_examples=300)
def test_any_text_is_read_and_graded(text: str) -> None:
    out = grade(rollout(text, "a, b", "set"))
    assert out.status is Status.FINISHED
    assert out.reward == 0.0 or len(members(text)) == 2
