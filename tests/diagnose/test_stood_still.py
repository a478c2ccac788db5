"""Where batches wait for their turn no weights that sampled a token are kept, and an engine that stood still looks like one whose
tokens are old. The trainer's own log-probs of the version that the tokens state tell the two apart.

Not covered: how far an engine has to be behind; `benchmarks/doctor` has several.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import TINY

from benchmarks.doctor import patches as broken
from benchmarks.doctor.workloads import run_once
from rollkeel.diagnose.recompute import refine, stood_still
from rollkeel.recipe import load
from rollkeel_doctor import Diagnosis

LATE = ["run.steps=16", "experiment.lag=2", "eval.every=0", "rollout.prompts=16", "checkpoint.every=15"]


@pytest.mark.usually("2")
@pytest.mark.parametrize("arrives", [2, 99])
def test_an_engine_that_stood_still_among_batches_that_wait(arrives: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_once(load(None, [*TINY, *LATE]), run, [lambda: broken.updates_dropped(lambda n: n < arrives)])
    cause = stood_still(run)
    if arrives == 99:
        assert cause is None
        return
    assert cause is not None
    assert cause.id == "stale_version"
    assert "which the first step does not show" in cause.evidence
    clean = Diagnosis(source="rollkeel run", path=str(run), tokens=1, sequences=1, steps=1, causes=[])
    assert refine(clean, run).causes == [cause]
