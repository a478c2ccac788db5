"""Function calls compared with those that are right, by their syntax trees, as BFCL does (Patil et al. 2025): nothing is executed.

A gold call is `{name: {parameter: [accepted value, …]}}`; `""` among the accepted values means that the parameter may be left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollkeel.evals import reading
from rollkeel.tasks.base import excerpt
from rollkeel.tasks.environments.tools import Refused, parse
from rollkeel.types import Rollout

_UNHEARD = re.compile(r"[ ,./\-_*^]")
Call = tuple[str, Any]
Gold = Mapping[str, Mapping[str, Sequence[Any]]]


def grade_calls(rollout: Rollout) -> tuple[float, str]:
    """1 when the calls in the response are the gold ones, in any order. Options `{functions, wants}`: their JSON schemas, and how many
    calls are right: `these` of the gold answer, `none`, or `any`, of whatever function."""
    options = rollout.prompt.grader.options
    wants, functions = options["wants"], {f["name"]: f.get("parameters", {}) for f in options["functions"]}
    try:
        calls = calls_in(reading.spoken(rollout.text))
    except Refused as error:
        return float(wants == "none"), str(error)
    shown = excerpt(json.dumps(calls, ensure_ascii=False))
    if wants != "these":
        return float(bool(calls) == (wants == "any")), shown
    return float(matches(calls, json.loads(rollout.prompt.answer), functions)), shown


def calls_in(text: str) -> list[Call]:
    """All calls of a turn, in order. Raises `Refused` for a malformed one."""
    calls = list[Call]()
    for call in parse(text):
        if isinstance(call, Refused):
            raise call
        calls.append(call)
    return calls


def matches(calls: Sequence[Call], gold: Sequence[Gold], functions: Mapping[str, Any]) -> bool:
    """Whether every call is one of `gold`, each of which is taken once."""
    left = list(gold)
    for name, arguments in calls:
        taken = next((g for g in left if name in g and _accepted(arguments, g[name], functions.get(name, {}))), None)
        if taken is None:
            return False
        left.remove(taken)
    return not left


def _accepted(arguments: Any, gold: Mapping[str, Sequence[Any]], schema: Mapping[str, Any]) -> bool:
    if not isinstance(arguments, dict):
        return False
    kinds = {name: about.get("type") for name, about in schema.get("properties", {}).items()}
    whole = all(kinds.get(name) != "integer" or type(value) is int for name, value in arguments.items())
    needed = all(name in arguments for name in schema.get("required", ()))
    return whole and needed and _fields(arguments, gold)


def _fields(given: Mapping[str, Any], gold: Mapping[str, Any]) -> bool:
    """Whether every field is an accepted one, and those that are not there may be left out."""
    present = all(name in gold and _among(value, gold[name]) for name, value in given.items())
    return present and all(name in given or "" in accepted for name, accepted in gold.items())


def _among(value: Any, accepted: Sequence[Any]) -> bool:
    return any(_same(value, one) for one in accepted)


def _same(value: Any, gold: Any) -> bool:
    """Words are equal but for case, blanks and `,./-_*^`, and numbers by value; objects have a list of accepted values per field."""
    if isinstance(value, str) and isinstance(gold, str):
        return _heard(value) == _heard(gold)
    if isinstance(value, bool) or isinstance(gold, bool):
        return value is gold
    if isinstance(value, list) and isinstance(gold, list):
        return len(value) == len(gold) and all(map(_same, value, gold))
    if isinstance(value, dict) and isinstance(gold, dict):
        return _fields(value, gold)
    return value == gold


def _heard(text: str) -> str:
    return _UNHEARD.sub("", text).lower().replace("'", '"')
