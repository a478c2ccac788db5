"""Benchmarks that a language model grades: HLE, Arena-Hard, Creative Writing, HealthBench, MultiChallenge. Their numbers are the judge's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollkeel.errors import BadInput
from rollkeel.evals.benchmarks.base import Benchmark, Item, Options, text_of
from rollkeel.tasks.rows import Row
from rollkeel.types import GraderSpec

BASELINES = {"hard_prompt": "o3-mini-2025-01-31", "creative_writing": "gemini-2.0-flash-001"}
"""Whose answers Arena-Hard v2 compares with."""
_SAME = "Score 1 if the final answer of the response is the right answer, else 0; nothing between. How it got there does not matter."
_WRITING = (
    "The quality of this piece of creative writing, from 0 to 20: adherence to the request, characters, imagery, originality, "
    "coherence, emotional depth and prose, less for clichés, overwrought language and what is unearned."
)


def _item(key: str, asked: str, options: Options, judge: Mapping[str, Any], answer: str = "-", **fields: Any) -> Item:
    grader = GraderSpec(name="judge_model", options={**options.judge, **judge})
    return Item(key=key, text=asked, answer=answer, grader=grader, **fields)


def _talk(messages: Any, column: str) -> tuple[str, tuple[dict[str, str], ...]]:
    """A conversation as text, and as messages."""
    if not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"column {column!r}: expected a list of messages")
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages):  # fmt: skip
        raise ValueError(f"column {column!r}: expected messages with role and content")
    turns = tuple({"role": m["role"], "content": m["content"]} for m in messages)
    if len(turns) == 1:
        return turns[0]["content"], turns
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns) + "\n\nassistant:", turns


def hle(row: Row, number: int, options: Options) -> list[Item]:
    """Questions with a picture are left out."""
    if row["image"]:
        return []
    judge = {"kind": "reference", "rubric": _SAME, "low": 0.0, "high": 1.0}
    asked, group = text_of(row, "question"), text_of(row, "category")
    return [_item(text_of(row, "id"), asked, options, judge, text_of(row, "answer"), group=group)]


def arena_rows(rows: Iterator[Row]) -> Iterator[Row]:
    """Questions, each with the baseline's answer of another file."""
    questions, answers = list[Row](), dict[str, dict[str, Row]]()
    for row in rows:
        if "prompt" in row:
            questions.append(row)
        else:
            answers.setdefault(str(row.get("uid")), {})[str(row.get("model"))] = row
    for row in questions:
        given = answers.get(str(row.get("uid")), {})
        named = BASELINES.get(str(row.get("category")), "")
        if len(given) != 1 and named not in given:
            raise BadInput(
                f"arena_hard_v2: expected one baseline's answer to {row.get('uid')}, or that of {named}, got"
                f" {', '.join(given) or 'none'}; put question.jsonl and the baselines' answers into one folder"
            )
        yield {**row, "messages": (given.get(named) or next(iter(given.values())))["messages"]}


def arena(row: Row, number: int, options: Options) -> list[Item]:
    """The judge sees both answers in both orders."""
    said = row["messages"][-1]["content"]
    said = said["answer"] if isinstance(said, dict) else said
    rubric = "Which response is the better answer to the question: right, helpful, relevant and concise?"
    judge = {"kind": "pairwise", "rubric": rubric}
    return [_item(text_of(row, "uid"), text_of(row, "prompt"), options, judge, said, group=text_of(row, "category"))]


def writing_rows(rows: Iterator[Row]) -> Iterator[Row]:
    """One row of each prompt of the file, an object of prompts by number."""
    for row in rows:
        if "writing_prompt" in row:
            yield row
        else:
            yield from ({"id": key, **value} for key, value in row.items() if isinstance(value, dict))


def writing(row: Row, number: int, options: Options) -> list[Item]:
    """An item for each of the prompt's seeds; they are one unit."""
    seeds, unit = row["seed_modifiers"], str(row.get("id", number + 1))
    if not isinstance(seeds, list) or not seeds:
        raise ValueError("column 'seed_modifiers': expected a list of texts")
    judge = {"kind": "rubric", "rubric": _WRITING, "low": 0.0, "high": 20.0}
    asked = text_of(row, "writing_prompt")
    return [
        _item(f"{unit}/{i}", asked.replace("<SEED>", str(seed)), options, judge, unit=unit)
        for i, seed in enumerate(seeds, 1)
    ]


