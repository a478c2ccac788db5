"""`rollkeel objectives`: recipes, their formulas, and pictures of what they accept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollkeel.recipe import load

app = typer.Typer(no_args_is_help=True, help="Objectives: masks, weights and surrogates under their papers' names.")


@app.command(name="list")
def list_objectives() -> None:
    """Names of the recipes."""
    from rollkeel.objectives.described import summaries

    for name, summary in summaries():
        print(f"{name:22} {summary}")
    print("  beside these: composed (your own masks, weight, surrogate) and module:function; see docs/objectives.md")


ObjectiveOptions = Annotated[
    list[str] | None, typer.Argument(metavar="[OPTION=VALUE]...", help="Options of the recipe, as under `objective`.")
]


@app.command(name="show")
def show_objective(name: str, options: ObjectiveOptions = None) -> None:
    """Formula, source, options with their defaults, and what they resolve to."""
    from rollkeel.objectives.described import description

    print(description(name, load(None, [f"objective.{o}" for o in options or []]).objective.options))


@app.command()
def plot(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]... [OPTION=VALUE]...", help="Recipes (all) and options for them."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for NAME.svg and index.html; may exist.")] = Path(
        "objectives"
    ),
) -> None:
    """Draw acceptance regions over the two probabilities of a token, by calling the objectives."""
    names = [w for w in words or [] if "=" not in w]
    options = load(None, [f"objective.{w}" for w in words or [] if "=" in w]).objective.options
    from rollkeel import objectives
    from rollkeel.report import regions

    made = {name: objectives.build(name, options) for name in names or list(objectives.RECIPES)}
    print(regions.write(made, out)[-1])
