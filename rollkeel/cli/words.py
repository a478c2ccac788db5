"""What commands that take a recipe share: its words on the command line, and the config they make."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rollkeel.config import Config
from rollkeel.errors import Corrupt
from rollkeel.recipe import load

Words = Annotated[
    list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A recipe (name or file), then settings.")
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Where the result is written; must not exist.")]


Scenario = Annotated[
    list[str] | None, typer.Argument(metavar="[FILE] [KEY=VALUE]...", help="A scenario (file or name), overrides.")
]


def named(words: list[str] | None) -> tuple[str | None, list[str]]:
    """What the first word names, if it is no setting, and the settings."""
    words = list(words or [])
    return (words.pop(0) if words and "=" not in words[0] else None), words


def config_of(words: list[str] | None) -> Config:
    """The recipe with its overrides; the task's options are checked as well."""
    config = load(*named(words))
    for part in config.data.parts or [config.data]:
        if part.task is not None:
            from rollkeel import tasks

            tasks.get(part.task, part.options)
    return config


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on one line instead.")]


def show_result(metrics: dict[str, float], out: Path | None, as_json: bool) -> None:
    """What a stage measured, one number a line, and where its result is; or one line of JSON."""
    if as_json:
        print(json.dumps({k: round(v, 6) for k, v in metrics.items()}))
        return
    for key, value in metrics.items():
        print(f"{key:24} {value:.6g}")
    if out is not None:
        print(f"written to {out}")


def refuse_damage(run: Path, problems: Sequence[str]) -> None:
    """Raise `Corrupt` (exit code 4) for a run with damaged files, after what could be read of it was shown."""
    if problems:
        more = f"; {len(problems) - 1} more" if len(problems) > 1 else ""
        raise Corrupt(f"{run}: damaged, what is left was read: {problems[0]}{more}")
