"""`rollkeel conformance`: another implementation of a recipe, judged token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rollkeel.errors import BadInput
from rollkeel.recipe import load

app = typer.Typer()


@app.command()
def conformance(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="module:function or file.py:function of a batch, or a library: verl, trl, …"
        ),
    ],
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="What it claims to be: a recipe, kl:NAME or advantages:NAME. The function's name, if not given."
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPTION=VALUE]...", help="Options of the recipe, as under `objective`."),
    ] = None,
    checkout: Annotated[
        Path | None, typer.Option("--checkout", help="Sources of the library, where it is not installed.")
    ] = None,
    float64: Annotated[
        bool, typer.Option("--float64", help="Give it float64 tensors in the place of float32.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every token that differs.")] = False,
) -> None:
    """Compare somebody's loss with a recipe: which tokens differ, by how much, and which rule it follows in their place.

    The function takes a `rollkeel.conformance.Batch` and returns its loss. Exit code 1 if it differs.
    """
    chosen = load(None, [f"objective.{o}" for o in options or []]).objective.options
    import torch

    from rollkeel import plugins
    from rollkeel.conformance import check
    from rollkeel.conformance.adapters import Claim, claims
    from rollkeel.conformance.table import as_json as plain
    from rollkeel.conformance.table import lines

    if plugins.is_own(target):
        function = plugins.load(target, "conformance", "a function of (batch)", lambda f: plugins.takes(f, 1))
        judged = [Claim(target, recipe or target.rpartition(":")[2], function, chosen)]
    elif recipe:
        raise BadInput(
            f"conformance {target} {recipe}: a library's functions have their recipes; leave {recipe} out, or name module:function"
        )
    else:
        judged = claims(target, checkout)
    dtype = torch.float64 if float64 else torch.float32
    verdicts = [check(c.function, c.recipe, c.options, name=c.name, dtype=dtype) for c in judged]
    if as_json:
        print(json.dumps([plain(v) for v in verdicts] if len(verdicts) > 1 else plain(verdicts[0]), ensure_ascii=False))
    else:
        print("\n\n".join("\n".join(lines(v)) for v in verdicts))
    raise typer.Exit(not all(v.passed for v in verdicts))
