"""A judge that crashes on some response must never pay or punish for it: `judge` with the real sandbox.

Its verdicts, what it is handed, and every way in which it can fail to give one. Not covered: what the sandbox keeps it from
(tests/sandbox), and what a response may do that a judge evaluates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from test_graders import rollout

from rollkeel import tasks
from rollkeel.config import GradersConfig
from rollkeel.rewards import Graders
from rollkeel.tasks.source import GeneratedProblems
from rollkeel.types import GraderSpec, Rollout, Status
from rollkeel_sandbox import Level, probe

pytestmark = pytest.mark.skipif(probe().plan(()).level < Level.RESTRICTED, reason="no isolation can be had here")
LENGTH = "def judge(text, given):\n    return len(text) == given, f'{len(text)} characters'"


@pytest.fixture(scope="module")
def graders() -> Iterator[Graders]:
    with Graders(GradersConfig(sandbox_level="restricted"), regrade=0.0) as made:
        yield made


def judged(text: str, judge: str, given: Any = None, **more: Any) -> Rollout:
    limits = {"wall_s": 2.0, "cpu_s": 2.0, "memory_mb": 256}
    options = {"judge": judge, "given": given, "limits": limits, **more}
    return rollout(text, "", GraderSpec(name="judge", options=options))


@pytest.mark.parametrize(
    ("judge", "text", "given", "reward", "detail"),
    [
        (LENGTH, "abc", 3, 1.0, "3 characters"),
        (LENGTH, "abcd", 3, 0.0, "4 characters"),
        (LENGTH, "", 0, 1.0, "0 characters"),
        (LENGTH, "so?</think>ab\n", 3, 1.0, "3 characters"),
        (LENGTH, "<think>ab", 9, 0.0, "no answer: the response ends within a thought"),
        (LENGTH, "\ud800\0²", 3, 1.0, "3 characters"),
        ("def judge(text, given): return text in given['words']", "b", {"words": ["a", "b"]}, 1.0, ""),
        ("def judge(text, given): return 0.25", "", None, 0.25, ""),
        ("def judge(text, given): return -1, 'bad'", "", None, -1.0, "bad"),
        ("import sys\ndef judge(text, given): print(1); sys.stderr.write('2'); return True", "", None, 1.0, ""),
    ],
)  # fmt: skip
def test_verdicts(graders: Graders, judge: str, text: str, given: Any, reward: float, detail: str) -> None:
    found = graders.grade([judged(text, judge, given)])[0]
    assert (found.reward, found.detail, found.status) == (reward, detail, Status.FINISHED)


@pytest.mark.parametrize(
    ("judge", "why"),
    [
        ("def judge(text, given): return 1 / 0", "the judge failed: exit code 1: ZeroDivisionError: division by zero"),
        ("def judge(text, given):\n    while True: pass", " limit"),
        ("def judge(text, given): return bytearray(1 << 30)", "the judge failed: "),
        ("import os\ndef judge(text, given): os._exit(0)", "the judge left no verdict: ''"),
        ("def judge(text, given): return 'yes'", "expected true, false or a finite number from the judge, got 'yes'"),
        ("def judge(text, given): return None", "expected true, false or a finite number from the judge, got None"),
        ("def judge(text, given): return float('nan'), 'x'", "expected true, false or a finite number"),
        ("def judge(text, given): return 10**400", "expected true, false or a finite number"),
        ("def judge(text, given): return 1, 2", "expected true, false or a finite number"),
        ("def judge(text): return True", "the judge failed: exit code 1: TypeError"),
        ("def decide(text, given): return True", "the judge failed: exit code 1: KeyError: 'judge'"),
        ("def judge(", "the judge failed: exit code 1: SyntaxError"),
    ],
)  # fmt: skip
def test_a_judge_that_fails_gives_no_reward(graders: Graders, judge: str, why: str) -> None:
    found = graders.grade([judged("x", judge)])[0]
    assert (found.reward, found.status) == (None, Status.GRADER_FAILURE)
    assert why in found.detail


@pytest.mark.parametrize(
    "options", [{}, {"judge": ""}, {"judge": "x", "tests": []}, {"judge": "x", "limits": {"wall": 1}}]
)
def test_options_that_are_none(graders: Graders, options: dict[str, Any]) -> None:
    found = graders.grade([rollout("x", "", GraderSpec(name="judge", options=options))])[0]
    assert (found.reward, found.status) == (None, Status.GRADER_FAILURE)


def test_the_24_game_in_the_sandbox(graders: Graders) -> None:
    task = tasks.get("game24", {"sandbox": True})
    item = task.item(0, "train", 0)
    texts = [item.answer, *task.near_misses(item), "__import__('os')._exit(0)", "(" * 300]
    found = graders.grade([rollout(text, "", task.grader(item)) for text in texts])
    assert [r.reward for r in found] == [1.0] + [0.0] * (len(texts) - 1), [r.detail for r in found]


def test_who_judges_the_24_game_changes_no_item_and_no_demonstration() -> None:
    here, there = (GeneratedProblems(tasks.get("game24", {"sandbox": s}), 0, "train") for s in (False, True))
    for i in range(20):
        assert here.problem(i).text == there.problem(i).text
        assert here.response(i, 0.5) == there.response(i, 0.5)
