"""Code data sets in the forms they are published in, as problems for the grader `code`: a prompt and tests, nothing executed here.

| form | recognised by | tests |
|---|---|---|
| MBPP | `test_list` | `assert f(1, 2) == 3` with literals |
| HumanEval | `test`, `entry_point` | the same for `candidate` in the function `check` |
| APPS, TACO | `input_output` | JSON with `inputs`, `outputs` and perhaps `fn_name` |
| LiveCodeBench | `public_test_cases`, `private_test_cases` | `{input, output, testtype}`; private ones may be packed |
| plain | `tests` | a list of `{input, output}`, or as in APPS or MBPP; `fn_name` or `entry_point` names the function |

A row with a test that cannot be read is refused: half its tests would be another problem.
"""

from __future__ import annotations

import ast
import base64
import itertools
import json
import math
import pickle
import pickletools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from rollkeel.tasks.base import excerpt
from rollkeel.tasks.data import Row
from rollkeel.types import GraderSpec

PROMPTS = ("question", "question_content", "prompt", "text", "problem", "description")
SOLUTIONS = ("canonical_solution", "code", "solutions", "solution", "reference_solution")
FUNCTIONS = ("fn_name", "entry_point", "function_name", "func_name")
MAX_UNPACKED = 1 << 28
"""Bytes of one row's packed tests."""
_TEXT = {"PROTO", "FRAME", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "MEMOIZE", "BINPUT", "STOP"}
"""Opcodes of a pickle that is one text."""


class Refused(ValueError):
    """A row that makes no problem, with the reason."""


def code_row(record: Any, *, number: int = 0, prompt_column: str = "prompt") -> Row:
    """One record as a problem. Raises `Refused`."""
    if not isinstance(record, Mapping):
        raise Refused("not an object")
    prompt, starter = _first(record, (prompt_column, *PROMPTS)), _first(record, ("starter_code",))
    if not prompt:
        raise Refused("no prompt")
    function, tests = _tests(record)
    if not tests:
        raise Refused("no tests")
    if function and "class Solution" in starter:
        function = f"Solution.{function}"
    options: dict[str, Any] = {"mode": "function" if function else "stdin", "tests": tests}
    if function:
        options["function"] = function
    elif not all(isinstance(t["input"], str) and isinstance(t["output"], str) for t in tests):
        raise Refused("tests without a function name must be text in and text out")
    return Row(
        number=number, prompt=f"{prompt}\n\n{starter}" if starter and starter not in prompt else prompt,
        answer=next(iter(solutions(record)), ""), grader=GraderSpec(name="code", options=options),
    )  # fmt: skip


