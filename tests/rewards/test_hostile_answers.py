"""The policy alone must not end a run with what it answers: whatever a response does to a grader costs that response its reward.

A thousand hostile answers through every built-in grader, and the line between the response's fault and the grader's. Not covered: reward
models (their scale has no 0 that means wrong), environments, what a hostile program does in the sandbox (tests/sandbox).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from test_graders import rollout

from rollkeel import tasks
from rollkeel.config import GradersConfig
from rollkeel.rewards import FailureBudget, Graders
from rollkeel.types import GraderSpec, Status

AMBIGUOUS = [
    r"7\%",
    "5 m or 6 m",
    "1.41",
    "1,234",
    "3,14",
    "1/2x",
    r"\log 10",
    "x'",
    "5 m",
    r"1\pm2\pm3",
    "(1;2)",
    "10_2",
    "B or b",
    "2 Hz",
]
HEAVY = [
    "9**9**9", "9^{9^{9^9}}", "(9^9)!!", "99999999999!", r"\int_0^1 x^{x^x} dx", r"\sum_{n=1}^{10^9} \frac{1}{n^{1.5}}", "10^{-999999999}",
    "1e999999999", "-1e-999999", r"\frac{1}{0}", "0^0", "0/0", r"\sqrt{-1}^{\sqrt{-1}}", "x^{1000}+" * 90 + "1", r"\sin" * 200 + " 1",
    r"\frac{" * 400 + "1" + "}{2}" * 400, "(" * 900 + "1" + ")" * 900, "[" * 5000, r"\{" * 5000, "{" * 100_000, '{"a":' * 5000, "9" * 900,
    "9" * 5000 + "/7", r"\prod_{k=1}^{99999} k", "factorial(99999999)", r"\binom{10^9}{5\cdot10^8}", "x=" * 300 + "1", "1," * 500, "1;" * 40000,
    r"\begin{pmatrix}" + "1&" * 200 + r"1\end{pmatrix}", "B, " * 300, "7 m" + "^9" * 50, "kg" * 150, "m**9**9**9",
]  # fmt: skip
JUNK = [
    "", " ", "\0", "7\0", "\ud800", "\udfff7", "\u202e7", "\u00ad", "\u200b" * 999, "٣", "𝟕", "⁷", "½" * 100, "\N{HANGUL FILLER}", "\U000e0041",
    "a\u0301" * 5000, "\\", "\\boxed", "\\boxed{", "$" * 9999, "`" * 9999, "```", "~~~", "```python\n", "```" + "a" * 10**6 + "`", "." * 10**6, "7" * 10**6, "A" * 10**6,
    "\n" * 10**5, "answer is " * 10**4, r"\boxed{" * 10**4, "**" * 10**4, "<think>" * 1000, "</think>" * 1000, "None", "nan", "inf", "-inf", "True",
    "NaN", '{"a": NaN}', "%s%n{0}", "'; import os", "import sys; sys.exit(0)", "raise SystemExit", "import os; os.kill(os.getpid(), 9)", "while True: pass",
    "x = [0] * 10**10", "print('x' * 10**9)", "exec('(' * 9999)", "[" * 3000 + "]" * 3000,
]  # fmt: skip
FRAMES = [
    "{}",
    r"\boxed{{{}}}",
    "The answer is {}.",
    "${}$",
    "```python\n{}\n```",
    "7 or {}",
    r"\frac{{{}}}{{7}}",
    "{} and {}",
    "{} = 7",
    "not {}",
]
SOUP = [
    "7",
    "\\",
    "{",
    "}",
    "(",
    ")",
    "^",
    "_",
    "/",
    ",",
    ".",
    "x",
    " m",
    "\\frac",
    "\\sqrt",
    "\\text{",
    "\\le",
    "=",
    "\\pm",
    "%",
    "B",
    "or",
    "not",
    "\n",
    "\u200b",
]


def hostile(n: int) -> list[str]:
    """The first `n` of a fixed sequence: single answers, the short ones in frames, then soup."""
    single = [*AMBIGUOUS, *HEAVY, *JUNK]
    framed = [frame.format(*(a, a)) for a in single if len(a) < 5000 for frame in FRAMES[1:]]
    draw = random.Random(0)
    draw.shuffle(framed)
    soup = ["".join(draw.choices(SOUP, k=draw.randint(2, 40))) for _ in range(n)]
    return [*single, *framed[: max(n - len(single), 0) // 2], *soup][:n]


def spec(name: str, **options: Any) -> GraderSpec:
    return GraderSpec(name=name, options=options)


def task_spec(name: str) -> tuple[GraderSpec, str]:
    task = tasks.get(name)
    item = task.draw(random.Random(0))
    return spec("task", task=name, options={}, item=item.to_json()), item.answer


JUDGE = "def judge(text, given):\n    return eval(text, {}) == given"
KINDS = [
    {"kind": "keywords:forbidden_words", "forbidden_words": ["seven"]}, {"kind": "detectable_format:json_format"}, {"kind": "punctuation:no_comma"},
    {"kind": "language:response_language", "language": "en"}, {"kind": "change_case:english_lowercase"},
    {"kind": "length_constraints:number_sentences", "num_sentences": 2, "relation": "less than"},
    {"kind": "detectable_format:title"}, {"kind": "detectable_format:code_block"}, {"kind": "detectable_format:number_highlighted_sections", "num_highlights": 1},
    {"kind": "length_constraints:nth_paragraph_first_word", "num_paragraphs": 1, "nth_paragraph": 1, "first_word": "a"},
]  # fmt: skip
TASKS = [
    name for name in tasks.names() if name not in ("gym", "gymnasium", "programs", "repo", "terminal", "verifiers")
]  # those are graded elsewhere
QUICK: dict[str, tuple[GraderSpec, str]] = {
    "exact": (spec("exact"), "7"),
    "numeric": (spec("numeric"), "7"),
    "choice": (spec("choice"), "B"),
    "set": (spec("set"), "red, green, blue"),
    "quantity": (spec("quantity"), "7 m"),
    **{f"constraints-{k['kind']}": (spec("constraints", constraints=[k]), "") for k in KINDS},
    **{f"task-{name}": task_spec(name) for name in TASKS},
    "mix": (spec("mix", parts=[{"grader": "numeric"}, {"grader": "quantity", "required": True}, {"grader": "choice", "options": {"letters": "7"}}]), "7"),
}  # fmt: skip
SLOW: dict[str, tuple[GraderSpec, str]] = {
    "math": (spec("math"), "7"),
    "math-expression": (spec("math"), r"\frac{\sqrt{x}}{7}"),
    "math-set": (spec("math"), r"\{1, 2, 7\}"),
    "code": (spec("code", tests=[{"input": "1", "output": "7"}], limits={"wall_s": 1.0, "cpu_s": 1.0, "memory_mb": 64}), ""),
    "judge": (spec("judge", judge=JUDGE, given=7, limits={"wall_s": 1.0, "cpu_s": 1.0, "memory_mb": 64}), "7"),
}  # fmt: skip


@pytest.fixture(scope="module")
def made() -> Iterator[Graders]:
    with Graders(GradersConfig(deadline_s=1.0), memory_mb=512, regrade=0.0) as one:
        yield one


def nothing_fails(made: Graders, grader: GraderSpec, gold: str, answers: list[str], *, raises: bool = True) -> None:
    found = made.grade([rollout(text, gold, grader, id=i) for i, text in enumerate(answers)])
    assert [(answers[r.id][:60], r.detail) for r in found if r.status is Status.GRADER_FAILURE] == []
    FailureBudget(0.0).check(found)  # raises at the first failure
    assert all(0.0 <= (r.reward if r.reward is not None else -1.0) <= 3.0 for r in found)
    assert raises or [(answers[r.id][:60], r.detail) for r in found if "undecided: grader" in r.detail] == []
    if grader.name != "task":  # tasks decide by themselves and say so in the detail alone
        assert made.report()[0]["reward/undecided"] == float(sum("undecided: " in r.detail for r in found))


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", list(QUICK))
def test_a_thousand_hostile_answers_fail_no_grader(made: Graders, name: str, count: int) -> None:
    nothing_fails(made, *QUICK[name], random.Random(1).sample(hostile(1000), count), raises=False)


@pytest.mark.parametrize("name", ["math", "code", "judge"])
def test_hostile_answers_fail_no_worker_and_no_sandbox(made: Graders, name: str) -> None:
    if name.startswith("math"):
        pytest.importorskip("math_verify")
    nothing_fails(made, *SLOW[name], random.Random(1).sample(hostile(1000), 12) + AMBIGUOUS[:3])


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SLOW))
def test_a_thousand_hostile_answers_fail_no_worker_and_no_sandbox(made: Graders, name: str) -> None:
    nothing_fails(made, *SLOW[name], hostile(1000))
