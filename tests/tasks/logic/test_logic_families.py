"""A puzzle whose gold answer is wrong, whose wrong answer is paid or whose difficulty knob does nothing spoils a run unseen.

Covers what all generated puzzles promise: a thousand items with gold 1 and near misses 0, the same item in every
process, more work for a reference solver at higher knobs. The rules of each family are tested in its own file.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest

from rollkeel import tasks
from rollkeel.errors import BadInput

FAMILIES = ("sudoku", "maze", "game24", "knights")
THOUSAND: list[Any] = [
    *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ("sudoku", "maze", "game24")),
    ("knights", {}),
]
HARDER: list[tuple[str, dict[str, Any], int]] = [
    *((name, {}, 60) for name in ("sudoku", "maze", "game24")),
    ("sudoku", {"holes": 11}, 30),
    ("sudoku", {"side": 9, "holes": 30}, 3),
    ("maze", {"size": 2}, 30),
    ("maze", {"size": 9, "loops": 1.0}, 10),
    ("maze", {"loops": 0.0}, 20),
    ("game24", {"cards": 3, "max_card": 30}, 20),
    ("game24", {"cards": 5, "target": 100}, 3),
    ("knights", {"people": 2, "depth": 2}, 30),
    ("knights", {"people": 8, "depth": 3, "prose": True}, 10),
]
HARDEST: list[tuple[str, dict[str, Any], int]] = [
    ("sudoku", {"side": 9, "holes": 54}, 50),
    ("maze", {"size": 20}, 30),
    ("knights", {"people": 10, "depth": 4}, 100),
]


@pytest.mark.parametrize(("name", "options"), THOUSAND, ids=lambda v: str(v))
def test_a_thousand_items(name: str, options: dict[str, Any]) -> None:
    report = tasks.check(tasks.get(name, options), 334)
    assert report.failures == ()
    assert report.items == 1002
    assert min(report.distinct.values()) > 140  # the 24 game has about 170 solvable hands for the smallest split


@pytest.mark.parametrize(("name", "options", "n"), HARDER, ids=lambda v: str(v))
def test_other_knobs(name: str, options: dict[str, Any], n: int) -> None:
    assert tasks.check(tasks.get(name, options), n, seed=1).failures == ()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "n"), HARDEST, ids=lambda v: str(v))
def test_the_highest_knobs(name: str, options: dict[str, Any], n: int) -> None:
    assert tasks.check(tasks.get(name, options), n, seed=2).failures == ()


def test_items_are_the_same_in_a_fresh_process() -> None:
    code = (
        "from rollkeel import tasks\n"
        f"for name in {FAMILIES}:\n    for i in range(20):\n        print(tasks.get(name).item(5, 'train', i))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "3"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [str(tasks.get(n).item(5, "train", i)) for n in FAMILIES for i in range(20)]


LEVELS: list[tuple[str, dict[str, Any], str, tuple[Any, ...]]] = [
    ("sudoku", {}, "holes", (2, 5, 8, 11)),
    ("maze", {}, "size", (3, 5, 8)),
    ("maze", {"size": 6}, "loops", (0.0, 0.3, 1.0)),
    ("knights", {}, "people", (2, 4, 7)),
    ("knights", {}, "depth", (1, 2, 4)),
]
SLOW_LEVELS: list[tuple[str, dict[str, Any], str, tuple[Any, ...]]] = [
    ("sudoku", {"side": 9}, "holes", (20, 40, 54)),
    # At target 24 five cards have so many solutions that search meets one sooner than with four.
    ("game24", {"target": 100}, "cards", (3, 4, 5)),
    ("game24", {}, "max_card", (5, 13, 25)),
]


@pytest.mark.parametrize(
    ("name", "base", "knob", "levels"),
    [*LEVELS, *(pytest.param(*level, marks=pytest.mark.slow) for level in SLOW_LEVELS)],
    ids=lambda v: str(v),
)
def test_a_reference_solver_works_more_at_every_level(
    name: str, base: dict[str, Any], knob: str, levels: tuple[Any, ...]
) -> None:
    medians = []
    for level in levels:
        task = tasks.get(name, {**base, knob: level})
        medians.append(statistics.median(task.effort(task.item(0, "train", i)) for i in range(200)))
    assert all(a < b for a, b in pairwise(medians)), medians


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sudoku", {"side": 5}, "option side: .*4 or 9, got 5"),
        ("sudoku", {"holes": 12}, "expected holes ≤ 11 at side 4, got 12"),
        ("sudoku", {"side": 9, "holes": 55}, "option holes: .*54, got 55"),
        ("maze", {"loops": 1.5}, "option loops: .*1, got 1.5"),
        ("game24", {"cards": 6}, "option cards: .*5, got 6"),
        ("knights", {"peoples": 3}, "did you mean people"),
    ],
)
def test_bad_knobs_are_one_line(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        tasks.get(name, options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "instead"), [("algebra", "generator=simple_equations"), ("patterns", "generator=rearc")]
)
def test_a_family_that_is_gone_names_what_to_use(name: str, instead: str) -> None:
    with pytest.raises(BadInput, match=f"task '{name}': removed; use data.task=gym .*{instead}"):
        tasks.get(name)
