"""Every program under `benchmarks/` runs, at toy size: a number that nobody can make again is worth nothing.

Not covered: what the numbers are, TRL's side of the comparison (an environment of its own), and `benchmarks/doctor`, whose parts
tests/doctor/test_fault_corpus.py runs, and `benchmarks/gpu`, whose stages tests/test_gpu_suite.py runs.
"""

from __future__ import annotations

import importlib
import io
import os
import pkgutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_run import TINY

import benchmarks
from benchmarks.browser import find
from rollkeel.engines.open import open_engine
from rollkeel.lab.claims import over_last
from rollkeel.lab.preset import Arm, Finding, Preset

TOY = ["--model", "tiny", "--median", "2", "--prompts", "2", "--steps", "1", "--warmup", "1", "--rounds", "1"]
SHORT = ["--set", *TINY, "sft.steps=5"]
MACHINE = ["--peer-python", sys.executable, "--cores", *map(str, os.sched_getaffinity(0))]
PROGRAMS: dict[str, tuple[list[str], str]] = {
    "board": (
        ["--runs", "3", "--steps", "20", "--tokens", "20000", "--turns", "2", "--rounds", "1"],
        "to other hosts: none",
    ),
    "c3po": ([*TOY, "--slots", "8"], "rollout speed-up"),
    "cluster": (
        ["--model", "tiny", "--steps", "1", "--warmup", "1", "--prompts", "2", "--tokens", "4"],
        "bytes through the controller",
    ),
    "data": (["--rows", "500"], "near duplicate"),
    "deltas": (["--elements", "20000", "--rounds", "1"], "10 steps 1e-06 bfloat16"),
    "engines": (["--concurrent", "2", "--tokens", "2", "--rounds", "1"], "| 2 |"),
    "engine_kills": (["--minutes", "0.5", "--window", "15", "--every", "7"], "kills"),
    "goodput": (["--steps", "6", "--every", "1000", "--save", "5"], "goodput measured"),
    "group_transport": (["--mb", "64", "--rounds", "1", "--buffer-mb", "8"], "carried"),
    "healthy": (["--only", "toy", "--seeds", "1", "--steps", "1"], "toy                seed 0"),
    "in_flight": (["--layers", "1", "--width", "64", "--rounds", "1", "--slots", "2", "--steps", "2"], "actor"),
    "lab": (["--only", "toy", "--seeds", "1", "--out", "{folder}/lab"], "### `toy`"),
    "objectives": (["--tokens", "256", "--repeats", "1", "--steps", "1", "--only", "kpop"], "kpop"),
    "overlap": ([*TOY, "--rounds", "0", "--workload", "tail"], "tail"),
    "parity": (["dense", "--steps", "2", *SHORT], "with parity"),
    "publication": (["--layers", "1", "--width", "64", "--rounds", "1"], "int4"),
    "residency": (["--model", "tiny", "--steps", "2", "--prompts", "4", "--tokens", "4"], "same bits: True"),
    "routing": (["--steps", "2", "--every", "1", "--rounds", "2", *SHORT], "over the run"),
    "sandbox": (["--count", "2", "--jobs", "10"], "held after 10 jobs"),
    "sandbox_front": (["--requests", "400"], "load before"),
    "sandbox_service": (["--count", "2", "--jobs", "8"], "HTTP"),
    "served_weights": (["--layers", "1", "--width", "64", "--rounds", "1", "--tokens", "4"], "plan"),
    "shared_prompts": (["--prompt", "48", "--answer", "4", "--members", "2", "--repeats", "1"], "with shared prompts"),
    "simulator": ([*TOY, "--slots", "8"], "largest error"),
    "transport": (["--mb", "64", "--rounds", "1", "--buffer-mb", "8"], "columns"),
    "trace": (["--tokens", "2000", "--steps", "8", *SHORT], "diagnosis of 2,000 tokens"),
    "peer.compare": (
        ["--sides", "rollkeel", "--layouts", "1x1", "--rounds", "1", "--repeats", "1", "--out", "{folder}", *MACHINE],
        "| step |",
    ),
}
"""Program → its arguments, and something that it prints."""
SLOW = {
    "board",
    "cluster",
    "engine_kills",
    "goodput",
    "group_transport",
    "in_flight",
    "lab",
    "overlap",
    "parity",
    "residency",
    "routing",
    "sandbox",
    "sandbox_service",
    "trace",
}
SERVED = {"served_weights"}
"""They need a vLLM server."""
IN_BROWSER = {"board"}
WITHOUT = {
    "browser",
    "data_rows",
    "doctor",
    "gpu",
    "peer",
    "peer.model",
    "peer.rollkeel_side",
    "peer.trl_side",
    "peer.workload",
    "sandbox_stub",
}
"""Parts of the others, and what the opening of this file names."""


