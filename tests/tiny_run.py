"""A whole run small enough for a test: a second of warm start, twelve steps of a tenth of a second, rewards that vary."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from forked import Command

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

DEADLINE_S = 120.0
VOLATILE = ("time/", "throughput/", "memory/", "async/wait_s")


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


def start(*words: str | Path) -> Command:
    """`rollkeel WORDS` in a process of its own."""
    return Command(*words)


def assert_same(run: Path, whole: Path) -> None:
    """Metrics, rollouts and final weights of `run` are those of the uninterrupted run."""
    assert rows(run) == rows(whole)
    assert weights(run) == weights(whole)
    # As bytes: two tables with the same NaN, of a token that an environment gave, are not equal.
    mine, theirs = files(run / "rollouts"), files(whole / "rollouts")
    assert list(mine) == list(theirs)
    assert [name for name in mine if mine[name] != theirs[name]] == []
    left = [path.name for path in run.rglob(".*") if path.name != ".lock"]
    assert left == []


def wait_for(run: Path, process: Command, stage: str, step: int, deadline_s: float = DEADLINE_S) -> None:
    """Until the log says that `stage` of `step` (or of a later one) has begun."""
    log, seen, end = run / "events.jsonl", 0, time.monotonic() + deadline_s
    while time.monotonic() < end:
        size = log.stat().st_size if log.exists() else 0
        if size > seen:
            seen = size
            found = [e for e in events(run) if e["event"] == "stage"]
            if any(e["stage"] == stage and e["step"] >= step for e in found):
                return
        assert process.poll() is None, f"ended before {stage} of step {step}: {process.communicate()[1]}"
        time.sleep(0.0005)
    process.kill()
    raise AssertionError(f"{stage} of step {step} did not begin within {deadline_s} s")


def fell_in(run: Path) -> str:
    """Stage that was going on when the process died, by the last event; `between` if a checkpoint had just been saved."""
    last = [e for e in events(run) if e["event"] in ("stage", "checkpoint_saved")][-1]
    return last["stage"] if last["event"] == "stage" else "between"


def kill_at(run: Path, words: Sequence[str], stage: str, step: int, delay_s: float) -> str:
    """Start a run with `words`, kill it `delay_s` after `stage` of `step` began; the stage in which the kill fell."""
    process = start("train", *words, f"run.dir={run}")
    try:
        wait_for(run, process, stage, step)
        time.sleep(delay_s)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    log = events(run)
    assert any(e["event"] == "sft_cached" for e in log)
    assert not any(e["event"] == "run_end" for e in log)
    return fell_in(run)


KILL_STAGES = ("rollout", "update", "checkpoint")


def killed_in(folder: Path, words: Sequence[str], stage: str, step: int, delay_s: float) -> Path:
    """A run below `folder` that was killed in `stage`: on a busy machine that may be over before the signal arrives."""
    for attempt in range(4):
        run = folder / f"run{attempt}"
        if kill_at(run, words, stage, step, delay_s) == stage:
            return run
    pytest.fail(f"four kills, none of them in {stage}")


def twenty_kills(folder: Path, words: Sequence[str], whole: Path, *, each: int, every: int = 1) -> dict[str, int]:
    """Kill at random moments, resume, compare with `whole`, until 20 kills of which `each` fell in every stage.

    `every`: steps between checkpoints. Returns how many fell where.
    """
    draw = random.Random(20)
    counts: dict[str, int] = dict.fromkeys((*KILL_STAGES, "elsewhere"), 0)
    for attempt in range(40):
        if sum(counts.values()) >= 20 and min(counts[s] for s in KILL_STAGES) >= each:
            break
        run = folder / f"run{attempt}"
        stage = min(KILL_STAGES, key=lambda s: (counts[s], draw.random()))
        step = draw.randint(1, STEPS // every) * every if stage == "checkpoint" else draw.randint(1, STEPS)
        fell = kill_at(run, words, stage, step, draw.uniform(0.0, 0.03))
        counts[fell if fell in KILL_STAGES else "elsewhere"] += 1
        resumed = start("train", "--resume", run)
        assert resumed.communicate()[1] == ""
        assert resumed.returncode == 0
        assert_same(run, whole)
        shutil.rmtree(run)
    print(f"kills: {counts}")
    assert sum(counts.values()) >= 20
    assert min(counts[s] for s in KILL_STAGES) >= each, counts
    return counts
