"""Small repositories with a bug in them, drawn at random: what is there, what mends it, and tests that tell."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MODULES = ("calc", "core", "data", "lists", "maths", "stats", "tools", "util", "work", "nums", "base", "kit")
PARAMETERS = ("bc", "mn", "pq", "xy")
TESTS = 6
"""Hidden tests of a function."""
LEVELS = "1 a wrong operator, 2 off by one, 3 a wrong constant, 4 in another file than the one tested, 5 in two files"
# Function: its expression in numbers A, B and the list X, and the expressions that a bug makes of it.
OPERATORS: Mapping[str, tuple[str, ...]] = {
    "add": ("A + B", "A - B", "A * B"),
    "sub": ("A - B", "A + B", "A * B"),
    "mul": ("A * B", "A + B", "A - B"),
    "div": ("A // B", "A % B", "A * B"),
    "mod": ("A % B", "A // B", "A + B"),
    "less": ("A < B", "A > B", "A == B"),
    "more": ("A > B", "A < B", "A == B"),
    "same": ("A == B", "A < B", "A > B"),
}
BY_ONE: Mapping[str, tuple[str, ...]] = {
    "first": ("X[0]", "X[1]"),
    "last": ("X[-1]", "X[-2]"),
    "rest": ("X[1:]", "X[2:]", "X[0:]"),
    "most": ("X[:-1]", "X[:-2]"),
    "count": ("len(X)", "len(X) - 1", "len(X) + 1"),
    "upto": ("list(range(A))", "list(range(A + 1))", "list(range(A - 1))"),
    "next": ("A + 1", "A + 2", "A + 0"),
    "prev": ("A - 1", "A - 2", "A - 0"),
}
CONSTANTS: Mapping[str, tuple[str, ...]] = {
    "double": ("A * 2", "A * 3", "A * 4"),
    "triple": ("A * 3", "A * 2", "A * 4"),
    "half": ("A // 2", "A // 3", "A // 4"),
    "tenfold": ("A * 10", "A * 11", "A * 12"),
    "dozen": ("A * 12", "A * 10", "A * 11"),
    "even": ("A % 2 == 0", "A % 2 == 1", "A % 3 == 0"),
    "square": ("A ** 2", "A ** 3", "A ** 4"),
    "digit": ("A % 10", "A % 9", "A % 8"),
}
KINDS = (OPERATORS, BY_ONE, CONSTANTS)


@dataclass(frozen=True)
class Edit:
    """A line of a file in the place of another, without its indentation."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"edit {self.path} {self.line} {self.text}"


@dataclass(frozen=True, kw_only=True)
class Repository:
    files: Mapping[str, str]
    gold: Sequence[Edit]
    wrong: Edit
    """Another bug in the place of the last one."""
    tests: str
    """Hidden ones, as a file."""
    failing: Sequence[str]
    """Names of those that the bug breaks."""
    passing: Sequence[str]


class _Function:
    """One function, with its right expression and wrong ones."""

    def __init__(self, rng: random.Random, name: str, forms: Sequence[str]) -> None:
        self.name = name
        a, b = rng.sample(rng.choice(PARAMETERS), 2)
        letters = {"A": a, "B": b, "X": a + "s"}
        self.parameters = [letters[c] for c in "ABX" if re.search(rf"\b{c}\b", forms[0])]
        self.right, *others = [re.sub(r"\b[ABX]\b", lambda m: letters[m[0]], form) for form in forms]
        self.wrong = rng.sample(others, len(others))

    def source(self, expression: str) -> str:
        return f"def {self.name}({', '.join(self.parameters)}):\n    return {expression}\n"

    def draw(self, rng: random.Random) -> list[Any]:
        out = list[Any]()
        for name in self.parameters:
            if len(name) == 2:
                out.append([rng.randint(1, 9) for _ in range(rng.randint(3, 5))])
            else:
                out.append(rng.randint(2, 9))
        return out


