"""Graders by name. A wrong answer is 0; a grader that breaks is a failure with a reason (see `grading.py`).

`task`, `exact`, `numeric`, `choice`, `set`, `quantity` and `constraints` run in this process and are bounded in time themselves. `math` and
`translation` run in workers, as does `task` for families that ask for it, `code` and `judge` in the sandbox, `judge_model` behind an
address, `reward_model` on batches, and `mix` combines others.
`register` adds one's own.
"""

from __future__ import annotations

import enum
import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rollkeel import plugins
from rollkeel.errors import BadInput, nearest
from rollkeel.rewards import judge, programs
from rollkeel.rewards.answers import NoAnswer, final_answer
from rollkeel.rewards.choices import settled
from rollkeel.tasks import TASKS, Task, TaskItem, family
from rollkeel.tasks import get as get_task
from rollkeel.tasks.base import excerpt
from rollkeel.tasks.environment import GRADER
from rollkeel.tasks.members import key, members
from rollkeel.types import GraderSpec, Rollout

GraderFn = Callable[[Rollout], float | tuple[float | None, str]]
"""Reward of one complete rollout, or reward and one line of detail. Raising means that the grader failed; a reward of None with a
reason, that the response is undecided and scores 0."""

MAX_NUMBER_CHARS = 256
_SPACE = re.compile(r"[ \t\r\n\f\v]+")
_NUMBER = re.compile(r"[+-]?([0-9]+/[0-9]+|[0-9]+(\.[0-9]+)?|\.[0-9]+)")


def grade_task(rollout: Rollout) -> tuple[float, str]:
    """Options `{task, options, item}` as written by `PromptSource`: exact verification by that task."""
    options = rollout.prompt.grader.options
    task = _task(options["task"], json.dumps(dict(options.get("options", {})), sort_keys=True))
    return task.score(TaskItem.from_json(options["item"]), rollout.text)


def grade_environment(rollout: Rollout) -> tuple[float, str]:
    """The reward that its environment gave while the episode was played."""
    if rollout.reward is None:
        raise ValueError("expected an episode that was played, with its reward; a text alone cannot be graded")
    return rollout.reward, rollout.detail


def grade_exact(rollout: Rollout) -> tuple[float, str]:
    """1 when response and answer are equal after runs of ASCII whitespace become one space and the ends are stripped."""
    gold = _spaces(rollout.prompt.answer)
    if not gold:
        raise ValueError("the gold answer is empty, so that silence would score 1")
    read = _spaces(rollout.text)
    return float(read == gold), excerpt(read)


def grade_numeric(rollout: Rollout) -> tuple[float, str]:
    """1 when the whole stripped response is a number equal to the answer as an exact rational.

    Numbers are ASCII: an optional sign, then an integer, a decimal or a fraction `a/b`; no exponents, separators or units.
    """
    gold = parse_number(rollout.prompt.answer)
    if gold is None:
        raise ValueError(f"the gold answer {excerpt(rollout.prompt.answer)!r} is not a number")
    read = parse_number(rollout.text)
    if read is None:
        return 0.0, f"not a number: {excerpt(rollout.text)}"
    return float(read == gold), str(read)


def parse_number(text: str) -> Fraction | None:
    """Exact value of a text that is a number and nothing else (see `grade_numeric`), else None."""
    text = text.strip(" \t\r\n")
    # The length limit comes first: integers beyond Python's digit limit raise, and long ones are slow.
    if len(text) > MAX_NUMBER_CHARS or not _NUMBER.fullmatch(text):
        return None
    if "/" in text and int(text.split("/")[1]) == 0:
        return None
    return Fraction(text)


def grade_choice(rollout: Rollout) -> tuple[float, str]:
    """1 when the letter that the response settles on is the answer's. Options `{letters: "ABCD", extract: "auto"}`.

    Read is the final answer (see `answers.py`), by the rules of `choices.py`.
    """
    options = _options(rollout, letters="ABCD", extract="auto")
    letters = str(options["letters"]).upper()
    gold = rollout.prompt.answer.strip().strip("().").upper()
    if len(gold) != 1 or gold not in letters:
        raise ValueError(f"the gold answer {excerpt(rollout.prompt.answer)!r} is none of the letters {letters}")
    try:
        read = final_answer(rollout.text, options["extract"])
    except NoAnswer as none:
        return 0.0, str(none)
    letter = settled(read, letters)
    if letter is None:
        return 0.0, f"no letter: {excerpt(read)}"
    return float(letter == gold), letter


