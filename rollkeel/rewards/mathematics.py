"""`math`: is this answer the gold one? Right, wrong, or undecided, which scores 0 and is counted apart.

Runs in a worker: LaTeX parsers and computer algebra hang on what models write. What an answer consists of is read by `forms.py`; single
expressions are compared by math-verify in both directions and at sample points, and where these three disagree the pair is undecided.
The rules are in `docs/rewards.md`. Options: `extract` (see `answers.py`), `percent: true` when answers are percentages, so that the sign
means nothing, and `rounded: true` or `false` to decide about decimals that are the gold value rounded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from rollkeel.rewards.answers import NoAnswer, final_answer, tidy
from rollkeel.rewards.forms import Form, Unreadable, exact, is_name, read
from rollkeel.rewards.symbolic import ROUND, Undecided, equal, expression, verified

_APPROXIMATELY = re.compile(r"\\approx(?![A-Za-z])|≈")


class BadGold(Exception):
    """The gold answer cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Options that decide what is undecided otherwise."""

    percent: bool = False
    rounded: bool | None = None
    digits: int = 3
    """Significant digits below which a decimal is not taken for the rounded gold value."""


def grade(text: str, answer: str, options: Mapping[str, Any]) -> tuple[float | None, str]:
    """1 for the gold answer, 0 for another one or none, None where the rules do not decide; and what was read. Raises `BadGold`."""
    if unknown := sorted(set(options) - {"extract", "percent", "rounded"}):
        raise ValueError(f"unknown option {unknown[0]!r}; known: extract, percent, rounded")
    rules = Rules(percent=bool(options.get("percent", False)), rounded=options.get("rounded"))
    try:
        gold = read(final_answer(answer, "boxed") if "\\boxed" in answer else tidy(answer))
    except (Unreadable, NoAnswer) as error:
        raise BadGold(f"the gold answer {answer[:80]!r} cannot be read: {error}") from None
    try:
        said = final_answer(text, options.get("extract", "auto"))
    except NoAnswer as none:
        return 0.0, str(none)
    shown = said if len(said) <= 80 else said[:79] + "…"
    try:
        exactly, *rounded = (read(part) for part in _APPROXIMATELY.split(said))
        right = same(gold, exactly, rules) and all(same(exactly, r, Rules(rounded=True, digits=1)) for r in rounded)
        return float(right), shown
    except Unreadable as error:
        return 0.0, f"cannot be read ({error}): {shown}"
    except Undecided as error:
        return None, f"{error}; read {shown!r}"


def same(gold: Form, answer: Form, rules: Rules = Rules()) -> bool:
    """Whether two answers are one. Raises `Undecided`, `Unreadable` for the answer and `BadGold`."""
    written = [(form.source, form.percent, form.unit, form.kind) for form in (gold, answer)]
    if written[0] == written[1] or _same(gold, answer, rules):
        return True
    for text, other in ((gold, answer), (answer, gold)):
        if text.kind != other.kind and text.commas:
            raise Undecided("a comma that may separate thousands or numbers")
        pointed = text.source.replace(",", ".")
        if re.fullmatch(r"[-+]?\d+,\d{1,2}", text.source) and exact(pointed) == (other.value, other.decimals):
            raise Undecided("a comma that may be a decimal one")
    return False


def _same(a: Form, b: Form, rules: Rules) -> bool:
    kinds = {a.kind, b.kind}
    if "eq" in kinds or _named(a) or _named(b):
        return _equations(a, b, rules)
    if "rel" in kinds and kinds & {"rel", "seq", "union"} == kinds:
        return _relations(a, b)
    if kinds & {"set", "list", "seq", "union"}:
        return _collections(a, b, rules)
    if "text" in kinds or kinds == {"word"}:
        return _words(a, b)
    if "based" in kinds:
        return _based(a, b)
    if "rel" in kinds:
        return False
    if any(sign in form.source for form in (a, b) for sign in (r"\pm", r"\mp")):
        return _plus_minus(a, b, rules)
    return _scalars(a, b, rules)


def _relations(a: Form, b: Form) -> bool:
    """Inequalities that are no intervals as they stand."""
    if a.kind == b.kind and verified(_parsed(a, True), _parsed(b, False)) == (True, True):
        return True
    raise Undecided("inequalities that are written differently")


def _words(a: Form, b: Form) -> bool:
    x, y = (re.sub(r"(?<=\w{3})s\b", "", " ".join(f.source.casefold().split()).strip("()")) for f in (a, b))
    if x == y:
        return True
    if a.kind == b.kind == "word" and sorted(x) == sorted(y) and len(x) <= 3:
        raise Undecided("letters that may be a product or a name")
    return False


def _based(a: Form, b: Form) -> bool:
    if a.kind != b.kind:
        if a.source == b.left or b.source == a.left:
            raise Undecided("a number with and without its base")
        return False
    try:
        equals = int(a.left, int(a.right)) == int(b.left, int(b.right))
    except ValueError:
        raise Undecided("digits that the base does not have") from None
    if equals and a.right != b.right:
        raise Undecided("one value in two bases")
    return equals


# -- equations ---------------------------------------------------------------------------------------------------------


def _named(form: Form) -> bool:
    """A list of equations, such as `x = 1, y = 2`."""
    return form.kind == "list" and any(part.kind == "eq" for part in form.parts)


def _equations(a: Form, b: Form, rules: Rules) -> bool:
    if _named(a) or _named(b):
        return _lists_of_equations(a, b, rules)
    if a.kind == b.kind:
        if not (is_name(a.left) and is_name(b.left)):
            return _same_curve(a, b)
        right = same(a.parts[0], b.parts[0], rules)
        if right and re.sub(r"\W", "", a.left) != re.sub(r"\W", "", b.left):
            raise Undecided(f"one value under two names, {a.left} and {b.left}")
        return right
    equation, other = (a, b) if a.kind == "eq" else (b, a)
    order = (equation.parts[0], other) if equation is a else (other, equation.parts[0])
    if not is_name(equation.left) and not same(*order, rules):
        return False
    if not is_name(equation.left) and re.search(r"(?<!\\)[a-zA-Z]", re.sub(r"\\[A-Za-z]+", "", equation.left)):
        raise Undecided(f"an equation whose left side {equation.left} is not a name")
    return same(*order, rules)


def _lists_of_equations(a: Form, b: Form, rules: Rules) -> bool:
    values, names = [], []
    for form in (a, b):
        parts = form.parts if form.kind in ("list", "seq", "set") else (form,)
        values.append([part.parts[0] if part.kind == "eq" else part for part in parts])
        names.append([re.sub(r"\W", "", part.left) if part.kind == "eq" else "" for part in parts])
    if len(values[0]) != len(values[1]):
        return False
    named = [{n for n in part if n} for part in names]
    if all(len(n) == len(v) and all(m) for n, v, m in zip(named, values, names, strict=True)):
        if named[0] != named[1]:
            raise Undecided("other names")
        return all(same(v, values[1][names[1].index(n)], rules) for n, v in zip(names[0], values[0], strict=True))
    if all(len(n) <= 1 for n in named):  # x = 1 or x = 2
        return _matched(values[0], values[1], rules)
    if all(same(x, y, rules) for x, y in zip(*values, strict=True)):
        raise Undecided("values with and without names")
    return False


def _same_curve(a: Form, b: Form) -> bool:
    """Equations of polynomials have the same complex solutions if these have the same factors."""
    import sympy

    sides = []
    for form, gold in ((a, True), (b, False)):
        left, right = (_expression(text, gold) for text in (form.left, form.right))
        sides.append(sympy.expand(left - right))
    symbols = sorted(sides[0].free_symbols | sides[1].free_symbols, key=str)
    if not symbols or not all(side.is_polynomial(*symbols) for side in sides):
        raise Undecided("equations that are written differently")
    x, y = (sympy.Poly(side, *symbols).sqf_part().monic() for side in sides)
    return bool(x == y)


# -- sets, lists, tuples, intervals ------------------------------------------------------------------------------------


def _collections(a: Form, b: Form, rules: Rules) -> bool:
    kinds = {a.kind, b.kind}
    if kinds <= {"seq", "union"} and ("union" in kinds or a.variable or b.variable):
        return _intervals(a, b, rules)
    if kinds == {"seq"}:
        if len(a.parts) != len(b.parts) or not all(same(x, y, rules) for x, y in zip(a.parts, b.parts, strict=True)):
            return False
        if (a.left, a.right) != (b.left, b.right) and len(a.parts) != 2:
            raise Undecided("other brackets")
        return (a.left, a.right) == (b.left, b.right)
    if kinds <= {"set", "list"}:
        if not _matched(a.parts, b.parts, rules):
            return False
        if len(a.parts) != len(b.parts) and kinds != {"set"}:
            raise Undecided("one value more than once")
        return True
    if kinds <= {"set", "list", "seq"}:
        if len(a.parts) != len(b.parts) or not _matched(a.parts, b.parts, rules):
            return False
        seq = a if a.kind == "seq" else b
        if "set" not in kinds and seq.left == "(" and seq.right == ")":
            pairs = [_decided(x, y, rules) for x, y in zip(a.parts, b.parts, strict=True)]
            if all(pairs):
                return True
        raise Undecided("the same values in other brackets")
    for many, one, gold_first in ((a, b, True), (b, a, False)):
        if many.kind == "set" and len(many.parts) == 1 and one.kind in ("number", "expr"):
            return same(many.parts[0], one, rules) if gold_first else same(one, many.parts[0], rules)
    if any(r"\pm" in form.source for form in (a, b)):
        return _plus_minus(a, b, rules)
    return False


def _decided(a: Form, b: Form, rules: Rules) -> bool | None:
    try:
        return same(a, b, rules)
    except Undecided:
        return None


def _matched(a: Sequence[Form], b: Sequence[Form], rules: Rules) -> bool:
    """Every value of each is among the other's. Raises `Undecided` where it turns on a pair that is."""
    table = [[_decided(x, y, rules) for y in b] for x in a]
    rows = [*table, *zip(*table, strict=True)] if table and b else [[False]] * (len(a) + len(b))
    if all(True in row for row in rows):
        return True
    if all(True in row or None in row for row in rows):
        raise Undecided("a value that may be among the others")
    return False