def healthbench(row: Row, number: int, options: Options) -> list[Item]:
    """Every criterion is judged by itself."""
    asked, turns = _talk(row["prompt"], "prompt")
    criteria = [{"criterion": r["criterion"], "points": float(r["points"])} for r in row["rubrics"]]
    if not any(c["points"] > 0 for c in criteria):
        raise ValueError("column 'rubrics': expected a criterion with positive points")
    judge = {"kind": "criteria", "criteria": criteria}
    return [_item(text_of(row, "prompt_id"), asked, options, judge, messages=turns)]


def multichallenge(row: Row, number: int, options: Options) -> list[Item]:
    """The last turn of a conversation; its target question decides. Columns in capitals in the authors' own file."""
    row = {key.lower(): value for key, value in row.items()}
    asked, turns = _talk(row["conversation"], "conversation")
    passes = text_of(row, "pass_criteria").strip().upper()
    if passes not in ("YES", "NO"):
        raise ValueError(f"column 'pass_criteria': expected YES or NO, got {passes!r}")
    rubric = (
        f"Answer this about the response: {text_of(row, 'target_question')}\nScore 1 if the answer is {passes}, else 0."
    )
    judge = {"kind": "rubric", "rubric": rubric, "low": 0.0, "high": 1.0}
    key, group = text_of(row, "question_id"), text_of(row, "axis")
    return [_item(key, asked, options, judge, messages=turns, group=group)]


BENCHMARKS = (
    Benchmark(
        name="hle",
        title="Humanity's Last Exam (text)",
        hub="cais/hle",
        split="test",
        files=("**/test*.parquet", "**/*.parquet", "**/*.jsonl"),
        where="https://huggingface.co/datasets/cais/hle (terms to accept)",
        columns=("id", "question", "image", "answer", "category"),
        items=2158,
        license="MIT",
        grader="judge_model",
        build=hle,
        reported="Ring-1T: without k; judged",
        k=1,
        context=131_072,
    ),
    Benchmark(
        name="arena_hard_v2",
        title="Arena-Hard v2",
        hub="",
        split="test",
        files=("**/*.jsonl",),
        where="https://github.com/lmarena/arena-hard-auto, folder data/arena-hard-v2.0: question.jsonl and model_answer/ of the baselines",
        columns=("uid", "category", "prompt", "messages"),
        items=750,
        license="Apache-2.0",
        grader="judge_model",
        build=arena,
        reported="Ring-1T: win rate and Elo; judged; here wins and half of the ties, without control of style",
        k=1,
        join=arena_rows,
        aggregate="groups",
    ),
    Benchmark(
        name="creative_writing_v3",
        title="Creative Writing v3",
        hub="",
        split="test",
        files=("**/creative_writing_prompts_v3.json", "**/*.json"),
        where="https://github.com/EQ-bench/creative-writing-bench, data/creative_writing_prompts_v3.json",
        columns=("writing_prompt", "seed_modifiers"),
        items=96,
        license="MIT",
        grader="judge_model",
        build=writing,
        reported="Ring-1T: rubric score; judged; here one rubric for all of a piece, and no Elo",
        k=1,
        join=writing_rows,
    ),
    Benchmark(
        name="healthbench",
        title="HealthBench",
        hub="openai/healthbench",
        split="test",
        files=("**/*oss_eval.jsonl", "**/*.jsonl"),
        where="https://github.com/openai/simple-evals (its README has the address), 2025-05-07-06-14-12_oss_eval.jsonl",
        columns=("prompt_id", "prompt", "rubrics"),
        items=5000,
        license="MIT",
        grader="judge_model",
        build=healthbench,
        reported="Ring-1T: without k; judged; a score below 0 stays, where its authors clip the mean",
        k=1,
    ),
    Benchmark(
        name="multichallenge",
        title="MultiChallenge",
        hub="ScaleAI/MultiChallenge",
        split="test",
        files=("**/test*.parquet", "**/*.parquet", "**/*.jsonl"),
        where="https://huggingface.co/datasets/ScaleAI/MultiChallenge",
        columns=("question_id", "axis", "conversation", "target_question", "pass_criteria"),
        items=266,
        license="CC BY 4.0",
        grader="judge_model",
        build=multichallenge,
        reported="Ring-1T: without k; judged; the judge also sees the conversation",
        k=1,
        aggregate="groups",
    ),
)
