"""A few gradings before anything is trained: of gold answers, of a wrong response and of an empty one.

Own graders and own data are tried; tests prove the built-in families. Three faults stop a run here and not at its first step, after
the warm start: a grader that breaks, gold answers that earn nothing, rewards that do not tell right from wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rollkeel import plugins
from rollkeel.config import GradersConfig
from rollkeel.errors import BadInput, GraderFailure
from rollkeel.rewards import graders
from rollkeel.rewards.grading import Graders
from rollkeel.tasks import TASKS, WRONG
from rollkeel.tasks.base import content_hash, excerpt
from rollkeel.tasks.environment import GRADER
from rollkeel.tasks.source import FileProblems, Problem, Problems
from rollkeel.types import Prompt, Rollout, SamplingParams, Status, TokenSpan

PROBLEMS = 4
"""Most that are tried; one whose gold answer earns something is enough."""


def rollout_of(task: str, problem: Problem, response: str, sampling: SamplingParams | None = None) -> Rollout:
    """A response as a rollout that nobody sampled: its tokens are its characters and a stop token."""
    ids = np.array([*map(ord, response), 0], np.int64)
    zeros, ones = np.zeros(len(ids), np.float32), np.ones(len(ids), np.float32)
    versions = np.zeros(len(ids), np.int64)
    text: Mapping[str, Any] = {
        "text": problem.text,
        "answer": problem.answer,
        "metadata": {"split": "train", **problem.metadata},
    }
    return Rollout(
        id=0,
        group=0,
        member=0,
        prompt=Prompt(
            id=content_hash(task, problem.text, problem.answer),
            index=0,
            token_ids=np.array([*map(ord, problem.text)], np.int64),
            grader=problem.grader,
            task=task,
            **text,
        ),
        span=TokenSpan(token_ids=ids, logprobs=zeros, kept_mass=ones, versions=versions, kv_versions=versions),
        status=Status.FINISHED,
        sampling=sampling or SamplingParams(),
        engine="trial",
        dtype="text",
        text=response,
    )


def trial(problems: Problems, settings: GradersConfig, sampling: SamplingParams, *, warm_start: bool) -> str:
    """What is odd about the rewards of `problems`, or nothing. Reward models are not asked: their scale is their own.

    Raises `BadInput` for a grader that breaks, and for gold answers that all earn 0 where a `warm_start` would teach them.
    """
    spec = problems.problem(0).grader
    if spec.name == GRADER or (spec.name == "task" and spec.options.get("task") in TASKS):
        return ""
    models = list[str]()

    def unasked(path: str) -> Any:
        models.append(path)
        return _Zeros()

    with Graders(settings, load_model=unasked) as grader:

        def graded(problem: Problem, response: str) -> tuple[float, str]:
            try:
                done = grader.grade([rollout_of(problems.name, problem, response, sampling)])[0]
            except GraderFailure as error:  # no result in time
                raise BadInput(f"{error}, {_on(problem, response)}") from None
            if done.reward is None:
                raise BadInput(f"{done.detail}, {_on(problem, response)}")
            return done.reward, done.detail

        problem, response, gold, tried = _gold(problems, graded)
        wrong, empty = graded(problem, WRONG)[0], graded(problem, "")[0]
    if models or gold is None or gold[0] > max(wrong, empty):
        return ""
    place = plugins.place(spec.name) if plugins.is_own(spec.name) else ""
    why = f" ({gold[1]})" if gold[1] else ""
    about = f"grader {plugins.short(spec.name)}{place}: a gold answer earns {gold[0]:g}{why}, {_on(problem, response)}"
    if gold[0] == 0 and warm_start:
        raise BadInput(
            f"{about}, and so does that of each of {tried} problems tried; the warm start would teach it: mend the grader,"
            " name whole responses by data.solution_column, or set sft.steps=0"
        )
    return f"{about}; {f'{WRONG!r} {wrong:g}' if wrong >= gold[0] else f'an empty response {empty:g}'}"


class _Zeros:
    def score(self, texts: list[str]) -> list[float]:
        return [0.0] * len(texts)


def _gold(
    problems: Problems, graded: Callable[[Problem, str], tuple[float, str]]
) -> tuple[Problem, str, tuple[float, str] | None, int]:
    """The first problem whose gold answer earns something, else the last tried; that answer, what it earns, and how many were tried.

    A gold answer that a sound grader cannot read is its row's fault, and a few such rows may be: another is tried.
    """
    earned = None
    response = ""
    failed = None
    problem, tried = problems.problem(0), 0
    for index in range(min(PROBLEMS, problems.size or PROBLEMS)):
        if isinstance(problems, FileProblems) and not problems.problem(index).answer:
            continue  # a program without a reference solution
        problem = problems.problem(index)
        response = problems.response(index, 0.0)
        tried = tried + 1
        try:
            earned = graded(problem, response)
        except BadInput as error:
            if not graders.entry_of(problem.grader).sound:
                raise
            failed = error
            continue
        if earned[0] > 0:
            break
    if failed is not None and earned is None:
        raise failed
    return problem, response, earned, tried


def _on(problem: Problem, response: str) -> str:
    row = f" (row {problem.metadata['row']})" if "row" in problem.metadata else ""
    return f"on the response {excerpt(response, 40)!r} to {excerpt(problem.text, 40)!r}{row}"
