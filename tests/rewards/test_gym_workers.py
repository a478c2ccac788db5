"""A foreign scorer that hangs or crashes must cost one grading and no run: `gym` is graded in processes that can be killed.

A small library by the name of reasoning-gym stands in for it, on disk, so that real workers import it. Not covered: the real library's
scorers (tests/tasks/test_gym.py), how workers are killed (test_grader_workers.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_graders import rollout

from rollkeel import tasks
from rollkeel.config import GradersConfig
from rollkeel.errors import GraderFailure
from rollkeel.rewards import FailureBudget, Graders, graders
from rollkeel.tasks.base import TaskItem
from rollkeel.types import GraderSpec, Rollout, Status

FACTORY = """
import ctypes, dataclasses, os, sys

@dataclasses.dataclass
class Config:
    seed: int = 0
    size: int = 1
    step: int = 1

class Adder:
    def __init__(self, config):
        self.config = config

    def __getitem__(self, i):
        return {"question": f"{i} + {self.config.step} =", "answer": str(i + self.config.step), "metadata": {}}

    def score_answer(self, said, entry):
        sys.scored = True
        if said and "pytest" in sys.modules:  # or a regression would hang the tests
            raise AssertionError("scored in the process of the run")
        while said == "hang":
            pass
        if said == "exit":
            os._exit(3)
        if said == "crash":
            ctypes.string_at(0)
        if said == "greedy":
            bytearray(4 << 30)
        if said == "raise":
            raise ValueError("no such answer")
        if said == "half":
            return 0.5
        return float(said == entry["answer"])

DATASETS = {"adder": (Adder, Config)}

def create_dataset(name, **options):
    return DATASETS[name][0](Config(**options))
"""
SETTINGS = GradersConfig(deadline_s=1.0)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of the stand-in, found before any real one here and in workers."""
    folder = tmp_path / "reasoning_gym"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "factory.py").write_text(FACTORY)
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "reasoning_gym"}
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "reasoning_gym"]:
        del sys.modules[name]
    sys.modules.update(before)


def asked(texts: list[str], **config: Any) -> tuple[TaskItem, list[Rollout]]:
    """An item of the stand-in, and a rollout for each text."""
    task = tasks.get("gym", {"generator": "adder", "config": config})
    item = task.item(0, "train", 0)
    return item, [rollout(text, item.answer, task.grader(item), id=i) for i, text in enumerate(texts)]


@pytest.mark.usefixtures("library")
def test_what_breaks_the_scorer_costs_its_own_reward_unless_the_gold_answer_breaks_it_too() -> None:
    item, rollouts = asked(["?", "hang", "exit", "crash", "greedy", "raise", "half", ""], step=2)
    rollouts.append(rollout(item.answer, grader=rollouts[0].prompt.grader, id=8))
    rollouts.append(rollout("hang", "raise", grader=rollouts[0].prompt.grader, id=9))
    with Graders(SETTINGS, memory_mb=256, regrade=0.0) as made:
        out = made.grade(rollouts)
        undecided = made.report()[0]["reward/undecided"]
        again = made.grade(rollouts[-2:-1])
    assert [r.reward for r in out] == [0.0] * 8 + [1.0, None]
    assert [r.detail.partition(" (")[0] for r in out[1:6]] == [
        "undecided: grader task: no answer in 1 s",
        "undecided: grader task: worker died by exit code 3",
        "undecided: grader task: worker died by signal 11",
        "undecided: grader task: worker out of memory",
        "undecided: grader task: ValueError: no such answer",
    ]
    assert undecided == 5.0
    assert out[6].detail == "scored 0.5: half"
    assert again[0].reward == 1.0
    assert (out[9].status, out[9].detail) == (Status.GRADER_FAILURE, "grader task: no answer in 1 s")
    assert FailureBudget(0.1).check(out)["failures/grader"] == 1.0
    with pytest.raises(GraderFailure, match="1 of 10 rollouts failed"):
        FailureBudget(0.0).check(out)


@pytest.mark.usefixtures("library")
def test_nothing_is_scored_in_this_process_not_even_as_a_part_of_a_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    item, [plain] = asked(["hang"])
    part = {"grader": "task", "options": dict(plain.prompt.grader.options)}
    mixed = rollout("hang", grader=GraderSpec(name="mix", options={"parts": [part]}))
    right = rollout(item.answer, grader=GraderSpec(name="mix", options={"parts": [part]}))
    monkeypatch.setattr(sys, "scored", False, raising=False)
    with Graders(SETTINGS, memory_mb=256, regrade=0.0) as made:
        made.begin([mixed])
        assert [r.reward for r in made.grade([mixed, right])] == [0.0, 1.0]
    assert not vars(sys)["scored"]


def test_the_deadline_of_a_grading_does_not_pay_for_the_library(library: Path) -> None:
    item, [plain] = asked(["?"])
    (library / "__init__.py").write_text("import time\ntime.sleep(1.5)")
    with Graders(SETTINGS, memory_mb=256, regrade=0.0) as made:
        assert made.grade([rollout(item.answer, grader=plain.prompt.grader)])[0].reward == 1.0


def test_a_worker_without_the_library_names_what_to_install(library: Path) -> None:
    _, rollouts = asked(["1"])
    (library / "factory.py").write_text("raise ImportError('not here')")
    with Graders(SETTINGS, memory_mb=256, regrade=0.0) as made:
        out = made.grade(rollouts)[0]
    assert (out.reward, out.status) == (None, Status.GRADER_FAILURE)
    assert "not here; install it with: pip install 'rollkeel[gym]'" in out.detail


def test_families_of_our_own_stay_in_this_process() -> None:
    lanes = {n: graders.entry_of(GraderSpec(name="task", options={"task": n})).lane for n in tasks.names()}
    assert [name for name, lane in lanes.items() if lane is graders.Lane.WORKER] == ["gym"]
    assert graders.entry_of(GraderSpec(name="task")).lane is graders.Lane.INLINE
