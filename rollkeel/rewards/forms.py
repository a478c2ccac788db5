"""What an answer is made of: numbers, expressions, sets, lists, tuples, intervals, equations, words; by rules of its own.

Only single expressions are left to a LaTeX parser: which brackets are open, what is ordered and what a comma means is read here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import Literal

from rollkeel.rewards.spelling import normalised, unit, worded

Kind = Literal["number", "expr", "text", "word", "set", "list", "seq", "union", "eq", "rel", "based"]
MAX_CHARS, MAX_DEPTH, MAX_POWER = 1000, 30, 5000

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+(?!\d)|\d+)"
_PLAIN = re.compile(
    rf"(?P<sign>[-+]?)\s*(?=\.?\d|\.\\)(?P<int>{_DIGITS})?(?:\.(?P<dec>\d*)(?:\\overline\{{(?P<rep>\d+)\}})?)?(?:[eE](?P<exp>[-+]?\d+))?"
)
_POWER = re.compile(r"(?P<head>.+?)\s*(?:\\times|\\cdot)\s*10\s*\^\s*\{?\s*(?P<exp>[-+]?\d+)\s*\}?")
_FRACTION = re.compile(
    r"(?P<sign>[-+]?)\s*(?:(?P<whole>\d+)\s*)?\\frac\s*\{\s*(?P<a>-?[\d.,]+)\s*\}\s*\{\s*(?P<b>-?[\d.,]+)\s*\}"
)
_SLASH = re.compile(r"(?P<sign>[-+]?)\s*(?:(?P<whole>\d+) +)?(?P<a>[\d.,]+)\s*/\s*(?P<b>-?[\d.,]+)")
_BASED = re.compile(r"(\w+)_\{?(\d+)\}?")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_UNITS = "mm|cm|dm|km|mg|kg|ml|mL|ft|in|yd|mi|lbs?|oz|mins?|secs?|hrs?|ms|mph|Hz|kHz|kW|kJ|m/s|km/h|days?"
"""Abbreviations that are units behind a number; other words are where they stand behind a space and have four letters."""
_SUFFIX = re.compile(
    r"(?P<head>.*?)\s*(?:\\text\s*\{(?P<text>[^{}]*)\}|(?<![A-Za-z\\])(?P<words>"
    rf"(?:{_UNITS})(?![A-Za-z])|(?<=\s)[A-Za-z]{{4,}}(?:[ /][A-Za-z]+)*))(?P<power>\s*\^\s*\{{?[23]\}}?)?\.?"
)
_DRESS = [(re.compile(pattern), unit) for pattern, unit in [
    (r"([-+]?)\s*\$\s*(.+)", "dollar"),
    (r"([-+]?)\s*[€£]\s*(.+)", "currency"),
    (r"()(.+?)\s*(?:%|(?:\\text\s*\{)?\s*per ?cent\s*\}?)", "%"),
    (r"(?!.*\\(?:sin|cos|tan|cot|sec|csc))()(.+?)\s*(?:°\s*([CFK]?)|(?:\\text\s*\{)?\s*degrees?\s*\}?)", r"degree\3"),
]]  # fmt: skip
"""What may stand before or behind a number or expression, and the unit that it is."""
_NO_WORDS = re.compile(r"\\(?:begin|end|text|overline|vec)\s*\{[^{}]*\}")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_BRACKETED = re.compile(r"(?P<left>\\\{|[(\[])(?P<inner>.*)(?P<right>\\\}|[)\]])")
_MARK = re.compile(r"\\.|[{}()\[\]]")
_STEP = {"{": 1, "(": 1, "[": 1, r"\{": 1, "}": -1, ")": -1, "]": -1, r"\}": -1}
_RELATION = re.compile(r"\\(?:le|ge|ne)(?![A-Za-z])|<|>")
_NAME = re.compile(r"(?:\\?[A-Za-z]+|\\text\{[^{}]*\}|[|'\s]|_\{?\w+\}?|\([A-Za-z, ]*\)|\^\{?-1\}?)+")


class Unreadable(Exception):
    """This is no mathematical answer, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """An answer, or a part of one."""

    kind: Kind
    source: str
    """Normalised text."""
    parts: tuple[Form, ...] = ()
    left: str = ""
    """Opening bracket of a `seq`; left side of an `eq`; digits of a `based`. `right` likewise, with the base."""
    right: str = ""
    value: Fraction | None = None
    """Of a `number`, without its percent sign."""
    decimals: int | None = None
    """Places behind the point, of a number that was written with one."""
    percent: bool = False
    unit: str = ""
    variable: str = ""
    """Of an interval that was written as an inequality."""
    commas: bool = False
    """True of a whole answer in which a comma may separate thousands."""


def read(text: str) -> Form:
    """Raises `Unreadable`."""
    if len(text) > MAX_CHARS:
        raise Unreadable(f"longer than {MAX_CHARS} characters")
    text = normalised(text)
    _check_brackets(text)
    return replace(_form(text), commas=bool(_THOUSANDS.search(text)))


