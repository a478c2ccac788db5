"""More tests for a programming problem, from solutions that are known to be right (`rollkeel data tests`).

Inputs are made from those that are there: by type, at the edges, larger and smaller. One is kept if every verified solution takes it
and all agree; with one solution there is nothing to agree with, and only what it fails on is left out. An input outside of the problem's
statement that all solutions take alike is kept too: nothing here reads statements. `select` scores tests by the wrong programs that
they fail and keeps a few.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollkeel.errors import BadInput
from rollkeel.rewards.programs import Answer, CodeProblem, Example, answers, equal, judge

if TYPE_CHECKING:
    from rollkeel.rewards.sandboxed import Run

EDGES: tuple[int, ...] = (0, 1, -1, 2, 10, 100, 10**3, 10**5, 2**31 - 1, 2**31, 2**63)
ROUNDS = 40
"""Drafts for each input that is asked for, after which no more different ones are expected."""


@dataclass(frozen=True, kw_only=True)
class Synthesis:
    """What came of it."""

    problem: CodeProblem
    """The given one with the new tests behind its own."""
    added: int
    discarded: tuple[tuple[Any, str], ...]
    """Input and why it was not kept."""


def synthesize(
    run: Run, problem: CodeProblem, solutions: Sequence[str], *, count: int = 20, seed: int = 0
) -> Synthesis:
    """Up to `count` more tests. `run`: of a sandbox, as `sandbox.run`. `solutions`: programs that are right.

    Raises `BadInput` when a solution fails a test that is there, `Broken` and what `run` raises when the sandbox fails.
    """
    if not solutions:
        raise BadInput("synthesis: expected at least one verified solution, got none")
    for number, program in enumerate(solutions, 1):
        reward, why = judge(run, problem, program)
        if not reward:
            raise BadInput(f"synthesis: solution {number} is to be right, but {why}")
    drafts = list(_drafts([t.input for t in problem.tests], count, random.Random(seed)))
    columns = [_all_answers(run, problem, program, drafts) for program in solutions]
    kept: list[Example] = []
    discarded: list[tuple[Any, str]] = []
    for draft, *row in zip(drafts, *columns, strict=True):
        output = row[0].value.decode("utf-8", "replace") if isinstance(row[0].value, bytes) else row[0].value
        faults = [f"solution {i}: {answer.fault}" for i, answer in enumerate(row, 1) if answer.fault]
        faults = faults or [
            f"solutions 1 and {i} disagree" for i, a in enumerate(row, 1) if not equal(problem, a.value, output)
        ]
        if faults:
            discarded.append((draft, faults[0]))
        else:
            kept.append(Example(input=draft, output=output))
    after = problem.model_copy(update={"tests": (*problem.tests, *kept)})
    return Synthesis(problem=after, added=len(kept), discarded=tuple(discarded))


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What came of it."""

    problem: CodeProblem
    wrong: int
    failed_before: int
    """Wrong programs that fail a test of those that were there."""
    failed: int
    """Of those that are kept."""


def select(run: Run, problem: CodeProblem, own: int, wrong: Sequence[str], keep: int) -> Selection:
    """The first `own` tests and at most `keep` others: those that wrong programs fail, each first that fails most of those left.

    Raises like `synthesize`.
    """
    fails = [_failed(run, problem, program) for program in wrong]
    left = [failed for failed in fails if min(failed, default=own) >= own]
    before, chosen = len(fails) - len(left), list[int]()
    places = range(own, len(problem.tests))
    while left and len(chosen) < keep:
        best = max(places, key=lambda i: sum(i in failed for failed in left), default=own)
        spared = [failed for failed in left if best not in failed]
        if len(spared) == len(left):
            break
        chosen, left = [*chosen, best], spared
    others = [i for i in places if i not in chosen and any(i in failed for failed in fails)]
    others.sort(key=lambda i: -sum(i in failed for failed in fails))
    kept = [*range(own), *sorted([*chosen, *others[: keep - len(chosen)]])]
    after = problem.model_copy(update={"tests": tuple(problem.tests[i] for i in kept)})
    return Selection(problem=after, wrong=len(wrong), failed_before=before, failed=len(fails) - len(left))


