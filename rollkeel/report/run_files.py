"""Everything a reader can know from a run folder that may be running, killed, damaged or empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollkeel.errors import BadInput, Corrupt
from rollkeel.record.lock import is_locked
from rollkeel.record.run_config import foreign_config, nothing_to_do
from rollkeel.record.runfolder import CHECKPOINTS, CONFIG, EVENTS, METRICS, REPORT, rollout_files
from rollkeel.train import checkpoint
from rollkeel_doctor.errors import DoctorError
from rollkeel_doctor.traces.folder import Folder, ended, read_folder


@dataclass(frozen=True, kw_only=True)
class RunFiles(Folder):
    """A run folder, and what became of the run."""

    status: str
    """`running`, `killed`, `unknown` (running or killed), or what the run itself recorded: `done`, `interrupted`, …"""
    detail: str
    duration_s: float
    """Wall time of all sessions of the run that its files record, seconds."""


def read_run(run_dir: str | Path) -> RunFiles:
    """Read a run folder. Raises `BadInput` if it is none; damage inside it is reported, not raised."""
    try:
        folder = read_folder(Path(run_dir))
    except DoctorError as error:
        raise BadInput(str(error)) from None
    problem = foreign_config(folder.path) if folder.config_text else ""
    problems = [*([f"{CONFIG}: {problem}"] if problem else []), *folder.problems]
    config = folder.config
    if folder.config_text and "experiment" not in config:  # older than that section
        from rollkeel.renamed import upgraded

        config = upgraded(config, to_go_on=False)
    status, detail = status_of(folder.events, folder.path)
    about: dict[str, Any] = vars(folder) | {"problems": problems, "config": config}
    return RunFiles(**about, status=status, detail=detail, duration_s=_duration(folder.events, folder.path / METRICS))


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
        saved = checkpoint.verify(newest).model
        whole = saved.is_dir() and checkpoint.same_files(saved, run.path / "model")
    except (BadInput, Corrupt):
        return ""
    return nothing_to_do(step, steps) if whole and (run.path / REPORT).is_file() else ""


def status_of(events: Sequence[Mapping[str, Any]], path: Path) -> tuple[str, str]:
    """`RunFiles.status` and `detail` of the run in folder `path`, from its log and its lock."""
    if end := ended(events):
        return str(end["status"]), str(end.get("detail", ""))
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
