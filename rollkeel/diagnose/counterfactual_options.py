"""Objectives named on a command line: `kpop,icepop:low=0.8:high=1.25,kpop:phi={drop_rate: 0.01},my.module:function:tau=2`.

Objectives are parted by commas, an objective's options by colons; inside brackets neither counts. A second part without `=`
belongs to the name: `module:function`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from rollkeel import objectives
from rollkeel.config import parse_yaml
from rollkeel.errors import BadInput
from rollkeel.objectives import Objective

SYNTAX = "write name or name:option=value:option=value, several parted by commas"
_OPEN, _CLOSE = "[{(", "]})"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An objective to be tried on recorded tokens."""

    label: str
    """As it was typed."""
    objective: Objective


def candidates(texts: Sequence[str]) -> list[Candidate]:
    """The objectives that `texts` name, in order, each built anew. Raises `BadInput`, naming the nearest of what is unknown."""
    found = [candidate(part) for text in texts for part in split(text, ",")]
    labels = [c.label for c in found]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise BadInput(f"--objective: {twice} is named twice; give one of them other options")
    return found


def candidate(text: str) -> Candidate:
    """One objective with its options."""
    name, *parts = split(text, ":")
    if parts and "=" not in parts[0] and name.strip() not in objectives.RECIPES:
        name = f"{name}:{parts.pop(0)}"
    options: dict[str, Any] = {}
    for part in parts:
        key, sep, raw = part.partition("=")
        if not sep or not key.strip() or not raw.strip():
            raise BadInput(f"--objective {text!r}: expected option=value, got {part!r}; {SYNTAX}")
        try:
            options[key.strip()] = parse_yaml(raw)
        except yaml.YAMLError:
            raise BadInput(f"--objective {text!r}: {raw!r} is not a value; {SYNTAX}") from None
    return Candidate(label=text.strip(), objective=objectives.build(name.strip(), options))


def split(text: str, mark: str) -> list[str]:
    """`text` cut at every `mark` outside of brackets. Raises `BadInput` for brackets that do not match and empty parts."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in _OPEN) - (c in _CLOSE)
        if c == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
        if depth < 0:
            break
    if depth != 0:
        raise BadInput(f"--objective {text!r}: brackets do not match; {SYNTAX}")
    if any(not part.strip() for part in parts):
        raise BadInput(f"--objective {text!r}: a name or an option is missing; {SYNTAX}")
    return parts


def steps_of(text: str) -> tuple[int, int]:
    """First and last step of `12`, `10:20`, `10:` or `:20`, both inclusive. Raises `BadInput`."""
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first.strip() else 0
        high = low if not colon else int(last) if last.strip() else 2**31
    except ValueError:
        low, high = 1, 0
    if low > high or not text.strip(": "):
        raise BadInput(f"--steps {text!r}: expected a step or a range of them, such as 12, 10:20, 10: or :20")
    return low, high
