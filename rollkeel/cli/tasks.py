"""`rollkeel tasks`: families, their items, and the proof that they are sound."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

from rollkeel.errors import BadInput, RollkeelError
from rollkeel.recipe import load

app = typer.Typer(no_args_is_help=True, help="List, show and check the verifiable task families.")


@app.command(name="list")
def list_tasks(
    files: Annotated[list[str] | None, typer.Argument(help="Files with families of your own.")] = None,
) -> None:
    """Names of the task families."""
    from rollkeel import plugins, tasks

    found = {name: tasks.TASKS[name] for name in tasks.names()}
    for file in files or []:
        own = plugins.members(file, "tasks list", tasks.is_family)
        if not own:
            raise BadInput(f"tasks list {file!r}: expected a subclass of rollkeel.tasks.Task, got none")
        found |= {f"{file}:{name}": kind for name, kind in own.items()}
    for name, kind in found.items():
        print(f"{name:12} {kind.summary}")


Options = Annotated[list[str] | None, typer.Argument(metavar="[OPTION=VALUE]...", help="Difficulty knobs.")]


def _task(name: str, options: list[str] | None) -> Any:
    from rollkeel import tasks

    return tasks.get(name, load(None, [f"data.options.{o}" for o in options or []]).data.options)


@app.command()
def show(
    name: str,
    options: Options = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1)] = 5,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    split: str = "train",
) -> None:
    """Knobs and a few items of a task."""
    task = _task(name, options)
    print(f"{name}: {task.summary}\nknobs: {task.describe()}")
    for index in range(count):
        item = task.item(seed, split, index)
        print(f"{index}: {item.text!r} → {task.gold(item)!r}   near miss {task.near_miss(item)!r}")


def _through(graders: Any, task: Any) -> Callable[[Any, str], tuple[float, str]]:
    """A score by the grader that a run would use, which for code is the sandbox."""
    from rollkeel.rewards.trial import rollout_of
    from rollkeel.tasks.source import Problem

    def score(item: Any, response: str) -> tuple[float, str]:
        problem = Problem(text=item.text, answer=item.answer, grader=task.grader(item), metadata=item.metadata)
        graded = graders.grade([rollout_of(task.name, problem, response)])[0]
        if graded.reward is None:
            raise RollkeelError(graded.detail)
        return graded.reward, graded.detail

    return score


_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")


def _shape(failure: str) -> str:
    """What two failures for one reason share: not the numbers and words of an item; of a grader that broke not the answer either."""
    broke = "scores None" in failure
    shaped = _QUOTED.sub(lambda quoted: "" if broke else re.sub(r"\w+", "#", quoted[0]), failure)
    return re.sub(r"^\w+ item|\d+", "#", shaped)


EPISODES = 4
"""Episodes played at once by `tasks check`: one waits for its tool most of the time."""


@app.command()
def check(
    name: str, options: Options = None, count: Annotated[int, typer.Option("--count", "-n", min=1)] = 200
) -> None:
    """Prove that gold answers score 1, near misses 0, items repeat and splits are disjoint."""
    from rollkeel import rewards, tasks
    from rollkeel.record.bars import Bars
    from rollkeel.tasks.environment import Environment

    task = _task(name, options)
    if isinstance(task, Environment):
        from rollkeel.loop.play import equipped

        with equipped(task), Bars() as bars:
            result = tasks.check(task, count, threads=EPISODES if task.uses_tool else 1, progress=bars)
    else:
        with rewards.Graders() as graders, Bars() as bars:
            result = tasks.check(task, count, score=_through(graders, task), progress=bars)
    alike: dict[str, list[str]] = {}
    for failure in result.failures:
        alike.setdefault(_shape(failure), []).append(failure)
    for first, *more in alike.values():
        print(f"FAIL {first}{f' (and {len(more)} more like it)' if more else ''}")
    print(f"{name}: {result.items} items, {result.scored} answers scored, {len(result.failures)} failures")
    if not result.passed:
        raise typer.Exit(1)
