"""Function calling: the Berkeley Function Calling Leaderboard v3, single turns whose calls are JSON, and conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rollkeel.errors import BadInput
from rollkeel.evals.benchmarks.base import Benchmark, Item, Options, text_of
from rollkeel.evals.conversations import Conversations, interfaces, parsed
from rollkeel.tasks.base import TaskItem
from rollkeel.tasks.environment import GRADER
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
TURNS = ("base", "miss_func", "miss_param", "long_context")
"""Categories of conversations."""
FORM = (
    "These functions can be called:\n{functions}\n\nA call is of the form "
    '<tool_call>{{"name": "…", "arguments": {{…}}}}</tool_call>, and several may be made at once. Results come back, and you may then '
    "call again. A reply without a call ends your turn: give it when the request is done, or when no function fits or a needed value "
    "is missing.\n\n{question}"
)
MORE = "From now on these functions can be called too:\n{functions}"


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
    return [
        Item(
            key=key,
            text=TEMPLATE.format(functions=_shown(functions), question=asked.strip()),
            answer=json.dumps(gold, ensure_ascii=False),
            grader=GraderSpec(name="calls", options={"functions": functions, "wants": WANTS[category]}),
            group=category,
        )
    ]


def _shown(functions: Sequence[Any]) -> str:
    return "\n".join(json.dumps(f, ensure_ascii=False) for f in functions)


def conversation(row: Row, number: int, options: Options) -> list[Item]:
    """A row of several turns. Functions that are missing at first are told in the turn that has no message of its own."""
    key = text_of(row, "id")
    category = key.removeprefix("multi_turn_").rstrip("0123456789-").rstrip("_")
    if category not in TURNS:
        return []
    api, classes = interfaces(options.classes), list(row["involved_classes"])
    functions = [function for name in classes for function in api.functions(name)]
    late = {int(turn): list(names) for turn, names in (row.get("missed_function") or {}).items()}
    hidden = {name for names in late.values() for name in names}
    asked = ["\n\n".join(message["content"] for message in turn) for turn in row["question"]]
    if not set(late) <= set(range(len(asked))):
        raise ValueError(f"column 'missed_function': expected turns 0 to {len(asked) - 1}, got {sorted(late)}")
    for turn, names in late.items():
        asked[turn] = MORE.format(functions=_shown([f for f in functions if f["name"] in names]))
    gold = [[str(call) for call in calls] for calls in row["ground_truth"]]
    if len(gold) != len(asked) or not all(text.strip() for text in asked):
        raise ValueError(f"expected a message and a list of calls for each turn, got {len(asked)} and {len(gold)}")
    for call in (call for calls in gold for call in calls):
        parsed(call)
    shown = _shown([f for f in functions if f["name"] not in hidden])
    text = FORM.format(functions=shown, question=asked[0].strip())
    played = {
        "classes": {name: api.address(name) for name in classes},
        "config": row["initial_config"],
        "long": category == "long_context",
        "turns": [{"asked": a, "gold": g} for a, g in zip(asked, gold, strict=True)],
    }
    answer = json.dumps(gold, ensure_ascii=False)
    item = TaskItem(text=text, answer=answer, metadata=played)
    grader = GraderSpec(name=GRADER, options={"task": Conversations.name, "item": item.to_json()})
    return [Item(key=key, text=text, answer=answer, grader=grader, group=category)]


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
        reported="Ring-1T: without parts; here without Java, JavaScript and executed calls; conversations are bfcl_v3_multi_turn",
        k=1,
        context=131_072,
        aggregate="groups",
        join=joined,
    ),
    Benchmark(
        name="bfcl_v3_multi_turn",
        title="BFCL v3 (several turns)",
        hub="",
        split="test",
        files=("**/BFCL_v3_multi_turn_*.json", "**/BFCL_v4_multi_turn_*.json", "**/*.jsonl"),
        where="https://huggingface.co/datasets/gorilla-llm/Berkeley-Function-Calling-Leaderboard, with the folder possible_answer",
        columns=("id", "question", "initial_config", "involved_classes", "missed_function", "ground_truth"),
        items=800,
        license="Apache-2.0",
        grader=GRADER,
        build=conversation,
        reported="Ring-1T: without parts; here functions are told in the prompt",
        k=1,
        context=131_072,
        aggregate="groups",
        join=joined,
        played=Conversations,
    ),
)