def _intervals(a: Form, b: Form, rules: Rules) -> bool:
    if a.variable and b.variable and a.variable != b.variable:
        raise Undecided("inequalities of different variables")
    sets = [_real_set(form) for form in (a, b)]
    if None not in sets:
        return bool(sets[0] == sets[1])
    pieces = [form.parts if form.kind == "union" else (form,) for form in (a, b)]
    marks = [sorted((p.left, p.right) for p in some) for some in pieces]
    plain = [[replace(p, kind="seq", variable="", unit="", percent=False) for p in some] for some in pieces]
    if len(plain[0]) == len(plain[1]) and _matched(plain[0], plain[1], rules):
        return True
    if len(plain[0]) == len(plain[1]) == 1 and (marks[0] == marks[1] or a.variable == b.variable):
        return False
    raise Undecided("unions of intervals that are written differently")


def _real_set(form: Form) -> Any:
    """A sympy set of intervals between rational numbers or infinities and of single numbers; None for anything else."""
    import sympy

    if form.kind == "union":
        parts = [_real_set(part) for part in form.parts]
        return None if None in parts else sympy.Union(*parts)
    ends = []
    for part in form.parts:
        if infinite := re.fullmatch(r"([-+]?)\s*\\infty", part.source):
            ends.append(-sympy.oo if infinite[1] == "-" else sympy.oo)
        elif part.value is not None:
            ends.append(sympy.Rational(part.value.numerator, part.value.denominator))
        else:
            return None
    if form.kind == "seq" and len(ends) == 2:
        return sympy.Interval(ends[0], ends[1], form.left == "(", form.right == ")")
    return sympy.FiniteSet(*ends) if form.kind == "set" else None


