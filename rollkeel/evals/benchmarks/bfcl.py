"""Function calling: the single-turn parts of the Berkeley Function Calling Leaderboard v3 whose calls are JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rollkeel.errors import BadInput
from rollkeel.evals.benchmarks.base import Benchmark, Item, Options, text_of
from rollkeel.tasks.rows import Row
from rollkeel.types import GraderSpec

CATEGORIES = ("simple", "multiple", "parallel", "parallel_multiple")
WANTS = {
    **{f"{live}{name}": "these" for live in ("", "live_") for name in CATEGORIES},
    "irrelevance": "none",
    "live_irrelevance": "none",
    "live_relevance": "any",
}
TEMPLATE = (
    "These functions can be called:\n{functions}\n\nA call is of the form "
    '<tool_call>{{"name": "…", "arguments": {{…}}}}</tool_call>. Make as many calls as the request needs, at once, and none '
    "if no function fits or a needed value is missing.\n\n{question}"
)


def joined(rows: Iterator[Row]) -> Iterator[Row]:
    """Questions with the possible answers that other files have under the same id."""
    questions, answers = list[Row](), dict[str, Row]()
    for row in rows:
        if "question" in row:
            questions.append(row)
        elif "ground_truth" in row:
            answers[str(row.get("id"))] = row
        else:
            raise BadInput("bfcl_v3: expected rows with question and function, or with ground_truth")
    for row in questions:
        found = answers.get(str(row.get("id")), {})
        yield {**row, **({"ground_truth": found["ground_truth"]} if found else {})}


def bfcl(row: Row, number: int, options: Options) -> list[Item]:
    """Other categories (Java, JavaScript, executed ones, conversations) are left out."""
    key = text_of(row, "id")
    category = key.rstrip("0123456789-").rstrip("_")
    if category not in WANTS:
        return []
    functions, [turn] = list(row["function"]), row["question"]
    if not functions or not all(isinstance(f, dict) and isinstance(f.get("name"), str) for f in functions):
        raise ValueError("column 'function': expected a list of objects with a name")
    gold = row["ground_truth"] if WANTS[category] == "these" else []
    if not all(isinstance(call, dict) for call in gold):
        raise ValueError("column 'ground_truth': expected a list of objects, a call each")
    asked = "\n\n".join(m["content"] for m in turn)
    shown = "\n".join(json.dumps(f, ensure_ascii=False) for f in functions)
    return [
        Item(
            key=key,
            text=TEMPLATE.format(functions=shown, question=asked.strip()),
            answer=json.dumps(gold, ensure_ascii=False),
            grader=GraderSpec(name="calls", options={"functions": functions, "wants": WANTS[category]}),
            group=category,
        )
    ]


BENCHMARKS = (
    Benchmark(
        name="bfcl_v3",
        title="BFCL v3 (single turn)",
        hub="",
        split="test",
        files=("**/BFCL_v3_*.json", "**/BFCL_v3_*.jsonl", "**/*.jsonl"),
        where="https://huggingface.co/datasets/gorilla-llm/Berkeley-Function-Calling-Leaderboard, with the folder possible_answer",
        columns=("id", "question", "function", "ground_truth"),
        items=3491,
        license="Apache-2.0",
        grader="calls",
        build=bfcl,
        reported="Ring-1T: without parts; here without Java, JavaScript, executed calls and conversations",
        k=1,
        context=131_072,
        aggregate="groups",
        join=joined,
    ),
)
