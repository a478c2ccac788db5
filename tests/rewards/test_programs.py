"""A program that passes by a trick, or a sandbox that breaks and scores 0, poisons a run: `code` with the real sandbox and server.

Every mode, the programs that try to lie about their results, and a server that is killed with force in the middle. Not covered: what the
sandbox keeps programs from (tests/sandbox).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_graders import rollout

from rollkeel.config import GradersConfig
from rollkeel.rewards import Graders
from rollkeel.rewards.answers import NoAnswer
from rollkeel.rewards.programs import CodeProblem, equal, program_of
from rollkeel.types import GraderSpec, Rollout, Status
from rollkeel_sandbox import Level, probe

LEVEL = probe().plan(()).level
pytestmark = pytest.mark.skipif(LEVEL < Level.RESTRICTED, reason="no isolation can be had here")
SETTINGS: dict[str, Any] = {"sandbox_level": "restricted"}


@pytest.fixture(scope="module")
def graders() -> Iterator[Graders]:
    with Graders(GradersConfig(**SETTINGS), regrade=0.0) as made:
        yield made


DOUBLE: dict[str, Any] = {"mode": "stdin", "tests": [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in (1, 5, -7)]}
ADD: dict[str, Any] = {
    "mode": "function",
    "function": "add",
    "tests": [{"input": [1, 2], "output": 3}, {"input": [5, -5], "output": 0}],
}
PAIR: dict[str, Any] = {
    "mode": "function",
    "function": "f",
    "tests": [{"input": [[3, 1]], "output": [[1, 3], True, None]}],
}
EXPRESSION: dict[str, Any] = {
    "mode": "expression",
    "tests": [{"input": {"x": x}, "output": x * x + 1} for x in (0, 2, -3)],
}


def code(text: str, options: dict[str, Any], **more: Any) -> Rollout:
    limits = {"wall_s": 5.0, "cpu_s": 5.0}
    return rollout(text, "", GraderSpec(name="code", options={"limits": limits, **options, **more}))


@pytest.mark.parametrize(
    ("options", "text", "reward", "detail"),
    [
        (DOUBLE, "print(int(input()) * 2)", 1.0, "3 tests passed"),
        (DOUBLE, "Sure:\n```python\nprint(int(input()) * 2)\n```\nDone.", 1.0, "3 tests passed"),
        (DOUBLE, "print(int(input()) * 2, end='  \\n\\n')", 1.0, "3 tests passed"),
        (DOUBLE, "print(int(input()) + 1)", 0.0, "test 2 of 3: got 6\\n, expected 10\\n"),
        (DOUBLE, "print(2)\nprint(10)", 0.0, "test 1 of 3: got 2\\n10\\n, expected 2\\n"),
        (DOUBLE, "print(1 / 0)", 0.0, "test 1 of 3: exit code 1: ZeroDivisionError: division by zero"),
        (DOUBLE, "```python\nprint(2)", 0.0, "no program: the response ends within a thought or fence"),
        (DOUBLE, "", 0.0, "no program: it is empty"),
        (ADD, "def add(a, b):\n    return a + b", 1.0, "2 tests passed"),
        (ADD, "def add(a, b):\n    print('3')\n    return a - b", 0.0, "test 1 of 2: got -1, expected 3"),
        (ADD, "def add(a, b):\n    return True + 2", 0.0, "test 2 of 2: got 3, expected 0"),
        (ADD, "def plus(a, b): pass", 0.0, "test 1 of 2: exit code 1: KeyError: 'add'"),
        (ADD, "def add(a, b): raise ValueError('no')", 0.0, "test 1 of 2: ValueError: no"),
        (ADD, "def add(a, b): return {1}", 0.0, "test 1 of 2: TypeError: Object of type set is not JSON serializable"),
        (ADD, "def add(a, b): import os; os._exit(0)", 0.0, "test 1 of 2: ended early, without a result"),
        (PAIR, "def f(x): return (tuple(sorted(x)), x[0] > x[1], None)", 1.0, "1 tests passed"),
        (PAIR, "def f(x): return (sorted(x), 1, None)", 0.0, "test 1 of 1: got [[1, 3], 1, None], expected [[1, 3], True, None]"),
        (EXPRESSION, "x * x + 1", 1.0, "3 tests passed"),
        (EXPRESSION, " 1 + x**2 \n", 1.0, "3 tests passed"),
        (EXPRESSION, "x + 1", 0.0, "test 2 of 3: got 3, expected 5"),
        (EXPRESSION, "y", 0.0, "test 1 of 3: NameError: name 'y' is not defined"),
        (EXPRESSION, "return x", 0.0, "test 1 of 3: exit code 1: SyntaxError: invalid syntax"),
    ],
)  # fmt: skip
def test_verdicts(graders: Graders, options: dict[str, Any], text: str, reward: float, detail: str) -> None:
    found = graders.grade([code(text, options)])[0]
    assert (found.reward, found.detail) == (reward, detail)


IMPORTS = "from math import *\nimport heapq\n"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (ADD, "from __future__ import annotations\ndef add(a: int, b: List) -> int: return floor(a + b)"),
        (ADD, "def add(a, b):\n    h = [b, a]\n    heapq.heapify(h)\n    return sum(h)"),
        (DOUBLE, "print(floor(2 * int(input())))"),
        (
            DOUBLE,
            "from __future__ import annotations\nif __name__ == '__main__':\n    def main(): print(floor(2 * int(input())))\n    main()",
        ),
    ],
)
def test_a_prelude_gives_names(graders: Graders, options: dict[str, Any], text: str) -> None:
    given = graders.grade([code(text, options, prelude=IMPORTS), code(text, options)])
    assert [r.reward for r in given] == [1.0, 0.0], [r.detail for r in given]
    assert "NameError" in given[1].detail


LIES = {
    "a value that says it is equal": "class Yes(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\ndef add(a, b): return Yes(9)",
    "a file of results of its own": "open('results.jsonl', 'w').write('{\"value\": 9}\\n' * 2)\nimport os; os._exit(0)",
    "more results than tests": "open('results.jsonl', 'w').write('{\"value\": 9}\\n' * 9)\nimport os; os._exit(0)",
    "another json": "import json\njson.dumps = lambda v: '{\"value\": true}'\ndef add(a, b): return 0",
    "the caller's frame": "import sys\ndef add(a, b):\n    return sys._getframe(1).f_locals.get('outputs', 9)",
    "numbers no parser takes": "open('results.jsonl', 'w').write('{\"value\": ' + '9' * 9999 + '}\\n')\nimport os; os._exit(0)",
    "brackets no parser takes": "open('results.jsonl', 'w').write('[' * 99999 + '\\n')\nimport os; os._exit(0)",
    "a link to what it may not read": "import os\nos.symlink('/etc/hostname', 'results.jsonl')\nos._exit(0)",
}


@pytest.mark.parametrize("name", LIES)
def test_a_program_that_lies_about_its_results_scores_0(graders: Graders, name: str) -> None:
    found = graders.grade([code(LIES[name], ADD)])[0]
    assert (found.reward, found.status) == (0.0, Status.FINISHED), found.detail


def test_what_it_does_to_itself_is_its_own_fault(graders: Graders) -> None:
    small = {"limits": {"wall_s": 0.4, "memory_mb": 64}}
    given = [
        code("while True: pass", DOUBLE, **small),
        code("x = bytearray(1 << 30)", DOUBLE, **small),
        code("import time; time.sleep(9)\ndef add(a, b): return a + b", ADD, **small),
        code("def add(a, b):\n    if a == 5:\n        while True: pass\n    return a + b", ADD, **small),
        code("import os; os.kill(os.getpid(), 9)", DOUBLE, **small),
        code("\ud800", DOUBLE),
        code("x" * 70_000, DOUBLE),
    ]
    found = graders.grade(given)
    assert [r.reward for r in found] == [0.0] * len(given), [r.detail for r in found]
    assert found[0].detail == "test 1 of 3: timeout limit"
    assert found[3].detail == "test 2 of 2: timeout limit"
    assert found[4].detail == "test 1 of 3: signal 9"


@pytest.mark.parametrize(
    "options",
    [{}, {"tests": []}, {"tests": [{"input": "1"}]}, {**ADD, "function": None}, {**DOUBLE, "function": "f"}, {**DOUBLE, "mode": "x"},
     {**DOUBLE, "limits": {"wall_s": -1}}, {**DOUBLE, "limits": {"wal_s": 1}}, {**DOUBLE, "kind": "cobol"}, {**DOUBLE, "kind": "shell", "prelude": "x"},
     {**EXPRESSION, "prelude": "x = 1"}, {**DOUBLE, "tolerance": -1.0}],
)  # fmt: skip
def test_faults_of_the_tests_are_failures_and_never_a_0(graders: Graders, options: dict[str, Any]) -> None:
    found = graders.grade([rollout("print(1)", "", GraderSpec(name="code", options=options))])[0]
    assert (found.reward, found.status) == (None, Status.GRADER_FAILURE)


def test_a_sandbox_that_is_refused_or_away_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLKEEL_SANDBOX_TOKEN", "a-token-of-the-tests-0123456789")
    with Graders(GradersConfig(sandbox="http://127.0.0.1:9", deadline_s=0.01), regrade=0.0) as away:
        found = away.grade([code("print(1)", DOUBLE)])[0]
    assert (found.reward, found.status) == (None, Status.GRADER_FAILURE)
    assert found.detail.startswith("grader code: RunStopped: sandbox: no server at 127.0.0.1 took the job")
    monkeypatch.delenv("ROLLKEEL_SANDBOX_TOKEN")
    with Graders(GradersConfig(sandbox="http://127.0.0.1:9")) as lost:
        assert "ROLLKEEL_SANDBOX_TOKEN" in lost.grade([code("print(1)", DOUBLE)])[0].detail
    if Level.FULL > LEVEL:
        with Graders(GradersConfig(sandbox_level="full")) as strict:
            assert "sandbox: refused" in strict.grade([code("print(1)", DOUBLE)])[0].detail


@pytest.mark.parametrize(
    ("value", "expected", "tolerance", "same"),
    [
        (b"1 2 \n", "1 2", None, True),
        (b"1  2\n", "1 2", None, False),
        (b" 1\n", "1", None, False),
        (b"0.3333333\n", "0.3333334", None, False),
        (b"0.3333333\n", "0.3333334", 1e-6, True),
        (b"x 0.33\n", "x 0.3333334", 1e-6, False),
        (b"x 1\n", "y 1", 1e-6, False),
        (b"1\n2\n", "1 2", 1e-6, False),
        (b"0.50 x\n", "0.5 x", 0.0, True),
        (b"0.50\n", "0.5", None, False),
        (b"0.1\n", "0.10000000000000001", 0.0, False),
        (b"10000000000000001\n", "10000000000000000", 0.0, False),
        (b"1e999999999999\n", "5", 0.0, False),
        (b"sNaN\n", "nan", 0.0, False),
        (b"1_0\n", "1_0", 0.0, True),
        (b"nan\n", "1", 1e-6, False),
    ],
)
def test_printed_text(value: bytes, expected: str, tolerance: float | None, same: bool) -> None:
    problem = CodeProblem(tests=({"input": "", "output": ""},), tolerance=tolerance)  # type: ignore[arg-type]
    assert equal(problem, value, expected) is same


def test_values() -> None:
    exact = CodeProblem(mode="expression", tests=({"input": {}, "output": 0},))  # type: ignore[arg-type]
    near = exact.model_copy(update={"tolerance": 1e-6})
    for a, b in (
        (1, 1.0),
        ([1, [2]], [1, [2]]),
        ({"a": [1]}, {"a": [1]}),
        ("a", "a"),
        (None, None),
        (True, True),
        (10**400, 10**400),
    ):
        assert equal(exact, a, b)
    for a, b in (
        (1, True),
        (0, False),
        (1, "1"),
        ([1], [1, 1]),
        ({"a": 1}, {"b": 1}),
        (None, 0),
        (0.1 + 0.2, 0.3),
        ([], {}),
        (10**400, 1.5),
    ):
        assert not equal(exact, a, b)
    assert equal(near, [0.1 + 0.2], [0.3])
    assert not equal(near, 10**400, 1.5)


def test_extraction_of_programs() -> None:
    fenced = "a\n```python\none\n```\nb\n```\ntwo\n```\n"
    assert program_of(fenced) == "one\n"  # what follows without a mark is its output more often than another program
    assert program_of(fenced, kind="cpp") == program_of(fenced.replace("python", "text")) == "two\n"
    assert program_of("plain") == "plain"
    assert program_of("<think>```\nx\n```</think>plain") == "plain"
    assert program_of(fenced, "whole") == fenced
    for text, rule in (
        ("plain", "fenced"),
        ("```\nx", "auto"),
        ("<think>x", "auto"),
        ("```\n```", "auto"),
        ("a\0", "whole"),
    ):
        with pytest.raises(NoAnswer):
            program_of(text, rule)


@pytest.mark.slow
def test_a_server_that_is_killed_in_the_middle_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "sandbox")
    from service_host import TOKEN, Server  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("ROLLKEEL_SANDBOX_TOKEN", TOKEN)
    server = Server(tmp_path, "--minimum", "restricted")
    program = "import time; time.sleep(0.15); print(int(input()) * {})"
    given = [code(program.format(2 + i % 2), DOUBLE) for i in range(12)]
    settings = GradersConfig(**SETTINGS, sandbox=server.url, workers=2)
    try:
        with Graders(settings) as graders:
            graders.begin(given)
            for _ in range(2):
                time.sleep(0.5)
                server.kill()
                server.start()
            busy = [r for r in given if not graders.ready(r)]
            found = graders.grade(given)
        assert busy, "all was over before the server was killed"
        assert [r.reward for r in found] == [1.0, 0.0] * 6, [r.detail for r in found]
    finally:
        server.close()
        sys.modules.pop("service_host", None)
    assert threading.active_count() < 20
