"""What the objectives say of themselves, for a reader who chooses one."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping
from typing import Any

from rollkeel.objectives.registry import RECIPES, build, find


def summaries() -> list[tuple[str, str]]:
    """Name and first paragraph, on one line, of every recipe."""
    docs = {name: inspect.getdoc(recipe) or "" for name, recipe in RECIPES.items()}
    return [(name, " ".join(doc.split("\n\n")[0].split())) for name, doc in docs.items()]


def description(name: str, options: Mapping[str, Any]) -> str:
    """What an objective's docstring says, its options with their defaults, and the composition it resolves to.

    `name`: a recipe, `composed`, or `module:function` of a user's own.
    """
    built = build(name, options)
    recipe = find(name)
    recipe = recipe.func if isinstance(recipe, functools.partial) else recipe
    parameters = inspect.signature(recipe).parameters.values()
    defaults = ", ".join(f"{p.name}={p.default!r}" for p in parameters if p.default is not p.empty and p.name != "name")
    resolved = "\n".join(f"  {key}: {json.dumps(value)}" for key, value in built.describe().items())
    lines = [name, inspect.getdoc(recipe) or "", f"Defaults: {defaults}", f"Resolved:\n{resolved}"]
    return "\n\n".join(part for part in lines if part)


def in_words(described: Mapping[str, Any]) -> str:
    """One line for a person: name, parameters, masks, weight and surrogate of what `Objective.describe` gives."""
    keys = list(described)
    own = {key: described[key] for key in keys[1 : keys.index("anchor")]}
    parts = own | {key: described[key] for key in ("masks", "weight", "surrogate")}
    told = (f"{k} {', '.join(v) if isinstance(v, list) else v}" for k, v in parts.items() if v not in (None, []))
    return f"{described['name']}: {'; '.join(told)}"