def grade_set(rollout: Rollout) -> tuple[float, str]:
    """1 when the final answer names the members of the gold answer, all of them, no other and none twice, in any order. Members are
    words or numbers, see `rollkeel.tasks.members`. Options `{extract: "auto"}`."""
    options = _options(rollout, extract="auto")
    gold = [_member(part) for part in members(rollout.prompt.answer)]
    if not gold or len(set(gold)) < len(gold):
        raise ValueError(f"the gold answer {excerpt(rollout.prompt.answer)!r} is no list without repetition")
    try:
        text = final_answer(rollout.text, options["extract"])
    except NoAnswer as none:
        return 0.0, str(none)
    read = [_member(part) for part in members(text)]
    if not read:
        return 0.0, f"no list: {excerpt(text)}"
    twice = next((member for member in read if read.count(member) > 1), None)
    if twice is not None:
        return 0.0, f"names {excerpt(str(twice))} twice: {excerpt(text)}"
    return float(set(read) == set(gold)), excerpt(text)


def _member(text: str) -> Fraction | str:
    number = parse_number(word := key(text))
    return word if number is None else number


def grade_quantity(rollout: Rollout) -> tuple[float | None, str]:
    """1 when the final answer is the quantity of the gold answer. Options `{relative: null, extract: "auto"}`; `relative` is the
    tolerance of values, see `rollkeel.tasks.quantity`."""
    from rollkeel.tasks.quantity import compare, readings

    options = _options(rollout, relative=None, extract="auto")
    readings(rollout.prompt.answer)  # raises for a gold answer that is no quantity
    try:
        read = final_answer(rollout.text, options["extract"])
    except NoAnswer as none:
        return 0.0, str(none)
    verdict = compare(rollout.prompt.answer, read, relative=options["relative"])
    if verdict.right is None:
        return None, f"{verdict.detail} (read {excerpt(read)!r})"
    return float(verdict.right), verdict.detail


def grade_constraints(rollout: Rollout) -> tuple[float | None, str]:
    """Options `{constraints: [...], score: "all"}`: 1 when all hold, see `rollkeel.tasks.constraints`; with `score: "fraction"`
    the share of those that do."""
    from rollkeel.tasks.constraints import check

    options = _options(rollout, constraints=None, score="all")
    if not options["constraints"] or options["score"] not in ("all", "fraction"):
        raise ValueError("expected at least one constraint, and all or fraction as score")
    found = check(rollout.text, list(options["constraints"]))
    held = [bool(ok) for ok, _ in found]
    unknown = [detail for ok, detail in found if ok is None]
    if unknown and (options["score"] == "fraction" or False not in [ok for ok, _ in found]):
        return None, unknown[0]
    broken = "; ".join(detail for ok, detail in found if not ok)
    reward = float(all(held)) if options["score"] == "all" else sum(held) / len(held)
    return reward, f"{sum(held)} of {len(held)}" + (f"; broken: {excerpt(broken, 200)}" if broken else "")


def grade_judge_model(rollout: Rollout) -> tuple[float, str]:
    """What a language model behind an address thinks of it, see `rollkeel.rewards.judge_model`."""
    from rollkeel.rewards.judge_model import grade

    return grade(rollout)


def grade_row(rollout: Rollout) -> float:
    """Stands for the graders that rows of a file name (`data.grader=row`)."""
    raise ValueError("expected a row that names its grader, see data.grader_options")