def _plus_minus(a: Form, b: Form, rules: Rules) -> bool:
    """`a ± b` is the two values a + b and a − b."""

    def values(form: Form) -> list[Form]:
        if form.kind in ("set", "list"):
            return [value for part in form.parts for value in values(part)]
        if r"\mp" in form.source or form.source.count(r"\pm") > 1:
            raise Undecided("several signs ±")
        if r"\pm" not in form.source:
            return [form]
        return [read(form.source.replace(r"\pm", sign).lstrip("+ ")) for sign in "+-"]

    return _matched(values(a), values(b), rules)


# -- single values -----------------------------------------------------------------------------------------------------


def _scalars(a: Form, b: Form, rules: Rules) -> bool:
    if a.unit and b.unit and a.unit != b.unit:
        raise Undecided(f"units {a.unit} and {b.unit}; the grader quantity converts")
    if rules.percent or a.percent == b.percent:
        return _values(a, b, rules)
    plain, hundredth = (_values(a, b, rules), _values(a, b, rules, percent=True))
    if a.percent or hundredth:
        return plain or hundredth
    if plain:
        raise Undecided("a percent sign that the gold answer does not have")
    return False


def _values(a: Form, b: Form, rules: Rules, *, percent: bool = False) -> bool:
    """Whether the values are equal; with `percent`, after what has the sign was divided by 100."""
    x, y = (None if f.value is None else f.value / (100 if percent and f.percent else 1) for f in (a, b))
    gap: Fraction | float | None = None
    if x is not None and y is not None:
        gap = abs(x - y)
        alike = not gap
    else:
        if found := _letter(a, b):
            raise Undecided(f"{found} may be a unit or a factor")
        u, v = (_parsed(f, g) / (100 if percent and f.percent else 1) for f, g in ((a, True), (b, False)))
        alike = equal(u, v)
        if not alike and a.source.casefold() == b.source.casefold():
            raise Undecided("capital and small letters")
        first, second = (re.sub(r"\\log(?![A-Za-z]|\s*_)", r"\\ln", form.source) for form in (a, b))
        changed = (first, second) != (a.source, b.source)
        if not alike and changed and equal(_expression(first, True), _expression(second, False)):
            raise Undecided("a logarithm without its base")
        if not alike and {a.unit, b.unit} == {"degree", ""} and r"\pi" in (b if a.unit else a).source:
            raise Undecided("degrees and radians")
        if not alike and (x is not None or y is not None) and not getattr(u - v, "free_symbols", True):
            gap = abs(complex((u - v).evalf(ROUND)))
    if alike or gap is None or not (_near(a, x, gap, rules) or _near(b, y, gap, rules)):
        return alike
    if rules.rounded is None:
        raise Undecided("a decimal that is the other value rounded; see the option rounded")
    return rules.rounded


