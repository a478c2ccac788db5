"""Parse an answer into a `Form`: a number, expression, set, list, tuple, interval, equation or words.

`read` tries the parsers of `_PARSERS` in their order; the first that returns a form decides. A new kind of answer is a parser in that
table, a row of `Form`'s docstring and a branch of `mathematics.same`. Brackets, commas and order are read here; single expressions
are left as text for the LaTeX parser.
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


class Unreadable(Exception):
    """The text is no mathematical answer; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """A parsed answer, or a part of one.

    `number`: `value`, `decimals`. `expr`, `rel` (`x < y`), `text` (`\\text{no solution}`), `word` (`Monday`): `source` alone.
    `set`, `list` (`1, 2`), `union`: `parts`. `eq`: its sides `left` and `right`, and the right one parsed in `parts`.
    `seq`, a tuple or interval: `parts`, its brackets `left` and `right`, `variable` if it was written as an inequality.
    `based` (`1011_2`): digits `left`, base `right`.
    Numbers and expressions also have `percent` and `unit`.
    """

    kind: Kind
    source: str
    """Normalised text."""
    parts: tuple[Form, ...] = ()
    left: str = ""
    right: str = ""
    value: Fraction | None = None
    """Without its percent sign."""
    decimals: int | None = None
    """Places behind the point, of a number that was written with one."""
    percent: bool = False
    unit: str = ""
    variable: str = ""
    commas: bool = False
    """True of a whole answer in which a comma may separate thousands."""


def read(text: str) -> Form:
    """Normalise and parse a whole answer. Raises `Unreadable`."""
    if len(text) > MAX_CHARS:
        raise Unreadable(f"longer than {MAX_CHARS} characters")
    text = normalised(text)
    _check_brackets(text)
    return replace(_parse(text), commas=bool(_THOUSANDS.search(text)))


def _parse(text: str) -> Form:
    text = text.strip()
    if not text:
        raise Unreadable("nothing there")
    if text[0] == "{" and text[-1] == "}" and _balanced(text[1:-1]):
        return _parse(text[1:-1])
    if not re.search(r"[(\[]|\\\{", text):
        text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    text = re.sub(r"^[A-Za-z]\s*\\in\s*(?=[(\[\\])", "", text)
    return _first(_PARSERS, text)


def _first(parsers: tuple[Callable[[str], Form | None], ...], text: str) -> Form:
    return next(form for parser in parsers if (form := parser(text)))


# -- numbers in digits -------------------------------------------------------------------------------------------------

_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_DECIMAL = re.compile(
    r"(?P<sign>[-+]?)\s*(?=\.?\d|\.\\)(?P<whole>\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+(?!\d)|\d+)?"
    r"(?:\.(?P<places>\d*)(?:\\overline\{(?P<repeat>\d+)\})?)?(?:[eE](?P<exponent>[-+]?\d+))?"
)
_POWER = re.compile(r"(?P<head>.+?)\s*(?:\\times|\\cdot)\s*10\s*\^\s*\{?\s*(?P<exponent>[-+]?\d+)\s*\}?")
_FRACTION = re.compile(
    r"(?P<sign>[-+]?)\s*(?:(?P<whole>\d+)\s*)?\\frac\s*\{\s*(?P<over>-?[\d.,]+)\s*\}\s*\{\s*(?P<under>-?[\d.,]+)\s*\}"
)
_SLASH = re.compile(r"(?P<sign>[-+]?)\s*(?:(?P<whole>\d+) +)?(?P<over>[\d.,]+)\s*/\s*(?P<under>-?[\d.,]+)")


def exact(text: str) -> tuple[Fraction, int | None] | None:
    """Value of a number in digits, and its decimal places if it has a point; None for any other text.

    Thousands separators, decimals (with a repeating part), fractions, mixed numbers and powers of ten are read.
    """
    text = text.strip()
    exponent = 0
    places = None
    if match := _POWER.fullmatch(text):
        text, exponent = match["head"], int(match["exponent"])
    if match := _FRACTION.fullmatch(text) or _SLASH.fullmatch(text):
        value = _quotient(match)
    elif match := _DECIMAL.fullmatch(text):
        value, places = _decimal(match)
        exponent += int(match["exponent"] or 0)
    else:
        return None
    if value is None or abs(exponent) > MAX_POWER:
        return None
    value *= Fraction(10) ** exponent * (-1 if match["sign"] == "-" else 1)
    return value, None if places is None else max(places - exponent, 0)


