"""Programs judged by hidden tests, in the form of LiveCodeBench."""

from __future__ import annotations

import json
from typing import Any

from rollkeel.evals.benchmarks.base import Benchmark, Item, Options, text_of
from rollkeel.tasks.rows import Row
from rollkeel.tasks.tests_form import packed_cases
from rollkeel.types import GraderSpec

TEMPLATE = "{question}\n\n{how}\n\nReason step by step, and end with the whole program in one ```python code block."
STDIN = "Write a Python program that reads the input from standard input and prints the answer to standard output."
METHOD = "Complete this Python code, keeping its names:\n```python\n{starter}\n```"
_STAR = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
PRELUDE = "".join(
    [
        *(f"from {module} import *\n" for module in _STAR),
        *(f"import {module}\n" for module in _STAR[:-2]),
        "sys.setrecursionlimit(50000)\n",
    ]
)
"""The names that the benchmark's own runner gives to every program, in its order: later ones hide earlier ones."""
SINCE, UNTIL = "2024-08", "2025-05"
"""The window of release 6 that the Ring-1T report evaluates."""


def livecodebench(row: Row, number: int, options: Options) -> list[Item]:
    """Problems of the window alone; their hidden tests, compressed in the file, are unpacked without running anything."""
    date = text_of(row, "contest_date")[:10]
    # "2024-08" sorts before all of its days, and with a high character behind it after them.
    if not (options.since or SINCE) <= date <= (options.until or UNTIL) + "~":
        return []
    tests = [*_tests(row["public_test_cases"]), *_tests(row["private_test_cases"])]
    if not tests:
        raise ValueError("no test cases")
    function = json.loads(row["metadata"] or "{}").get("func_name")
    starter = (row["starter_code"] or "").strip()
    grader: dict[str, Any] = {"mode": "stdin", "tests": [{"input": t["input"], "output": t["output"]} for t in tests]}
    if function:
        # One JSON value per line and argument; the result is one JSON value.
        called = [{"input": [json.loads(a) for a in t["input"].splitlines() if a.strip()], "output": json.loads(t["output"])} for t in tests]  # fmt: skip
        grader = {"mode": "function", "function": f"Solution.{function}" if "class Solution" in starter else function, "tests": called}  # fmt: skip
    seconds = 60.0 if function else 10.0  # the calls of a method run as one job
    limits = {"wall_s": seconds, "cpu_s": seconds, "memory_mb": 1024}
    grader |= {"prelude": PRELUDE, "tolerance": 0.0, "limits": limits}
    how = METHOD.format(starter=starter) if starter else STDIN
    return [
        Item(
            key=text_of(row, "question_id"),
            text=TEMPLATE.format(question=text_of(row, "question_content").strip(), how=how),
            answer=f"{len(tests)} tests",
            grader=GraderSpec(name="code", options=grader),
            group=text_of(row, "difficulty"),
        )
    ]


def _tests(packed: str) -> list[dict[str, str]]:
    """Test cases as JSON, or as base64 of zlib of a pickled JSON text. Raises `ValueError` for anything else."""
    tests = packed_cases(packed or "[]", "a list of tests")
    if not all(isinstance(t, dict) and {"input", "output"} <= set(t) for t in tests):
        raise ValueError("expected a list of tests with input and output")
    return tests


BENCHMARKS = (
    Benchmark(
        name="livecodebench",
        title="LiveCodeBench v6, August 2024 to May 2025",
        hub="livecodebench/code_generation_lite",
        split="test",
        files=("**/test*.jsonl", "**/*.jsonl", "**/*.parquet"),
        where="https://huggingface.co/datasets/livecodebench/code_generation_lite, test.jsonl to test6.jsonl",
        columns=(
            "question_id", "question_content", "contest_date", "starter_code", "difficulty", "public_test_cases",
            "private_test_cases", "metadata",
        ),
        items=454,
        license="CC (the card says no more); problems © their contests",
        grader="code",
        build=livecodebench,
        reported="Ring-1T: avg@4 on 2408 to 2505",
        k=4,
        context=131_072,
    ),
)  # fmt: skip
