"""JSON schema, the part that instructions use: types, objects, arrays, bounds, enumerations and combinations.

Not supported, and refused rather than passed over: references, patterns (a schema's regular expression could be made to hang on a
model's text) and conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollkeel.errors import BadInput, nearest

MAX_DEPTH = 64
_IGNORED = {"$schema", "$id", "$comment", "title", "description", "default", "examples", "format"}
_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "integer": lambda v: not isinstance(v, bool) and (isinstance(v, int) or (isinstance(v, float) and v.is_integer())),
}
_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("number", lambda v, b: v >= b),
    "maximum": ("number", lambda v, b: v <= b),
    "exclusiveMinimum": ("number", lambda v, b: v > b),
    "exclusiveMaximum": ("number", lambda v, b: v < b),
    "multipleOf": ("number", lambda v, b: v % b == 0),
    "minLength": ("string", lambda v, b: len(v) >= b),
    "maxLength": ("string", lambda v, b: len(v) <= b),
    "minItems": ("array", lambda v, b: len(v) >= b),
    "maxItems": ("array", lambda v, b: len(v) <= b),
    "uniqueItems": ("array", lambda v, b: not b or not any(same(x, y) for i, x in enumerate(v) for y in v[:i])),
    "minProperties": ("object", lambda v, b: len(v) >= b),
    "maxProperties": ("object", lambda v, b: len(v) <= b),
    "required": ("object", lambda v, b: all(name in v for name in b)),
}
_NESTED = ("type", "enum", "const", "properties", "additionalProperties", "items", "anyOf", "allOf", "oneOf", "not")


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values: `true` is no 1, `1.0` is 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return set(a) == set(b) and all(same(a[k], b[k]) for k in a)
    return a == b


def fault(value: Any, schema: Any, where: str = "$", depth: int = 0) -> str:
    """The first thing in which `value` is not what `schema` asks for, as one line; empty when it is. Raises `BadInput` for a
    schema that holds anything but what is supported."""
    if schema is True or schema is False:
        return "" if schema else f"{where}: nothing is allowed here"
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        raise BadInput(
            f"JSON schema at {where}: expected an object no deeper than {MAX_DEPTH}, got {type(schema).__name__}"
        )
    for key in schema:
        if key not in _BOUNDS and key not in _NESTED and key not in _IGNORED:
            raise BadInput(
                f"JSON schema at {where}: keyword {key!r} is not supported{nearest(key, [*_BOUNDS, *_NESTED])}"
            )
    for key, (kind, holds) in _BOUNDS.items():
        if key in schema and _TYPES[kind](value) and not holds(value, schema[key]):
            return f"{where}: {key} {schema[key]!r} does not hold"
    return (
        _simple(value, schema, where) or _inside(value, schema, where, depth) or _combined(value, schema, where, depth)
    )


def _simple(value: Any, schema: Mapping[str, Any], where: str) -> str:
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    for name in types:
        if name not in _TYPES:
            raise BadInput(f"JSON schema at {where}: type {name!r} is unknown{nearest(str(name), list(_TYPES))}")
    if types and not any(_TYPES[name](value) for name in types):
        return f"{where}: expected {' or '.join(types)}"
    if "enum" in schema and not any(same(value, allowed) for allowed in schema["enum"]):
        return f"{where}: not one of {schema['enum']!r}"
    if "const" in schema and not same(value, schema["const"]):
        return f"{where}: expected {schema['const']!r}"
    return ""


def _inside(value: Any, schema: Mapping[str, Any], where: str, depth: int) -> str:
    parts: list[tuple[Any, Any, str]] = []
    if isinstance(value, dict):
        known, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        parts = [(v, known.get(name, more), f"{where}.{name}") for name, v in value.items()]
    elif isinstance(value, list) and "items" in schema:
        parts = [(v, schema["items"], f"{where}[{i}]") for i, v in enumerate(value)]
    return next((found for v, inner, at in parts if (found := fault(v, inner, at, depth + 1))), "")


def _combined(value: Any, schema: Mapping[str, Any], where: str, depth: int) -> str:
    for key, enough in (
        ("anyOf", lambda n, _: n > 0),
        ("allOf", lambda n, total: n == total),
        ("oneOf", lambda n, _: n == 1),
    ):
        if key in schema:
            matches = sum(not fault(value, inner, where, depth + 1) for inner in schema[key])
            if not enough(matches, len(schema[key])):
                return f"{where}: {matches} of {len(schema[key])} schemas of {key} match"
    if "not" in schema and not fault(value, schema["not"], where, depth + 1):
        return f"{where}: matches what it must not"
    return ""
