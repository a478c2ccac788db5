"""Puzzles and reasoning with answers of a form of their own: ARC-AGI-1, BIG-Bench Extra Hard, ZebraLogic, TriviaQA, PhyBench."""

from __future__ import annotations

import json
import re
from typing import Any

from rollkeel.evals import reading
from rollkeel.evals.benchmarks.base import Benchmark, Item, Options, text_of
from rollkeel.evals.benchmarks.maths import TEMPLATE as BOXED
from rollkeel.tasks.rows import SOURCE, Row
from rollkeel.types import GraderSpec

ARC_TEMPLATE = (
    "A rule turns each input grid into its output grid. Find it from the examples and apply it to the test input. "
    "A grid is a list of rows of digits.\n\n{examples}\n\nTest input:\n{test}\n\n"
    "Reason step by step, and end with the output grid of the test input in the same form."
)
BBEH_TEMPLATE = "{question}\n\nReason step by step, and end with a line that begins with `The answer is:` and holds nothing but the answer."
ZEBRA_TEMPLATE = (
    "{puzzle}\n\nReason step by step, and end with the solution as JSON of the form "
    '{{"solution": {{{form}}}}}, where every … is the value for that house.'
)


def arc(row: Row, number: int, options: Options) -> list[Item]:
    """A row, or a file, is one task; every test input is an item, and those of a task are one unit."""
    source = str(row[SOURCE])
    name = source.rsplit("/", 1)[-1].removesuffix(".json") if source.endswith(".json") else str(number + 1)
    for pair in [*row["train"], *row["test"]]:
        if not all(reading.is_grid(pair.get(side)) for side in ("input", "output")):
            raise ValueError(f"task {name}: expected pairs of an input and an output grid")
    examples = "\n\n".join(f"Input:\n{_grid(p['input'])}\nOutput:\n{_grid(p['output'])}" for p in row["train"])
    return [
        Item(
            key=f"{name}/{place}",
            text=ARC_TEMPLATE.format(examples=examples, test=_grid(pair["input"])),
            answer=_grid(pair["output"]),
            grader=GraderSpec(name="grid"),
            unit=name,
        )
        for place, pair in enumerate(row["test"])
    ]


def _grid(rows: list[list[int]]) -> str:
    return json.dumps(rows, separators=(",", ":"))


def bbeh(row: Row, number: int, options: Options) -> list[Item]:
    """The hub has one table with a column `task`, the repository one `<task>/task.json` per task."""
    source = str(row[SOURCE])
    task = text_of(row, "task") if "task" in row else source.split("/")[-2] if "/" in source else source
    task = task.removeprefix("bbeh_").replace("_", " ")
    return [
        Item(
            key=str(number + 1),
            text=BBEH_TEMPLATE.format(question=text_of(row, "input").strip()),
            answer=text_of(row, "target"),
            grader=GraderSpec(name="said"),
            group=task,
        )
    ]


def zebra(row: Row, number: int, options: Options) -> list[Item]:
    """`solution` is a table: its header, whose first column is the house, and one row per house."""
    solution: Any = row["solution"]
    solution = json.loads(solution) if isinstance(solution, str) else solution
    header, rows = list(solution["header"]), [[str(cell) for cell in cells] for cells in solution["rows"]]
    if header[:1] != ["House"] or not rows or any(len(cells) != len(header) for cells in rows):
        raise ValueError("column 'solution': expected a table whose first column is House")
    if any(not cell.strip("_ ") for cells in rows for cell in cells):
        raise ValueError("column 'solution': the values are hidden in this file; take a release that has them")
    table = {f"House {cells[0]}": dict(zip(header[1:], cells[1:], strict=True)) for cells in rows}
    form = ", ".join(
        f'"{house}": {{' + ", ".join(f'"{a}": "…"' for a in values) + "}" for house, values in table.items()
    )
    return [
        Item(
            key=text_of(row, "id"),
            text=ZEBRA_TEMPLATE.format(puzzle=text_of(row, "puzzle").strip(), form=form),
            answer=json.dumps(table),
            grader=GraderSpec(name="houses"),
            group=text_of(row, "size"),
        )
    ]


