"""Checking recipe options: one clear line for a wrong type, range or name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any

from rollkeel.errors import BadInput


def number(
    name: str, value: Any, *, at_least: float = -math.inf, above: float = -math.inf, at_most: float = math.inf
) -> float:
    """`value` as a finite float inside its range. Raises `BadInput` naming `name`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadInput(f"{name}: expected a finite number, got {value!r}")
    bounds = [
        (value < at_least, f"≥ {at_least:g}"),
        (value <= above, f"> {above:g}"),
        (value > at_most, f"≤ {at_most:g}"),
    ]
    for broken, text in bounds:
        if broken:
            raise BadInput(f"{name}: expected a number {text}, got {value!r}")
    return float(value)


def optional_number(name: str, value: Any, *, above: float = -math.inf) -> float | None:
    """As `number`, or None."""
    return None if value is None else number(name, value, above=above)


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """`value` if it is one of `allowed`. Raises `BadInput` naming the nearest."""
    if not isinstance(value, str) or value not in allowed:
        raise BadInput(f"{name}: expected one of {', '.join(allowed)}, got {value!r}{nearest(value, allowed)}")
    return value


def flag(name: str, value: Any) -> bool:
    """`value` if it is true or false. Raises `BadInput`."""
    if not isinstance(value, bool):
        raise BadInput(f"{name}: expected true or false, got {value!r}")
    return value


def nearest(value: Any, known: Sequence[str]) -> str:
    """`; did you mean X?` or the list of what there is."""
    close = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
