"""Programs are the one family that no verifier in this process may judge: gold and near misses are run for real, in the sandbox.

The interpreter that wrote the expected outputs never sees the gold source, so agreement of the two proves both. Does not cover the
grader `code`, which has tests of its own.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator
from typing import Any

import pytest

from rollkeel import tasks
from rollkeel.errors import GraderFailure
from rollkeel.tasks import pipelines
from rollkeel.tasks.base import TaskItem
from rollkeel_sandbox import Job, Limits, Sandbox
from rollkeel_sandbox.cases import same
from rollkeel_sandbox.job import Level

LEVELS = (1, 2, 3, 4, 5)
DRIVER = rb"""
import contextlib, io, json, sys
out = []
for mode, program, inputs in json.load(open("asked.json")):
    values = []
    for given in inputs:
        printed = io.StringIO()
        try:
            if mode == "expression":
                value = eval(program, dict(given))
            elif mode == "function":
                names = {}
                exec(program, names)
                value = names["f"](*given)
            else:
                sys.stdin = io.StringIO(given)
                with contextlib.redirect_stdout(printed):
                    exec(program, {})
                value = printed.getvalue()
        except Exception as error:
            value = {"error": repr(error)[:80]}
        values.append(value)
    out.append(values)
json.dump(out, open("out.json", "w"))
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(workers=1, minimum=Level.NONE) as made:
        yield made


def judge(sandbox: Sandbox, asked: list[tuple[TaskItem, str, str]], batch: int = 200) -> list[bool]:
    """Whether each program passes the cases of its item under the given key (`tests` or `shown`); many programs per job."""
    right = []
    for at in range(0, len(asked), batch):
        part = asked[at : at + batch]
        rows = [(i.metadata["mode"], program, [c["input"] for c in i.metadata[key]]) for i, program, key in part]
        job = Job(
            source=DRIVER, files={"asked.json": json.dumps(rows).encode()}, collect=("out.json",),
            limits=Limits(wall_s=60, cpu_s=60), untrusted=False,
        )  # fmt: skip
        result = sandbox.run(job)
        assert "out.json" in result.files, result.stderr
        for (item, _, key), values in zip(part, json.loads(result.files["out.json"]), strict=True):
            pairs = zip(values, item.metadata[key], strict=True)
            right.append(all(equal(item.metadata["mode"], value, case["output"]) for value, case in pairs))
    return right


def equal(mode: str, value: Any, expected: Any) -> bool:
    if mode == "stdin" and isinstance(value, str):
        return same(value.encode(), expected.encode())
    return type(value) is type(expected) and value == expected


def prove(sandbox: Sandbox, level: int, count: int) -> tasks.CheckReport:
    """`tasks.check` with verdicts of the sandbox: a first pass notes what is asked, a second one answers."""
    task, asked = tasks.get("programs", {"level": level}), dict[tuple[str, str], TaskItem]()

    def note(item: TaskItem, response: str) -> tuple[float, str]:
        asked[json.dumps(item.to_json()), response] = item
        return 0.0, ""

    tasks.check(task, count, score=note)
    verdicts = judge(sandbox, [(item, response, "tests") for (_, response), item in asked.items()])
    known = dict(zip(asked, verdicts, strict=True))
    return tasks.check(task, count, score=lambda i, r: (float(known[json.dumps(i.to_json()), r]), "judged"))


@pytest.mark.parametrize("level", LEVELS)
def test_gold_passes_and_near_misses_fail_in_the_sandbox(sandbox: Sandbox, level: int) -> None:
    report = prove(sandbox, level, 10)
    assert report.failures == ()
    assert report.scored == 30 * (2 + 1 + 3 + len(tasks.TASKS["programs"].junk))


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_thousand_programs_in_the_sandbox(sandbox: Sandbox, level: int) -> None:
    assert prove(sandbox, level, 334).failures == ()


@pytest.mark.parametrize("level", LEVELS)
def test_hard_coded_and_edge_near_misses_are_right_on_what_is_shown(sandbox: Sandbox, level: int) -> None:
    task = tasks.get("programs", {"level": level})
    items = [task.item(0, "train", i) for i in range(20)]
    near = [(item, miss) for item in items for miss in (task.near_misses(item)[0], task.near_misses(item)[2])]
    assert all(judge(sandbox, [(item, program, "shown") for item, program in near]))


@pytest.mark.parametrize("level", LEVELS)
def test_no_hidden_input_is_shown(level: int) -> None:
    task = tasks.get("programs", {"level": level, "examples": 5, "tests": 20})
    for i in range(50):
        item = task.item(0, "train", i)
        shown, hidden = ([json.dumps(c["input"]) for c in item.metadata[key]] for key in ("shown", "tests"))
        assert not set(shown) & set(hidden)
        assert len(hidden) == (3 if level == 5 else 20)