def _failed(run: Run, problem: CodeProblem, program: str) -> set[int]:
    """Tests that a program fails, up to the first that it has no answer to: one that hangs hangs once."""
    out = set[int]()
    for i, answer in enumerate(answers(run, problem, program, [t.input for t in problem.tests])):
        if answer.fault or not equal(problem, answer.value, problem.tests[i].output):
            out.add(i)
        if answer.fault:
            break
    return out


def _all_answers(run: Run, problem: CodeProblem, program: str, inputs: Sequence[Any]) -> list[Answer]:
    """One answer for each input: what comes behind an input that ended the program is run again without it."""
    out: list[Answer] = []
    while len(out) < len(inputs):
        out += answers(run, problem, program, inputs[len(out) :])
    return out


def _drafts(inputs: Sequence[Any], count: int, rng: random.Random) -> Iterator[Any]:
    """Different inputs that are not there yet."""
    seen = {json.dumps(given, sort_keys=True) for given in inputs}
    for _ in range(count * ROUNDS):
        draft = rng.choice(inputs)
        for _ in range(rng.choice((1, 1, 2, 3))):
            draft = _text(draft, rng) if isinstance(draft, str) else _changed(draft, rng)
        if (key := json.dumps(draft, sort_keys=True)) not in seen:
            seen.add(key)
            yield draft
            if (count := count - 1) == 0:
                return


def _changed(value: Any, rng: random.Random) -> Any:
    """A JSON value of the same type and shape, with one change."""
    kind = next((kind for kind in _CHANGES if isinstance(value, kind)), None)
    return _CHANGES[kind](value, rng) if kind and value not in ([], {}) else value


def _list(values: list[Any], rng: random.Random) -> list[Any]:
    """A list is an argument list or data: mostly one entry changes, sometimes the list itself where all entries are alike."""
    i, n = rng.randrange(len(values)), len(values)
    alike = n > 1 and len({type(v) for v in values}) == 1 and not isinstance(values[0], list | Mapping)
    how: list[Callable[[], list[Any]]] = [lambda: [*values[:i], _changed(values[i], rng), *values[i + 1 :]]]
    if alike:
        how += [
            *how,
            lambda: [-v if type(v) in (int, float) else _changed(v, rng) for v in values],
            lambda: values[:i] + values[i + 1 :],
            lambda: [*values, values[i]],
            lambda: rng.choice((sorted(values), sorted(values, reverse=True), values[::-1], rng.sample(values, n))),
            list,
            lambda: [_changed(v, rng) if rng.random() < 0.3 else v for v in values * 8],
        ]
    return rng.choice(how)()


def _mapping(value: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    key = rng.choice(sorted(value))
    return {**value, key: _changed(value[key], rng)}


def _letters(text: str, rng: random.Random) -> str:
    i = rng.randrange(len(text) + 1)
    more = text[:i] + rng.choice("aZ0 ") + text[i:]
    return rng.choice((text[:i] + text[i + 1 :], text + text, text[::-1], "", text.swapcase(), more))


_CHANGES: dict[type, Callable[[Any, random.Random], Any]] = {
    bool: lambda v, rng: not v,
    int: lambda v, rng: rng.choice((v + 1, v - 1, -v, 2 * v, v // 2, rng.randint(-100, 100), rng.choice(EDGES))),
    float: lambda v, rng: rng.choice((v + 0.5, -v, v / 2, 0.0, 1e-9, 1e9, round(rng.uniform(-100, 100), 3))),
    str: _letters,
    list: _list,
    dict: _mapping,
}


def _text(text: str, rng: random.Random) -> str:
    """Standard input with one word changed, and the count before a line of words kept true where it was."""
    lines = text.split("\n")
    places = [(i, m.span()) for i, line in enumerate(lines) for m in re.finditer(r"\S+", line)]
    if not places:
        return _letters(text, rng)
    i, (start, end) = rng.choice(places)
    word, words = lines[i][start:end], lines[i].split()
    number = re.compile(r"-?\d+")
    counted = i > 0 and lines[i - 1].strip() == str(len(words)) and all(map(number.fullmatch, words))
    if counted and rng.random() < 0.5:
        others = list(map(str, _list(list(map(int, words)), rng)))
        return "\n".join([*lines[: i - 1], str(len(others)), " ".join(others), *lines[i + 1 :]])
    new = str(_changed(int(word), rng)) if number.fullmatch(word) else _letters(word, rng).replace("\n", "") or word
    return "\n".join([*lines[:i], lines[i][:start] + new + lines[i][end:], *lines[i + 1 :]])
