"""Every setting of a config with its default, type and sentence: `rollkeel config`, docs/config.md, a schema for editors."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rollkeel import config, config_cluster, config_data, config_train
from rollkeel.errors import BadInput, nearest


@dataclass(frozen=True)
class Leaf:
    """One setting."""

    key: str
    default: str
    type: str
    sentence: str


def leaves(section: str | None = None) -> list[Leaf]:
    """Settings in the order of the tree, of a section (`engine`, `engine.server`) or one of them. Raises `BadInput`."""
    found = list(_walk(config.Config, ""))
    if section is None:
        return found
    chosen = [leaf for leaf in found if leaf.key == section or leaf.key.startswith(f"{section}.")]
    if not chosen:
        parts = {".".join(leaf.key.split(".")[:depth]) for leaf in found for depth in (1, 2, 3)}
        raise BadInput(f"config {section!r}: no such section or key{nearest(section, sorted(parts))}")
    return chosen


def schema() -> dict[str, Any]:
    """JSON schema of a recipe."""
    made = config.Config.model_json_schema()
    for name, node in made["$defs"].items():
        for field, about in node.get("properties", {}).items():
            if sentence := _sentence(getattr(config, name, None) or getattr(config_data, name), field):
                about["description"] = sentence
    return made


def markdown() -> str:
    """docs/config.md."""
    out = [
        "# Settings",
        "",
        "Every key of a recipe, also `KEY=VALUE` on the command line. Written by `rollkeel config --markdown`; `rollkeel config",
        "SECTION` prints a part, `rollkeel config --schema` the JSON schema that editors complete from.",
    ]
    section = ""
    for leaf in leaves():
        if (head := leaf.key.partition(".")[0]) != section:
            section = head
            out += ["", f"## {section}", "", "| key | default | type | |", "|---|---|---|---|"]
        cells = (f"`{leaf.key}`", f"`{leaf.default}`", leaf.type, leaf.sentence)
        out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(out) + "\n"


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Leaf]:
    properties = _properties(model)
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _walk(kind, f"{prefix}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        sentence = field.description or _sentence(model, name)
        yield Leaf(f"{prefix}{name}", _value(default), _type(properties[name]), " ".join(sentence.split()))


@cache
def _properties(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()["properties"]


def _value(default: Any) -> str:
    return json.dumps(default, ensure_ascii=False).strip('"')


_RANGES = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))


def _type(about: dict[str, Any]) -> str:
    """A JSON schema in a few words: `integer ≥ 1`, `cpu | cuda`, `string | null`."""
    if "anyOf" in about:
        return " | ".join(_type(one) for one in about["anyOf"])
    if "enum" in about:
        return " | ".join(map(str, about["enum"]))
    if "pattern" in about:
        return "file.py:name"
    if about.get("type") == "array":
        inner = about["prefixItems"] if "prefixItems" in about else [about.get("items", {})]
        return f"list of {', '.join(_type(one) for one in inner)}"
    return " ".join([about.get("type", "any"), *(f"{sign} {about[k]:g}" for k, sign in _RANGES if k in about)])


def _sentence(model: type, field: str) -> str:
    """The string below a field, in the class or in one that it inherits from."""
    for kind in model.__mro__:
        if text := _docs().get((kind.__name__, field)):
            return text
    return ""


@cache
def _docs() -> dict[tuple[str, str], str]:
    """Strings below fields, by class and field; pydantic would read them at import, for a quarter of a second."""
    found: dict[tuple[str, str], str] = {}
    files = [Path(str(m.__file__)) for m in (config, config_cluster, config_data, config_train)]
    modules = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    for node in [node for module in modules for node in module.body]:
        body = node.body if isinstance(node, ast.ClassDef) else []
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[node.name, ast.unparse(field.target)] = str(text.value.value)  # type: ignore[union-attr]
    return found