class Lane(enum.Enum):
    """Where a grader runs."""

    INLINE = enum.auto()
    WORKER = enum.auto()
    SANDBOX = enum.auto()
    SERVICE = enum.auto()
    MODEL = enum.auto()
    MIX = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A grader and what it needs."""

    lane: Lane
    run: Any = None
    """`GraderFn` of an inline one, `module:function` of one in a worker, a function of `(run, rollout)` of one in the sandbox,
    a function of a rollout, called in a thread, of a service."""
    needs: str = ""
    """Module that must be installed."""
    extra: str = ""
    """What installs it."""
    sound: bool = False
    """What it raises on a response, but not on the gold answer in its place, is the response's doing. Not so of one's own graders."""

    def run_on(self, rollout: Rollout) -> Any:
        """What one in this process makes of a rollout."""
        return self.run(rollout)


_INLINE: dict[str, GraderFn] = {
    "task": grade_task,
    "exact": grade_exact,
    "numeric": grade_numeric,
    "choice": grade_choice,
    "set": grade_set,
    "quantity": grade_quantity,
    "row": grade_row,
    GRADER: grade_environment,
}
_MATH, _TRANSLATION = "rollkeel.rewards.mathematics:grade", "rollkeel.rewards.translation:grade"
_GRADERS: dict[str, Entry] = {name: Entry(lane=Lane.INLINE, run=fn, sound=True) for name, fn in _INLINE.items()} | {
    "math": Entry(lane=Lane.WORKER, run=_MATH, needs="math_verify", extra="math", sound=True),
    "constraints": Entry(lane=Lane.INLINE, run=grade_constraints, needs="langdetect", extra="constraints", sound=True),
    "code": Entry(lane=Lane.SANDBOX, run=programs.grade),
    "judge": Entry(lane=Lane.SANDBOX, run=judge.grade),
    "judge_model": Entry(lane=Lane.SERVICE, run=grade_judge_model),
    "translation": Entry(lane=Lane.WORKER, run=_TRANSLATION, needs="sacrebleu", extra="translation", sound=True),
    "reward_model": Entry(lane=Lane.MODEL),
    "mix": Entry(lane=Lane.MIX),
}
_BUILT_IN = frozenset(_GRADERS)


def register(name: str, fn: GraderFn | str) -> None:
    """Make `fn` the grader `name`: a function of a rollout, called in this process, or `module:function` of `(text, answer, options)`,
    called in a killable worker. Raises `BadInput` for the name of a built-in one; one's own may be replaced."""
    if name in _BUILT_IN:
        raise BadInput(f"grader {name!r}: built in, choose another name")
    path = isinstance(fn, str) and plugins.is_own(fn)
    if not name or not (callable(fn) or path):
        raise BadInput(f"grader {name!r}: expected a name and a function of a rollout or module:function, got {fn!r}")
    _GRADERS[name] = Entry(lane=Lane.WORKER if path else Lane.INLINE, run=fn)


def built_in(name: str) -> bool:
    """True of graders that every process of this version has."""
    return name in _BUILT_IN


def names() -> list[str]:
    """Names of all graders known now."""
    return list(_GRADERS)


def get(name: str) -> Entry:
    """Grader `name`, built in, registered or somebody's own file. Raises `BadInput` naming the nearest, or what must be installed;
    call it before a run to check `data.grader`."""
    if name not in _GRADERS and plugins.is_own(name):
        place = plugins.absolute(name)
        wanted = "a function of (rollout), or of (text, answer, options)"
        fn = plugins.load(place, "grader", wanted, lambda f: plugins.takes(f, 1) or plugins.takes(f, 3))
        inline = plugins.takes(fn, 1)
        _GRADERS[name] = Entry(lane=Lane.INLINE if inline else Lane.WORKER, run=fn if inline else place)
    if name not in _GRADERS:
        raise BadInput(f"grader {name!r}: unknown{nearest(name, names())}; your own is file.py:name")
    entry = _GRADERS[name]
    if entry.needs and importlib.util.find_spec(entry.needs) is None:
        raise BadInput(f"grader {name!r}: needs {entry.needs}; install rollkeel[{entry.extra}]")
    return entry


def entry_of(spec: GraderSpec) -> Entry:
    """Who grades by `spec`: as `get`, and a worker for `task` where the family's verifier is not trusted to return."""
    entry = get(spec.name)
    task = str(spec.options.get("task")) if entry.run is grade_task else ""
    if task not in TASKS and not plugins.is_own(task):
        return entry
    entry, worker = replace(entry, sound=task in TASKS), family(task).worker
    return replace(entry, lane=Lane.WORKER, run=worker) if worker else entry


def _options(rollout: Rollout, **defaults: Any) -> Mapping[str, Any]:
    """The prompt's options over `defaults`. Raises `ValueError` for one that is not among them."""
    given = rollout.prompt.grader.options
    if unknown := sorted(set(given) - set(defaults)):
        raise ValueError(f"unknown option {unknown[0]!r}; known: {', '.join(defaults)}")
    return {**defaults, **given}


def _spaces(text: str) -> str:
    return _SPACE.sub(" ", text).strip(" ")


@lru_cache(maxsize=64)
def _task(name: str, options: str) -> Task[Any]:
    return get_task(name, json.loads(options))
