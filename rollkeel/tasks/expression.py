"""Arithmetic from untrusted text: a grammar small enough to be safe to evaluate, over exact rationals.

    expression := term (("+" | "-") term)*
    term       := factor (("*" | "/") factor)*
    factor     := integer | "(" expression ")"

No unary signs, powers, decimals, names or implied products. `×`, `÷` and `−` are read as `*`, `/` and `-`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

MAX_CHARS = 256
MAX_DEPTH = 16
_TOKEN = re.compile(r"[ \t\r\n]*(?:([1-9][0-9]{0,8}|0)(?![0-9])|([-+*/()]))")
_ALIASES = str.maketrans({"×": "*", "÷": "/", "−": "-"})


class NotArithmetic(ValueError):
    """The text is not in the grammar, too long, too deep, or divides by zero."""


def tokenize(text: str) -> list[int | str]:
    """Integers and operator characters. Raises `NotArithmetic` at the first character outside the grammar."""
    if len(text) > MAX_CHARS:
        raise NotArithmetic(f"longer than {MAX_CHARS} characters")
    text = text.strip(" \t\r\n").translate(_ALIASES)
    tokens: list[int | str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotArithmetic(f"unexpected {text[position]!r} at character {position}")
        tokens.append(int(match[1]) if match[1] is not None else match[2])
        position = match.end()
    return tokens


def evaluate(tokens: Sequence[int | str]) -> Fraction:
    """Exact value. Time and size grow with the number of integers only; callers bound those first."""
    value, end = _sum(tokens, 0, 0)
    if end != len(tokens):
        raise NotArithmetic(f"unexpected {tokens[end]!r} after a complete expression")
    return value


def _sum(tokens: Sequence[int | str], at: int, depth: int) -> tuple[Fraction, int]:
    value, at = _product(tokens, at, depth)
    while at < len(tokens) and tokens[at] in ("+", "-"):
        right, end = _product(tokens, at + 1, depth)
        value = value + right if tokens[at] == "+" else value - right
        at = end
    return value, at


def _product(tokens: Sequence[int | str], at: int, depth: int) -> tuple[Fraction, int]:
    value, at = _factor(tokens, at, depth)
    while at < len(tokens) and tokens[at] in ("*", "/"):
        right, end = _factor(tokens, at + 1, depth)
        if tokens[at] == "/" and right == 0:
            raise NotArithmetic("division by zero")
        value = value * right if tokens[at] == "*" else value / right
        at = end
    return value, at


def _factor(tokens: Sequence[int | str], at: int, depth: int) -> tuple[Fraction, int]:
    if at >= len(tokens):
        raise NotArithmetic("ends where a number is expected")
    token = tokens[at]
    if isinstance(token, int):
        return Fraction(token), at + 1
    if token != "(":
        raise NotArithmetic(f"unexpected {token!r} where a number is expected")
    if depth >= MAX_DEPTH:
        raise NotArithmetic(f"parentheses deeper than {MAX_DEPTH}")
    value, end = _sum(tokens, at + 1, depth + 1)
    if end >= len(tokens) or tokens[end] != ")":
        raise NotArithmetic("a parenthesis is not closed")
    return value, end + 1