def _quotient(match: re.Match[str]) -> Fraction | None:
    """Value of a fraction or mixed number, without its sign; None for a zero below or a mixed number with a second sign."""
    over, under = exact(match["over"]), exact(match["under"])
    if not over or not under or under[0] == 0 or (match["whole"] and "-" in match["over"] + match["under"]):
        return None
    return Fraction(match["whole"] or 0) + over[0] / under[0]


def _decimal(match: re.Match[str]) -> tuple[Fraction, int | None]:
    """Value without sign and exponent, and decimal places, which a repeating decimal does not have."""
    places, repeat = match["places"] or "", match["repeat"]
    digits = re.sub("[, ]", "", match["whole"] or "0") + places
    value = Fraction(int(digits), 10 ** len(places))
    if repeat:
        return value + Fraction(int(repeat), (10 ** len(repeat) - 1) * 10 ** len(places)), None
    return value, len(places) or None


# -- brackets ----------------------------------------------------------------------------------------------------------

_BRACKET = re.compile(r"\\.|[{}()\[\]]")
_DEPTH = {"{": 1, "(": 1, "[": 1, r"\{": 1, "}": -1, ")": -1, "]": -1, r"\}": -1}


def _check_brackets(text: str) -> None:
    """Braces pair with braces; round and square ones with each other, as in half-open intervals."""
    stack: list[str] = []
    for mark in _BRACKET.findall(text):
        if _DEPTH.get(mark) == 1:
            stack.append(mark[-1])
        elif mark in _DEPTH and (not stack or (stack.pop() == "{") != (mark[-1] == "}")):
            raise Unreadable("brackets that do not close")
        if len(stack) > MAX_DEPTH:
            raise Unreadable(f"brackets nested deeper than {MAX_DEPTH}")
    if stack:
        raise Unreadable("brackets that do not close")


def _balanced(inner: str) -> bool:
    """True if every bracket of `inner` opens and closes within it."""
    depths = [0, *accumulate(_DEPTH.get(mark, 0) for mark in _BRACKET.findall(inner))]
    return min(depths) == depths[-1] == 0


def _split(text: str, separator: str) -> list[str]:
    """Pieces between the matches of `separator` that stand outside of all brackets."""
    pieces = []
    depth = 0
    start = 0
    for match in re.finditer(rf"({separator})|{_BRACKET.pattern}", text):
        if match[1] is None:
            depth += _DEPTH.get(match[0], 0)
        elif depth == 0:
            pieces.append(text[start : match.start()])
            start = match.end()
    return [*pieces, text[start:]]


# -- answers of several parts ------------------------------------------------------------------------------------------

_BRACKETED = re.compile(r"(?P<left>\\\{|[(\[])(?P<inner>.*)(?P<right>\\\}|[)\]])")
_RELATION = re.compile(r"\\(?:le|ge|ne)(?![A-Za-z])|<|>")
_VARIABLE = re.compile(r"[A-Za-z]|\\(?:theta|alpha|beta|lambda|mu)")
_MIRRORED = {">": "<", r"\ge": r"\le"}
_ENDS = {"<": "()", r"\le": "[]"}
"""Brackets of an interval that ends at this sign."""


def _union(text: str) -> Form | None:
    pieces = _split(text, r"\\cup(?![A-Za-z])")
    return Form(kind="union", source=text, parts=tuple(map(_parse, pieces))) if len(pieces) > 1 else None


