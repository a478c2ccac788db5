"""Runs that are told in whole, `full` and the held-out `elsewhere`: a typo in a table costs hours of runs, or counts a fault that is none.

Not covered: what the runs come to (`python -m benchmarks.doctor`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.doctor import silent
from benchmarks.doctor.cases import HEALTHY, TABLES, told_cases
from benchmarks.doctor.full import QUICK
from benchmarks.doctor.weaving import Weaving
from benchmarks.doctor.workloads import OWN_TASKS, today
from rollkeel.loop.check import validate
from rollkeel.recipe import load
from rollkeel.tasks import TASKS, check
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan
from rollkeel_doctor import CAUSES

RNG = np.random.default_rng(0)


def rollout(number: int, text: str) -> Rollout:
    """One token a character and a stop token; a reward of 1."""
    n = len(text) + 1
    span = TokenSpan(
        token_ids=np.array([*map(ord, text), 0]),
        logprobs=-np.ones(n, np.float32),
        kept_mass=np.ones(n, np.float32),
        versions=np.zeros(n, np.int64),
        kv_versions=np.zeros(n, np.int64),
    )
    known: dict[str, Any] = {"id": str(number // 2), "index": number // 2, "text": "?", "task": "", "answer": text}
    prompt = Prompt(**known, token_ids=np.ones(1, np.int64), grader=GraderSpec(name="task"))
    return Rollout(
        id=number,
        group=number // 2,
        member=number % 2,
        prompt=prompt,
        span=span,
        text=text,
        status=Status.FINISHED,
        reward=1.0,
        detail="",
        sampling=SamplingParams(),
        engine="local",
        dtype="fp32",
    )


@pytest.mark.usually("full")
@pytest.mark.parametrize("split", TABLES)
def test_every_run_of_a_table_is_one_that_rollkeel_takes(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, task in OWN_TASKS.items():
        monkeypatch.setitem(TASKS, name, task)
    cases = [*told_cases(split, 1, 2)]
    assert len({case.path(Path()) for case in cases}) == len(cases)
    for case in cases:
        run = TABLES[split][case.kind]
        assert set(run.wanted) <= set(CAUSES)
        validate(load(run.recipe, today([*QUICK, *run.words])))


def test_the_held_out_set_is_large_enough_and_of_its_own_kind() -> None:
    cases = [*told_cases("elsewhere", 1, 2)]
    well = [case for case in cases if case.fault == HEALTHY]
    assert len(well) >= 60
    assert len(cases) - len(well) >= 120
    assert check(Weaving(), 50).passed
    assert Weaving().item(0, "train", 0).answer != Weaving().item(0, "train", 1).answer


def test_silent_faults_change_what_they_say() -> None:
    four = [rollout(i, f"abcd{i}") for i in range(4)]
    twice = silent.doubled(1, four)
    assert [r.id for r in twice] == [0, 1, 2, 3]
    assert [r.text for r in twice] == ["abcd0", "abcd0", "abcd2", "abcd2"]
    short = silent.cut(four[0], RNG, 1.0, 3)
    assert (short.text, len(short.span), short.status, short.reward) == ("abc", 3, Status.FINISHED, 0.0)
    open_ = silent.unended(four[0], RNG)
    assert (open_.text, len(open_.span), open_.reward) == ("abcd0", 5, 1.0)
    nothing = silent.paid(four[0], RNG, 1.0)
    assert (nothing.text, nothing.span.token_ids.tolist(), nothing.reward) == ("", [0], 1.0)
    assert silent.cut(four[0], RNG, 0.0, 3) is four[0]
