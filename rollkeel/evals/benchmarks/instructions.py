"""Instruction following that a program can check: IFEval."""

from __future__ import annotations

import json

from rollkeel.errors import BadInput
from rollkeel.evals.benchmarks.base import Benchmark, Item, Options, text_of
from rollkeel.tasks.constraints import from_ifeval
from rollkeel.tasks.rows import Row
from rollkeel.types import GraderSpec


def ifeval(row: Row, number: int, options: Options) -> list[Item]:
    """Every instruction with its own arguments, as `from_ifeval` reads them. The prompt is used as it is."""
    names, arguments = list(row["instruction_id_list"]), list(row["kwargs"])
    if len(names) != len(arguments) or not names:
        raise ValueError(f"expected as many kwargs as instructions, got {len(arguments)} and {len(names)}")
    try:
        constraints = from_ifeval({"instruction_id_list": names, "kwargs": arguments})
    except BadInput as error:
        raise ValueError(str(error)) from None  # the caller says which row it is
    return [
        Item(
            key=text_of(row, "key"),
            text=text_of(row, "prompt"),
            answer=json.dumps(constraints, sort_keys=True),
            grader=GraderSpec(name="constraints", options={"constraints": constraints}),
        )
    ]


BENCHMARKS = (
    Benchmark(
        name="ifeval",
        title="IFEval",
        hub="google/IFEval",
        split="train",
        files=("**/ifeval_input_data.jsonl", "**/input_data.jsonl", "**/*.jsonl", "**/*.parquet"),
        where="https://huggingface.co/datasets/google/IFEval",
        columns=("key", "prompt", "instruction_id_list", "kwargs"),
        items=541,
        license="Apache-2.0",
        grader="constraints",
        build=ifeval,
        reported="Ring-1T: without k; here prompt-level strict: all instructions of a prompt hold",
        k=1,
    ),
)
