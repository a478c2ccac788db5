"""Public code data comes in five forms and with many damaged rows: a test misread is a reward for the wrong program.

Rows are written here after the published forms. Does not cover the data sets themselves, nor running the tests.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkeel.config import DataConfig
from rollkeel.errors import BadInput
from rollkeel.tasks.data import Row
from rollkeel.tasks.graded import convert, load_graded
from rollkeel.tasks.source import FileProblems
from rollkeel.tasks.tests_form import Refused, code_row


def form(record: Any, number: int) -> Row:
    return code_row(record, number=number)


def packed(cases: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


STDIN = {"input": "2\n", "output": "4\n", "testtype": "stdin"}
CALL = {"input": '[1, 2]\n"a"', "output": "3", "testtype": "functional"}
FORMS: list[tuple[str, dict[str, Any], str | None, list[dict[str, Any]], str]] = [
    ("mbpp", {"text": "Add.", "code": "def add(a, b): ...", "test_list": ["assert add(1, 2) == 3", "assert add(-1, (2,)) == [1, None]"]},
     "add", [{"input": [1, 2], "output": 3}, {"input": [-1, [2]], "output": [1, None]}], "def add(a, b): ..."),
    ("humaneval", {"prompt": "def f(x):\n", "canonical_solution": "    return x\n", "entry_point": "f",
                   "test": "METADATA = {}\n\ndef check(candidate):\n    'doc'\n    assert candidate({'a': 1}) == {'a': 1}\n    assert candidate(True) == True\n"},
     "f", [{"input": [{"a": 1}], "output": {"a": 1}}, {"input": [True], "output": True}], "def f(x):\n    return x\n"),
    ("apps stdin", {"question": "Double.", "input_output": json.dumps({"inputs": ["2\n", ["3", "4"]], "outputs": ["4\n", "6"]}), "solutions": '["s1", "s2"]'},
     None, [{"input": "2\n", "output": "4\n"}, {"input": "3\n4", "output": "6"}], "s1"),
    ("apps call", {"question": "Count.", "input_output": {"fn_name": "count", "inputs": [[1, [2]], [3, []]], "outputs": [[1], [0]]}},
     "count", [{"input": [1, [2]], "output": 1}, {"input": [3, []], "output": 0}], ""),
    ("apps call, bare outputs", {"question": "Same.", "starter_code": "class Solution:\n    def same(self, x):", "input_output": {"fn_name": "same", "inputs": [["a"], ["b"]], "outputs": [["a"], "b"]}},
     "Solution.same", [{"input": ["a"], "output": ["a"]}, {"input": ["b"], "output": "b"}], ""),
    ("livecodebench stdin", {"question_content": "Double.", "public_test_cases": json.dumps([STDIN]), "private_test_cases": packed([{**STDIN, "input": "5"}]), "metadata": "{}"},
     None, [{"input": "2\n", "output": "4\n"}, {"input": "5", "output": "4\n"}], ""),
    ("livecodebench call", {"question_content": "Sum.", "starter_code": "class Solution:\n    def total(self): ...", "public_test_cases": json.dumps([CALL]),
                            "private_test_cases": json.dumps([CALL]), "metadata": json.dumps({"func_name": "total"})},
     "Solution.total", [{"input": [[1, 2], "a"], "output": 3}] * 2, ""),
    ("plain stdin", {"prompt": "Double.", "tests": [{"input": "2", "output": "4"}], "solution": "print()"}, None, [{"input": "2", "output": "4"}], "print()"),
    ("plain call", {"prompt": "Double.", "fn_name": "f", "tests": '[{"input": [2], "output": 4}, {"input": 3, "output": 6}]'},
     "f", [{"input": [2], "output": 4}, {"input": [3], "output": 6}], ""),
    ("plain asserts", {"prompt": "Double.", "tests": ["assert f(2) == 4"]}, "f", [{"input": [2], "output": 4}], ""),
    ("plain columns", {"prompt": "Double.", "tests": {"inputs": ["2"], "outputs": ["4"]}}, None, [{"input": "2", "output": "4"}], ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("record", "function", "tests", "solution"), [form[1:] for form in FORMS], ids=[form[0] for form in FORMS]
)
def test_each_form(record: dict[str, Any], function: str | None, tests: list[dict[str, Any]], solution: str) -> None:
    row = code_row(record, number=7)
    options = (
        {"mode": "function", "tests": tests, "function": function} if function else {"mode": "stdin", "tests": tests}
    )
    assert (row.grader.name, row.grader.options) == ("code", options)
    assert (row.number, row.answer) == (7, solution)
    assert row.prompt.endswith(record.get("starter_code", ""))


TRACE = os.path.join(tempfile.gettempdir(), f"rollkeel-{os.getpid()}-must-not-exist")


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (TRACE,)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (None, "not an object"),
        ({"tests": [STDIN]}, "no prompt"),
        ({"prompt": " ", "tests": [STDIN]}, "no prompt"),
        ({"prompt": "x"}, "no tests"),
        ({"prompt": "x", "tests": []}, "no tests"),
        ({"prompt": "x", "tests": "[{"}, "tests is not JSON"),
        ({"prompt": "x", "tests": 3}, "tests is no list"),
        ({"prompt": "x", "tests": [{"input": "2"}]}, "a test without input and output"),
        ({"prompt": "x", "tests": [{"input": 2, "output": 4}]}, "tests without a function name must be text in and text out"),
        ({"prompt": "x", "tests": [STDIN, CALL]}, "tests of several types"),
        ({"prompt": "x", "public_test_cases": [CALL]}, "functional tests without a function name"),
        ({"prompt": "x", "input_output": ""}, "input_output is not JSON"),
        ({"prompt": "x", "input_output": "{}"}, "no lists of inputs and outputs"),
        ({"prompt": "x", "input_output": {"inputs": ["1"], "outputs": []}}, "inputs and outputs differ in number"),
        ({"prompt": "x", "input_output": {"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}}, "an input is no list of arguments"),
        ({"prompt": "x", "private_test_cases": "!!"}, "private_test_cases cannot be unpacked: Error"),
        ({"prompt": "x", "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()}, "private_test_cases cannot be unpacked: UnpicklingError"),
        ({"prompt": "x", "test_list": ["assert f(1) == 2"], "test_setup_code": "import math"}, "the tests need set-up code"),
        ({"prompt": "x", "test_list": ["assert f(1) == 2", "assert g(1) == 2"]}, "asserts of several functions"),
        ({"prompt": "x", "test_list": ["assert f(1"]}, "an assert that is not Python"),
        ({"prompt": "x", "test_list": [3]}, "an assert that is no text"),
        *[({"prompt": "x", "test_list": [source]}, "an assert that is not f(literals) == literal") for source in (
            "assert f(1)", "assert f(1) > 2", "assert not f(1)", "assert f(x) == 2", "assert f(a=1) == 2", "assert m.f(1) == 2", "assert f(1) == {1, 2}",
            "assert f(1) == b''", "assert f(1) == 1e999", "assert f(1) == {1: 2}", "assert 0 < f(1) == 2", "print(1)", "import os", "assert f(1) == " + "-" * 5000 + "1")],
        ({"prompt": "x", "entry_point": "f", "test": "assert f(1) == 2"}, "no function check in test"),
        ({"prompt": "x", "entry_point": "f", "test": "def check(c):\n    for i in range(3):\n        assert c(i) == i"}, "an assert that is not f(literals) == literal"),
        ({"prompt": "x", "entry_point": "f", "test": "def check(candidate):\n    assert g(1) == 2"}, "asserts of several functions"),
    ],
)  # fmt: skip
def test_unusable_rows_are_refused_by_one_line(record: Any, reason: str) -> None:
    with pytest.raises(Refused) as caught:
        code_row(record)
    assert str(caught.value) in (reason, reason.replace("not f(literals) == literal", "not Python"))
    assert not os.path.exists(TRACE)


def test_a_packed_column_that_unfolds_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollkeel.tasks.tests_form.MAX_UNPACKED", 1000)
    bomb = packed([STDIN] * 1000)
    with pytest.raises(Refused, match="packed beyond"):
        code_row({"prompt": "x", "private_test_cases": bomb})


@pytest.mark.parametrize("protocol", range(1, 6))
@pytest.mark.parametrize("n", [1, 100, 10_000])
def test_every_way_to_pickle_a_text_is_read(protocol: int, n: int) -> None:
    data = pickle.dumps(json.dumps([STDIN] * n), protocol)
    row = code_row({"prompt": "x", "private_test_cases": base64.b64encode(zlib.compress(data)).decode()})
    assert row.grader.options["tests"] == [{"input": "2\n", "output": "4\n"}] * n


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02X\x02\x00\x00\x00[]r\xff\xff\xff\x7f.",  # asks for sixteen gigabytes of memo
        b"\x80\x02})" + b"\x85" * 200_000 + b"Ns.",  # hashing it takes more stack than there is
        b"\x80\x04" + b"\x94" * 1_000_000,
        b"\x80\x04\x8d" + b"\xff" * 7 + b"\x3f[].",
        pickle.dumps([STDIN]),
    ],
    ids=["memo", "deep key", "memoize", "size", "a list"],
)
def test_a_pickle_of_anything_else_is_refused_unread(data: bytes) -> None:
    packed_column = base64.b64encode(zlib.compress(data)).decode()
    with pytest.raises(Refused, match="cannot be unpacked"):
        code_row({"prompt": "x", "private_test_cases": packed_column})


def test_rows_that_make_no_problem_are_named_with_the_reason() -> None:
    records = [(1, FORMS[0][1]), (2, {"prompt": "x"}), (3, None), (5, {"prompt": "x"})]
    rows, refused = convert(records, form)
    assert [(row.number, len(row.grader.options["tests"])) for row in rows] == [(1, 2)]
    assert refused == [(2, "no tests"), (3, "not an object"), (5, "no tests")]


def config(path: Path, **changes: Any) -> DataConfig:
    return DataConfig(task=None, path=str(path), grader="code", eval_fraction=0.0, **changes)


def test_files_become_problems_for_the_sandbox(tmp_path: Path) -> None:
    lines = [json.dumps(FORMS[7][1]), "", "{", json.dumps({"q": "Treble.", "tests": [{"input": "1", "output": "3"}]})]
    path = tmp_path / "code.jsonl"
    path.write_text("\n".join(lines))
    with pytest.warns(UserWarning, match=r"1 of 3 rows refused: not an object \(1, first row 3\)$"):
        problems = FileProblems(config(path, prompt_column="q"), 0, "train")
    found = {p.text: p for p in (problems.problem(i) for i in range(2))}
    assert set(found) == {"Double.", "Treble."}
    assert found["Double."].grader.options == {"mode": "stdin", "tests": [{"input": "2", "output": "4"}]}
    by_row = {problems.problem(i).metadata["row"]: i for i in range(2)}
    assert problems.response(by_row[1], 0.0) == "print()"
    with pytest.raises(BadInput, match="row 4: no reference solution"):
        problems.response(by_row[4], 0.0)


def test_parquet_and_unusable_files(tmp_path: Path) -> None:
    path = tmp_path / "code.parquet"
    pq.write_table(pa.Table.from_pylist([FORMS[0][1], FORMS[0][1]]), path)
    assert [row.number for row in load_graded(config(path))] == [1, 2]
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"prompt": "x"}\n')
    with pytest.raises(BadInput, match=r"none of 1 is usable: no tests \(1, first row 1\)"):
        load_graded(config(empty))
    with pytest.raises(BadInput, match="cannot be read"):
        load_graded(config(tmp_path / "missing.jsonl"))
    with pytest.raises(BadInput, match=r"a file ending in"):
        load_graded(config(tmp_path / "folder"))


values = st.recursive(
    st.one_of(st.none(), st.integers(0, 3), st.sampled_from(["", "x", "[]", "{}", "assert f(1) == 2", "def check(candidate): pass"])),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(["input", "output", "inputs", "outputs", "fn_name", "testtype"]), inner, max_size=3)),
    max_leaves=6,
)  # fmt: skip
columns = [
    "prompt",
    "tests",
    "test_list",
    "test",
    "entry_point",
    "input_output",
    "public_test_cases",
    "private_test_cases",
    "metadata",
    "starter_code",
    "solutions",
]


@given(st.dictionaries(st.sampled_from(columns), values, max_size=6))
@settings(deadline=None)
def test_any_record_is_kept_or_refused(record: dict[str, Any]) -> None:
    rows, refused = convert([(1, {"prompt": "x", **record})], form)
    assert len(rows) + len(refused) == 1
