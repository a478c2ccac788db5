"""`rollkeel init KIND NAME`: a working file of your own, its test and a recipe.

The templates beside this file are working files themselves, called `example`.
"""

from __future__ import annotations

import keyword
import re
import sys
from enum import StrEnum
from pathlib import Path

from rollkeel.errors import BadInput
from rollkeel.events import write_atomic


class Kind(StrEnum):
    """What `init` writes."""

    task = "task"
    """Items drawn from a generator, with a verifier."""
    environment = "environment"
    """Episodes of several turns."""
    grader = "grader"
    """A reward function for rows of a file."""
    objective = "objective"
    """A loss, put together from a mask, a weight and a surrogate."""


_HERE = Path(__file__).parent


def init(kind: Kind, name: str, folder: Path) -> list[Path]:
    """Write the files of `kind`, called `name`, to `folder`; returns them.

    Raises `BadInput`, with nothing written, for a name that is no lower-case Python name or that hides a module, and where a file is
    there already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise BadInput(f"init {name!r}: expected a lower-case Python name, such as word_count")
    if name in sys.stdlib_module_names | {"rollkeel", "torch", "numpy", "pydantic", "pytest"}:
        raise BadInput(f"init {name!r}: {name}.py would hide what it imports; choose another name")
    made = {
        folder / f"{name}{file.name.removeprefix(kind)}": _renamed(file.read_text(encoding="utf-8"), kind, name)
        for file in sorted(_HERE.glob(f"{kind}*"))
    }
    if taken := [path for path in made if path.exists()]:
        raise BadInput(f"init {name!r}: {taken[0]} is there already; choose another name or folder")
    for path, text in made.items():
        write_atomic(path, text)
    return list(made)


def _renamed(text: str, kind: Kind, name: str) -> str:
    """The template for a file beside it, with `example` called `name` and `Example` the same as the name of a class."""
    titled = "".join(part.capitalize() for part in name.split("_"))
    return text.replace(f"rollkeel.scaffold.{kind}", name).replace("Example", titled).replace("example", name)
