"""Arithmetic from untrusted text, exact: whole numbers, `+ - * /` (also `× ÷ −`) and brackets; no signs, powers, decimals or names.

This file needs nothing of rollkeel: its source is sent into the sandbox as the judge of `game24`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

MAX_CHARS, MAX_DEPTH = 256, 16
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_FORM = re.compile(r"(?:[ +*/()-]|(?<![0-9])(?:[1-9][0-9]{0,8}|0)(?![0-9]))+")
_ALIASES = str.maketrans("×÷−\t\r\n", "*/-   ")


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Value and the numbers used. Raises `ValueError` for anything but such an expression, and for a division by zero."""
    if len(text) > MAX_CHARS:
        raise ValueError(f"longer than {MAX_CHARS} characters")
    text = text.strip(" \t\r\n").translate(_ALIASES)
    depths = [text[:end].count("(") - text[:end].count(")") for end in range(len(text))]
    if not _FORM.fullmatch(text) or max(depths) > MAX_DEPTH:
        raise ValueError(f"more than numbers, + - * / and brackets {MAX_DEPTH} deep")
    used: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if not (isinstance(node, ast.Constant) and isinstance(node.value, int)):
            raise SyntaxError("a number is missing, or an operator")
        used.append(node.value)
        return Fraction(node.value)

    try:
        return value(ast.parse(text, mode="eval").body), used
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(getattr(error, "msg", None) or "division by zero") from None


def judge(text: str, given: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether an expression of the `numbers` that are `given` is worth `target`; with `use_all` false some may be left out."""
    try:
        worth, used = evaluate(text)
    except ValueError as error:
        return False, f"not an expression: {error}"
    more, left = Counter(used) - Counter(given["numbers"]), Counter(given["numbers"]) - Counter(used)
    if more:
        return False, f"uses {min(more)} more often than it is given"
    if left and given.get("use_all", True):
        return False, f"leaves {min(left)} unused"
    return worth == given["target"], f"is {worth}, asked for is {given['target']}"
