"""The default recipe learns, and the same run with shuffled advantages does not: the gain comes from the rewards.

Minutes long. Not covered: other tasks and models, and how fast it learns on other machines.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import rows

from rollkeel.loop.job import train
from rollkeel.recipe import load

ACCURACY = "eval/runsum/avg@k"

pytestmark = pytest.mark.slow


def accuracies(path: Path, *words: str) -> tuple[float, float]:
    """Held-out sampled accuracy at the start and the end of the default run."""
    train(load("default", [f"run.dir={path}", *words]))
    found = rows(path)
    return found[0][ACCURACY], found[-1][ACCURACY]


def test_default_recipe_lifts_held_out_accuracy(tmp_path: Path) -> None:
    start, end = accuracies(tmp_path / "run")
    print(f"held-out accuracy {start:.3f} → {end:.3f}")
    assert start < 0.5
    assert end >= 0.85


def test_shuffled_advantages_teach_nothing(tmp_path: Path) -> None:
    start, end = accuracies(tmp_path / "run", "experiment.advantages=shuffled")
    print(f"held-out accuracy with shuffled advantages {start:.3f} → {end:.3f}")
    assert end - start < 0.05