def _near(form: Form, value: Fraction | None, gap: Fraction | float, rules: Rules) -> bool:
    """True if `form` is a decimal with enough digits, and its distance `gap` from the other value is what rounding leaves."""
    if form.decimals is None or value is None:
        return False
    places = form.decimals + (2 if form.percent and form.value != value else 0)
    digits = len(str(abs(value) * 10**places))
    return digits >= rules.digits and gap * 2 * 10**places <= 1


def _letter(a: Form, b: Form) -> str:
    """A letter that follows one number where the other answer is that number alone."""
    for x, y in ((a, b), (b, a)):
        found = re.fullmatch(r"(.+?) ?([A-DF-HJ-Za-df-hj-z])", x.source)
        number = exact(found[1]) if found and y.value is not None else None
        if found and number and (y.unit or number[0] == y.value):
            return found[2]
    return ""


def _parsed(form: Form, gold: bool) -> Any:
    import sympy

    if form.value is not None:
        return sympy.Rational(form.value.numerator, form.value.denominator)
    return _expression(form.source, gold)


def _expression(text: str, gold: bool) -> Any:
    found = expression(text)
    if found is None:
        if gold:
            raise BadGold(f"the gold answer's {text[:80]!r} cannot be read")
        raise Unreadable("no mathematics")
    return found