def trivia(row: Row, number: int, options: Options) -> list[Item]:
    """Any of the answer's names counts."""
    answer = row["answer"]
    if not isinstance(answer, dict) or not isinstance(answer.get("value"), str):
        raise ValueError("column 'answer': expected an object with value and aliases")
    names = [answer["value"], *answer.get("aliases", ()), *answer.get("normalized_aliases", ())]
    return [
        Item(
            key=text_of(row, "question_id"),
            text=BBEH_TEMPLATE.format(question=text_of(row, "question").strip()),
            answer=answer["value"],
            grader=GraderSpec(name="alias", options={"aliases": list(dict.fromkeys(names))}),
        )
    ]


def phybench(row: Row, number: int, options: Options) -> list[Item]:
    """Most rows come without an answer, and are left out; what an answer is equal to is behind its last `=`."""
    answer = text_of(row, "answer") if row["answer"] is not None else ""
    answer = re.sub(r"\$+|\\\[|\\\]", "", answer).rpartition("=")[2].strip(" .\n")
    return [
        Item(
            key=text_of(row, "id"),
            text=BOXED.format(problem=text_of(row, "content").strip()),
            answer=answer,
            grader=GraderSpec(name="expression_distance"),
            group=text_of(row, "tag"),
        )
    ]


BENCHMARKS = (
    Benchmark(
        name="arc_agi_1",
        title="ARC-AGI-1 (public evaluation)",
        hub="lordspline/arc-agi",
        split="evaluation",
        files=("**/evaluation/*.json", "**/*.json", "**/evaluation*.parquet", "**/*.jsonl"),
        where="https://github.com/fchollet/ARC-AGI, folder data/evaluation",
        columns=("train", "test"),
        items=419,
        license="Apache-2.0",
        grader="grid",
        build=arc,
        reported="Ring-1T: without k or split; 400 tasks with 419 test inputs, a task counts the share of its inputs that are right",
        k=4,
        context=131_072,
        read=reading.grid,
    ),
    Benchmark(
        name="bbeh",
        title="BIG-Bench Extra Hard",
        hub="BBEH/bbeh",
        split="train",
        files=("**/bbeh*/task.json", "**/task.json", "**/*.parquet", "**/*.jsonl", "**/*.json"),
        where="https://github.com/google-deepmind/bbeh, folder bbeh/benchmark_tasks",
        columns=("input", "target", "task"),
        items=4520,
        license="Apache-2.0",
        grader="said",
        build=bbeh,
        reported="Ring-1T: without k; its authors report the harmonic mean over 23 tasks of accuracy in percent plus 1",
        k=1,
        context=65_536,
        read=reading.said,
        aggregate="harmonic",
    ),
    Benchmark(
        name="zebra_logic",
        title="ZebraLogic (grid mode)",
        hub="WildEval/ZebraLogic",
        config="grid_mode",
        split="test",
        files=("**/grid_mode/*.parquet", "**/*.parquet", "**/*.jsonl", "**/*.json"),
        where="https://huggingface.co/datasets/WildEval/ZebraLogic, config grid_mode",
        columns=("id", "size", "puzzle", "solution"),
        items=1000,
        license="the data set states none",
        grader="houses",
        build=zebra,
        reported="Ring-1T: without k; puzzle accuracy, every cell right",
        k=1,
        context=131_072,
        read=reading.vote_houses,
    ),
    Benchmark(
        name="trivia_qa",
        title="TriviaQA (closed book)",
        hub="mandarjoshi/trivia_qa",
        config="rc.nocontext",
        split="validation",
        files=("**/rc.nocontext/validation*.parquet", "**/validation*.parquet", "**/*.parquet", "**/*.jsonl"),
        where="https://huggingface.co/datasets/mandarjoshi/trivia_qa, config rc.nocontext",
        columns=("question_id", "question", "answer"),
        items=17944,
        license="the data set states none",
        grader="alias",
        build=trivia,
        reported="Ring-1T: without k or split; asked here without examples",
        k=1,
        read=reading.said,
    ),
    Benchmark(
        name="phybench",
        title="PHYBench",
        hub="Eureka-Lab/PHYBench",
        split="train",
        files=("**/PHYBench-fullques*.json", "**/*.json", "**/*.jsonl", "**/*.parquet"),
        where="https://huggingface.co/datasets/Eureka-Lab/PHYBench, PHYBench-fullques_v1.json",
        columns=("id", "tag", "content", "answer"),
        items=100,
        license="MIT",
        grader="expression_distance",
        build=phybench,
        reported="Ring-1T: without k; here the EED score over 100 of 500 problems, whose answers are public; pass@k is its accuracy",
        k=1,
        read=reading.boxed,
    ),
)
