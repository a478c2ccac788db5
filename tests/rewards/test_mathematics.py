"""A wrong verdict on mathematics trains the wrong thing for ever: the held table of pairs, the rules of extraction, what hangs a parser.

The table was labelled by hand; `right` and `wrong` must come out as such, `uncertain` as undecided. Needs math-verify
(extra `math`). Not covered: the LaTeX parser itself beyond what the table asks of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_graders import rollout

from rollkeel.config import GradersConfig
from rollkeel.rewards import Graders
from rollkeel.rewards.answers import NoAnswer, final_answer
from rollkeel.types import GraderSpec, Rollout, Status

pytest.importorskip("math_verify")

PAIRS = [
    tuple(line.split(" | "))
    for line in (Path(__file__).parent / "math_pairs.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


@pytest.fixture(scope="module")
def graders() -> Iterator[Graders]:
    with Graders(GradersConfig(deadline_s=20.0, workers=1), regrade=0.0) as made:
        yield made


def pair(gold: str, answer: str, **options: object) -> Rollout:
    return rollout(answer, gold, GraderSpec(name="math", options={"extract": "whole", **options}))


def verdict(found: Rollout) -> str:
    if found.status is Status.GRADER_FAILURE:
        return found.detail
    if found.detail.startswith("undecided: "):
        return "uncertain"
    return {1.0: "right", 0.0: "wrong"}[found.reward if found.reward is not None else -1.0]


def test_the_held_table(graders: Graders) -> None:
    found = [verdict(r) for r in graders.grade([pair(gold, answer) for gold, answer, _ in PAIRS])]
    missed = [(*p, got) for p, got in zip(PAIRS, found, strict=True) if got != p[2]]
    assert missed == []
    counts = Counter(wanted for _, _, wanted in PAIRS)
    assert len(PAIRS) >= 300
    assert min(counts["right"], counts["wrong"]) >= 100
    assert counts["uncertain"] >= 30


def test_every_readable_gold_is_its_own_answer(graders: Graders) -> None:
    golds = sorted({gold for gold, _, _ in PAIRS})
    found = graders.grade([pair(gold, gold) for gold in golds])
    assert [(g, verdict(r)) for g, r in zip(golds, found, strict=True) if verdict(r) != "right"] == []


def test_options_decide_what_is_undecided_otherwise(graders: Graders) -> None:
    given = [
        pair("50", "50\\%", percent=True),
        pair("50", "0.5", percent=True),
        pair("\\frac{1}{3}", "0.333", rounded=True),
        pair("\\frac{1}{3}", "0.333", rounded=False),
        pair("\\frac{1}{3}", "0.334", rounded=True),
        pair("\\pi", "3.1416", rounded=True),
        pair("\\sqrt{2}", "1.4143", rounded=True),
    ]
    assert [r.reward for r in graders.grade(given)] == [1, 0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("gold", ["", "\\frac{1}{", "words in a formula 3", "\\boxed{}", "x" * 2000])
def test_a_gold_answer_that_cannot_be_read_is_a_failure(graders: Graders, gold: str) -> None:
    found = graders.grade([pair(gold, "5")])[0]
    assert (found.reward, found.status) == (None, Status.GRADER_FAILURE)
    assert found.detail.startswith("grader math: BadGold: the gold answer")


def test_an_unknown_option_is_a_failure(graders: Graders) -> None:
    assert graders.grade([pair("5", "5", extrakt="boxed")])[0].detail.startswith(
        "grader math: ValueError: unknown option"
    )


def test_what_hangs_a_parser_is_undecided_and_the_others_are_served() -> None:
    tower = "9^{9^{9^{9}}}"
    with Graders(GradersConfig(deadline_s=2.0), regrade=0.0) as graders:
        found = graders.grade([pair("5", "5"), pair("5", tower), pair("5", "\\frac{10}{2}"), pair("\\sqrt{25}", "5")])
    assert [r.reward for r in found] == [1.0, 0.0, 1.0, 1.0]
    assert found[1].detail == "undecided: grader math: no answer in 2 s"


def test_a_long_name_before_an_equals_sign_is_read_at_once(graders: Graders) -> None:
    (rollout,) = graders.grade([pair("x = 5", "a" * 60 + "1 = 5")])
    assert (rollout.reward, "no answer in" in rollout.detail) == (0.0, False)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 500 + "5" + ")" * 500,
        "{" * 40 + "5" + "}" * 40,
        "\\sqrt{" * 200 + "5" + "}" * 200,
        "1+" * 800 + "1",
        "9" * 5000,
    ],
)
def test_what_is_too_deep_or_long_is_unreadable_and_wrong(graders: Graders, text: str) -> None:
    found = graders.grade([pair("5", text)])[0]
    assert found.reward == 0.0
    assert found.detail.startswith("cannot be read")


@pytest.mark.parametrize(
    ("rule", "text", "read"),
    [
        ("boxed", "so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("boxed", "\\boxed{1}, no, \\boxed{\\{2\\}}", "\\{2\\}"),
        ("boxed", "\\fbox{ 7 }", "7"),
        ("boxed", "\\boxed{\\text{a}, \\boxed{b}}", "b"),
        ("boxed", "5", None),
        ("boxed", "\\boxed{1} and \\boxed{2", None),
        ("boxed", "\\boxed{}", None),
        ("boxed", "\\boxed 5", None),
        ("boxed", "<think>\\boxed{3}</think> \\boxed{4}", "4"),
        ("boxed", "<think>\\boxed{3}</think> 4", None),
        ("boxed", "<think>\\boxed{3}", None),
        ("marker", "The answer is $5$.", "5"),
        ("marker", "Answer: 4\nFinal answer: 5\n", "5"),
        ("marker", "**Answer:** 5", "5"),
        ("marker", "Answer:\n\n 12", "12"),
        ("marker", "so\n#### 1,234", "1,234"),
        ("marker", "the answers are 1 and 2", "1 and 2"),
        ("marker", "5", None),
        ("marker", "The answer is", None),
        ("last_number", "it costs $1,234.50 or 3/4", "3/4"),
        ("last_number", "it costs $1,234.50.", "1,234.50"),
        ("last_number", "between 3 and -.5", "-.5"),
        ("last_number", "50% or so", "50%"),
        ("last_number", "version v1 of x2", None),
        ("last_number", "nothing", None),
        ("whole", " $ x+1 $ . ", "x+1"),
        ("whole", "$5$ and $6$", "$5$ and $6$"),
        ("auto", "Answer: 3 \\boxed{4} Answer: 5", "4"),
        ("auto", "the answer is 3", "3"),
        ("auto", "3", "3"),
        ("auto", "", None),
    ],
)
def test_extraction(rule: str, text: str, read: str | None) -> None:
    if read is None:
        with pytest.raises(NoAnswer, match="no answer"):
            final_answer(text, rule)
    else:
        assert final_answer(text, rule) == read


def test_what_was_read_is_in_the_detail(graders: Graders) -> None:
    spec = GraderSpec(name="math")
    texts = ["Thus \\boxed{\\dfrac{2}{4}}.", "Thus \\boxed{3}.", "I say \\boxed{", "It is \\boxed{\\frac{1}{}}"]
    found = graders.grade([rollout(t, "\\frac12", spec) for t in texts])
    assert [(r.reward, r.detail) for r in found[:3]] == [
        (1.0, "\\dfrac{2}{4}"),
        (0.0, "3"),
        (0.0, "no answer: the last box is not closed"),
    ]
    assert found[3].reward == 0.0
    assert found[3].detail.startswith("cannot be read")
