"""A question that only makes sense beside its choices has no right answer without them: each row kept or refused here was read by hand.

Does not cover whether a grader of words accepts every way to say an answer.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkeel.tasks.open_form import Refused, convert, open_form
from rollkeel.tasks.quantity import compare

ABCD = ["one", "two", "three", "four"]


@pytest.mark.parametrize(
    ("question", "choices", "answer", "expected", "kind"),
    [
        ("What is the capital of France?", ["Rome", "Paris", "Bern", "Oslo"], "B", "Paris", "exact"),
        ("What is the capital of France?", ["Rome", "Paris", "Bern", "Oslo"], 1, "Paris", "exact"),
        ("What is the capital of France?", ["Rome", "Paris", "Bern", "Oslo"], "Paris", "Paris", "exact"),
        ("What is the capital of France?", ["(A) Rome", "(B) Paris", "(C) Bern"], "(b)", "Paris", "exact"),
        ("What is the capital of France?", ["A. Rome", "B. Paris."], "B.", "Paris", "exact"),
        ("What is the capital of France?", {"A": "Rome", "B": "Paris"}, "B", "Paris", "exact"),
        ("What is the capital of France?", {"label": ["1", "2"], "text": ["Rome", "Paris"]}, "2", "Paris", "exact"),
        ("What is the capital of France?\n(A) Rome\n(B) Paris\n(C) Bern", None, "B", "Paris", "exact"),
        ("What is the capital of France? A) Rome B) Paris C) Bern", None, "B) Paris", "Paris", "exact"),
        ("The capital of France is", ["Rome", "Paris"], "B", "Paris", "exact"),
        ("____ is the capital of France.", ["Rome", "Paris"], "B", "Paris", "exact"),
        ("Which planet has rings seen by Galileo?", ["Mars", "Saturn"], "B", "Saturn", "exact"),
        ("How fast does it fall after 1 s?", ["4.9 m/s", "9.8 m/s", "19.6 m/s"], "B", "9.8 m/s", "quantity"),
        ("How many sides has a cube?", [4, 6, 8], 1, "6", "quantity"),
        ("What is the boiling point of water?", ["100 °C", "50 °C"], "A", "100 °C", "quantity"),
        ("What is 3 × 4 × 10^5?", ["1.2 × 10^6", "1.2 × 10^5"], "A", "1.2 × 10^6", "quantity"),
        ("What are the primary colours of light?", ["blue, red and green", "cyan, red and black"], "A", "blue, green, red", "set"),
        ("What department invents things?", ["R&D", "sales"], "A", "R&D", "exact"),
        ("At least how many legs has a stool?", ["3", "4"], "A", "3", "quantity"),
    ],
)  # fmt: skip
def test_kept(question: str, choices: Any, answer: Any, expected: str, kind: str) -> None:
    form = open_form(question, choices, answer)
    assert (form.answer, form.kind) == (expected, kind)
    assert "Rome" not in form.question


@pytest.mark.parametrize(
    ("question", "choices", "answer", "reason"),
    [
        ("Which of the following is a mammal?", ABCD, "A", "refers to the choices"),
        ("Which one of these is a mammal?", ABCD, "A", "refers to the choices"),
        ("Which statement about cells is correct?", ABCD, "A", "refers to the choices"),
        ("Choose the right word.", ABCD, "A", "refers to the choices"),
        ("Of the following, what floats?", ABCD, "A", "refers to the choices"),
        ("Which option above is right?", ABCD, "A", "refers to the choices"),
        ("All metals conduct EXCEPT what?", ABCD, "A", "asks for an exception"),
        ("What is NOT a metal?", ABCD, "A", "asks for an exception"),
        ("What is the least dense?", ABCD, "A", "asks for an exception"),
        ("Which metal is the densest?", ABCD, "A", "compares the choices"),
        ("What is the most likely cause?", ABCD, "A", "compares the choices"),
        ("What best describes a cell?", ABCD, "A", "compares the choices"),
        ("What does the diagram say?", ABCD, "A", "needs a figure"),
        ("What floats?", ["wood", "ice", "all of the above"], "A", "a choice combines or denies others"),
        ("What floats?", ["wood", "ice", "None of these"], "A", "a choice combines or denies others"),
        ("What floats?", ["wood", "ice", "A and B"], "C", "a choice combines or denies others"),
        ("What floats?", ["I only", "II only", "I and II"], "C", "a choice combines or denies others"),
        ("What floats?", ["wood", "it cannot be determined"], "A", "a choice combines or denies others"),
        ("Does wood float?", ["Yes", "No"], "A", "the answer is one of two"),
        ("Why do leaves fall?", ["to save water over the winter months", "they are old"], "A", "the answer is too long to be graded"),
        ("Leaves fall because", ["age", "cold"], "A", "an unfinished sentence with many ends"),
        ("Many leaves", ["fall", "stay"], "A", "an unfinished sentence with many ends"),
        ("How long is it?", ["5 m", "500 cm", "6 m"], "A", "two choices are the same answer"),
        ("What floats?", ["wood", "Wood", "ice"], "A", "two choices are the same answer"),
        ("What floats?", ["wood, ice and Wood", "iron"], "A", "the answer names one thing twice"),
        ("What floats?", ["wood and ice", "ice, wood"], "A", "two choices are the same answer"),
        ("What is it?", ["NH3", "H2O"], "A", "the answer mixes numbers and words"),
        ("", ABCD, "A", "malformed: no question"),
        (None, ABCD, "A", "malformed: no question"),
        ("What floats?", None, "A", "malformed: no choices"),
        ("What floats?", "ABCD", "A", "malformed: no choices"),
        ("What floats?", ["wood"], "A", "malformed: no choices"),
        ("What floats?", ["wood", None], "A", "malformed: a choice is empty or no text"),
        ("What floats?", ["wood", " "], "A", "malformed: a choice is empty or no text"),
        ("What floats?", ["wood", "ice"], "C", "malformed: the answer is no letter, index or text of a choice"),
        ("What floats?", ["wood", "ice"], 2, "malformed: the answer is no letter, index or text of a choice"),
        ("What floats?", ["wood", "ice"], True, "malformed: the answer is no letter, index or text of a choice"),
        ("What floats?", ["wood", "ice"], "stone", "malformed: the answer is no letter, index or text of a choice"),
    ],
)  # fmt: skip
def test_refused_with_the_reason(question: Any, choices: Any, answer: Any, reason: str) -> None:
    with pytest.raises(Refused) as caught:
        open_form(question, choices, answer)
    assert str(caught.value) == reason


def test_both_sides_are_counted() -> None:
    rows = [
        {"q": "What is the capital of France?", "c": ["Rome", "Paris"], "a": "B"},
        {"q": "Which of the following floats?", "c": ["wood", "iron"], "a": "A"},
        {"q": "How long is it?", "c": ["5 m", "6 m"], "a": 0},
        {"q": "Which of these sinks?", "c": ["wood", "iron"], "a": "B"},
        {"q": "What floats?", "c": ["wood", "iron"], "a": "Z"},
    ]
    kept, refused = convert(rows, question="q", choices="c", answer="a")
    assert [form.answer for form in kept] == ["Paris", "5 m"]
    assert refused == {
        "refers to the choices": ["Which of the following floats?", "Which of these sinks?"],
        "malformed: the answer is no letter, index or text of a choice": ["What floats?"],
    }


@given(
    st.one_of(st.none(), st.text(max_size=80)),
    st.one_of(
        st.none(), st.lists(st.one_of(st.text(max_size=20), st.none(), st.integers()), max_size=6), st.text(max_size=10)
    ),
    st.one_of(st.none(), st.integers(-2, 7), st.text(max_size=5)),
)
@settings(deadline=None)
def test_any_row_is_kept_or_refused(question: Any, choices: Any, answer: Any) -> None:
    kept, refused = convert([{"question": question, "choices": choices, "answer": answer}])
    assert len(kept) + len(refused) == 1
    for form in kept:
        if form.kind == "quantity":
            assert compare(form.answer, form.answer).right
