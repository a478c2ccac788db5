"""Commands that make rows fit for training out of files of strangers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from rollkeel.errors import BAD_INPUTS, BadInput, Corrupt, RunStopped

MUTANTS = 20
"""Programs made of a right one by a change, at most."""

app = typer.Typer(
    no_args_is_help=True, help="Clean training data, open multiple choice questions, add tests to programming problems."
)


@app.command()
def clean(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="IN... [KEY=VALUE]...", help="Files, folders or patterns (.jsonl, .jsonl.gz, .parquet), options."
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the result. An unfinished result in it is resumed.")
    ],
    options: Annotated[Path | None, typer.Option(help="YAML file of options.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that work on rows.")] = 1,
) -> None:
    """Remove what must not be trained on; writes parquet files and a report of what was removed and why."""
    from rollkeel.data import clean as run
    from rollkeel.data import read_options
    from rollkeel.record.bars import Bars

    inputs = [word for word in words if "=" not in word or Path(word).exists()]
    if not inputs:
        raise BadInput("data clean: expected an input file, folder or pattern, got options only")
    chosen = read_options(options, [word for word in words if word not in inputs])
    with Bars() as bars:
        run(inputs, out, chosen, processes=processes, progress=bars)
    report(out)


@app.command("convert")
def convert(
    inputs: Annotated[
        list[str], typer.Argument(metavar="IN...", help="Files, folders or patterns of a published data set.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for problems, pairs, issues and refused rows.")],
) -> None:
    """Make rows of ours of public data sets, told apart by their columns; every row that is refused is named with the reason."""
    from dataclasses import asdict

    from rollkeel.data.reading import expand
    from rollkeel.tasks import graded
    from rollkeel.tasks.data import Row
    from rollkeel.tasks.published import Pair, read

    rows: dict[str, list[dict[str, Any]]] = {"problems": [], "pairs": [], "issues": [], "refused": []}
    for file in expand(inputs, graded.SUFFIXES):
        made, refused = graded.convert(graded.records(file), read)
        for each in made:
            kind = "problems" if isinstance(each, Row) else "pairs" if isinstance(each, Pair) else "issues"
            rows[kind].append(graded.as_ours(each) if isinstance(each, Row) else asdict(each))
        for number, reason in refused:
            print(f"{file} row {number}: {reason}")
            rows["refused"].append({"file": str(file), "row": number, "reason": reason})
    if not any(rows[kind] for kind in ("problems", "pairs", "issues")):
        raise BadInput(f"data convert: none of {len(rows['refused'])} rows is of a known form; nothing written")
    uses = {"problems": "data.grader=row data.path", "pairs": "rollkeel reward-model", "issues": "", "refused": ""}
    for kind, lines in rows.items():
        if lines:
            _write(out / f"{kind}.jsonl", lines)
            print(f"{len(lines)} {kind}: {uses[kind]}{'=' if kind == 'problems' else ' '}{out}/{kind}.jsonl")


@app.command("open")
def open_form(
    inputs: Annotated[list[str], typer.Argument(metavar="IN...", help="Files, folders or patterns of questions.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="A .jsonl file of prompt, answer and grader.")],
    question: Annotated[str, typer.Option(help="Column of the question.")] = "question",
    choices: Annotated[str, typer.Option(help="Column of the choices; without it they end the question.")] = "choices",
    answer: Annotated[str, typer.Option(help="Column of the answer: letter, index or text.")] = "answer",
) -> None:
    """Make open questions of multiple choice ones; those that need their choices are left out, counted by reason."""
    from rollkeel.tasks.open_form import convert

    kept, refused = convert((row for _, row in _rows(inputs)), question=question, choices=choices, answer=answer)
    if not kept:
        reason = max(refused, key=lambda reason: len(refused[reason]), default="there are no rows")
        raise BadInput(
            f"data open: none of the questions can be opened, most often since: {reason}; columns are options"
        )
    _write(out, [{"prompt": form.question, "answer": form.answer, "grader": form.grader} for form in kept])
    print(f"{len(kept)} questions: data.path={out} data.grader=row")
    for reason, examples in sorted(refused.items(), key=lambda entry: -len(entry[1])):
        print(f"{len(examples)} left out: {reason}, as {examples[0]!r}")


@app.command("tests")
def more_tests(
    inputs: Annotated[list[str], typer.Argument(metavar="IN...", help="Programming problems with right solutions.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="A .jsonl file for the problems with more tests.")],
    count: Annotated[int, typer.Option(min=1, help="Inputs to try for each problem.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Keep at most so many new tests, those that wrong programs fail.")
    ] = None,
    wrong: Annotated[
        str, typer.Option(help="Column of wrong programs; mutants of the first solution are taken with them.")
    ] = "incorrect_solutions",
) -> None:
    """Add tests to programming problems: inputs on which all their solutions agree, in the sandbox."""
    from rollkeel.rewards.mutants import mutants
    from rollkeel.rewards.programs import CodeProblem
    from rollkeel.rewards.synthesis import Selection, select, synthesize
    from rollkeel.rewards.workers import Broken
    from rollkeel.tasks import tests_form as form
    from rollkeel_sandbox import Sandbox

    lines = list[dict[str, Any]]()
    added = 0
    number = 0
    chosen = list[Selection]()
    with Sandbox() as sandbox:
        for number, (_, record) in enumerate(_rows(inputs), 1):
            try:
                row, right = form.code_row(record), form.solutions(record)
                assert row.grader is not None  # it has tests
                given = CodeProblem(**row.grader.options)
                problem = synthesize(sandbox.run, given, right, count=count, seed=seed).problem
                if keep:
                    bad = [*form.programs(record.get(wrong)), *mutants(right[0], MUTANTS)]
                    chosen.append(select(sandbox.run, problem, len(given.tests), bad, keep))
                    problem = chosen[-1].problem
            except (form.Refused, *BAD_INPUTS) as reason:
                print(f"row {number}: {reason}")
                continue
            except Broken as error:
                raise RunStopped(f"data tests: row {number}: {error}") from None
            added += len(problem.tests) - len(given.tests)
            tests = [test.model_dump() for test in problem.tests]
            lines.append({"prompt": row.prompt, "fn_name": problem.function, "tests": tests, "solutions": right})
    if not lines:
        raise BadInput(f"data tests: none of {number} problems has solutions that pass its tests; nothing written")
    _write(out, lines)
    print(f"{len(lines)} of {number} problems written, {added} tests added: data.path={out} data.grader=code")
    if chosen:
        before = sum(s.failed_before for s in chosen)
        after = sum(s.failed for s in chosen)
        of = sum(s.wrong for s in chosen)
        print(f"{after} of {of} wrong programs fail, {before} without the new tests")


@app.command()
def samples(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="IN...", help="Runs, rollouts of rollout or score (.parquet), items.jsonl of eval."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="A .jsonl file of prompt, answer, solution and reward.")],
    passed: Annotated[float, typer.Option(help="Smallest reward that is kept.")] = 1.0,
    per_prompt: Annotated[int, typer.Option(min=1, help="Most samples of one prompt, best and then first ones.")] = 1,
) -> None:
    """Demonstrations of graded samples: finished responses that earned the reward, each once (rejection sampling)."""
    kept: dict[tuple[str, str], dict[str, tuple[float, str]]] = {}
    graded = right = 0
    for prompt, answer, finished, reward, text in _samples(inputs):
        graded += 1
        if finished and reward >= passed and text.strip():
            right += 1
            kept.setdefault((prompt, answer), {}).setdefault(" ".join(text.split()), (reward, text))
    if not kept:
        raise BadInput(f"data samples: none of {graded} graded rollouts finished with a reward of {passed:g} or more")
    lines = [
        {"prompt": prompt, "answer": answer, "solution": text, "reward": reward}
        for (prompt, answer), texts in kept.items()
        for reward, text in sorted(texts.values(), key=lambda sample: -sample[0])[:per_prompt]
    ]
    _write(out, lines)
    print(f"{len(lines)} of {graded} graded samples, {right} of them good, for {len(kept)} prompts:")
    print(f"rollkeel sft data.task=null data.path={out} data.solution_column=solution")


def _samples(inputs: list[str]) -> Iterator[tuple[str, str, bool, float, str]]:
    """Prompt, answer, whether it finished, reward and text of every graded sample."""
    from rollkeel.data.difficulty import rollout_files
    from rollkeel.data.options import PassRateOptions
    from rollkeel.evals.record import load
    from rollkeel.record.rollout_store import read_step, to_rollouts
    from rollkeel.types import Status

    items = [name for name in inputs if name.endswith(".jsonl")]
    for file in items:
        records = load(Path(file)).values()
        if not records or not all("prompt" in record for record in records):
            raise BadInput(
                f"data samples: {file}: expected items.jsonl of an evaluation, with prompts; run `rollkeel eval` again"
            )
        for record in records:
            for sample in record["samples"]:
                finished = sample["status"] == Status.FINISHED
                if sample["reward"] is not None:
                    yield record["prompt"], record["answer"], finished, sample["reward"], sample["text"]
    files = tuple(name for name in inputs if name not in items)
    for file in rollout_files(PassRateOptions(rollouts=files)):
        for r in to_rollouts(read_step(file)):
            if r.reward is not None:
                yield r.prompt.text, r.prompt.answer, r.status is Status.FINISHED, r.reward, r.text


def _rows(inputs: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    from rollkeel.data.reading import expand, records

    return chain.from_iterable(map(records, expand(inputs)))


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    from rollkeel.events import write_atomic

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="A folder that `data clean` finished.")]) -> None:
    """Print what was removed and why, and render report.html."""
    from rollkeel.report import data_view
    from rollkeel.tasks.data import REPORT

    path = folder / REPORT
    if not path.is_file():
        raise BadInput(f"{folder}: expected a folder that `rollkeel data clean` finished, found no {REPORT}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        data_view.show(found)
        print(data_view.write_page(found, folder))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{path}: not a report of `rollkeel data clean` ({error!r}); clean the data again") from None
