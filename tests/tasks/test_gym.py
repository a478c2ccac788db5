"""A third of reasoning-gym's scorers pay partial credit and several evaluate the response: through the adapter neither may happen.

Covers every generator offered: gold 1, near misses 0, items repeat in another process, responses are never run, refusals by name.
Needs the extra `gym`. Not covered: whether a generator's own scorer knows every right answer.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollkeel import tasks
from rollkeel.errors import BadInput, GraderFailure
from rollkeel.rewards import Graders
from rollkeel.tasks.base import TaskItem
from rollkeel.types import Prompt, Rollout, SamplingParams, Status, TokenSpan

QUICK = ("ab", "basic_arithmetic", "chain_sum", "graph_color", "gsm_symbolic", "modulo_grid", "n_queens", "rubiks_cube")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [m for m in sys.modules if m.split(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(BadInput, match=r"pip install 'rollkeel\[gym\]'") as caught:
        tasks.get("gym")
    assert "\n" not in str(caught.value)


def test_refusals_need_no_library() -> None:
    with pytest.raises(BadInput, match="'game_of_life_halting' its scorer gives 1 to any text"):
        tasks.get("gym", {"generator": "game_of_life_halting"})


pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")

from rollkeel.tasks import gym  # noqa: E402

ALL = gym.generators()


def proven(generator: str, n: int) -> list[str]:
    """Faults of `n` items of the train split."""
    task, twin = (tasks.get("gym", {"generator": generator}) for _ in range(2))
    faults = []
    for i in range(n):
        item = task.item(0, "train", i)
        again = TaskItem.from_json(json.loads(json.dumps(twin.item(0, "train", i).to_json())))
        faults += [f"{i}: another item"] if again != item else []
        faults += [f"{i}: gold {item.answer!r}"] if twin.score(again, item.answer)[0] != 1.0 else []
        faults += [f"{i}: {text!r} is paid" for text in task.near_misses(item) if task.score(item, text)[0] != 0.0]
    return faults


def test_there_are_as_many_generators_as_promised() -> None:
    assert len(ALL) >= 96
    assert not set(ALL) & set(gym.REFUSED)


@pytest.mark.parametrize("generator", QUICK)
def test_quick_generators(generator: str) -> None:
    assert proven(generator, 20) == []
    assert tasks.check(tasks.get("gym", {"generator": generator}), 3).failures == ()


@pytest.mark.slow
@pytest.mark.parametrize("generator", ALL)
def test_every_generator(generator: str) -> None:
    assert proven(generator, 20) == []


@pytest.mark.slow
def test_every_generator_makes_the_same_items_in_another_process() -> None:
    code = (
        "import sys, json\nfrom rollkeel import tasks\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    task = tasks.get('gym', {'generator': name})\n"
        "    print(name, [json.dumps(task.item(3, 'train', i).to_json()) for i in range(3)])"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code, json.dumps(ALL)],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for seed in ("1", "7")
    ]
    assert [a for a, b in zip(*runs, strict=True) if a != b] == []
    assert len(runs[0]) == len(ALL)


def attacked(generator: str, folder: Path) -> list[str]:
    """What a response that writes a file was paid, where it was paid or the file was written."""
    task = tasks.get("gym", {"generator": generator})
    item = task.item(0, "train", 0)
    written = folder / generator
    call = f"__import__('pathlib').Path({str(written)!r}).touch()"
    out = []
    for text in (
        call,
        f"[{call}]",
        f"{item.answer}+{call}",
        f"({call},)",
        "9**9**9**9",
        "((((9**99)**99)**99)**99)**99",
    ):
        try:
            if task.score(item, text)[0] != 0.0 and text != f"{item.answer}+{call}":
                out.append(text)
        except Exception as error:  # a broken grader earns nothing, which is all that is asked here
            out += [text] * isinstance(error, MemoryError | RecursionError)
    return out + ["written"] * written.exists()


@pytest.mark.parametrize("generator", [*gym.ACCEPTED, *QUICK])
def test_responses_are_not_run(generator: str, tmp_path: Path) -> None:
    assert attacked(generator, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("generator", ALL)
def test_responses_are_not_run_by_any(generator: str, tmp_path: Path) -> None:
    assert attacked(generator, tmp_path) == []


def test_partial_credit_is_none() -> None:
    task = tasks.get("gym", {"generator": "gcd"})
    item = task.item(0, "train", 0)
    source, entry = task._entry(item.metadata["number"])  # type: ignore[attr-defined]
    close = f"It is {item.answer}"
    assert 0 < source.score_answer(close, entry) < 1
    assert task.score(item, close)[0] == 0.0


def test_a_broken_scorer_is_a_grader_failure_and_no_zero() -> None:
    task = tasks.get("gym")
    item = task.item(0, "train", 0)
    foreign = TaskItem(
        text="State 1 + 1.", answer="2", metadata=item.metadata
    )  # made by another version of the library
    rollouts = [
        Rollout(
            id=i, group=0, member=i, status=Status.FINISHED, span=TokenSpan.empty(), sampling=SamplingParams(),
            engine="", dtype="", text=item.answer,
            prompt=Prompt(id="", index=0, text="", token_ids=np.ones(1, np.int64), answer="", grader=task.grader(of), task="gym"),
        )
        for i, of in enumerate((item, foreign))
    ]  # fmt: skip
    with Graders() as made:
        right, broken = made.grade(rollouts)
    assert (right.reward, right.status) == (1.0, Status.FINISHED)
    assert (broken.reward, broken.status) == (None, Status.GRADER_FAILURE)
    assert "use the version of reasoning-gym" in broken.detail


@pytest.mark.parametrize("score", [float("nan"), float("inf"), None, "1"])
def test_a_score_that_is_no_number_is_no_zero(score: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tasks.get("gym")
    item = task.item(0, "train", 0)
    source, _ = task._entry(item.metadata["number"])
    monkeypatch.setattr(source, "score_answer", lambda response, entry: score)
    with pytest.raises(GraderFailure, match="expected a finite score from chain_sum"):
        task.verify(item, item.answer)


def test_global_random_states_and_output_stay_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    for generator in ("pool_matrix", "list_functions", "tower_of_hanoi"):
        task = tasks.get("gym", {"generator": generator})
        item = task.item(0, "train", 0)
        task.score(item, item.answer)
        task.score(item, "Move disk 1 from Peg 1 to Peg 99")
    assert (random.random(), np.random.random()) == expected
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generator": "chain_summ"}, "'chain_summ': unknown; did you mean chain_sum"),
        ({"config": {"min_term": 2}}, "chain_sum has no option 'min_term'; did you mean min_terms"),
        ({"config": {"seed": 2}}, "no option 'seed'"),
        ({"config": {"min_terms": -2}}, "chain_sum refuses config {'min_terms': -2}: "),
        *(({"generator": name}, f"generator '{name}' ") for name in gym.REFUSED),
    ],
)
def test_bad_options_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        tasks.get("gym", options)
    assert "\n" not in str(caught.value)


def test_config_changes_the_items() -> None:
    task = tasks.get("gym", {"generator": "chain_sum", "config": {"min_terms": 6, "max_terms": 6}})
    assert all(
        task.item(0, "train", i).text.count(" + ") + task.item(0, "train", i).text.count(" - ") == 5 for i in range(9)
    )