def _list(text: str) -> Form | None:
    """Values between commas, `and` or `or`; a list of inequalities of one variable is a union of intervals."""
    pieces = [p for p in _split(text, r"(?:,|;)\s*(?:and\b|or\b)?|\b(?:and|or)\b") if p.strip()]
    if len(pieces) < 2:
        return None
    parts = tuple(map(_parse, pieces))
    intervals = all(part.kind == "seq" and part.variable for part in parts)
    return Form(kind="union" if intervals else "list", source=text, parts=parts)


def _inequality(text: str) -> Form | None:
    signs = [match.group().strip() for match in _RELATION.finditer(text)]
    sides = [side.strip() for side in _split(text, _RELATION.pattern)]
    if len(sides) > 1 and len(signs) == len(sides) - 1:
        return _interval(text, sides, signs) or Form(kind="rel", source=text)
    return None


def _interval(text: str, sides: list[str], signs: list[str]) -> Form | None:
    """The interval that `a < x ≤ b`, `x < b` or `a < x` describes; None for other inequalities."""
    if signs[0] in _MIRRORED:
        sides, signs = sides[::-1], [_MIRRORED.get(sign, "") for sign in signs[::-1]]
    if not set(signs) <= _ENDS.keys():
        return None
    if len(sides) == 2 and _VARIABLE.fullmatch(sides[0]):
        sides, signs = [r"-\infty", *sides], ["<", *signs]
    elif len(sides) == 2:
        sides, signs = [*sides, r"\infty"], [*signs, "<"]
    if len(sides) != 3 or not _VARIABLE.fullmatch(sides[1]):
        return None
    low, variable, high = sides
    left, right = _ENDS[signs[0]][0], _ENDS[signs[1]][1]
    return Form(kind="seq", source=text, parts=(_parse(low), _parse(high)), left=left, right=right, variable=variable)


def _equation(text: str) -> Form | None:
    left, *rest = (side.strip() for side in _split(text, "="))
    if not rest:
        return None
    if not left or not all(rest):
        raise Unreadable("an equation without a side")
    return Form(kind="eq", source=text, left=left, right=rest[-1], parts=(_parse(rest[-1]),))


def _bracketed(text: str) -> Form | None:
    """A set, tuple or interval; round brackets around a single value are taken off."""
    if text == r"\emptyset":
        return Form(kind="set", source=text)
    match = _BRACKETED.fullmatch(text)
    if not match or not _balanced(match["inner"]):
        return None
    left, inner, right = match.groups()
    pieces = [piece for piece in _split(inner, "[,;]") if piece.strip()]
    if (left == r"\{") != (right == r"\}") or (len(pieces) == 1 and left == "["):
        return None
    if len(pieces) == 1 and left + right == "()":
        return _parse(inner)
    kind = "set" if left == r"\{" else "seq"
    return Form(kind=kind, source=text, parts=tuple(map(_parse, pieces)), left=left, right=right)


# -- single values -----------------------------------------------------------------------------------------------------

_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_SIGNS = [(re.compile(pattern), unit) for pattern, unit in [
    (r"([-+]?)\s*\$\s*(.+)", "dollar"),
    (r"([-+]?)\s*[€£]\s*(.+)", "currency"),
    (r"()(.+?)\s*(?:%|(?:\\text\s*\{)?\s*per ?cent\s*\}?)", "%"),
    (r"(?!.*\\(?:sin|cos|tan|cot|sec|csc))()(.+?)\s*(?:°\s*([CFK]?)|(?:\\text\s*\{)?\s*degrees?\s*\}?)", r"degree\3"),
]]  # fmt: skip
"""Signs before or behind a number or expression (groups 1 and 2), and the unit each stands for."""
_UNITS = "mm|cm|dm|km|mg|kg|ml|mL|ft|in|yd|mi|lbs?|oz|mins?|secs?|hrs?|ms|mph|Hz|kHz|kW|kJ|m/s|km/h|days?"
"""Abbreviations that are units behind a number; other words need a space before them and four letters."""
_QUANTITY = re.compile(
    r"(?P<head>.*?)\s*(?:\\text\s*\{(?P<text>[^{}]*)\}|(?<![A-Za-z\\])(?P<words>"
    rf"(?:{_UNITS})(?![A-Za-z])|(?<=\s)[A-Za-z]{{4,}}(?:[ /][A-Za-z]+)*))(?P<power>\s*\^\s*\{{?[23]\}}?)?\.?"
)
_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ '-][A-Za-z]+)*")
_BASED = re.compile(r"(\d\w*)_\{?(\d+)\}?")
_COMMANDS = re.compile(r"\\(?:begin|end|text|overline|vec)\s*\{[^{}]*\}")
_NAME = re.compile(r"(?:\\?[A-Za-z]|\\text\{[^{}]*\}|[|'\s]|_\{?(?:\w(?!\{))++\}?|\([A-Za-z, ]*\)|\^\{?-1\}?)+")


