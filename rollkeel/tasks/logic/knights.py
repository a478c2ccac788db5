"""Knights and Knaves: who tells the truth? `A:(B&!A);B:K1:` → `NK`. One answer, proven by enumeration.

A statement is a person (`B`: B is a knight), `!` not (of a person), `(x&y)` and, `(x|y)` or, `(x=y)` if and only if, `(x>y)` implies, or a
count of all knights: `K2` exactly two, `K2+` at least two, `K2-` at most two. Knights say what is true, knaves what is false.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any, final

from pydantic import Field

from rollkeel.tasks.base import ASCII_SPACE, Task, TaskItem, TaskOptions, excerpt

PEOPLE = "ABCDEFGHIJ"
CONNECTIVES = {"&": "and", "|": "or", "=": "if and only if", ">": "implies that"}
COUNTS = {"": "exactly", "+": "at least", "-": "at most"}
Formula = Any
"""JSON lists: `["is", person]`, `["!", ["is", person]]`, `["&" | "|" | "=" | ">", f, g]`, `["K", n, "" | "+" | "-"]`."""


class KnightsOptions(TaskOptions):
    people: int = Field(3, ge=2, le=10, description="how many people there are, each with one statement")
    depth: int = Field(1, ge=1, le=4, description="connectives on the longest way into a statement")
    prose: bool = Field(False, description="English sentences instead of symbols")


@final
class Knights(Task[KnightsOptions]):
    """The answer has one letter per person in order, K knight or N knave; it is checked against every statement."""

    summary = "Knights and Knaves: who tells the truth"

    def draw(self, rng: random.Random) -> TaskItem:
        n, depth = self.options.people, self.options.depth
        while True:
            truth = rng.randrange(2**n)
            statements = []
            for person in range(n):
                statement = _formula(n, depth, rng)
                while _table(statement, n) >> truth & 1 != truth >> person & 1:
                    statement = _formula(n, depth, rng)
                statements.append(statement)
            if _worlds(statements) == 1 << truth:
                break
        text = (_prose if self.options.prose else _symbols)(statements)
        answer = "".join("NK"[truth >> person & 1] for person in range(n))
        return TaskItem(text=text, answer=answer, metadata={"statements": statements})

    def identity(self, item: TaskItem) -> str:
        """Prose and symbols of the same statements are one problem."""
        return _symbols(item.metadata["statements"])

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        read, statements = response.strip(ASCII_SPACE), item.metadata["statements"]
        if len(read) != len(statements) or set(read) - set("KN"):
            return 0.0, f"not {len(statements)} letters K or N: {excerpt(read)}"
        world = sum(1 << person for person, letter in enumerate(read) if letter == "K")
        for person, statement in enumerate(statements):
            if _table(statement, len(statements)) >> world & 1 != world >> person & 1:
                return 0.0, f"{PEOPLE[person]} could not say that: {excerpt(read)}"
        return 1.0, excerpt(read)

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        gold = item.answer
        other = gold.translate(str.maketrans("KN", "NK"))
        flips = [gold[:i] + other[i] + gold[i + 1 :] for i in range(len(gold))]
        swaps = [gold[:i] + gold[i + 1] + gold[i] + gold[i + 2 :] for i in range(len(gold) - 1)]
        return *flips, *(s for s in swaps if s != gold), other, gold[:-1], gold.lower(), ",".join(gold)

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """Each person is taken for the other kind with probability `label_noise`."""
        return "".join("KN"[letter == "K"] if rng.random() < label_noise else letter for letter in item.answer)

    def effort(self, item: TaskItem) -> float:
        """Parts of statements looked at by a truth table: every world, statement by statement until one fails."""
        statements, looked = item.metadata["statements"], 0
        for person, statement in enumerate(statements):
            looked += _worlds(statements[:person], len(statements)).bit_count() * _parts(statement)
        return float(looked)


def _worlds(statements: Sequence[Formula], people: int | None = None) -> int:
    """Bit w is set when all `statements` fit world w, in which person p is a knight if bit p of w is set."""
    n = people or len(statements)
    worlds = (1 << 2**n) - 1
    for person, statement in enumerate(statements):
        worlds &= ~(_table(statement, n) ^ _knight(person, n))
    return worlds


def _table(f: Formula, n: int) -> int:
    """Truth table of a formula over `n` people: bit w is its value in world w."""
    every = (1 << 2**n) - 1
    if f[0] == "is":
        return _knight(f[1], n)
    if f[0] == "K":
        return _count(f[1], f[2], n)
    left = _table(f[1], n)
    if f[0] == "!":
        return every ^ left
    right = _table(f[2], n)
    return {"&": left & right, "|": left | right, "=": every ^ left ^ right, ">": (every ^ left) | right}[f[0]]


@cache
def _knight(person: int, n: int) -> int:
    return sum(1 << world for world in range(2**n) if world >> person & 1)


@cache
def _count(number: int, how: str, n: int) -> int:
    fits = {"": int.__eq__, "+": int.__ge__, "-": int.__le__}[how]
    return sum(1 << world for world in range(2**n) if fits(world.bit_count(), number))


def _formula(n: int, depth: int, rng: random.Random) -> Formula:
    """A formula of exactly `depth` connectives along its longest way; `!` before a leaf costs none."""
    if depth == 0:
        leaf = ["is", rng.randrange(n)]
        return ["!", leaf] if rng.random() < 0.4 else leaf
    if depth == 1 and rng.random() < 0.2:
        how = rng.choice(list(COUNTS))
        return ["K", rng.randint({"": 0, "+": 1, "-": 0}[how], {"": n, "+": n, "-": n - 1}[how]), how]
    sides = [_formula(n, depth - 1, rng), _formula(n, rng.randrange(depth), rng)]
    while _table(sides[0], n) in (_table(sides[1], n), _table(["!", sides[1]], n)):  # (B&B) says no more than B
        sides[1] = _formula(n, rng.randrange(depth), rng)
    rng.shuffle(sides)
    return [rng.choice(list(CONNECTIVES)), *sides]


def _parts(f: Formula) -> int:
    return 1 + sum(_parts(part) for part in f[1:] if isinstance(part, list))


def _symbols(statements: Sequence[Formula]) -> str:
    def write(f: Formula) -> str:
        if f[0] in ("is", "K"):
            return PEOPLE[f[1]] if f[0] == "is" else f"K{f[1]}{f[2]}"
        return "!" + write(f[1]) if f[0] == "!" else f"({write(f[1])}{f[0]}{write(f[2])})"

    return ";".join(f"{PEOPLE[i]}:{write(s)}" for i, s in enumerate(statements)) + ":"


def _prose(statements: Sequence[Formula]) -> str:
    def write(f: Formula) -> str:
        if f[0] == "K":
            return f"{COUNTS[f[2]]} {f[1]} of us {'is a knight' if f[1] == 1 else 'are knights'}"
        if f[0] == "is" or (f[0] == "!" and f[1][0] == "is"):
            return f"{PEOPLE[f[1] if f[0] == 'is' else f[1][1]]} is a {'knight' if f[0] == 'is' else 'knave'}"
        first, second = (f"({write(g)})" if g[0] in CONNECTIVES else write(g) for g in f[1:])
        return f"{first} {CONNECTIVES[f[0]]} {second}"

    names = PEOPLE[: len(statements)]
    said = " ".join(f"{name} says: {write(s)}." for name, s in zip(names, statements, strict=True))
    return (
        f"Each of {', '.join(names)} is a knight, who says only what is true, or a knave, who says only what is false. {said} "
        f"Who is what? Answer with {len(names)} letters in the order {names}, K for a knight and N for a knave:"
    )
