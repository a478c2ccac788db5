"""A step that must not be trained is refused by all ranks, or one waits for the others for ever and weights part.

Real actors on a local Ray. Not covered: every rule (tests/test_fault_patterns.py), GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_kit import TWO, run_of
from tiny_run import assert_same, events, rows

from benchmarks.doctor.alterations import shifted
from rollkeel.errors import StoppedByCheck
from rollkeel.loop import steps
from rollkeel.loop.job import train
from rollkeel.recipe import load


@pytest.mark.slow
def test_ranks_refuse_a_step_together_and_the_run_goes_on_without_the_fault(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, run = steps.learn, tmp_path / "run"

    def learning(run: Any, drawn: Any, clock: Any) -> dict[str, float]:
        if clock.step == 2:
            new = {r.id: shifted(r, 1) for r in drawn.rollouts}
            drawn = replace(drawn, rollouts=list(new.values()), batch=[new[r.id] for r in drawn.batch])
        return inner(run, drawn, clock)

    monkeypatch.setattr(steps, "learn", learning)
    with pytest.raises(StoppedByCheck, match=r"check at step 2: fresh_ratio: .* under weights 2: "):
        run_of(run, *TWO)
    assert [e["check"] for e in events(run) if e["event"] == "check"] == ["fresh_ratio"]
    assert rows(run)[-1]["step"] == 1
    monkeypatch.undo()
    train(load(run / "config.yaml", []), resume=run)
    assert_same(run, whole)
