"""Checking recipe options: one clear line for a wrong type, range or name."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollkeel.errors import BadInput
from rollkeel.objectives.thresholds import Controller, Fixed, Threshold


def number(
    name: str,
    value: Any,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
) -> float:
    """`value` as a finite float inside its range. Raises `BadInput` naming `name`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadInput(f"{name}: expected a finite number, got {value!r}")
    bounds = [
        (value < at_least, f"≥ {at_least:g}"),
        (value <= above, f"> {above:g}"),
        (value > at_most, f"≤ {at_most:g}"),
        (value >= below, f"< {below:g}"),
    ]
    for broken, text in bounds:
        if broken:
            raise BadInput(f"{name}: expected a number {text}, got {value!r}")
    return float(value)


def whole(name: str, value: Any, *, at_least: float = -math.inf) -> int:
    """`value` as an integer, as `number` checks it. Raises `BadInput` for a fraction, which would be cut off silently."""
    parsed = number(name, value, at_least=at_least)
    if parsed != int(parsed):
        raise BadInput(f"{name}: expected a whole number, got {value!r}")
    return int(parsed)


def optional_number(name: str, value: Any, *, above: float = -math.inf) -> float | None:
    """As `number`, or None."""
    return None if value is None else number(name, value, above=above)


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """`value` if it is one of `allowed`. Raises `BadInput` naming the nearest."""
    if not isinstance(value, str) or value not in allowed:
        close = difflib.get_close_matches(str(value), allowed, n=1)
        guess = f"; did you mean {close[0]}?" if close else ""
        raise BadInput(f"{name}: expected one of {', '.join(allowed)}, got {value!r}{guess}")
    return value


def flag(name: str, value: Any) -> bool:
    """`value` if it is true or false. Raises `BadInput`."""
    if not isinstance(value, bool):
        raise BadInput(f"{name}: expected true or false, got {value!r}")
    return value


def nearest(value: Any, known: Sequence[str]) -> str:
    """`; did you mean X?` or the list of what there is."""
    close = difflib.get_close_matches(str(value), known, n=1)  # as far as a slip of the hand, no further
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"


RATE_OPTIONS = ("drop_rate", "steps", "momentum", "low", "high", "initial")


def threshold(name: str, value: Any, *, default: float, side: str = "upper", **range_: float) -> Threshold:
    """A number in its range (see `number`) as a `Fixed` threshold, or a drop rate as a `Controller`; a `Threshold` as it is.

    A drop rate is a mapping with `drop_rate` in [0, 1) or `[first, last]` over `steps` updates, and optionally `momentum`
    (0.9), clamps `low` and `high`, and the bound before the first batch, `initial` (`default`).
    """
    if isinstance(value, Threshold):
        return value
    if not isinstance(value, Mapping):
        return Fixed(number(name, value, **range_), side)
    for key in value:
        if key not in RATE_OPTIONS:
            raise BadInput(f"{name}.{key}: not an option of a drop rate{nearest(key, RATE_OPTIONS)}")
    if "drop_rate" not in value:
        raise BadInput(f"{name}: expected a number or a mapping with drop_rate, got {dict(value)}")
    rate = value["drop_rate"]
    rates = list(rate) if isinstance(rate, (list, tuple)) else [rate, rate]
    if len(rates) != 2:
        raise BadInput(f"{name}.drop_rate: expected a number or [first, last], got {rate!r}")
    first, last = (1 - number(f"{name}.drop_rate", r, at_least=0, below=1) for r in rates)
    steps = whole(f"{name}.steps", value.get("steps", 0), at_least=0)
    if steps == 0 and first != last:
        raise BadInput(f"{name}.steps: expected the number of updates from the first to the last drop rate, got none")
    numbers = {key: number(f"{name}.{key}", value[key]) for key in ("low", "high") if key in value}
    momentum = number(f"{name}.momentum", value.get("momentum", 0.9), at_least=0, below=1)
    initial = number(f"{name}.initial", value.get("initial", default))
    return Controller(first, last, steps, momentum, initial=initial, side=side, **numbers)


def starting_at(default: float, value: Any) -> Any:
    """A threshold option whose drop rate, if it is one without `initial`, begins at a recipe's own `default`."""
    return {"initial": default, **value} if isinstance(value, Mapping) and "drop_rate" in value else value


def named(what: str, entry: Any, known: Mapping[str, Callable[..., Any]]) -> Any:
    """Call the function that `entry` names: `name`, or `{name: {options}}`. Raises `BadInput` naming the nearest."""
    name, options = next(iter(entry.items())) if isinstance(entry, Mapping) and len(entry) == 1 else (entry, None)
    if not isinstance(name, str) or name not in known:
        raise BadInput(f"{what}: expected a name or {{name: {{options}}}}, got {entry!r}{nearest(name, list(known))}")
    if options is not None and not isinstance(options, Mapping):
        raise BadInput(f"{what}.{name}: expected a mapping of options, got {options!r}")
    parameters = list(inspect.signature(known[name]).parameters)
    for option, value in (options or {}).items():
        if option not in parameters:
            raise BadInput(f"{what}.{name}.{option}: not an option{nearest(option, parameters)}")
        if option == "name" and not (isinstance(value, str) and value):
            raise BadInput(f"{what}.{name}.name: expected a name for its metrics, got {value!r}")
    return known[name](**(options or {}))
