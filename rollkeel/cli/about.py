"""Commands that tell what there is: settings, runs, the version."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from rollkeel.errors import BadInput
from rollkeel.scaffold import Kind

app = typer.Typer()


@app.command()
def config(
    section: Annotated[str | None, typer.Argument(help="A section, as engine or engine.server, or one key.")] = None,
    as_schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of a recipe, for editors.")
    ] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/config.md.")] = False,
) -> None:
    """List the settings of a recipe: name, default, type, and what each one does."""
    from rollkeel.config_table import leaves, markdown, schema

    if as_schema or as_markdown:
        print(json.dumps(schema(), indent=1) if as_schema else markdown(), end="\n" if as_schema else "")
        return
    show_table(["key", "default", "type", ""], [[x.key, x.default, x.type, x.sentence] for x in leaves(section)])


@app.command()
def init(
    kind: Annotated[Kind, typer.Argument(help="What to write.")],
    name: Annotated[str, typer.Argument(help="A lower-case Python name; the files are called so.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the files.")] = Path("."),
) -> None:
    """Write a working task, environment, grader or objective of your own, with its test and a recipe."""
    from rollkeel.scaffold import init as write

    out.mkdir(parents=True, exist_ok=True)
    for path in write(kind, name, out):
        print(path)
    print(f"next: cd {out} && python -m pytest {name}_test.py && rollkeel train {name}.yaml")


@app.command()
def runs(folder: Annotated[Path, typer.Argument(help="Where run folders lie.")] = Path("runs")) -> None:
    """List the runs in a folder, newest last: steps done, last reward, last evaluation, how each ended."""
    from rollkeel.record.runfolder import CONFIG

    if not folder.is_dir():
        raise BadInput(f"runs {folder}: no such folder")
    found = sorted((p for p in folder.iterdir() if (p / CONFIG).is_file()), key=lambda p: (p / CONFIG).stat().st_mtime)
    show_table(["run", "steps", "reward", "evaluation", "state"], [[str(p), *_overview(p)] for p in found])


def _overview(run: Path) -> list[str]:
    from rollkeel.config import parse_yaml
    from rollkeel.errors import RollkeelError
    from rollkeel.record.runfolder import CONFIG, EVENTS, METRICS, read_rows

    try:
        asked = parse_yaml((run / CONFIG).read_text(encoding="utf-8"))["run"]["steps"]
        rows = read_rows(run / METRICS)[0]
        log = (run / EVENTS).read_text(encoding="utf-8").splitlines() if (run / EVENTS).is_file() else []
        events = [json.loads(line) for line in log if line.endswith("}")]
    except (RollkeelError, ValueError, LookupError, TypeError) as error:
        return ["", "", "", f"damaged: {' '.join(str(error).split())[:80]}"]
    state = events[-1]["status"] if events and events[-1]["event"] == "run_end" else "unfinished"
    last = {key: f"{value:.3f}" for row in rows for key, value in row.items() if isinstance(value, int | float)}
    evaluation = next((value for key, value in last.items() if key.endswith("/avg@k")), "")
    return [f"{rows[-1]['step'] if rows else 0}/{asked}", last.get("reward/mean", ""), evaluation, state]


def show_table(head: list[str], rows: list[list[str]]) -> None:
    """A table on a terminal; tabs between the cells anywhere else."""
    if not sys.stdout.isatty():
        print(*("\t".join(row) for row in rows), sep="\n")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*head, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    Console().print(table)


def version(wanted: bool) -> None:
    """`--version`."""
    if wanted:
        import rollkeel

        print(f"rollkeel {rollkeel.__version__}")
        raise typer.Exit
