"""What a response answers, by explicit rule: the last thing of the form that the prompt asked for.

Used by the graders of benchmarks that need one of their own, and for votes in majority@k. A thought, up to the last `</think>`, is
not read; one that was begun and not closed leaves no answer. All rules read in time linear in the response, or nearly so.
"""

from __future__ import annotations

import json
import re
from collections import deque
from fractions import Fraction
from typing import Any

from rollkeel.rewards import answers

MAX_SIDE, MAX_LINE = 30, 4096
_BOXED = re.compile(r"\\boxed\s*\{")
_LETTER = re.compile(
    r"(?i:answer)(?:\s*+is[\s:]*+|\**+\s*+:)[\s*(\[{$\\]*+(?:(?:boxed|text|mathrm)\{[\s(\\]*+)*+([A-J])(?![A-Za-z])"
)
_GRID = re.compile(r"\[\s*+(?:\[[0-9\s,]*+\]\s*+,?\s*+)++\]")
_SAID = re.compile(r"the answer is\s*:?", re.IGNORECASE)
_WRAPPED = re.compile(r"\\(?:boxed|text|mathrm|textbf)\s*\{([^{}]*)\}")
_DRESS = re.compile(r"\\(?:text|mathrm)\{[^{}]*\}|\\[!,;:]|\\?[$%]|[\s,€£¥]")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?")
_MAX_OBJECTS = 64
_MAX_NUMBER = 64


def spoken(text: str) -> str:
    """What stands behind the thought; nothing when it never ends."""
    return answers.spoken(text) or ""


def boxed(text: str) -> str | None:
    r"""What the last `\boxed{…}` holds, runs of whitespace as one space; None without one, or when its braces do not close."""
    text = spoken(text)
    start = _end_of_last(_BOXED, text)
    depth = 1
    for at in range(start or len(text), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0) if text[at - 1] != "\\" else 0
        if depth == 0:
            return " ".join(text[start:at].split()) or None
    return None


def _end_of_last(pattern: re.Pattern[str], text: str) -> int | None:
    found = deque(pattern.finditer(text), maxlen=1)
    return found[0].end() if found else None


def letter(text: str) -> str | None:
    r"""The choice, in upper case: of the last `answer: X` or `answer is X` (brackets, bold and LaTeX around X do not matter), else a `\boxed{X}` of one letter."""
    found = _LETTER.findall(spoken(text))
    if found:
        return found[-1].upper()
    inside = (boxed(text) or "").strip("()")
    return inside.upper() if len(inside) == 1 and inside.isalpha() else None


def grid(text: str) -> str | None:
    """The last list of lists of digits 0–9, rectangular and at most 30 × 30, as compact JSON."""
    for match in reversed(_GRID.findall(spoken(text))):
        try:
            rows = json.loads(match)
        except ValueError:
            continue
        if is_grid(rows):
            return json.dumps(rows, separators=(",", ":"))
    return None


def is_grid(value: Any) -> bool:
    """A non-empty rectangle of integers 0–9, at most 30 × 30."""
    return (
        isinstance(value, list)
        and 1 <= len(value) <= MAX_SIDE
        and all(isinstance(row, list) and 1 <= len(row) <= MAX_SIDE for row in value)
        and all(len(row) == len(value[0]) for row in value)
        and all(type(cell) is int and 0 <= cell <= 9 for row in value for cell in row)
    )


def houses(text: str) -> dict[str, dict[str, str]] | None:
    """The last JSON object of the form `{"solution": {"House 1": {attribute: value}}}`, or its inside; values in lower case."""
    decoder, text = json.JSONDecoder(), spoken(text)
    starts = [match.start() for match in re.finditer(r"\{", text)][-_MAX_OBJECTS:]
    for start in reversed(starts):
        try:
            value, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        value = value.get("solution", value)
        if (
            isinstance(value, dict)
            and value
            and all(isinstance(v, dict) and k.startswith("House") for k, v in value.items())
        ):
            return {k: {a: str(x).strip().lower() for a, x in v.items()} for k, v in value.items()}
    return None


def vote_houses(text: str) -> str | None:
    """`houses` as text to vote with."""
    found = houses(text)
    return None if found is None else json.dumps(found, sort_keys=True)


def said(text: str) -> str | None:
    r"""What follows the last `the answer is:` on its line, as `plain` text; None without one."""
    text = spoken(text)
    start = _end_of_last(_SAID, text)
    line = text[start:].strip().split("\n", 1)[0] if start is not None else ""
    return plain(line) or None if len(line) <= MAX_LINE else None


def plain(text: str) -> str:
    r"""Lower case, without `\boxed{}`, `$`, `*`, quotes, an end stop, or brackets around the whole; `, ` and `,` are the same."""
    while _WRAPPED.search(text):
        text = _WRAPPED.sub(r"\1", text)
    text = re.sub(r"[$*`\"']", "", text).strip().rstrip(".").strip().lower()
    while len(text) > 1 and (text[0], text[-1]) in (("(", ")"), ("[", "]")) and not set(text[1:-1]) & set("()[]"):
        text = text[1:-1].strip()
    return re.sub(r"\s*,\s*", ",", " ".join(text.split()))


def number(text: str) -> float | None:
    """The number in the last box, without signs of money, percent and thousands; None for anything else."""
    inside = _DRESS.sub("", boxed(text) or "").rpartition("=")[2]
    return float(inside) if len(inside) <= _MAX_NUMBER and _DECIMAL.fullmatch(inside) else None


def bare(text: str) -> str:
    """Lower case without articles and punctuation, words one space apart."""
    words = re.sub(r"[^\w\s]|_", " ", text.lower()).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def same(one: str, other: str) -> bool:
    """Equal as `plain` text, or as numbers (`5` and `5.0`)."""
    if one == other:
        return True
    try:
        return max(len(one), len(other)) <= _MAX_NUMBER and _number(one) == _number(other)
    except (ValueError, ZeroDivisionError):
        return False


def _number(text: str) -> Fraction:
    if not re.fullmatch(r"[+-]?[0-9]+(?:[./][0-9]+)?", text):
        raise ValueError(text)
    return Fraction(text)
