"""Instructions that a program can check: length, format, keywords, case, language, JSON. In the manner of IFEval and by its names.

A constraint is `{"kind": "length_constraints:number_words", "num_words": 50, "relation": "at least"}`, its keys those of
`kinds.KINDS`. `check` judges a text, `describe` says it as a sentence, `from_ifeval` reads IFEval's rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollkeel.errors import BadInput, nearest
from rollkeel.tasks.constraints.kinds import KINDS, Found
from rollkeel.tasks.looks import as_read

__all__ = ["KINDS", "check", "describe", "from_ifeval", "validate"]

Constraint = Mapping[str, Any]


def validate(constraint: Constraint) -> None:
    """Raises `BadInput` for an unknown kind, naming the nearest, and for an argument that is missing or of the wrong type."""
    kind = constraint.get("kind")
    if kind not in KINDS:
        raise BadInput(f"constraint kind {kind!r}: unknown{nearest(str(kind), list(KINDS))}")
    missing = [key for key in KINDS[kind].needs if constraint.get(key) is None]
    if missing:
        raise BadInput(f"constraint {kind}: expected {', '.join(KINDS[kind].needs)}, {', '.join(missing)} missing")
    for key in KINDS[kind].needs:
        value, lists = constraint[key], key in ("keywords", "forbidden_words", "marks")
        number = key.startswith(("num_", "nth_")) or key.endswith("frequency")
        good = isinstance(value, int) and not isinstance(value, bool) if number else isinstance(value, str)
        if lists:
            good = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
        if not good and key != "schema":
            raise BadInput(
                f"constraint {kind}: {key}: expected {'texts' if lists else 'a number' if number else 'a text'}, got {value!r}"
            )


def check(text: str, constraints: Sequence[Constraint], *, loose: bool = False) -> list[tuple[bool | None, str]]:
    """For each constraint: does `text` hold it (None: cannot be decided), and one line of detail.

    `loose` is IFEval's: a constraint holds if it does for the text without asterisks, without its first line, its last line, or
    several of these. An empty text holds nothing. Raises `BadInput` for a constraint that is not one (see `validate`).
    """
    texts = _variants(text) if loose else [text]
    out = []
    for constraint in constraints:
        validate(constraint)
        found = [_found(t, constraint) for t in texts if t.strip()]
        best = next((f for f in found if f[0]), next((f for f in found if f[0] is None), None))
        out.append(best or (found[0] if found else (False, "the response is empty")))
    return out


def _found(text: str, constraint: Constraint) -> Found:
    kind = KINDS[constraint["kind"]]
    found = kind.check(text, constraint)
    if kind.read and found[0] is not False and (read := as_read(text)) != text:
        return kind.check(read, constraint)
    return found


def describe(constraint: Constraint) -> str:
    """One sentence that asks for it. Raises `BadInput` like `validate`."""
    validate(constraint)
    said = {"marked": f", marked as {constraint['language']}" if "language" in constraint else "", **constraint}
    for key, value in constraint.items():
        if key == "schema":
            said[key] = json.dumps(value)
        elif isinstance(value, list | tuple):
            said[key] = " ".join(value) if key == "marks" else ", ".join(f'"{item}"' for item in value)
    return KINDS[constraint["kind"]].asks.format(**said)


def from_ifeval(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Constraints of one of IFEval's rows, of its columns `instruction_id_list` and `kwargs`. Raises `BadInput`."""
    kinds, arguments = row.get("instruction_id_list"), row.get("kwargs")
    if not isinstance(kinds, Sequence) or not isinstance(arguments, Sequence) or len(kinds) != len(arguments):
        raise BadInput("IFEval row: expected instruction_id_list and kwargs of one length")
    out = [
        {"kind": kind, **{k: v for k, v in (a or {}).items() if v is not None}}
        for kind, a in zip(kinds, arguments, strict=True)
    ]
    for constraint in out:
        for key, value in constraint.items():
            if isinstance(value, float) and value.is_integer():  # tables store numbers with gaps as floats
                constraint[key] = int(value)
        validate(constraint)
    return out


def _variants(text: str) -> list[str]:
    lines = text.split("\n")
    cut = ["\n".join(part).strip() for part in (lines, lines[1:], lines[:-1], lines[1:-1])]
    return [text, *cut[1:], *(t.replace("*", "") for t in cut)]
