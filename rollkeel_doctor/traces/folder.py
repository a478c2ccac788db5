"""What rollkeel's run folders hold, of runs that may be running, killed, damaged or empty. `docs/trace.md` is the schema."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from rollkeel_doctor.errors import BadInput, Corrupt
from rollkeel_doctor.yaml_text import parse_yaml

CONFIG, METRICS, EVENTS = "config.yaml", "metrics.jsonl", "events.jsonl"


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A run as its files tell it. What could not be read is in `problems`, one line each."""

    path: Path
    config_text: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]  # Metrics rows with an integer `step`, in file order.
    events: list[dict[str, Any]]
    problems: list[str]


def read_folder(path: Path) -> Folder:
    """Read a run folder. Raises `BadInput` if it is none; damage inside it is reported, not raised."""
    if not path.is_dir():
        raise BadInput(f"run folder {path}: no such folder")
    if not (path / CONFIG).is_file() and not (path / METRICS).is_file():
        raise BadInput(f"{path} holds neither {CONFIG} nor {METRICS}; expected a folder made by rollkeel train")
    problems: list[str] = []
    text, config = _config(path / CONFIG, problems)
    rows = [row for row in _jsonl(path / METRICS, problems) if isinstance(row.get("step"), int)]
    events = _jsonl(path / EVENTS, problems)
    problems += _gaps(path, config, [row["step"] for row in rows], ended(events).get("status") == "done")
    return Folder(path=path, config_text=text, config=config, rows=rows, events=events, problems=problems)


def rollout_files(path: Path) -> list[tuple[int, Path]]:
    """`(step, file)` of every rollouts file of the run folder `path`, by step."""
    folder = path / "rollouts"
    files = folder.iterdir() if folder.is_dir() else ()
    named = ((re.fullmatch(r"step_(\d{6,})\.parquet", file.name), file) for file in files)
    return sorted((int(match[1]), file) for match, file in named if match)


def damage(path: Path) -> list[str]:
    """What is wrong with the files that `rollkeel train` wrote to `path`, one line each; nothing for what it did not write."""
    written = (path / CONFIG).is_file() or (path / EVENTS).is_file()
    return read_folder(path).problems if written else []


def ended(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The event that the newest session ended with; empty if it recorded none."""
    for event in reversed(events):
        if event.get("event") == "run_end":
            return {"status": "done", **event}
        if event.get("event") in ("run_created", "run_opened"):
            break
    return {}


def read_table(file: Path, kinds: Mapping[str, str], needed: Sequence[str]) -> pa.Table:
    """The columns of `kinds` (list, number or text, by name) that a rollouts file has, one row per rollout.

    Raises `BadInput` for a missing file, `Corrupt` for a damaged one, a column of another kind, or without a needed one. A column of
    nothing but null may have lost its type to the program that wrote it, and counts as missing.
    """
    if not file.is_file():
        raise BadInput(f"rollouts {file}: no such file")
    try:
        names = pq.read_schema(file).names
        table = pq.read_table(file, columns=[name for name in kinds if name in names])
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise Corrupt(f"rollouts {file}: not a whole parquet file ({reason}); delete it or restore it") from None
    table = table.select([column.name for column in table.schema if not pa.types.is_null(column.type)])
    for name in needed:
        if name not in table.column_names:
            raise Corrupt(f"rollouts {file}: column {name} is missing; expected a file written by rollkeel")
    for column in table.schema:
        if not _fits(column.type, expected := kinds[column.name]):
            words = {"list": "lists of numbers", "number": "numbers", "text": "text"}[expected]
            raise Corrupt(
                f"rollouts {file}: column {column.name}: expected {words}, got {column.type}; restore the file"
            )
    return table


def _fits(found: pa.DataType, expected: str) -> bool:
    if expected == "list":
        return (pa.types.is_list(found) or pa.types.is_large_list(found)) and _fits(found.value_type, "number")
    if expected == "number":
        return pa.types.is_integer(found) or pa.types.is_floating(found) or pa.types.is_boolean(found)
    inner = found.value_type if pa.types.is_dictionary(found) else found
    return pa.types.is_string(inner) or pa.types.is_large_string(inner)


def _gaps(path: Path, config: dict[str, Any], steps: list[int], done: bool) -> list[str]:
    """Rows that must have been there once; of a run that goes on, the last may be on their way."""
    lines = [f"{METRICS}: step {b} follows step {a}" for a, b in itertools.pairwise(steps) if b != a + 1][:3]
    last, run = max(steps, default=0), config.get("run")
    planned = run.get("steps") if isinstance(run, dict) else None
    sampled = max((step for step, _ in rollout_files(path)), default=0)
    if sampled > last + 1:
        lines.append(f"{METRICS}: ends at step {last}, rollouts go up to step {sampled}")
    elif done and isinstance(planned, int) and last < planned:
        lines.append(f"{METRICS}: ends at step {last}, the run was done at step {planned}")
    return lines


def _config(path: Path, problems: list[str]) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        tree = parse_yaml(text)
    except (OSError, yaml.YAMLError) as error:
        problems.append(f"{path.name} cannot be read: {' '.join(str(error).split())[:200]}")
        return "", {}
    return text, tree if isinstance(tree, dict) else {}


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
