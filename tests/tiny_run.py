"""A whole run small enough for a test: a second of warm start, twelve steps of a tenth of a second, rewards that vary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollkeel.cli import main

STEPS = 12
TINY = [
    f"run.steps={STEPS}",
    "data.options.digits=2",
    "sft.steps=60",
    "sft.batch_size=64",
    "sft.lr=1e-2",
    "sampling.max_new_tokens=4",
    "rollout.prompts=8",
    "rollout.samples=4",
    "train.updates_per_step=2",
    "train.micro_batch_tokens=48",
    "train.lr=1e-3",
    "train.warmup_steps=2",
    "train.kl_coefficient=0.01",
    "eval.every=4",
    "eval.items=8",
    "eval.samples=2",
    "checkpoint.every=1",
    "report.samples=1",
]
"""Every part of the state that a resume must bring back is in use: moments, warm-up, reference weights, data position."""

VOLATILE = ("time/", "throughput/", "memory/")


def rows(run: Path, *, volatile: bool = False) -> list[dict[str, Any]]:
    """Metrics rows, without the keys that measure the machine."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if volatile or not k.startswith(VOLATILE)} for row in found]


def events(run: Path) -> list[dict[str, Any]]:
    """Whole lines of the log; a killed process may have left half of one."""
    path = run / "events.jsonl"
    *lines, _ = path.read_text().split("\n") if path.is_file() else [""]
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def weights(run: Path) -> dict[str, bytes]:
    """Bytes of the final weights by file name."""
    found = {file.name: file.read_bytes() for file in sorted((run / "model").glob("*.safetensors"))}
    assert found, f"{run} has no model"
    return found


def files(folder: Path, *without: str) -> dict[str, bytes]:
    """Bytes of every file below `folder`, by relative path."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name not in without
    }


def cli(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `rollkeel WORDS`, in this process."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    code = stopped.value.code
    assert isinstance(code, int)
    return code, out, err


def start(cache: Path, *words: str | Path) -> subprocess.Popen[str]:
    """`rollkeel WORDS` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "rollkeel", *map(str, words)],
        env={**os.environ, "ROLLKEEL_CACHE": str(cache)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
