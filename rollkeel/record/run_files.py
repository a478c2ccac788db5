"""Everything a reader can know from a run folder that may be running, killed, damaged or empty."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from rollkeel.errors import BadInput, Corrupt
from rollkeel.record.lock import is_locked
from rollkeel.record.run_config import foreign_config
from rollkeel.record.runfolder import CHECKPOINTS, CONFIG, EVENTS, METRICS, REPORT, rollout_files
from rollkeel.train import checkpoint


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """A run as its files tell it. What could not be read is in `problems`, one line each."""

    path: Path
    config_text: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    """Metrics rows with an integer `step`, in file order."""
    events: list[dict[str, Any]]
    status: str
    """`running`, `killed`, `unknown` (running or killed), or what the run itself recorded: `done`, `interrupted`, …"""
    detail: str
    duration_s: float
    """Wall time of all sessions of the run that its files record, seconds."""
    problems: list[str] = field(default_factory=list)


def read_run(run_dir: str | Path) -> RunFiles:
    """Read a run folder. Raises `BadInput` if it is none; damage inside it is reported, not raised."""
    path = Path(run_dir)
    if not path.is_dir():
        raise BadInput(f"run folder {path}: no such folder")
    if not (path / CONFIG).is_file() and not (path / METRICS).is_file():
        raise BadInput(f"{path} holds neither {CONFIG} nor {METRICS}; expected a folder made by rollkeel train")
    problems: list[str] = []
    text, config = _config(path / CONFIG, problems)
    rows = [row for row in _jsonl(path / METRICS, problems) if isinstance(row.get("step"), int)]
    events = _jsonl(path / EVENTS, problems)
    status, detail = _status(path, events)
    problems += _gaps(path, config, [row["step"] for row in rows], status)
    return RunFiles(
        path=path,
        config_text=text,
        config=config,
        rows=rows,
        events=events,
        status=status,
        detail=detail,
        duration_s=_duration(events, path / METRICS),
        problems=problems,
    )


def damage(path: Path, *, rollouts: bool = True) -> list[str]:
    """What is wrong with the files that `rollkeel train` wrote to `path`, one line each; nothing for what it did not write."""
    if not (path / CONFIG).is_file() and not (path / EVENTS).is_file():
        return []
    problems = list(read_run(path).problems)
    for _, file in rollout_files(path) if rollouts else ():
        try:
            pq.read_metadata(file)
        except (OSError, pa.ArrowException) as error:
            problems.append(f"{file.name} cannot be read: {' '.join(str(error).split())[:200]}")
    return problems


def finished(run_dir: str | Path, steps: int) -> str:
    """A line if the run came to its end and is whole, without loading any of it; empty where only a resume can tell."""
    run = read_run(run_dir)
    step, newest = (checkpoint.listing(run.path / CHECKPOINTS) or [(-1, run.path)])[-1]
    if run.status != "done" or run.problems or step < steps or [row["step"] for row in run.rows][-1:] != [step]:
        return ""
    try:
        whole = checkpoint.same_files(checkpoint.verify(newest).model, run.path / "model")
    except (BadInput, Corrupt):
        return ""
    return nothing_to_do(step, steps) if whole and (run.path / REPORT).is_file() else ""


def nothing_to_do(step: int, steps: int) -> str:
    """What the resume of a run that has done its `steps` says."""
    return f"nothing to do: the checkpoint is at step {step} of {steps}; raise run.steps to go on"


def _gaps(path: Path, config: dict[str, Any], steps: list[int], status: str) -> list[str]:
    """Rows that must have been there once; of a run that goes on, the last may be on their way."""
    gaps = [f"{METRICS}: step {b} follows step {a}" for a, b in itertools.pairwise(steps) if b != a + 1][:3]
    last, planned = max(steps, default=0), (config.get("run") or {}) if isinstance(config.get("run"), dict) else {}
    sampled = max((step for step, _ in rollout_files(path)), default=0)
    if sampled > last + 1:
        gaps.append(f"{METRICS}: ends at step {last}, rollouts go up to step {sampled}")
    elif status == "done" and isinstance(planned.get("steps"), int) and last < planned["steps"]:
        gaps.append(f"{METRICS}: ends at step {last}, the run was done at step {planned['steps']}")
    return gaps


def _config(path: Path, problems: list[str]) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        tree = yaml.safe_load(text)
    except (OSError, yaml.YAMLError) as error:
        problems.append(f"{path.name} cannot be read: {' '.join(str(error).split())[:200]}")
        return "", {}
    if problem := foreign_config(path.parent):
        problems.append(f"{path.name}: {problem}")
    tree = tree if isinstance(tree, dict) else {}
    if "experiment" not in tree:  # older than that section
        from rollkeel.renamed import upgraded

        tree = upgraded(tree, to_go_on=False)
    return text, tree


def _jsonl(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Objects of a file that another process may be writing: a half-written last line is not a fault."""
    if not path.is_file():
        return []
    *lines, tail = path.read_bytes().split(b"\n")
    rows, bad = [], 0
    for line in [*lines, tail]:
        try:
            row = json.loads(line)
        except ValueError:
            bad += line is not tail and bool(line.strip())
            continue
        if isinstance(row, dict):
            rows.append(row)
    if bad:
        problems.append(f"{path.name}: {bad} damaged line{'s' if bad > 1 else ''} left out")
    return rows


def _status(path: Path, events: list[dict[str, Any]]) -> tuple[str, str]:
    for event in reversed(events):
        kind = event.get("event")
        if kind == "run_end":
            return str(event.get("status", "done")), str(event.get("detail", ""))
        if kind in ("run_created", "run_opened"):
            break
    locked = is_locked(path)
    if locked is None:
        return "unknown", "the run recorded no end: it is running or was killed"
    return ("running", "") if locked else ("killed", "the process ended without recording why")


def _duration(events: list[dict[str, Any]], metrics: Path) -> float:
    """Sum over sessions of last minus first sign of life; the time between a kill and its resume does not count."""
    sessions: list[list[float]] = []
    for event in events:
        at = event.get("time")
        if not isinstance(at, int | float):
            continue
        if event.get("event") in ("run_created", "run_opened") or not sessions:
            sessions.append([at, at])
        sessions[-1][1] = max(sessions[-1][1], at)
    if sessions and metrics.is_file() and (events[-1].get("event") != "run_end"):
        sessions[-1][1] = max(sessions[-1][1], metrics.stat().st_mtime)
    return sum(end - start for start, end in sessions)
