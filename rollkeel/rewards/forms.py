"""What an answer is made of: numbers, expressions, sets, lists, tuples, intervals, equations, words; by rules of its own.

Only single expressions are left to a LaTeX parser: which brackets are open, what is ordered and what a comma means is read here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from rollkeel.rewards.spelling import normalised, unit, worded

Kind = Literal["number", "expr", "text", "word", "set", "list", "seq", "union", "eq", "rel", "based"]
MAX_CHARS, MAX_DEPTH, MAX_POWER = 1000, 30, 5000

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+(?!\d)|\d+)"
_PLAIN = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<int>{_DIGITS})?(?P<dec>\.\d*)?(?:\\overline\{{(?P<rep>\d+)\}})?(?:[eE](?P<exp>[-+]?\d+))?"
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
    r"(?P<head>.*?)\s*(?:\\text\s*\{(?P<text>[^{}]*)\}|(?<![A-Za-z\\])(?P<words>(?:UNITS)(?![A-Za-z])|(?<=\s)[A-Za-z]{4,}(?:[ /][A-Za-z]+)*))(?P<power>\s*\^\s*\{?[23]\}?)?\.?".replace(
        "UNITS", _UNITS
    )
)
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
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
    if (found := _POWER.fullmatch(text)) and len(found["exp"]) < 6:
        text, shift = found["head"], int(found["exp"])
    if found := (_FRACTION.fullmatch(text) or _SLASH.fullmatch(text)):
        a, b = exact(found["a"]), exact(found["b"])
        if a is None or b is None or b[0] == 0 or (found["whole"] and "-" in found["a"] + found["b"]):
            return None
        value, decimals = Fraction(found["whole"] or 0) + a[0] / b[0], None
    elif (found := _PLAIN.fullmatch(text)) and (found["int"] or (found["dec"] or ".") != "." or found["rep"]):
        if (found["rep"] and not found["dec"]) or len(text) > 4000:
            return None
        digits, dec = re.sub("[, ]", "", found["int"] or "0"), (found["dec"] or ".")[1:]
        value, decimals = Fraction(int(digits + dec), 10 ** len(dec)), len(dec) if dec and not found["rep"] else None
        if found["rep"]:
            value += Fraction(int(found["rep"]), (10 ** len(found["rep"]) - 1) * 10 ** len(dec))
        shift += int(found["exp"]) if found["exp"] and len(found["exp"]) < 6 else 0
        if found["exp"] and len(found["exp"]) >= 6:
            return None
    else:
        return None
    if abs(shift) > MAX_POWER:
        return None
    value = value * Fraction(10) ** shift * (-1 if found["sign"] == "-" else 1)
    return value, decimals if decimals is None else max(decimals - shift, 0)


def split(text: str, pattern: str) -> list[str]:
    """Pieces between matches of `pattern` outside of all brackets."""
    out, depth, start, i = [], 0, 0, 0
    compiled = re.compile(pattern)
    while i < len(text):
        found = compiled.match(text, i) if depth == 0 else None
        if found and found.end() > i:
            out.append(text[start : found.start()])
            i = start = found.end()
            continue
        if text[i] == "\\" and i + 1 < len(text):
            depth += {"{": 1, "}": -1}.get(text[i + 1], 0)
            i += 2
            continue
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[i], 0)
        i += 1
    return [*out, text[start:]]


def _check_brackets(text: str) -> None:
    """Braces pair with braces; round and square ones with each other, as in half-open intervals."""
    stack: list[str] = []
    for mark in re.findall(r"\\.|[{}()\[\]]", text):
        mark = {r"\{": "{", r"\}": "}"}.get(mark, mark)
        if mark in ("{", "(", "["):
            stack.append(mark)
        elif mark in ("}", ")", "]") and (not stack or (stack.pop() == "{") != (mark == "}")):
            raise Unreadable("brackets that do not close")
        if len(stack) > MAX_DEPTH:
            raise Unreadable(f"brackets nested deeper than {MAX_DEPTH}")
    if stack:
        raise Unreadable("brackets that do not close")


def _form(text: str) -> Form:
    text = text.strip()
    if not text:
        raise Unreadable("nothing there")
    if text[0] == "{" and text[-1] == "}" and _whole(text[1:-1]):
        return _form(text[1:-1])
    if not re.search(r"[(\[]|\\\{", text):
        text = _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)
    if (value := worded(found[1] if (found := _TEXT.fullmatch(text)) else text)) is not None:
        return Form(kind="number", source=text, value=Fraction(value))
    if found:
        number = _scalar(found[1].strip()) if found[1].strip()[:1].isdigit() else None
        return number if number and number.kind == "number" else Form(kind="text", source=_plain(found[1]))
    if (number := exact(text)) is not None:
        return Form(kind="number", source=text, value=number[0], decimals=number[1])
    text = re.sub(r"^[A-Za-z]\s*\\in\s*(?=[(\[\\])", "", text)
    if len(pieces := split(text, r"\\cup(?![A-Za-z])")) > 1:
        return Form(kind="union", source=text, parts=tuple(map(_form, pieces)))
    if len(pieces := [p for p in split(text, r"(?:,|;)\s*(?:and\b|or\b)?|\b(?:and|or)\b") if p.strip()]) > 1:
        parts = tuple(map(_form, pieces))
        interval = all(part.kind == "seq" and part.variable for part in parts)
        return Form(kind="union" if interval else "list", source=text, parts=parts)
    return _related(text) or _bracketed(text) or _scalar(text)


def _related(text: str) -> Form | None:
    """An inequality or equation."""
    signs = [m.group().strip() for m in _RELATION.finditer(text)]
    sides = [side.strip() for side in split(text, _RELATION.pattern)]
    if len(sides) > 1 and len(signs) == len(sides) - 1:
        return _interval(text, sides, signs) or Form(kind="rel", source=text)
    sides = [side.strip() for side in split(text, "=")]
    if len(sides) > 1:
        if not all(sides):
            raise Unreadable("an equation without a side")
        return Form(kind="eq", source=text, left=sides[0], right=sides[-1], parts=(_form(sides[-1]),))
    return None


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
    for left, rights in ((r"\{", (r"\}",)), ("(", (")", "]")), ("[", (")", "]"))):
        for right in rights:
            inner = text[len(left) : len(text) - len(right)]
            if text.startswith(left) and text.endswith(right) and len(text) >= len(left + right) and _whole(inner):
                pieces = [p for p in split(inner, "[,;]") if p.strip()]
                if left == "(" and right == ")" and len(pieces) == 1:
                    return _form(inner)
                if left == "[" and len(pieces) == 1:
                    return None
                parts = tuple(map(_form, pieces))
                return Form(kind="set" if left == r"\{" else "seq", source=text, parts=parts, left=left, right=right)
    return None


def _whole(inner: str) -> bool:
    """True if no bracket within closes one that stands before."""
    depth = 0
    for mark in re.findall(r"\\.|[{}()\[\]]", inner):
        depth += {"{": 1, "(": 1, "[": 1, r"\{": 1, "}": -1, ")": -1, "]": -1, r"\}": -1}.get(mark, 0)
        if depth < 0:
            return False
    return depth == 0


def _scalar(text: str) -> Form:
    """A number or expression with its percent sign, currency or unit; or words."""
    if found := re.fullmatch(r"([-+]?)\s*[$€£]\s*(.+)", text):
        return replace(_scalar(found[1] + found[2]), unit="dollar" if "$" in text else "currency")
    if found := re.fullmatch(r"(.+?)\s*(?:%|(?:\\text\s*\{)?\s*per ?cent\s*\}?)", text):
        return replace(_scalar(found[1]), percent=True)
    trigonometric = re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text)
    if not trigonometric and (
        found := re.fullmatch(r"(.+?)\s*(?:°\s*([CFK]?)|(?:\\text\s*\{)?\s*degrees?\s*\}?)", text)
    ):
        return replace(_scalar(found[1]), unit="degree" + (found[2] or "").lower())
    if (number := exact(text)) is not None:
        return Form(kind="number", source=text, value=number[0], decimals=number[1])
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
    if re.search(r"(?<![\\A-Za-z])[A-Za-z]{3,}", re.sub(r"\\(?:begin|end|text|overline|vec)\s*\{[^{}]*\}", "", text)):
        raise Unreadable("words in a formula")
    if re.search(r"(?<![_^{\d])\d+ +\d", text):
        raise Unreadable("two numbers side by side")
    return Form(kind="expr", source=text)


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