def run(name: str, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What `python -m benchmarks.NAME WORDS` prints, in this process."""
    monkeypatch.setattr(sys, "argv", [name, *words])
    with redirect_stdout(io.StringIO()) as out:
        importlib.import_module(f"benchmarks.{name}").main()
    return out.getvalue()


def reward(words: Sequence[str], seed: int) -> dict[str, float]:
    return {"reward": 0.5 + seed}


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sizes that the programs have no option for; the vLLM server's place is taken by another embedded engine."""
    monkeypatch.setattr("benchmarks.overlap.LAYOUTS", {"sync": ((0, 1),), "async": ((1, 1),)})
    monkeypatch.setattr("benchmarks.trace.PER_STEP", 1000)
    monkeypatch.setattr("benchmarks.healthy.RUNS", {"toy": ("default", *TINY, "sft.steps=5")})
    toy = Preset(
        name="toy",
        question="?",
        paper="none",
        expected="it runs",
        arms=(Arm(name="one", words=()),),
        measure=reward,
        judge=lambda found: [
            Finding(claim="c", source="rollkeel", numbers=f"{found['reward']['one']}", verdict="reproduced", met=None)
        ],
        readings={"reward": over_last("reward", 1)},
        seeds=1,
    )
    monkeypatch.setattr("benchmarks.lab.find", {"toy": toy}.__getitem__)

    def local(shape: Any, config: Any, *rest: Any, **more: Any) -> Any:
        return open_engine(shape, config.model_copy(update={"kind": "local"}), *rest, **more)

    monkeypatch.setattr("benchmarks.engines.open_engine", local)
    for size, value in {"ROLLOUTS": 8, "GROUP_SIZE": 4, "NEW_TOKENS": 4, "MEDIAN_LENGTH": 2}.items():
        monkeypatch.setattr(f"benchmarks.peer.workload.{size}", value)

    def side(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        """A measurement of the peer comparison, in this process too."""
        module, *words = command[command.index("-m") + 1 :]
        with monkeypatch.context() as patch:
            out = run(module.removeprefix("benchmarks."), words, patch)
        return subprocess.CompletedProcess(command, 0, out, "")

    monkeypatch.setattr("benchmarks.peer.compare.subprocess", SimpleNamespace(run=side, DEVNULL=subprocess.DEVNULL))


def marked(name: str) -> Any:
    marks = [getattr(pytest.mark, mark) for mark, names in {"slow": SLOW, "vllm": SERVED}.items() if name in names]
    if name in IN_BROWSER:
        marks += [pytest.mark.browser, pytest.mark.skipif(find() is None, reason="no Chromium on this machine")]
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [marked(name) for name in PROGRAMS])
def test_it_runs(name: str, toys: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words, printed = PROGRAMS[name]
    out = run(name, [word.replace("{folder}", str(tmp_path)) for word in words], monkeypatch)
    assert printed in out


def test_no_program_is_left_out() -> None:
    found = {
        module.name.removeprefix("benchmarks.") for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")
    }
    assert {name for name in found if not name.startswith(("doctor.", "gpu."))} == {*PROGRAMS, *WITHOUT}
