"""Commands that make rows fit for training out of files of strangers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from rollkeel.errors import BAD_INPUTS, BadInput, Corrupt, RunStopped

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


@app.command("open")
def open_form(
    inputs: Annotated[list[str], typer.Argument(metavar="IN...", help="Files, folders or patterns of questions.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for quantity.jsonl and set.jsonl, by grader.")],
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
    for grader in ("quantity", "set"):
        forms = [{"prompt": form.question, "answer": form.answer} for form in kept if form.grader == grader]
        _write(out / f"{grader}.jsonl", forms)
        print(f"{len(forms)} questions: data.path={out}/{grader}.jsonl data.grader={grader}")
    for reason, examples in sorted(refused.items(), key=lambda entry: -len(entry[1])):
        print(f"{len(examples)} left out: {reason}, as {examples[0]!r}")


@app.command("tests")
def more_tests(
    inputs: Annotated[list[str], typer.Argument(metavar="IN...", help="Programming problems with right solutions.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="A .jsonl file for the problems with more tests.")],
    count: Annotated[int, typer.Option(min=1, help="Inputs to try for each problem.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
) -> None:
    """Add tests to programming problems: inputs on which all their solutions agree, in the sandbox."""
    from rollkeel.rewards.programs import CodeProblem
    from rollkeel.rewards.synthesis import synthesize
    from rollkeel.rewards.workers import Broken
    from rollkeel.tasks import tests_form as form
    from rollkeel_sandbox import Sandbox

    lines, added, number = list[dict[str, Any]](), 0, 0
    with Sandbox() as sandbox:
        for number, (_, record) in enumerate(_rows(inputs), 1):
            try:
                row, right = form.code_row(record), form.solutions(record)
                made = synthesize(sandbox.run, CodeProblem(**row.grader.options), right, count=count, seed=seed)
            except (form.Refused, *BAD_INPUTS) as reason:
                print(f"row {number}: {reason}")
                continue
            except Broken as error:
                raise RunStopped(f"data tests: row {number}: {error}") from None
            added += made.added
            tests = [test.model_dump() for test in made.problem.tests]
            lines.append({"prompt": row.prompt, "fn_name": made.problem.function, "tests": tests, "solutions": right})
    if not lines:
        raise BadInput(f"data tests: none of {number} problems has solutions that pass its tests; nothing written")
    _write(out, lines)
    print(f"{len(lines)} of {number} problems written, {added} tests added: data.path={out} data.grader=code")


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
