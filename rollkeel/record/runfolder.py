"""A run on disk: one folder, readable while the run goes on, whole after the process is killed.

    config.yaml  metrics.jsonl  events.jsonl  rollouts/step_000012.parquet  (tensors/step_000012.safetensors  schedule.jsonl)
    checkpoints/step_000012/{manifest.json, model/, state/}  model/  report.html

The rule that makes resuming exact: the row of a step is durable in `metrics.jsonl` before the checkpoint of that step
is saved. A resume from step s drops every later row and file, so no step is missing or doubled.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rollkeel import plugins
from rollkeel.config import Config
from rollkeel.errors import BadInput, Corrupt, NonFinite
from rollkeel.events import EventLog, write_atomic
from rollkeel.recipe import load
from rollkeel.record.lock import NAME as LOCK
from rollkeel.record.lock import RunLock
from rollkeel.record.run_config import CONFIG, EVENTS, changes, digest, foreign_config

METRICS, REPORT = "metrics.jsonl", "report.html"
SCHEDULE = "schedule.jsonl"
ROLLOUTS, TENSORS, CHECKPOINTS, ACTORS = "rollouts", "tensors", "checkpoints", "actors"
_STEP_FILE = {ROLLOUTS: re.compile(r"step_(\d{6,})\.parquet"), TENSORS: re.compile(r"step_(\d{6,})\.safetensors")}


class RunFolder:
    """Paths and files of one run. Made by `create` (new), `open` (resume) or `open(lock=False)` (read only)."""

    def __init__(self, path: Path, config: Config, lock: RunLock | None) -> None:
        self.path = path
        self.config = config
        self.digest = digest((path / CONFIG).read_bytes()) if (path / CONFIG).exists() else ""  # a replay has none
        """Of the bytes of `config.yaml`."""
        self.events = EventLog(path / EVENTS)
        self.checkpoints = path / CHECKPOINTS
        self.model, self.warm_start = path / "model", path / "warm_start"
        self.report = path / REPORT
        self.announced = True
        """False while a resumed run is only looked at: nothing has been written to its folder."""
        self._lock = lock
        self._made: list[Path] = []
        self._last_step: int | None = None
        self._unsynced: list[Path] = []

    @classmethod
    def create(cls, dir: str | Path, config: Config) -> RunFolder:
        """Start a run in a new or empty folder and lock it.

        Raises `BadInput` (one line) if a run is there already or the folder cannot be written; then nothing that this
        call made is left behind.
        """
        path = Path(dir)
        made = _make_folder(path)
        had_lock = (path / LOCK).exists()
        lock: RunLock | None = None
        started = False
        try:
            lock = RunLock(path)
            names = (CONFIG, METRICS, EVENTS, SCHEDULE, ROLLOUTS, TENSORS, CHECKPOINTS, "model")
            taken = [name for name in names if _exists(path / name)]
            if taken:
                raise BadInput(
                    f"run folder {path}: already holds a run ({taken[0]}); resume it with --resume {path} or choose another"
                )
            if foreign := sorted(file.name for file in path.iterdir() if file.name != LOCK and _exists(file)):
                raise BadInput(
                    f"run folder {path}: is not empty ({foreign[0]}) and holds no run; choose a new or empty folder"
                )
            started = True
            write_atomic(path / CONFIG, config.to_yaml())
            folder = cls(path, config, lock)
            folder._made = made
            folder._emit("run_created", name=config.run.name, steps=config.run.steps, config=folder.digest)
        except BaseException:
            for name in (CONFIG, EVENTS) if started else ():
                (path / name).unlink(missing_ok=True)
            if lock is not None:
                lock.release(delete=not had_lock)
            for parent in made:
                parent.rmdir()
            raise
        return folder

    @classmethod
    def open(cls, dir: str | Path, *, lock: bool = True, announce: bool = True) -> RunFolder:
        """Open an existing run: locked to go on with it, `lock=False` to read it while another process may write.

        `announce=False` leaves every file as it is until `announce` is called, so that a resume can still be refused.
        Raises `BadInput` if it is not a run folder or another process holds it, `Corrupt` if its config is damaged.
        """
        path = Path(dir)
        if not path.is_dir():
            raise BadInput(f"run folder {path}: no such folder")
        file = path / CONFIG
        if not file.is_file():
            raise BadInput(f"run folder {path}: {CONFIG} is missing; expected a folder made by rollkeel train")
        if problem := foreign_config(path):
            raise Corrupt(f"{file}: {problem}; put it back, and give changes on the command line behind --resume")
        try:
            config = load(file)
        except (BadInput, ValueError, yaml.YAMLError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise Corrupt(
                f"{file}: not a config this version reads ({reason}); restore it or start a new run"
            ) from None
        plugins.recall(path)
        held = RunLock(path) if lock else None
        folder = cls(path, config, held)
        folder.announced = False
        if held is not None and announce:
            folder.announce()
        return folder

    def announce(self) -> None:
        """Record that a locked run goes on; from here on its files change."""
        _end_line(self.path / EVENTS)
        self._emit("run_opened")
        self.announced = True

    def change_config(self, config: Config) -> None:
        """Replace the saved config (more steps, say); the next resume continues with it."""
        if config != self.config:
            text = config.to_yaml().encode()
            # Recorded before it is written: a kill in between must not leave a file that nobody owns up to.
            self._emit("config_changed", changed=changes(self.config, config), config=digest(text))
            write_atomic(self.path / CONFIG, text)
            self.config, self.digest = config, digest(text)

    def discard(self) -> None:
        """Take back a run that `create` made and that never got anywhere: its files, the lock, the folders made for it."""
        for file in (CONFIG, METRICS, EVENTS, SCHEDULE, REPORT, plugins.RECORD):
            (self.path / file).unlink(missing_ok=True)
        for folder in (self.checkpoints, self.warm_start, *(self.path / name for name in (ROLLOUTS, TENSORS, ACTORS))):
            shutil.rmtree(folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.release(delete=True)
            self._lock = None
        for made in self._made:
            if any(made.iterdir()):
                break
            made.rmdir()

    def clean(self) -> None:
        """Remove the temporary files that killed writes left behind."""
        for folder in (self.path, self.path / ROLLOUTS, self.path / TENSORS):
            for file in folder.glob(".*.tmp"):
                file.unlink(missing_ok=True)

    def rollouts(self, step: int) -> Path:
        """Path of a step's rollouts; its folder is made on first use."""
        return self._step_file(ROLLOUTS, f"step_{step:06d}.parquet")

    def tensors(self, step: int) -> Path:
        """Path of a step's tensors; its folder is made on first use."""
        return self._step_file(TENSORS, f"step_{step:06d}.safetensors")

    def _step_file(self, kind: str, name: str) -> Path:
        folder = self.path / kind
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise BadInput(f"cannot write {folder}: {error.strerror}; free space or choose another folder") from None
        self._unsynced.append(folder / name)
        return folder / name

    def sync_rollouts(self) -> None:
        """Before a checkpoint says that these steps are done: their files are on disk even after a power cut."""
        for path in self._unsynced:
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        self._unsynced.clear()

    def rollout_files(self) -> list[tuple[int, Path]]:
        """`(step, path)` of every rollouts file, by step."""
        return rollout_files(self.path)

    def metrics(self) -> list[dict[str, Any]]:
        """All rows, by step. A half-written last line is left out. Raises `Corrupt` naming a damaged line."""
        return read_rows(self.path / METRICS)[0]

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add the row of one step; on the disk when this returns. Values: numbers, strings, None or lists of them.

        Floats keep every bit. Raises `NonFinite` naming the key of a NaN or infinite value, `ValueError` unless
        `row["step"]` follows the last one (0 or 1 for the first), `BadInput` if the disk is full; the file is then as
        it was.
        """
        plain = {str(key): _plain(value, str(key), row.get("step")) for key, value in row.items()}
        step = plain.get("step")
        if not isinstance(step, int):
            raise ValueError(f"metrics row: expected an integer step, got {step!r}")
        last = self._last_step
        if last is None:
            rows = self.metrics()
            last = rows[-1]["step"] if rows else -1
        if step != last + 1 and not (last == -1 and step == 1):
            raise ValueError(f"metrics row of step {step}: expected step {last + 1}; truncate_after first")
        _append_line(self.path / METRICS, json.dumps(plain, allow_nan=False))
        self._last_step = step

    def append_schedule(self, row: Mapping[str, Any]) -> None:
        """Add to the schedule of an asynchronous run; on the disk when this returns. Raises `BadInput` if it is full."""
        _append_line(self.path / SCHEDULE, json.dumps(row))

    def truncate_after(self, step: int) -> None:
        """Make the files end at `step` (0: before the first), as they were when its checkpoint was saved.

        Drops rows, rollouts and tensors of later steps; a half-written last row goes with an event. Raises `Corrupt` if a row
        up to `step` is missing, doubled or damaged, before anything is changed.
        """
        path = self.path / METRICS
        rows, lines, half = read_rows(path)
        steps = [row["step"] for row in rows]
        kept = [line for row, line in zip(rows, lines, strict=True) if row["step"] <= step]
        first = steps[0] if steps and steps[0] in (0, 1) else 1
        expected = list(range(first, step + 1))
        if steps[: len(expected)] != expected or any(later <= step for later in steps[len(expected) :]):
            raise Corrupt(f"{path}: expected one row for each step {first} to {step}, got {_gap(steps, expected)}")
        for at, file in [*self.rollout_files(), *tensor_files(self.path)]:
            if at > step:
                file.unlink()
        if half is not None:
            self._emit("metrics_half_line_dropped", line=len(lines) + 1, bytes=len(half))
        if path.exists():
            write_atomic(path, b"".join(kept))
        schedule = self.path / SCHEDULE
        if schedule.exists():
            done, calls, _ = read_rows(schedule)
            write_atomic(schedule, b"".join(x for r, x in zip(done, calls, strict=True) if r["step"] <= step))
        self._last_step = step if kept else -1
        self._emit("metrics_truncated", step=step, rows_dropped=len(lines) - len(kept))

    def end(self, status: str, detail: str = "") -> None:
        """Record how the run ended (`done`, `interrupted`, `stopped`, `failed`) for the report, and unlock it."""
        try:
            self._emit("run_end", status=status, detail=detail)
        finally:
            self.close()

    def close(self) -> None:
        """Unlock. Safe to call twice."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _emit(self, kind: str, **fields: Any) -> None:
        try:
            self.events.emit(kind, **fields)
        except OSError as error:
            raise BadInput(
                f"cannot write {self.path / EVENTS}: {error.strerror}; free space or choose another"
            ) from None


