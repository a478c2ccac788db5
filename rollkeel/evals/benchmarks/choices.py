"""Multiple choice: GPQA-Diamond, MMLU-Pro, C-Eval, CMMLU, AGIEval. The order of the choices is part of the question, so it is a function of a seed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollkeel.evals import reading
from rollkeel.evals.benchmarks.base import Benchmark, Builder, Item, Options, text_of
from rollkeel.evals.benchmarks.maths import TEMPLATE as BOXED
from rollkeel.tasks.base import keyed_rng
from rollkeel.tasks.rows import ALL_CONFIGS, SOURCE, Row
from rollkeel.types import GraderSpec

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TEMPLATE = (
    "{question}\n\n{choices}\n\n"
    "Reason step by step, and end with a line of the form `Answer: X`, where X is the letter of the right choice."
)
CHINESE = "{question}\n\n{choices}\n\n请逐步推理，最后把正确选项的字母写在\\boxed{{}}中。"
SEVERAL = (
    "{question}\n\n{choices}\n\n"
    "One or more choices are right. Reason step by step, and put the letters of all of them within \\boxed{{}}, as in \\boxed{{A, C}}."
)
CHINESE_SEVERAL = "{question}\n\n{choices}\n\n有一个或多个正确选项。请逐步推理，最后把所有正确选项的字母写在\\boxed{{}}中，如\\boxed{{A, C}}。"
_MARK = re.compile(r"^\s*\([A-Z]\)\s*")
_IN_CHINESE = ("gaokao", "jec-qa", "logiqa-zh")


def item(
    name: str, key: str, question: str, choices: Sequence[str], gold: int, seed: int | None, *, template: str = TEMPLATE, group: str = ""
) -> Item:  # fmt: skip
    """A question with lettered choices; choice `gold` (0-based) is right; `seed` orders them, item by item."""
    order = list(range(len(choices)))
    if seed is not None:
        keyed_rng("choices", name, seed, key).shuffle(order)
    listed = "\n".join(f"{LETTERS[place]}. {choices[i].strip()}" for place, i in enumerate(order))
    return Item(
        key=key,
        text=template.format(question=question.strip(), choices=listed),
        answer=LETTERS[order.index(gold)],
        grader=GraderSpec(name="choice", options={"letters": LETTERS[: len(choices)]}),
        group=group,
        order=tuple(order) if seed is not None else (),
    )


def gpqa(row: Row, number: int, options: Options) -> list[Item]:
    """The right answer stands first in the file, so the choices are always shuffled, by seed 0 unless another is given."""
    names = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    seed = options.shuffle or 0
    return [
        item(
            "gpqa_diamond",
            text_of(row, "Record ID"),
            text_of(row, "Question"),
            [text_of(row, name) for name in names],
            0,
            seed,
            group=text_of(row, "High-level domain"),
        )
    ]


def mmlu_pro(row: Row, number: int, options: Options) -> list[Item]:
    """Up to ten choices; `N/A` fills some rows up and is no choice."""
    choices, gold = list(row["options"]), int(row["answer_index"])
    if text_of(row, "answer") != LETTERS[gold] or not 0 <= gold < len(choices):
        raise ValueError(f"answer {row['answer']!r} is not choice {gold} of {len(choices)}")
    kept = [i for i, choice in enumerate(choices) if choice != "N/A"]
    if gold not in kept:
        raise ValueError(f"the right choice {gold} is N/A")
    shown = [str(choices[i]) for i in kept]
    key, group = text_of(row, "question_id"), text_of(row, "category")
    return [item("mmlu_pro", key, text_of(row, "question"), shown, kept.index(gold), options.shuffle, group=group)]


def by_subject(name: str, question: str, answer: str, key: str | None) -> Builder:
    """A builder for Chinese questions, one file or config per subject; ids count from 0 in each."""

    def build(row: Row, number: int, options: Options) -> list[Item]:
        subject = _stem(row).removesuffix("_val")
        gold = text_of(row, answer).strip().upper() if row[answer] is not None else ""
        if gold not in ("A", "B", "C", "D", ""):
            raise ValueError(f"column {answer!r}: expected A, B, C or D, got {gold!r}")
        made = item(
            name,
            f"{subject}/{text_of(row, key) if key else number + 1}",
            text_of(row, question),
            [text_of(row, letter) for letter in "ABCD"],
            "ABCD".index(gold or "A"),
            options.shuffle,
            template=CHINESE,
            group=subject,
        )
        return [made] if gold else []

    return build


def _stem(row: Row) -> str:
    return str(row[SOURCE]).rsplit("/", 1)[-1].split(".")[0]


def agieval(row: Row, number: int, options: Options) -> list[Item]:
    """One file per exam. `label` is a letter, or a list of all right ones; exams without choices have an `answer` in its place."""
    exam, label = _stem(row), row["label"]
    question = f"{row.get('passage') or ''}\n\n{text_of(row, 'question')}".strip()
    key = f"{exam}/{number + 1}"
    if not row["options"]:
        answer, grader = text_of(row, "answer"), GraderSpec(name="math")
        return [Item(key=key, text=BOXED.format(problem=question), answer=answer, grader=grader, group=exam)]
    choices = [_MARK.sub("", str(choice)) for choice in row["options"]]
    right = list(label) if isinstance(label, list | str) else []
    if not right or not set(right) <= set(LETTERS[: len(choices)]):
        raise ValueError(f"column 'label': expected letters of {len(choices)} choices, got {label!r}")
    template = CHINESE if exam.startswith(_IN_CHINESE) else TEMPLATE
    if isinstance(label, str) and len(right) == 1:
        gold = LETTERS.index(label)
        return [item("agieval", key, question, choices, gold, options.shuffle, template=template, group=exam)]
    listed = "\n".join(f"{letter}. {choice.strip()}" for letter, choice in zip(LETTERS, choices, strict=False))
    text = (CHINESE_SEVERAL if template is CHINESE else SEVERAL).format(question=question, choices=listed)
    return [Item(key=key, text=text, answer=", ".join(right), grader=GraderSpec(name="set"), group=exam)]


BENCHMARKS = (
    Benchmark(
        name="gpqa_diamond",
        title="GPQA-Diamond",
        hub="Idavidrein/gpqa",
        config="gpqa_diamond",
        split="train",
        files=("**/gpqa_diamond.csv", "**/*diamond*", "**/*.csv", "**/*.parquet", "**/*.jsonl"),
        where="https://huggingface.co/datasets/Idavidrein/gpqa (terms to accept: do not publish the questions), gpqa_diamond.csv",
        columns=(
            "Record ID",
            "Question",
            "Correct Answer",
            "Incorrect Answer 1",
            "Incorrect Answer 2",
            "Incorrect Answer 3",
            "High-level domain",
        ),
        items=198,
        license="CC BY 4.0, with the request not to reveal examples in plain text online",
        grader="choice",
        build=gpqa,
        reported="Ring-1T: without k",
        k=4,
        read=reading.letter,
    ),
    Benchmark(
        name="mmlu_pro",
        title="MMLU-Pro",
        hub="TIGER-Lab/MMLU-Pro",
        split="test",
        files=("**/test*.parquet", "**/test*.jsonl", "**/*.parquet", "**/*.jsonl", "**/*.csv"),
        where="https://huggingface.co/datasets/TIGER-Lab/MMLU-Pro, split test",
        columns=("question_id", "question", "options", "answer", "answer_index", "category"),
        items=12032,
        license="MIT",
        grader="choice",
        build=mmlu_pro,
        reported="Ring-1T: without k; asked here without examples",
        k=1,
        read=reading.letter,
    ),
    Benchmark(
        name="ceval",
        title="C-Eval (validation)",
        hub="ceval/ceval-exam",
        config=ALL_CONFIGS,
        split="val",
        files=("**/*_val.csv", "**/val*.parquet", "**/*.csv"),
        where="https://huggingface.co/datasets/ceval/ceval-exam, ceval-exam.zip, folder val",
        columns=("id", "question", "A", "B", "C", "D", "answer"),
        items=1346,
        license="CC BY-NC-SA 4.0",
        grader="choice",
        build=by_subject("ceval", "question", "answer", "id"),
        reported="Ring-1T: without k; answers of the test split are not public, so this is the validation split",
        k=1,
        read=reading.letter,
        aggregate="groups",
    ),
    Benchmark(
        name="cmmlu",
        title="CMMLU",
        hub="haonan-li/cmmlu",
        config=ALL_CONFIGS,
        split="test",
        files=("**/test/*.csv", "**/test*.parquet", "**/*.csv"),
        where="https://huggingface.co/datasets/haonan-li/cmmlu, cmmlu_v1_0_1.zip, folder test",
        columns=("Question", "A", "B", "C", "D", "Answer"),
        items=11582,
        license="CC BY-NC 4.0",
        grader="choice",
        build=by_subject("cmmlu", "Question", "Answer", None),
        reported="Ring-1T: without k; asked here without examples",
        k=1,
        read=reading.letter,
        aggregate="groups",
    ),
    Benchmark(
        name="agieval",
        title="AGIEval",
        hub="",
        split="test",
        files=("**/v1_1/*.jsonl", "**/v1/*.jsonl", "**/*.jsonl"),
        where="https://github.com/ruixiangcui/AGIEval, folder data/v1_1",
        columns=("passage", "question", "options", "label", "answer"),
        items=8062,
        license="MIT",
        grader="choice",
        build=agieval,
        reported="Ring-1T: without k; asked here without examples",
        k=1,
        aggregate="groups",
    ),
)
