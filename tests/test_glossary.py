"""A number without a meaning is noise: every metric that a run writes stands in the glossary.

Runs the three loops with what adds metrics of its own. Not covered: inference servers' `sync/probe_*`, reward models.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_run import TINY, cli, rows

from rollkeel.record.glossary import GLOSSARY, meaning, page

LOOPS = {
    "sync": (
        "reward.overlong.buffer=2",
        "rollout.zero_variance=3",
        "objective={name: ac_mis_po}",
        "train.kl_in=reward",
    ),
    "budgeted": ("run.loop=budgeted", "rollout.budget.tokens=40", "rollout.budget.capacity=40", "engine.dtype=fp8"),
    "async": (
        "run.loop=async",
        "engine.processes=1",
        "rollout.overlap.max_staleness=2",
        "objective.phi={drop_rate: 0.01}",
    ),
}


@pytest.mark.parametrize("words", LOOPS.values(), ids=LOOPS)
def test_every_metric_of_a_run_is_explained(
    words: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = cli(capsys, "train", "default", *TINY, "run.steps=3", *words, f"run.dir={tmp_path / 'run'}")
    assert (code, err) == (0, "")
    keys = {key for row in rows(tmp_path / "run", volatile=True) for key in row}
    assert len(keys) > 100
    assert [key for key in sorted(keys) if not meaning(key)] == []


def test_the_page_is_printed_from_the_table() -> None:
    path = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
    assert path.read_text(encoding="utf-8") == page(), "python -m rollkeel.record.glossary > docs/metrics.md"


def test_a_metric_is_explained_once() -> None:
    root = Path(__file__).resolve().parent.parent
    files = [*root.glob("rollkeel/**/*.py"), *(f for f in root.glob("docs/*.md") if f.name != "metrics.md")]
    rows = [(f.name, row) for f in files for row in re.findall(r"^\| `([^`]+)`", f.read_text(encoding="utf-8"), re.M)]
    assert len(files) > 200
    assert [(name, key) for name, key in rows if "/" in key and meaning(key)] == []


def test_names_and_patterns() -> None:
    assert meaning("mask/kpop/dropped").startswith("Tokens that the mask drops.")
    assert meaning("mask/kpop/dropped_low").startswith("Tokens dropped by one threshold")
    assert meaning("mask/kpop/phi").startswith("Current value")
    assert meaning("mismatch/equal_version/kl") == meaning("mismatch/kl") != meaning("mismatch/kl_k3")
    assert meaning("controller/bound") == meaning("controller/x/bound") != ""
    assert meaning("nobody/knows") == ""
    assert len({name for name, _, _ in GLOSSARY}) == len(GLOSSARY)
    assert all(said.endswith(".") and unit for _, unit, said in GLOSSARY)