def rollout_files(path: Path) -> list[tuple[int, Path]]:
    """`(step, path)` of every rollouts file of the run folder `path`, by step."""
    return _step_files(path, ROLLOUTS)


def tensor_files(path: Path) -> list[tuple[int, Path]]:
    """`(step, path)` of every file of recorded tensors of the run folder `path`, by step."""
    return _step_files(path, TENSORS)


def _step_files(path: Path, kind: str) -> list[tuple[int, Path]]:
    folder = path / kind
    if not folder.is_dir():
        return []
    matches = ((_STEP_FILE[kind].fullmatch(file.name), file) for file in folder.iterdir())
    return sorted((int(match[1]), file) for match, file in matches if match)


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[bytes], bytes | None]:
    """Rows of a metrics file, their lines (each ending in a newline), and a half-written last line or None.

    A missing file has no rows. Raises `Corrupt` naming the line that is not a JSON object with an integer `step`.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], [], None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    rows: list[dict[str, Any]] = []
    lines: list[bytes] = []
    *complete, tail = data.split(b"\n")
    for number, line in enumerate(complete, 1):
        row = _row(line)
        if row is None:
            raise Corrupt(f"{path}: line {number} is not a metrics row; restore the file or start a new run")
        rows.append(row)
        lines.append(line + b"\n")
    last = _row(tail) if tail else None
    if last is not None:  # Only its newline was lost.
        rows.append(last)
        lines.append(tail + b"\n")
        tail = b""
    return rows, lines, tail or None


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) and not isinstance(step, bool) else None


def _gap(steps: list[int], expected: list[int]) -> str:
    for at, want in enumerate(expected):
        if at >= len(steps):
            return f"nothing after step {steps[-1] if steps else 0}"
        if steps[at] != want:
            return f"step {steps[at]} where {want} belongs"
    return "a step twice"


def _plain(value: Any, key: str, step: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item, key, step) for item in value]
    if not isinstance(value, bool | int | float | str) and hasattr(value, "item"):
        value = value.item()  # numpy and torch scalars
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NonFinite(f"metrics of step {step}: expected a finite {key}, got {value}")
        return float(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"metrics {key}: expected a number, string or list, got {type(value).__name__}")


def _append_line(path: Path, text: str) -> None:
    data = text.encode() + b"\n"
    descriptor = size = None
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        size = os.fstat(descriptor).st_size
        written = 0
        while written < len(data):
            written += os.write(descriptor, data[written:])
        os.fsync(descriptor)
    except OSError as error:
        if descriptor is not None and size is not None:
            os.ftruncate(descriptor, size)
        raise BadInput(f"cannot write {path}: {error.strerror}; free space or choose another folder") from None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _end_line(path: Path) -> None:
    """Close a line that a killed process left half-written, so that the next event starts on its own line."""
    if path.is_file() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _make_folder(path: Path) -> list[Path]:
    """Make `path` and its parents; the folders that were made, innermost first."""
    made: list[Path] = []
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir()
            made.insert(0, folder)
        if not path.is_dir():
            raise NotADirectoryError(20, "not a folder")
    except OSError as error:
        for folder in made:
            folder.rmdir()
        raise BadInput(f"run folder {path}: cannot be made ({error.strerror}); choose another folder") from None
    return made


def _exists(path: Path) -> bool:
    """True for a file, or a folder with something in it."""
    return any(path.iterdir()) if path.is_dir() else path.exists()
