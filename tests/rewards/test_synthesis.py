"""Weak tests reward wrong programs. More of them are only worth having if right programs agree on them, which is checked in the sandbox.

Not covered: whether an input lies within a problem's statement, which nobody here can read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import cli

from rollkeel.config import DataConfig
from rollkeel.errors import BadInput
from rollkeel.rewards.mutants import mutants
from rollkeel.rewards.programs import CodeProblem, Example, judge
from rollkeel.rewards.synthesis import Synthesis, select, synthesize
from rollkeel.tasks.graded import load_graded
from rollkeel_sandbox import Level, Sandbox, probe

pytestmark = pytest.mark.skipif(probe().plan(()).level < Level.RESTRICTED, reason="no isolation can be had here")

LARGEST = CodeProblem(
    mode="function",
    function="f",
    tests=(Example(input=[[1, 5, 3]], output=5), Example(input=[[2, 2]], output=2)),
    limits={"wall_s": 2.0},
)
RIGHT = ("def f(x): return max(x)", "def f(x): return sorted(x)[-1]")
WRONG = (
    "def f(x): return max([0, *x])",  # wrong for negative ones
    "def f(x): return max(x[:3])",  # wrong for long ones
    "def f(x): return sorted(x, key=abs)[-1]",
    "def f(x): return x[0]",  # killed by the tests that are there
)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(minimum=Level.RESTRICTED) as made:
        yield made


def made(sandbox: Sandbox, problem: CodeProblem = LARGEST, **more: Any) -> Synthesis:
    return synthesize(sandbox.run, problem, **{"solutions": RIGHT, "count": 30, **more})


def test_tests_that_right_programs_agree_on_kill_more_wrong_ones(sandbox: Sandbox) -> None:
    found = made(sandbox, count=40)
    passed = [[judge(sandbox.run, p, w)[0] for w in WRONG] for p in (LARGEST, found.problem)]
    assert passed == [[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    assert found.added >= 10
    assert found.problem.tests[:2] == LARGEST.tests
    assert len(found.problem.tests) == 2 + found.added
    assert len({str(t.input) for t in found.problem.tests}) == len(found.problem.tests)
    assert all(judge(sandbox.run, found.problem, program)[0] == 1.0 for program in RIGHT)
    assert all(t.output == max(t.input[0]) for t in found.problem.tests)
    whys = [why for given, why in found.discarded if given == [[]]]
    assert whys == ["solution 1: ValueError: max() arg is an empty sequence"] or not whys
    assert found.added + len(found.discarded) <= 40


def test_of_many_tests_the_few_are_kept_that_wrong_programs_fail(sandbox: Sandbox) -> None:
    many = made(sandbox).problem
    assert len(many.tests) > 12
    hangs = "def f(x):\n    while min(x) < 0: pass\n    return max(x)"
    found = select(sandbox.run, many, 2, [*WRONG, hangs, RIGHT[0]], 3)
    assert found.problem.tests[:2] == LARGEST.tests
    assert (found.wrong, found.failed_before, found.failed) == (6, 1, 5)
    assert len(found.problem.tests) == 5
    assert all(test in many.tests for test in found.problem.tests)
    assert [judge(sandbox.run, found.problem, program)[0] for program in (*RIGHT, *WRONG)] == [1, 1, 0, 0, 0, 0]
    one = select(sandbox.run, many, 2, WRONG, 1)
    assert (one.failed_before, one.failed, len(one.problem.tests)) == (1, max(one.failed, 2), 3)
    assert select(sandbox.run, many, 2, RIGHT, 3).problem.tests == LARGEST.tests  # nothing shows that they are worth it


def test_mutants_differ_by_one_change_and_are_programs() -> None:
    right = "def f(x):\n    total = 0\n    for v in x:\n        if v > 10 and v != 3:\n            total = total + v\n    return total"
    found = mutants(right, 20)
    assert len(set(found)) == len(found) == 8
    for text in ("total = 1", "v >= 10", "v > 11", "v > 10 or v != 3", "v == 3", "v != 4", "total - v", "return None"):
        assert sum(text in program for program in found) == 1, text
    assert len(mutants(right, 3)) == 3
    assert mutants("def f(:", 5) == mutants("", 5) == []


def test_the_seed_decides_and_nothing_else(sandbox: Sandbox) -> None:
    one, two, other = made(sandbox), made(sandbox), made(sandbox, seed=1)
    assert one == two
    assert one.problem.tests != other.problem.tests


def test_inputs_on_which_solutions_disagree_or_fail_are_left_out_with_the_reason(sandbox: Sandbox) -> None:
    picky = "def f(x):\n    if min(x) < 0: raise ValueError('negative')\n    return max(x)"
    other = "def f(x): return max(x) if len(x) < 9 else 0"
    found = made(sandbox, solutions=(RIGHT[0], picky, other))
    reasons = {why for _, why in found.discarded}
    assert "solution 2: ValueError: negative" in reasons
    assert any("disagree" in why for why in reasons)
    assert all(min(t.input[0]) >= 0 and len(t.input[0]) < 9 for t in found.problem.tests)


def test_an_input_that_ends_the_program_spoils_only_itself(sandbox: Sandbox) -> None:
    fatal = "import os\ndef f(x):\n    if min(x) < 0: os._exit(1)\n    return max(x)"
    found = made(sandbox, solutions=(RIGHT[0], fatal))
    assert "solution 2: exit code 1" in {why for _, why in found.discarded}
    assert found.added >= 5


def test_standard_input_keeps_its_shape(sandbox: Sandbox) -> None:
    total = CodeProblem(tests=(Example(input="3\n1 2 3\n", output="6"),), limits={"wall_s": 2.0})
    right = ("n = int(input())\nx = list(map(int, input().split()))\nassert len(x) == n\nprint(sum(x))",)
    found = made(sandbox, total, solutions=right, count=12)
    assert found.added >= 4
    wrong = "input(); print(sum(abs(int(w)) for w in input().split()))"
    assert [judge(sandbox.run, p, wrong)[0] for p in (total, found.problem)] == [1.0, 0.0]
    for test in found.problem.tests:
        count, values = test.input.split("\n")[:2]
        assert int(count) == len(values.split())
        assert int(test.output) == sum(map(int, values.split()))


def test_the_command_writes_rows_that_a_run_can_train_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"prompt": "Largest?", "fn_name": "f", "tests": [{"input": [[1, 5]], "output": 5}], "solutions": RIGHT},
        {"prompt": "Largest?", "fn_name": "f", "tests": [{"input": [[1, 5]], "output": 5}], "solutions": WRONG[3:]},
        {"prompt": "Largest?", "fn_name": "f"},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data", "tests", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--count", "5"]
    code, said, _ = cli(capsys, *words)
    assert code == 0
    assert "1 of 3 problems written" in said
    assert "row 2: synthesis: solution 1 is to be right, but test 1 of 1: got 1, expected 5" in said
    assert "row 3: no tests" in said
    [row] = load_graded(DataConfig(path=str(tmp_path / "out.jsonl"), grader="code"))
    assert row.answer == RIGHT[0]
    assert len(row.grader.options["tests"]) > 1
    assert f"{len(row.grader.options['tests']) - 1} tests added" in said


def test_the_command_keeps_a_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "Largest?", "fn_name": "f", "tests": [{"input": [[1, 5, 3]], "output": 5}], "solutions": RIGHT}
    (tmp_path / "in.jsonl").write_text(json.dumps({**row, "incorrect_solutions": {"solution": WRONG[:3]}}))
    words = ["data", "tests", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--count", "40", "--keep", "3"]
    code, said, _ = cli(capsys, *words)
    assert code == 0
    assert "1 of 1 problems written, 3 tests added" in said
    assert "4 of 4 wrong programs fail, 1 without the new tests" in said  # a mutant returns nothing


def test_a_solution_that_is_wrong_and_no_solution_are_refused(sandbox: Sandbox) -> None:
    with pytest.raises(BadInput, match="solution 2 is to be right, but test 1 of 2: got 1, expected 5"):
        made(sandbox, solutions=(RIGHT[0], "def f(x): return x[0]"))
    with pytest.raises(BadInput, match="at least one verified solution"):
        made(sandbox, solutions=())