def _first(record: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Text of the first column that has any."""
    return next((record[c] for c in columns if isinstance(record.get(c), str) and record[c].strip()), "")


def _tests(record: Mapping[str, Any]) -> tuple[str | None, list[dict[str, Any]]]:
    """Function name (None: standard input) and tests."""
    name = _first(record, FUNCTIONS) or None
    if record.get("test_list") is not None:
        if any(record.get(c) for c in ("test_setup_code", "test_imports")):
            raise Refused("the tests need set-up code")
        return _asserts(_listed(record["test_list"], "test_list"))
    if isinstance(record.get("test"), str) and name:
        return name, _check_function(record["test"])
    if record.get("input_output") is not None:
        return _columns(_json(record["input_output"], "input_output"), name)
    if record.get("public_test_cases") is not None or record.get("private_test_cases") is not None:
        parts = [packed_cases(record.get(key), key) for key in ("public_test_cases", "private_test_cases")]
        about = _json(record.get("metadata") or {}, "metadata")
        return _cases([*parts[0], *parts[1]], name or (about.get("func_name") if isinstance(about, Mapping) else None))
    if record.get("tests") is None:
        raise Refused("no tests")
    tests = _json(record["tests"], "tests")
    if isinstance(tests, Mapping):
        return _columns(tests, name)
    tests = _listed(tests, "tests")
    return _asserts(tests) if tests and isinstance(tests[0], str) else _cases(tests, name)


def _json(value: Any, column: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise Refused(f"{column} is not JSON") from None


def _listed(value: Any, column: str) -> list[Any]:
    value = _json(value, column)
    if not isinstance(value, list):
        raise Refused(f"{column} is no list")
    return value


def _columns(value: Any, name: str | None) -> tuple[str | None, list[dict[str, Any]]]:
    """APPS: parallel lists. Outputs that are all lists of one value are that value, as its function problems have them."""
    if not isinstance(value, Mapping) or not all(isinstance(value.get(k), list) for k in ("inputs", "outputs")):
        raise Refused("no lists of inputs and outputs")
    inputs = value["inputs"]
    outputs = value["outputs"]
    name = value.get("fn_name") or name
    if len(inputs) != len(outputs):
        raise Refused("inputs and outputs differ in number")
    if name:
        if not all(isinstance(given, list) for given in inputs):
            raise Refused("an input is no list of arguments")
        if outputs and all(isinstance(o, list) and len(o) == 1 for o in outputs):
            outputs = [o[0] for o in outputs]
    else:
        inputs, outputs = ([_lines(v) for v in values] for values in (inputs, outputs))
    return name, [{"input": given, "output": expected} for given, expected in zip(inputs, outputs, strict=True)]


def _lines(value: Any) -> Any:
    return "\n".join(value) if isinstance(value, list) and all(isinstance(line, str) for line in value) else value


def _cases(cases: Sequence[Any], name: str | None) -> tuple[str | None, list[dict[str, Any]]]:
    """Lists of `{input, output}`; `functional` ones of LiveCodeBench hold one JSON value per line."""
    if not all(isinstance(case, Mapping) and {"input", "output"} <= set(case) for case in cases):
        raise Refused("a test without input and output")
    kinds = {case.get("testtype", "stdin") for case in cases}
    if kinds == {"functional"}:
        if not name:
            raise Refused("functional tests without a function name")
        return name, [
            {"input": [_json(line, "a test") for line in str(c["input"]).split("\n") if line.strip()], "output": _json(c["output"], "a test")}
            for c in cases
        ]  # fmt: skip
    if kinds > {"functional"}:
        raise Refused("tests of several types")
    if not name or any(case.get("testtype") == "stdin" for case in cases):
        return None, [{"input": _lines(c["input"]), "output": _lines(c["output"])} for c in cases]
    return name, [
        {"input": c["input"] if isinstance(c["input"], list) else [c["input"]], "output": c["output"]} for c in cases
    ]


def packed_cases(value: Any, column: str) -> list[Any]:
    """A list as JSON, or as LiveCodeBench packs it: pickled text, compressed, in base 64. Raises `Refused`."""
    if not isinstance(value, str) or value.lstrip()[:1] in ("[", "{"):
        return _listed([] if value is None else value, column)
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(value, validate=True), MAX_UNPACKED)
        if not unpacker.eof:
            raise Refused(f"{column} is cut short, or packed beyond {MAX_UNPACKED >> 20} MB")
        # Nothing is unpickled: the text is taken from the list of opcodes.
        found = {op.name: value for op, value, _ in itertools.islice(pickletools.genops(data), 6)}
        if not {"STOP"} <= found.keys() <= _TEXT:
            raise pickle.UnpicklingError
    except Refused:
        raise
    except Exception as error:  # whatever damage leads to
        raise Refused(f"{column} cannot be unpacked: {type(error).__name__}") from None
    return _listed("".join(text for text in found.values() if isinstance(text, str)), column)


def _asserts(sources: Sequence[Any], candidate: str | None = None) -> tuple[str, list[dict[str, Any]]]:
    """`assert f(literals) == literal`, all of one function."""
    calls = [_assertion(tree) for source in sources for tree in _parsed(source).body]
    names = {candidate or name for name, _, _ in calls}
    if len(names) != 1:
        raise Refused("no tests" if not names else "asserts of several functions")
    return names.pop(), [{"input": arguments, "output": expected} for _, arguments, expected in calls]


def _check_function(source: str) -> list[dict[str, Any]]:
    """Asserts on `candidate` in HumanEval's `check`."""
    found = [n for n in _parsed(source).body if isinstance(n, ast.FunctionDef) and n.name == "check"]
    if not found:
        raise Refused("no function check in test")
    calls = [_assertion(n) for n in found[0].body if not isinstance(n, ast.Pass | ast.Expr)]
    if any(name != "candidate" for name, _, _ in calls):
        raise Refused("asserts of several functions")
    return [{"input": arguments, "output": expected} for _, arguments, expected in calls]


def _parsed(source: Any) -> ast.Module:
    if not isinstance(source, str):
        raise Refused("an assert that is no text")
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Refused("an assert that is not Python") from None


def _assertion(node: ast.stmt) -> tuple[str, list[Any], Any]:
    match node:
        case ast.Assert(test=ast.Compare(ast.Call(ast.Name(name), arguments, []), [ast.Eq()], [expected])):
            return name, [_value(a) for a in arguments], _value(expected)
    raise Refused("an assert that is not f(literals) == literal")


def _value(node: ast.expr) -> Any:
    try:
        return _plain(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise Refused("an assert that is not f(literals) == literal") from None


def _plain(value: Any) -> Any:
    """JSON value; tuples are lists, as the grader has them. Sets, bytes and keys that are no text have no such form."""
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: _plain(v) for k, v in value.items()}
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"no JSON value: {excerpt(repr(value))}")


def programs(value: Any) -> list[str]:
    """Those in a column: a list of texts, or lists of language and solution as in CodeContests."""
    value = value.get("solution") if isinstance(value, Mapping) else value
    return [v for v in value if isinstance(v, str) and v.strip()] if isinstance(value, list) else []


def solutions(record: Mapping[str, Any]) -> list[str]:
    """Reference solutions of the first column that has any; HumanEval's continue their prompt."""
    for column in SOLUTIONS:
        value = record.get(column)
        if column == "solutions" and isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                continue
        if found := programs(value if isinstance(value, list) else [value]):
            return [record.get("prompt", "") + v for v in found] if column == "canonical_solution" else found
    return []
