"""Ctrl-C in the middle of an experiment costs a checkpoint's worth of work and no more: real processes, real training runs.

Not covered: kills in every stage of a single run, which `test_resume.py` tries.
"""

from __future__ import annotations

import fcntl
import multiprocessing.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import tiny_lab
from tiny_lab import TRAINED
from tiny_run import DEADLINE_S, events, rows, weights

from rollkeel.errors import Interrupted
from rollkeel.lab.command import run_preset
from rollkeel.lab.runs import _make, execute, plan

HERE = Path(__file__).resolve()


def lab(cache: Path, *words: str | Path) -> subprocess.Popen[str]:
    """`rollkeel lab WORDS` with the tests' presets, in a process of its own, as a terminal would start it."""
    path = os.pathsep.join(str(p) for p in (HERE.parent, HERE.parent.parent, HERE.parent.parent.parent))
    return subprocess.Popen(
        [sys.executable, str(HERE.with_name("tiny_lab.py")), "lab", *map(str, words)],
        env={**os.environ, "ROLLKEEL_CACHE": str(cache), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_until(true: Callable[[], bool], process: subprocess.Popen[str], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not true():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, f"{what}: not within {DEADLINE_S} s"
        time.sleep(0.001)


def stop(process: subprocess.Popen[str], number: int) -> None:
    """Send the signal and check what a shell sees. A terminal sends Ctrl-C to the whole group, `kill` to one process."""
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    assert err.splitlines()[-1].startswith("rollkeel: stopped;")
    assert "Traceback" not in out + err


@pytest.mark.slow
def test_an_interrupted_experiment_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, out = tmp_path / "cache", tmp_path / "out"
    monkeypatch.setenv("ROLLKEEL_CACHE", str(cache))
    (run,) = plan(TRAINED, [0], cache / "lab")
    saved = run.folder / "checkpoints"
    process = lab(cache, "trained", "--jobs", "1", "--out", out)
    try:
        wait_until(lambda: any(saved.glob("step_*")), process, "a checkpoint")
        stop(process, signal.SIGINT)
    finally:
        process.kill()
    assert not (out / "lab.json").exists()
    assert not run.done
    assert any(saved.glob("step_*"))

    run_preset(TRAINED, out=out, jobs=1)
    assert any(event["event"] == "resumed" for event in events(run.folder))
    (whole,) = plan(TRAINED, [0], tmp_path / "whole")
    whole.folder.parent.mkdir()
    assert _make(whole) == "done"
    assert rows(run.folder) == rows(whole.folder)
    assert weights(run.folder) == weights(whole.folder)


@pytest.mark.usually("running-term")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
@pytest.mark.parametrize("early", [True, False], ids=["starting", "running"])
def test_a_signal_ends_the_workers_too_and_says_one_line(
    number: int, early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tiny_lab.HEARD, str(tmp_path / "heard"))
    process = lab(tmp_path / "cache", "hanging", "--jobs", "2", "--seeds", "1", "--out", tmp_path)
    store = tmp_path / "cache" / "lab"
    low, high = plan(tiny_lab.measured("hanging", more="hang"), [0], store)
    lock = high.folder.with_suffix(".lock")
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: bool(children.read_text()) if early else low.done and lock.exists(), process, "the workers")
        stop(process, number)
    finally:
        process.kill()
    assert not high.done
    if lock.exists():
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody is left who holds it


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def test_a_signal_between_the_start_of_a_worker_and_its_first_words_leaves_nothing_behind(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The worker's process exists, and waits to be told what it is for."""
    real = multiprocessing.util.spawnv_passfds
    started: list[int] = []

    def interrupted(*args: Any) -> int:
        started.append(real(*args))
        os.kill(os.getpid(), number)
        return started[-1]

    resource_tracker.ensure_running()
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", interrupted)
    monkeypatch.setenv(tiny_lab.HEARD, str(tmp_path / "heard"))
    runs = plan(tiny_lab.measured("hanging", less="hang"), [0], tmp_path)
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Interrupted, match="2 runs are missing"):
        execute(runs, 2, lambda run, said: None)
    assert len(started) == 1
    assert not Path(f"/proc/{started[0]}").exists()
    assert capfd.readouterr() == ("", "")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
