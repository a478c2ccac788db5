"""A run over a cluster that is small enough for a test, and how its actors are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tiny_run import events

from rollkeel.cluster.audit import audit
from rollkeel.loop.job import train
from rollkeel.recipe import load

TINY = [
    "run.steps=3",
    "data.options.digits=2",
    "sft.steps=60",
    "sft.lr=1e-2",
    "sampling.max_new_tokens=4",
    "rollout.prompts=8",
    "rollout.samples=4",
    "train.updates_per_step=2",
    "train.micro_batch_tokens=48",
    "train.lr=1e-3",
    "train.warmup_steps=2",
    "train.kl_coefficient=0.01",
    "eval.every=0",
    "eval.items=8",
    "eval.samples=2",
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "report.samples=1",
]
"""Moments, warm-up and reference weights are in use, and the warm start comes from the cache but once."""
TWO = ["cluster.trainers=2", "cluster.engines=1"]
ONE = ["cluster.trainers=1", "cluster.engines=1"]


def run_of(folder: Path, *words: str) -> Path:
    return train(load(None, [*TINY, *words, f"run.dir={folder}"]))


def pid_of(run: Path, name: str) -> int:
    """Process of an actor, by the newest line about it."""
    return [e["pid"] for e in events(run) if e["event"] == "actor" and e["name"] == name][-1]


def tokens(run: Path) -> list[list[Any]]:
    """What was sampled in every step, by rollout."""
    files = sorted((run / "rollouts").iterdir())
    return [pq.read_table(file, columns=["id", "token_ids"]).sort_by("id").to_pylist() for file in files]


def assert_audited(run: Path) -> None:
    """By its files, no rollout was trained twice, none lost, and no token was older than the loop allows."""
    told = audit(run, load(run / "config.yaml"))
    assert told.fits, told
    assert told.trained


def kill_when(run: Path, name: str, stage: str, step: int) -> threading.Thread:
    """SIGKILL to an actor as soon as the log says that `stage` of `step` has begun."""

    def kill() -> None:
        end = time.monotonic() + 300
        while time.monotonic() < end:
            seen = events(run)
            if any(e["event"] == "stage" and e["stage"] == stage and e["step"] >= step for e in seen):
                os.kill(pid_of(run, name), signal.SIGKILL)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread
