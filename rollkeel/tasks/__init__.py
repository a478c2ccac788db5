"""Verifiable task families and loaders of prompt/answer data.

`get(name, options)` builds a task, `names()` lists them, `check(task, n)` proves one: gold answers score 1, near misses and
gold answers with junk around them score 0, items are reproducible, splits share nothing. Importing this needs no torch.
"""

from __future__ import annotations

import importlib
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from rollkeel import plugins
from rollkeel.errors import BadInput, nearest
from rollkeel.tasks.base import JUNK, SPLITS, Task, TaskItem, TaskOptions, keyed_rng
from rollkeel.tasks.environment import Environment, EnvironmentOptions, Step

R = TypeVar("R")
WRONG = "???"
"""A response that is plainly wrong; a verifier must have an answer to it."""
Score = Callable[[TaskItem, str], tuple[float, str]]
"""`(item, response)` → reward and detail. Raising means that the grader failed."""

__all__ = [
    "SPLITS",
    "TASKS",
    "CheckReport",
    "Environment",
    "EnvironmentOptions",
    "Score",
    "Step",
    "Task",
    "TaskItem",
    "TaskOptions",
    "check",
    "family",
    "get",
    "is_family",
    "names",
]


class _Families(dict[str, Any]):
    """Classes by name; one that stands here as `module:Class` is imported when it is asked for."""

    def __getitem__(self, name: str) -> type[Task[Any]]:
        kind = super().__getitem__(name)
        if isinstance(kind, str):
            module, _, attribute = kind.partition(":")
            kind = self[name] = getattr(importlib.import_module(f"rollkeel.tasks.{module}"), attribute)
        return kind


TASKS = _Families(
    runsum="runsum:Runsum",
    addition="addition:Addition",
    countdown="countdown:Countdown",
    game24="logic.game24:Game24",
    sudoku="logic.sudoku:Sudoku",
    maze="logic.maze:Maze",
    knights="logic.knights:Knights",
    science="science:Science",
    programs="programs:Programs",
    constraints="constraints.family:Constraints",
    sudoku_turns="environments.sudoku_turns:SudokuTurns",
    terminal="environments.terminal:Terminal",
    repo="environments.repo:Repo",
    prices="environments.tools:Prices",
    gym="gym:Gym",
    gymnasium="environments.gymnasium:Gymnasium",
    verifiers="environments.verifiers:Verifiers",
)
_GYM = "use data.task=gym data.options.generator={} of rollkeel[gym]"
REMOVED = {"algebra": _GYM.format("simple_equations or polynomial_equations"), "patterns": _GYM.format("rearc")}
"""Families there once were, and what to use."""


def names() -> list[str]:
    """Names of all task families, in the order they are documented."""
    return list(TASKS)


def family(name: str) -> type[Task[Any]]:
    """Class of a family: built in, or somebody's own. Raises `BadInput` for an unknown name, naming the nearest."""
    if name not in TASKS:
        if name in REMOVED:
            raise BadInput(f"task {name!r}: removed; {REMOVED[name]}")
        if not plugins.is_own(name):
            raise BadInput(f"task {name!r}: unknown{nearest(name, names())}; your own is file.py:name")
        return plugins.load(
            name,
            "task",
            "a subclass of rollkeel.tasks.Task with all it needs",
            lambda thing: is_family(thing) and not inspect.isabstract(thing),
        )
    return TASKS[name]


def get(name: str, options: Mapping[str, Any] | None = None) -> Task[Any]:
    """Task `name` with difficulty knobs. Raises `BadInput` for an unknown name or option, naming the nearest; and for one of
    somebody's own that cannot draw an item or does not give its own answer 1."""
    if name in TASKS:
        return TASKS[name](options)
    kind = family(name)
    _check_async(name, kind)

    def made() -> Task[Any]:
        task = kind(options)
        task.address = plugins.absolute(name)
        item = task.item(0, "sft", 0)
        if task.item(0, "sft", 0) != item:
            raise BadInput(f"task {name!r}: draw gave two items for one seed; take randomness from its argument alone")
        task.noisy(item, keyed_rng(name), 0.5)
        if getattr(task, "uses_tool", False):
            return task
        if isinstance(task, Environment) and (prompt := task.fresh().reset(item)) != item.text:
            where = plugins.place(task.reset)
            raise BadInput(
                f"task {name!r}: reset returned {prompt!r}, expected the prompt, item.text={item.text!r}{where}"
            )
        reward, detail = task.score(item, task.gold(item))
        if reward != 1.0:
            raise BadInput(f"task {name!r}: its answer to {item.text!r} scores {reward}, expected 1 ({detail})")
        task.score(item, WRONG)
        if (reward := task.score(item, "")[0]) == 1.0:
            where = plugins.place(task.verify)
            raise BadInput(f"task {name!r}: an empty response to {item.text!r} scores {reward:g}, expected less{where}")
        return task

    return plugins.tried(made, f"task {name!r}")


def _check_async(name: str, kind: type[Task[Any]]) -> None:
    for method in vars(Environment) | vars(Task):
        if inspect.iscoroutinefunction(own := getattr(kind, method, None)):
            raise BadInput(f"task {name!r}: expected a plain method, got async {method}{plugins.place(own)}")


def is_family(thing: Any) -> bool:
    """True of classes that are tasks."""
    return isinstance(thing, type) and issubclass(thing, Task)


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Counts and faults of `check`."""

    task: str
    options: str
    items: int
    """Items looked at, over all splits."""
    scored: int
    """Responses scored."""
    distinct: Mapping[str, int]
    """Different problems per split; far below `items / 3` means that the knobs leave few problems."""
    failures: tuple[str, ...]
    """One line each; empty when everything held."""

    @property
    def passed(self) -> bool:
        return not self.failures


def check(
    task: Task[Any],
    n: int = 100,
    seed: int = 0,
    score: Score | None = None,
    *,
    threads: int = 1,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> CheckReport:
    """Prove `task` on `n` items of each split, graded by `score` (default `task.score`); one that raises is a failure.

    `threads`: items whose answers are scored at once, for scores that wait; the report is the same. `progress`: called after
    every item with the split, the items done in it, and `n`.
    Raises `BadInput` when a split has no items at these knobs or n < 1.
    """
    if n < 1:
        raise BadInput(f"tasks check: expected at least 1 item, got {n}")
    failures: list[str] = []
    scored = 0
    problems: dict[str, set[str]] = {}
    twin = type(task)(task.options.model_dump())

    def look(item: TaskItem) -> tuple[list[str], int]:
        return _check_scores(task, item, score or task.score)

    for split in SPLITS:
        problems[split] = set()
        items = (task.item(seed, split, index) for index in range(n))
        for index, (item, (faults, count)) in enumerate(_at_once(look, items, threads)):
            problems[split].add(task.identity(item))
            where = f"{split} item {index} {item.text!r}"
            if twin.item(seed, split, index) != item:
                failures.append(f"{where}: drawn twice, came out different")
            scored += count
            failures += [f"{where}: {fault}" for fault in faults]
            progress(split, index + 1, n)
    for i, a in enumerate(SPLITS):
        for b in SPLITS[i + 1 :]:
            failures += [f"splits {a} and {b} share {p!r}" for p in sorted(problems[a] & problems[b])]
    return CheckReport(
        task=task.name,
        options=task.describe(),
        items=n * len(SPLITS),
        scored=scored,
        distinct={s: len(p) for s, p in problems.items()},
        failures=tuple(failures),
    )


def _at_once(look: Callable[[TaskItem], R], items: Iterable[TaskItem], threads: int) -> Iterator[tuple[TaskItem, R]]:
    """Each item with what `look` says, in order; `threads` are looked at while the caller has the one before."""
    if threads == 1:
        yield from ((item, look(item)) for item in items)
        return
    pool = ThreadPoolExecutor(threads)
    waiting: deque[tuple[TaskItem, Future[R]]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(look, item)))
            if len(waiting) > threads:
                first, future = waiting.popleft()
                yield first, future.result()
        yield from ((item, future.result()) for item, future in waiting)
    finally:
        pool.shutdown(cancel_futures=True)


def _check_scores(task: Task[Any], item: TaskItem, score: Score) -> tuple[list[str], int]:
    """Faults of one item, and the number of responses scored."""
    gold = task.gold(item)
    copied = TaskItem.from_json(item.to_json())
    wrong = ["", *task.near_misses(item), *(gold + junk for junk in task.junk)]
    if task.junk == JUNK:  # the bare answer and nothing else; elsewhere text before the answer may be right
        wrong += ["x" + gold, gold + " " + gold]
    cases = [(item, gold, 1.0, "gold"), (copied, gold, 1.0, "gold after a JSON round trip")]
    cases += [(item, text, 0.0, "") for text in wrong]
    faults = []
    for of, text, expected, what in cases:
        try:
            reward, detail = score(of, text)
        except Exception as error:  # a grader that breaks is what this looks for
            reward, detail = None, f"{type(error).__name__}: {error}"
        if reward != expected:
            faults.append(f"{f'{what} {text!r}'.strip()} scores {reward}, expected {expected:g} ({detail})")
    return faults, len(cases)
