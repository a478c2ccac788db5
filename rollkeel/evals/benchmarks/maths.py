"""Competition mathematics with short final answers: AIME, HMMT, CNMO, MATH-500, Omni-MATH, UGMathBench; and of finance: FinanceReasoning."""

from __future__ import annotations

from rollkeel.evals import reading
from rollkeel.evals.benchmarks.base import Benchmark, Builder, Item, Options, text_of
from rollkeel.tasks.rows import ALL_CONFIGS, Row
from rollkeel.types import GraderSpec

TEMPLATE = "{problem}\n\nReason step by step, and put your final answer within \\boxed{{}}."
ANY = ("**/*.jsonl", "**/*.parquet", "**/*.json", "**/*.csv")


def problems(
    problem: str = "problem", answer: str = "answer", key: str | None = None, group: str | None = None
) -> Builder:
    """A builder for rows with these columns; without `key` an item is called by its place."""

    def build(row: Row, number: int, options: Options) -> list[Item]:
        return [
            Item(
                key=text_of(row, key) if key else str(number + 1),
                text=TEMPLATE.format(problem=text_of(row, problem).strip()),
                answer=text_of(row, answer).strip(),
                grader=GraderSpec(name="math"),
                group=text_of(row, group) if group else "",
            )
        ]

    return build


def ugmath(row: Row, number: int, options: Options) -> list[Item]:
    """Three versions of a problem with other numbers: three items of one unit."""
    unit = text_of(row, "idx") if "idx" in row else str(number + 1)
    unit, subject = f"{text_of(row, 'subject')}/{unit}", text_of(row, "subject")
    made = []
    for version in ("v1", "v2", "v3"):
        answer = row[f"answer_{version}"]
        gold = ", ".join(map(str, answer)) if isinstance(answer, list) else text_of(row, f"answer_{version}")
        problem = TEMPLATE.format(problem=text_of(row, f"problem_{version}").strip())
        grader, key = GraderSpec(name="math"), f"{unit}/{version}"
        made.append(Item(key=key, text=problem, answer=gold.strip(), grader=grader, group=subject, unit=unit))
    return made


def finance(row: Row, number: int, options: Options) -> list[Item]:
    """A number is right within 0.2 % of the gold one."""
    float(text_of(row, "ground_truth"))
    asked = f"{row.get('context') or ''}\n\n{text_of(row, 'question')}".strip()
    return [
        Item(
            key=text_of(row, "question_id"),
            text=f"{TEMPLATE.format(problem=asked)} It is a number alone.",
            answer=text_of(row, "ground_truth"),
            grader=GraderSpec(name="near", options={"relative": 0.002}),
            group=text_of(row, "level") if "level" in row else "",
        )
    ]


BENCHMARKS = (
    Benchmark(
        name="aime24",
        title="AIME 2024 (I and II)",
        hub="HuggingFaceH4/aime_2024",
        split="train",
        files=("**/train*.parquet", *ANY),
        where="https://huggingface.co/datasets/HuggingFaceH4/aime_2024",
        columns=("problem", "answer"),
        items=30,
        license="problems © Mathematical Association of America; the data set states none",
        grader="math",
        build=problems(),
        reported="DPPO: avg@32, temperature 0.7, top-p 0.95; AC-MIS-PO: avg@16",
        k=32,
        read=reading.boxed,
    ),
    Benchmark(
        name="aime25",
        title="AIME 2025 (I and II)",
        hub="MathArena/aime_2025",
        split="train",
        files=("**/train*.parquet", *ANY),
        where="https://huggingface.co/datasets/MathArena/aime_2025",
        columns=("problem", "answer"),
        items=30,
        license="CC BY-NC-SA 4.0; problems © Mathematical Association of America",
        grader="math",
        build=problems(),
        reported="Ring-1T: avg@64; DPPO: avg@32, temperature 0.7, top-p 0.95; AC-MIS-PO: avg@16",
        k=64,
        context=131_072,
        read=reading.boxed,
    ),
    Benchmark(
        name="hmmt25",
        title="HMMT February 2025",
        hub="MathArena/hmmt_feb_2025",
        split="train",
        files=("**/train*.parquet", *ANY),
        where="https://huggingface.co/datasets/MathArena/hmmt_feb_2025",
        columns=("problem", "answer"),
        items=30,
        license="CC BY-NC-SA 4.0",
        grader="math",
        build=problems(),
        reported="Ring-1T: avg@16",
        k=16,
        context=131_072,
        read=reading.boxed,
    ),
    Benchmark(
        name="cnmo24",
        title="CNMO 2024 (English, from LiveMathBench)",
        hub="opencompass/LiveMathBench",
        config="v202412_CNMO_en",
        split="test",
        files=("**/*CNMO_en*.jsonl", "**/*CNMO*en*", *ANY),
        where="https://huggingface.co/datasets/opencompass/LiveMathBench (terms to accept), config v202412_CNMO_en",
        columns=("question", "answer"),
        items=18,
        license="CC BY 4.0",
        grader="math",
        build=problems("question"),
        reported="Ring-1T: without k",
        k=16,
        context=65_536,
        read=reading.boxed,
    ),
    Benchmark(
        name="math500",
        title="MATH-500",
        hub="HuggingFaceH4/MATH-500",
        split="test",
        files=("**/test*.jsonl", *ANY),
        where="https://huggingface.co/datasets/HuggingFaceH4/MATH-500",
        columns=("problem", "answer", "unique_id", "subject"),
        items=500,
        license="MIT (MATH); the selection states none",
        grader="math",
        build=problems(key="unique_id", group="subject"),
        reported="AC-MIS-PO: pass@1 as avg@4",
        k=4,
        read=reading.boxed,
    ),
    Benchmark(
        name="omni_math",
        title="Omni-MATH",
        hub="KbsdJames/Omni-MATH",
        split="test",
        files=("**/test*.jsonl", *ANY),
        where="https://huggingface.co/datasets/KbsdJames/Omni-MATH",
        columns=("problem", "answer", "difficulty"),
        items=4428,
        license="Apache-2.0",
        grader="math",
        build=problems(group="difficulty"),
        reported="Ring-1T: without k; its authors judge with a model, here by rule, so proofs and prose score 0",
        k=1,
        read=reading.boxed,
    ),
    Benchmark(
        name="ugmathbench",
        title="UGMathBench",
        hub="UGMathBench/ugmathbench",
        config=ALL_CONFIGS,
        split="test",
        files=("**/data/*.json", *ANY),
        where="https://huggingface.co/datasets/UGMathBench/ugmathbench, folder data",
        columns=("idx", "subject", "problem_v1", "answer_v1", "problem_v2", "answer_v2", "problem_v3", "answer_v3"),
        items=15186,
        license="GPL-3.0",
        grader="math",
        build=ugmath,
        reported="Ring-1T: without k; its authors report the share of 5,062 problems that are right in all three versions",
        k=1,
        read=reading.boxed,
        aggregate="effective",
    ),
    Benchmark(
        name="finance_reasoning",
        title="FinanceReasoning",
        hub="BUPT-Reasoning-Lab/FinanceReasoning",
        split="test",
        files=("**/data/*.json", *ANY),
        where="https://huggingface.co/datasets/BUPT-Reasoning-Lab/FinanceReasoning",
        columns=("question_id", "question", "context", "ground_truth"),
        items=2238,
        license="see its card",
        grader="near",
        build=finance,
        reported="Ring-1T: without k",
        k=1,
        read=reading.boxed,
    ),
)
