"""Commands that make rows fit for training out of files of strangers. Part of the command line in `cli.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rollkeel.errors import BadInput, Corrupt

app = typer.Typer(
    no_args_is_help=True, help="Clean training data: junk, duplicates, benchmark items, difficulty, mixture."
)


@app.command()
def clean(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="IN... [KEY=VALUE]...", help="Files, folders or patterns (.jsonl, .jsonl.gz, .parquet), options."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the result; an unfinished one is gone on with.")],
    options: Annotated[Path | None, typer.Option(help="YAML file of options.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that work on rows.")] = 1,
) -> None:
    """Remove what must not be trained on; writes parquet files and a report of what was removed and why."""
    from rollkeel.data import clean as run
    from rollkeel.data import read_options
    from rollkeel.diagnostics.bars import Bars

    inputs = [word for word in words if "=" not in word or Path(word).exists()]
    if not inputs:
        raise BadInput("data clean: expected an input file, folder or pattern, got options only")
    chosen = read_options(options, [word for word in words if word not in inputs])
    with Bars() as bars:
        run(inputs, out, chosen, processes=processes, progress=bars)
    report(out)


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