@pytest.mark.parametrize("level", [3, 4, 5])
def test_no_constant_passes(level: int) -> None:
    task = tasks.get("programs", {"level": level})
    for i in range(150):
        cases = task.draw(random.Random(i)).metadata["tests"]
        outputs = [line for c in cases for line in (c["output"].split("\n") if level == 5 else [str(c["output"])])]
        assert len(set(outputs)) > 2


def test_effort_rises_with_the_level() -> None:
    medians = []
    for level in LEVELS:
        task = tasks.get("programs", {"level": level})
        medians.append(statistics.median(task.effort(task.item(0, "train", i)) for i in range(200)))
    assert medians == sorted(set(medians)), medians


def test_an_item_by_hand() -> None:
    item = tasks.get("programs").item(0, "train", 0)
    (x1, y1), (x2, y2) = ((c["input"]["x"], c["output"]) for c in item.metadata["shown"][:2])
    a = (y2 - y1) // (x2 - x1)
    b = y1 - a * x1
    assert item.answer == f"{a}*x{b:+d}"
    assert item.text == ",".join(f"{c['input']['x']}>{c['output']}" for c in item.metadata["shown"]) + ":"
    assert all(c["output"] == a * c["input"]["x"] + b for c in item.metadata["tests"])


def test_answers_go_to_the_sandbox_and_nowhere_else() -> None:
    for level, mode in ((1, "expression"), (3, "function"), (5, "stdin")):
        task = tasks.get("programs", {"level": level})
        item = task.item(0, "train", 0)
        spec = task.grader(item)
        assert (spec.name, spec.options["mode"], spec.options.get("function")) == (
            "code",
            mode,
            "f" if level == 3 else None,
        )
        assert spec.options["tests"] == item.metadata["tests"]
        assert not any(json.dumps(case["input"]) in item.text for case in spec.options["tests"] if mode == "stdin")
        with pytest.raises(GraderFailure, match="sandbox"):
            task.score(item, item.answer)


@pytest.mark.parametrize(
    ("node", "text", "values"),
    [
        (pipelines.affine(3, -4), "3*x-4", {0: -4, -1: -7, 10: 26}),
        (["*", ["+", ["x"], ["n", 2]], ["-", ["x"], ["n", 1]]], "(x+2)*(x-1)", {0: -2, 3: 10}),
        (["-", ["n", 7], ["-", ["x"], ["n", 2]]], "7-(x-2)", {0: 9, 5: 4}),
        (["+", ["x"], pipelines.affine(2, 1)], "x+2*x+1", {2: 7}),
        (["%", pipelines.affine(2, 1), ["n", 5]], "(2*x+1)%5", {-4: 3, 7: 0}),
        (["//", ["x"], ["n", 4]], "x//4", {-1: -1, 7: 1, 8: 2}),
        (["abs", ["-", ["x"], ["n", 3]]], "abs(x-3)", {0: 3, 5: 2}),
        (["max", ["x"], ["n", 3]], "max(x,3)", {0: 3, 5: 5}),
    ],
)
def test_expressions_by_hand(node: list[Any], text: str, values: dict[int, int]) -> None:
    assert pipelines.source(node) == text
    assert {x: pipelines.evaluate(node, x) for x in values} == values


@pytest.mark.parametrize(
    ("steps", "xs", "result"),
    [
        ([["map", pipelines.affine(2, 1)], ["sum"]], [1, 2, -3], 3),
        ([["keep", ["divisible", 3]]], [3, 4, 0, -6, 7], [3, 0, -6]),
        ([["keep", [">", 2]], ["count"]], [3, 2, 9], 2),
        ([["keep", ["<", 2]]], [3, 2, 1, -9], [1, -9]),
        ([["sort"], ["first", 2]], [3, 1, 2], [1, 2]),
        ([["fall"], ["skip", 1]], [3, 1, 2], [2, 1]),
        ([["reverse"]], [3, 1, 2], [2, 1, 3]),
        ([["unique"]], [3, 1, 3, 1, 2], [3, 1, 2]),
        ([["running"]], [3, 1, -2], [3, 4, 2]),
        ([["differences"]], [3, 1, 5], [-2, 4]),
        ([["max"]], [], 0),
        ([["min"]], [4, -2], -2),
        ([["spread"]], [4, -2, 1], 6),
    ],
)
def test_pipelines_by_hand(steps: list[Any], xs: list[int], result: Any) -> None:
    assert pipelines.run(steps, xs) == result


def test_label_noise_changes_numbers_of_the_program_alone() -> None:
    item = TaskItem(text="1>-1:", answer="3*x-4", metadata={})
    task = tasks.get("programs")
    assert task.demonstration(item, random.Random(0), 0.0) == "3*x-4"
    assert task.demonstration(item, random.Random(0), 1.0) == "4*x-5"