def exact(text: str) -> tuple[Fraction, int | None] | None:
    """Value and decimals of a number in digits: thousands commas, decimals, fractions, mixed numbers, powers of ten."""
    text, shift = text.strip(), 0
    if found := _POWER.fullmatch(text):
        text, shift = found["head"], int(found["exp"])
    if found := (_FRACTION.fullmatch(text) or _SLASH.fullmatch(text)):
        a, b = exact(found["a"]), exact(found["b"])
        if a is None or b is None or b[0] == 0 or (found["whole"] and "-" in found["a"] + found["b"]):
            return None
        value, decimals = Fraction(found["whole"] or 0) + a[0] / b[0], None
    elif found := _PLAIN.fullmatch(text):
        dec, rep = found["dec"] or "", found["rep"]
        digits = re.sub("[, ]", "", found["int"] or "0") + dec
        value, decimals = Fraction(int(digits), 10 ** len(dec)), len(dec) if dec and not rep else None
        value += Fraction(int(rep), (10 ** len(rep) - 1) * 10 ** len(dec)) if rep else 0
        shift += int(found["exp"] or 0)
    else:
        return None
    if abs(shift) > MAX_POWER:
        return None
    value = value * Fraction(10) ** shift * (-1 if found["sign"] == "-" else 1)
    return value, decimals if decimals is None else max(decimals - shift, 0)


def split(text: str, pattern: str) -> list[str]:
    """Pieces between matches of `pattern` outside of all brackets."""
    out, depth, start = [], 0, 0
    for found in re.finditer(rf"({pattern})|{_MARK.pattern}", text):
        if found[1] is None:
            depth += _STEP.get(found[0], 0)
        elif depth == 0:
            out.append(text[start : found.start()])
            start = found.end()
    return [*out, text[start:]]


def _check_brackets(text: str) -> None:
    """Braces pair with braces; round and square ones with each other, as in half-open intervals."""
    stack: list[str] = []
    for mark in _MARK.findall(text):
        if _STEP.get(mark) == 1:
            stack.append(mark[-1])
        elif mark in _STEP and (not stack or (stack.pop() == "{") != (mark[-1] == "}")):
            raise Unreadable("brackets that do not close")
        if len(stack) > MAX_DEPTH:
            raise Unreadable(f"brackets nested deeper than {MAX_DEPTH}")
    if stack:
        raise Unreadable("brackets that do not close")


def _whole(inner: str) -> bool:
    """True if no bracket within closes one that stands before."""
    depths = list(accumulate(_STEP.get(mark, 0) for mark in _MARK.findall(inner)))
    return not depths or (min(depths) >= 0 and depths[-1] == 0)


def _form(text: str) -> Form:
    text = text.strip()
    if not text:
        raise Unreadable("nothing there")
    if text[0] == "{" and text[-1] == "}" and _whole(text[1:-1]):
        return _form(text[1:-1])
    if not re.search(r"[(\[]|\\\{", text):
        text = _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)
    text = re.sub(r"^[A-Za-z]\s*\\in\s*(?=[(\[\\])", "", text)
    return next(form for reader in _READERS if (form := reader(text)))


def _worded(text: str) -> Form | None:
    """A number in words, or words in `\\text`, which may be a number with a unit."""
    found = _TEXT.fullmatch(text)
    if (value := worded(found[1] if found else text)) is not None:
        return Form(kind="number", source=text, value=Fraction(value))
    if found is None:
        return None
    number = _scalar(found[1].strip()) if found[1].strip()[:1].isdigit() else None
    return number if number and number.kind == "number" else Form(kind="text", source=_plain(found[1]))


def _number(text: str) -> Form | None:
    number = exact(text)
    return number and Form(kind="number", source=text, value=number[0], decimals=number[1])


def _union(text: str) -> Form | None:
    pieces = split(text, r"\\cup(?![A-Za-z])")
    return Form(kind="union", source=text, parts=tuple(map(_form, pieces))) if len(pieces) > 1 else None


def _list(text: str) -> Form | None:
    """Values between commas, `and` or `or`; inequalities of one variable so are a union."""
    pieces = [p for p in split(text, r"(?:,|;)\s*(?:and\b|or\b)?|\b(?:and|or)\b") if p.strip()]
    if len(pieces) < 2:
        return None
    parts = tuple(map(_form, pieces))
    interval = all(part.kind == "seq" and part.variable for part in parts)
    return Form(kind="union" if interval else "list", source=text, parts=parts)


def _inequality(text: str) -> Form | None:
    signs = [m.group().strip() for m in _RELATION.finditer(text)]
    sides = [side.strip() for side in split(text, _RELATION.pattern)]
    if len(sides) > 1 and len(signs) == len(sides) - 1:
        return _interval(text, sides, signs) or Form(kind="rel", source=text)
    return None


