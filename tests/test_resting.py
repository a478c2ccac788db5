"""An engine that gives its device to the trainer must be told to at the one right place of a step: behind the rollouts, before the
first pass of the trainer, with nothing in flight. Elsewhere both are out of memory, or the run waits for ever.

The embedded engine with a `rest` that it otherwise does not have. Not covered: what a server does then (test_same_device.py).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TINY, cli

from rollkeel.engines.local import LocalEngine
from rollkeel.engines.workers import WorkerEngine
from rollkeel.train.trainer import LocalTrainer

TWO = [*TINY, "run.steps=2", "sft.steps=0", "eval.every=1"]
STEP = ["rest", "train", "publish", "sample"]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What engine and trainer did, in order."""
    log: list[str] = []

    def told(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *given: Any, **named: Any) -> Any:
            log.append(name)
            return method(self, *given, **named)

        return call

    def rest(engine: LocalEngine) -> None:
        assert not engine.busy

    monkeypatch.setattr(LocalEngine, "rest", told("rest", rest), raising=False)
    for kind, method, name in (
        (LocalEngine, "submit", "sample"),
        (LocalEngine, "update_weights", "publish"),
        (LocalTrainer, "score", "train"),
        (LocalTrainer, "ref_logprobs", "train"),
        (LocalTrainer, "update", "train"),
    ):
        monkeypatch.setattr(kind, method, told(name, getattr(kind, method)))
    return log


@pytest.mark.parametrize("words", [["run.loop=sync"], ["experiment.lag=1"], ["run.loop=budgeted"]], ids=" ".join)
def test_it_rests_while_weights_are_trained(
    words: list[str], done: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = cli(capsys, "train", "default", *TWO, f"run.dir={tmp_path / 'run'}", *words)
    assert code == 0, error
    assert [name for name, _ in groupby(done)] == ["publish", "sample", *STEP, *STEP]


def test_it_never_rests_while_others_are_sampled(
    done: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerEngine, "rest", lambda engine: done.append("rest"), raising=False)
    words = ["run.loop=async", "engine.processes=1", f"run.dir={tmp_path / 'run'}"]
    code, _, error = cli(capsys, "train", "default", *TWO, *words)
    assert code == 0, error
    assert "train" in done
    assert "rest" not in done