def is_name(text: str) -> bool:
    """True for what stands for a value on the left of `=`: `x`, `f(x)`, `x_1`, `AB`; not for what must be computed."""
    return bool(_NAME.fullmatch(text.strip())) and not re.search(r"\\(?:frac|sqrt|sin|cos|tan|log|ln|pm)", text)


def _text(text: str) -> Form | None:
    """A number in words, or `\\text{…}`, which may hold a number with its unit."""
    match = _TEXT.fullmatch(text)
    inner = match[1] if match else text
    if (value := worded(inner)) is not None:
        return Form(kind="number", source=text, value=Fraction(value))
    if match is None:
        return None
    number = _first(_SCALARS, inner.strip()) if inner.strip()[:1].isdigit() else None
    return number if number and number.kind == "number" else Form(kind="text", source=_plain(inner))


def _number(text: str) -> Form | None:
    number = exact(text)
    return number and Form(kind="number", source=text, value=number[0], decimals=number[1])


def _signed(text: str) -> Form | None:
    """A value with a currency, percent or degree sign."""
    for pattern, unit_of in _SIGNS:
        if match := pattern.fullmatch(text):
            value = _first(_SCALARS, match[1] + match[2])
            return (
                replace(value, percent=True) if unit_of == "%" else replace(value, unit=match.expand(unit_of).lower())
            )
    return None


def _quantity(text: str) -> Form | None:
    """A value with words behind it: a unit, a scale such as `million`, or others, which make all of it text."""
    match = _QUANTITY.fullmatch(text)
    if not match or not match["head"].strip() or not (match["text"] or exact(match["head"])):
        return None
    value = _first(_SCALARS, match["head"])
    if value.kind not in ("number", "expr"):
        return None
    scale, name = unit(match["words"] or match["text"]) or (0, "")
    if scale == 0 or (scale > 1 and value.value is None):
        return Form(kind="text", source=_plain(text))
    if scale > 1:
        value = replace(value, source=text, value=value.value and value.value * scale, decimals=None)
    return replace(value, unit=name + (match["power"] or "").strip(" ^{}"))


def _word(text: str) -> Form | None:
    return Form(kind="word", source=text) if _WORDS.fullmatch(text) else None


def _based(text: str) -> Form | None:
    match = _BASED.fullmatch(text)
    return match and Form(kind="based", source=text, left=match[1].lower(), right=match[2])


def _expression(text: str) -> Form:
    """Anything left, for the LaTeX parser, unless it cannot be one expression."""
    if text.endswith(r"\ldots"):
        raise Unreadable("dots that leave open what follows")
    if re.search(r"(?<![\\A-Za-z])[A-Za-z]{3,}", _COMMANDS.sub("", text)):
        raise Unreadable("words in a formula")
    if re.search(r"(?<![_^{\d])\d+ +\d", text):
        raise Unreadable("two numbers side by side")
    return Form(kind="expr", source=text)


def _plain(text: str) -> str:
    return " ".join(text.casefold().replace(".", "").split())


_SCALARS = (_signed, _number, _quantity, _word, _based, _expression)
"""Parsers of a single value in the order they are tried; the last one takes everything or raises."""
_PARSERS = (_text, _number, _union, _list, _inequality, _equation, _bracketed, *_SCALARS)
"""Parsers of a whole answer in the order they are tried. `1,000` is a number and no list, `x < 1, x > 2` a list and no inequality."""