def draw(rng: random.Random, level: int, functions: int) -> Repository:
    """One of that level, with so many functions in a file."""
    table: dict[str, tuple[str, ...]] = {}
    for kind in KINDS if level > 3 else KINDS[level - 1 : level]:
        table |= kind
    module, user = rng.sample(MODULES, 2)
    made = [_Function(rng, name, table[name]) for name in rng.sample(sorted(table), functions)]
    broken = rng.choice(made)
    parts = [f.source(f.wrong[0] if f is broken else f.right) for f in made]
    files = {f"{module}.py": "\n".join(parts)}
    line = 3 * made.index(broken) + 2
    gold = [Edit(f"{module}.py", line, f"return {broken.right}")]
    other = f"return {broken.wrong[-1]}" if len(broken.wrong) > 1 else "return None"
    if level > 3:
        parameters = ", ".join(broken.parameters)
        call = f"{broken.name}({parameters})"
        right = f"[{call}, {call}]"
        head = f"from {module} import {broken.name}\n\ndef pair({parameters}):\n    return "
        there = right if level == 4 else f"[{call}]"
        files[f"{user}.py"] = f"{head}{there}\n"
        if level > 4:
            gold.insert(0, Edit(f"{user}.py", 4, f"return {right}"))
    whole = _joined(edited(files, gold))
    return _tested(rng, made, broken, files, gold, Edit(f"{module}.py", line, other), whole)


def _tested(
    rng: random.Random,
    made: Sequence[_Function],
    broken: _Function,
    files: Mapping[str, str],
    gold: Sequence[Edit],
    wrong: Edit,
    whole: str,
) -> Repository:
    """With hidden tests of every function, and one that fails in a file that all may read."""
    module, *users = [path.removesuffix(".py") for path in files]
    sources = [_joined(files), _joined(edited(files, [wrong])), _joined(edited(files, [*gold[:-1], wrong]))]
    lines = list[str]()
    failing = list[str]()
    passing = list[str]()
    shown = ""
    called = [(f, f.name, module) for f in made] + [(broken, "pair", user) for user in users]
    for function, name, home in called:
        lines.append(f"from {home} import {name}")
        asked = [function.draw(rng) for _ in range(TESTS)]
        for source in sources if function is broken else []:
            while not any(_differs(whole, source, name, arguments) for arguments in asked):
                asked.append(function.draw(rng))
        for number, arguments in enumerate(asked):
            value = _value(whole, name, arguments)
            check = f"assert {name}({', '.join(map(repr, arguments))}) == {value!r}"
            lines.append(f"def test_{name}_{number}():\n    {check}")
            breaks = _differs(whole, sources[0], name, arguments)
            (failing if breaks else passing).append(f"test_{name}_{number}")
            if breaks and home == [module, *users][-1]:
                shown = f"from {home} import {name}\n{check}\n"
    return Repository(
        files={**files, f"test_{[module, *users][-1]}.py": shown},
        gold=gold,
        wrong=wrong,
        tests="\n".join(lines) + "\n",
        failing=failing,
        passing=passing,
    )


def edited(files: Mapping[str, str], edits: Sequence[Edit]) -> dict[str, str]:
    """The files after the edits."""
    out = dict(files)
    for edit in edits:
        lines = out[edit.path].split("\n")
        old = lines[edit.line - 1]
        lines[edit.line - 1] = old[: len(old) - len(old.lstrip())] + edit.text
        out[edit.path] = "\n".join(lines)
    return out


def _joined(files: Mapping[str, str]) -> str:
    return re.sub("^from .*\n", "", "\n".join(files.values()), flags=re.MULTILINE)


def _value(source: str, name: str, arguments: Sequence[Any]) -> Any:
    names: dict[str, Any] = {}
    exec(source, names)  # made here, of the tables above
    return names[name](*arguments)


def _differs(right: str, other: str, name: str, arguments: Sequence[Any]) -> bool:
    return _value(right, name, arguments) != _value(other, name, arguments)