def _equation(text: str) -> Form | None:
    sides = [side.strip() for side in split(text, "=")]
    if len(sides) > 1 and not all(sides):
        raise Unreadable("an equation without a side")
    right = sides[-1]
    return Form(kind="eq", source=text, left=sides[0], right=right, parts=(_form(right),)) if sides[1:] else None


def _interval(text: str, sides: list[str], signs: list[str]) -> Form | None:
    """An inequality of one variable between numbers, as the interval that it says."""
    if signs[0] in (">", r"\ge"):
        sides, signs = sides[::-1], [{">": "<", r"\ge": r"\le"}.get(s, "?") for s in signs[::-1]]
    if any(s not in ("<", r"\le") for s in signs):
        return None
    name = re.compile(r"[A-Za-z]|\\(?:theta|alpha|beta|lambda|mu)")
    if len(sides) == 2 and name.fullmatch(sides[0]):
        sides, signs = [r"-\infty", *sides], ["<", *signs]
    elif len(sides) == 2 and name.fullmatch(sides[1]):
        sides, signs = [*sides, r"\infty"], [*signs, "<"]
    if len(sides) != 3 or not name.fullmatch(sides[1]):
        return None
    low, high = ("(" if signs[0] == "<" else "["), (")" if signs[1] == "<" else "]")
    return Form(
        kind="seq", source=text, parts=(_form(sides[0]), _form(sides[2])), left=low, right=high, variable=sides[1]
    )


def _bracketed(text: str) -> Form | None:
    """A set, tuple or interval: brackets around all of it."""
    if text == r"\emptyset":
        return Form(kind="set", source=text)
    found = _BRACKETED.fullmatch(text)
    if not found or (found["left"] == r"\{") != (found["right"] == r"\}") or not _whole(found["inner"]):
        return None
    pieces = [p for p in split(found["inner"], "[,;]") if p.strip()]
    if len(pieces) == 1 and found["left"] != r"\{" and (found["left"] == "[" or found["right"] == ")"):
        return _form(found["inner"]) if found["left"] == "(" else None
    kind, parts = "set" if found["left"] == r"\{" else "seq", tuple(map(_form, pieces))
    return Form(kind=kind, source=text, parts=parts, left=found["left"], right=found["right"])


def _scalar(text: str) -> Form:
    """A number or expression with its percent sign, currency or unit; or words."""
    for pattern, unit_of in _DRESS:
        if found := pattern.fullmatch(text):
            inner = _scalar(found[1] + found[2])
            return (
                replace(inner, percent=True) if unit_of == "%" else replace(inner, unit=found.expand(unit_of).lower())
            )
    if number := _number(text):
        return number
    if text.endswith(r"\ldots"):
        raise Unreadable("dots that leave open what follows")
    if (found := _SUFFIX.fullmatch(text)) and found["head"].strip():
        head = _scalar(found["head"]) if found["text"] or exact(found["head"]) is not None else None
        if head is not None and head.kind in ("number", "expr"):
            return _measured(head, text, found)
    if re.fullmatch(r"[A-Za-z]{2,}(?:[ '-][A-Za-z]+)*", text):
        return Form(kind="word", source=text)
    if (found := _BASED.fullmatch(text)) and found[1][0].isdigit():
        return Form(kind="based", source=text, left=found[1].lower(), right=found[2])
    if re.search(r"(?<![\\A-Za-z])[A-Za-z]{3,}", _NO_WORDS.sub("", text)):
        raise Unreadable("words in a formula")
    if re.search(r"(?<![_^{\d])\d+ +\d", text):
        raise Unreadable("two numbers side by side")
    return Form(kind="expr", source=text)


_READERS: tuple[Callable[[str], Form | None], ...] = (
    _worded, _number, _union, _list, _inequality, _equation, _bracketed, _scalar,
)  # fmt: skip
"""Kinds of answers in the order in which they are tried; the first that knows a text decides. `_scalar` takes what is left."""


def _measured(head: Form, text: str, suffix: re.Match[str]) -> Form:
    """A number or expression with the words behind it: a unit, a scale such as `million`, or something else, which makes all of it words."""
    read = unit(suffix["text"] or suffix["words"])
    if read is None or (read[0] > 1 and head.value is None):
        return Form(kind="text", source=_plain(text))
    scale, name = read
    scaled = head if scale == 1 else replace(head, source=text, value=head.value and head.value * scale, decimals=None)
    return replace(scaled, unit=name + (suffix["power"] or "").strip(" ^{}"))


def is_name(text: str) -> bool:
    """True for what stands for a value on the left of `=`: `x`, `f(x)`, `x_1`, `AB`; not for what must be computed."""
    return bool(_NAME.fullmatch(text.strip())) and not re.search(r"\\(?:frac|sqrt|sin|cos|tan|log|ln|pm)", text)


def _plain(text: str) -> str:
    return " ".join(text.casefold().replace(".", "").split())
