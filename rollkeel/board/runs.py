"""Runs as the board lists and plots them: found under folders, followed while they go on."""

from __future__ import annotations

import itertools
import math
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollkeel.board.tail import Tail, json_object
from rollkeel.errors import BadInput
from rollkeel.record.glossary import meaning
from rollkeel.record.run_config import leaves_of
from rollkeel.record.runfolder import CONFIG, EVENTS, METRICS, ROLLOUTS, rollout_files
from rollkeel.report.charts import is_number, matching, smooth
from rollkeel.report.panels import SPECS
from rollkeel.report.run_files import status_of
from rollkeel_doctor.yaml_text import YAMLError, parse_yaml

DEPTH = 4
"""Folders below the one that was named in which runs are looked for."""
_GLANCE = 2**16
"""Bytes at the end of the metrics that a list of runs reads."""
_SHOWN = ("reward/mean", "eval/*/avg@k")


class Run:
    """One run folder. Every method may be called from any thread."""

    def __init__(self, number: int, name: str, path: Path) -> None:
        self.number = number
        self.name = name
        self.path = path
        self.root = path.resolve()
        self._lock = threading.Lock()
        self._metrics = Tail(path / METRICS, self.root)
        self._log = Tail(path / EVENTS, self.root)
        self._events: list[dict[str, Any]] = []
        self._steps = array("d")
        self._columns: dict[str, array[float]] = {}
        self._damaged = 0
        self._glanced: tuple[int, dict[str, Any]] = (-1, {})

    def names(self) -> set[str]:
        """The numeric metrics of the rows so far."""
        with self._lock:
            self._follow_metrics()
            return set(self._columns)

    def columns(self, keys: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Steps `[n]` and those of the metrics that the run has `[n]`, NaN where a row lacks it; new rows are read first."""
        with self._lock:
            self._follow_metrics()
            n = len(self._steps)
            found = {key: self._columns[key] for key in keys if key in self._columns}
            for column in found.values():
                column.extend([math.nan] * (n - len(column)))
            return np.array(self._steps), {key: np.array(column) for key, column in found.items()}

    def _follow_metrics(self) -> None:
        anew, lines = self._metrics.read()
        if anew:
            self._steps, self._columns, self._damaged = array("d"), {}, 0
        rows = _rows(lines)
        self._damaged += sum(bool(line.strip()) for line in lines) - len(rows)
        n = len(self._steps)
        self._steps.extend([row["step"] for row in rows])
        # Metric by metric and not row by row: fifty runs have millions of values.
        for key in dict.fromkeys(itertools.chain.from_iterable(rows)):
            values = _numbers([row.get(key) for row in rows])
            if key != "step" and (key in self._columns or not all(map(math.isnan, values))):
                column = self._columns.setdefault(key, array("d"))
                column.extend([math.nan] * (n - len(column)))
                column.extend(values)

    def summary(self) -> dict[str, Any]:
        """What a list of runs says; `rows` changes when there are new rows."""
        with self._lock:
            self._follow_events()
            size = self._metrics.size()
            if self._glanced[0] != size:
                self._glanced = (size, self._glance(size))
            problems = [self._metrics.problem, self._log.problem]
            if self._damaged:
                problems.append(f"{METRICS}: {self._damaged} damaged lines left out")
            status, detail = "trace", "no events.jsonl: written by save_batch, or by an older version"
            if self._events:
                status, detail = status_of(self._events, self.path)
            return {
                "run": self.number,
                "name": self.name,
                "status": status,
                "detail": detail,
                "steps": self._planned(),
                "rows": size,
                "alarms": sum(event.get("event") in ("alarm", "check") for event in self._events),
                "problems": [problem for problem in problems if problem],
                **self._glanced[1],
            }

    def _planned(self) -> int | None:
        """Steps that the run is to do; None where its log does not say."""
        steps = None
        for event in self._events:
            if event.get("event") == "run_created":
                steps = event.get("steps")
            changed = event.get("changed")
            if isinstance(changed, Mapping) and isinstance(changed.get("run.steps"), list):
                steps = changed["run.steps"][-1]
        return steps

    def _follow_events(self) -> None:
        anew, lines = self._log.read()
        if anew:
            self._events = []
        # Stages are most of a log, and say nothing that is shown.
        found = (json_object(line) for line in lines if b'"event": "stage"' not in line)
        self._events += [event for event in found if event is not None]

    def _glance(self, size: int) -> dict[str, Any]:
        """Last step and last values of `_SHOWN`, from the end of the file."""
        rows = _rows(self._metrics.end(_GLANCE) if size else [])
        last = {}
        for key in matching(rows, _SHOWN):
            last[key] = next(row[key] for row in reversed(rows) if is_number(row.get(key)))
        step = rows[-1]["step"] if rows else 0
        return {"step": step, "last": last, "changed": self._metrics.changed()}

    def leads_out(self) -> str:
        """What is wrong with a file of the run that is a link to somewhere else, one line; empty if there is none."""
        paths = [self.path / name for name in (CONFIG, METRICS, EVENTS, ROLLOUTS)]
        paths += [file for _, file in rollout_files(self.path) if file.is_symlink()]
        for path in paths:
            if not path.resolve().is_relative_to(self.root):
                return f"{path.name} is a link out of the run folder: not read"
        return ""

    def settings(self) -> dict[str, Any]:
        """Every leaf of the run's config by its dotted name; empty where there is none that can be read."""
        path = self.path / CONFIG
        if not path.is_file() or not path.resolve().is_relative_to(self.root):
            return {}
        try:
            tree = parse_yaml(path.read_bytes())
        except (OSError, YAMLError):
            return {}
        return leaves_of(tree) if isinstance(tree, dict) else {}


def _rows(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The lines that are rows of metrics."""
    found = map(json_object, lines)
    return [row for row in found if row is not None and is_number(row.get("step"))]


def _numbers(values: list[Any]) -> array[float]:
    """The numbers among the values, NaN for the others."""
    try:
        return array("d", values)
    except (TypeError, OverflowError):
        return array("d", [value if is_number(value) else math.nan for value in values])


class Runs:
    """The runs under the folders that were named. A run keeps its number as long as the board lives."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Raises `BadInput` for a folder that is not there."""
        for root in roots:
            if not root.is_dir():
                raise BadInput(f"board {root}: no such folder; name run folders or folders of runs")
        self.roots = roots
        self._lock = threading.Lock()
        self._by_path: dict[Path, Run] = {}
        self._there: list[Run] = []
        self._looked = -math.inf

    def look(self, every_s: float = 0.0) -> list[Run]:
        """The runs that are there now, by name; those of the last look if it was less than `every_s` seconds ago."""
        with self._lock:
            if time.monotonic() < self._looked + every_s:
                return self._there
            there = []
            for root in self.roots:
                for path in _runs_below(root, root.resolve(), DEPTH):
                    real = path.resolve()
                    if real not in self._by_path:
                        number = len(self._by_path)
                        self._by_path[real] = Run(number, self._name(path, root), path)
                    there.append(self._by_path[real])
            self._there = sorted(dict.fromkeys(there), key=lambda run: run.name)
            self._looked = time.monotonic()
            return self._there

    def _name(self, path: Path, root: Path) -> str:
        if path == root:
            return root.resolve().name
        inside = str(path.relative_to(root))
        return inside if len(self.roots) == 1 else f"{root.name}/{inside}"

    def get(self, number: int) -> Run:
        """Raises `BadInput` for a number that no run has."""
        for run in list(self._by_path.values()):
            if run.number == number:
                return run
        raise BadInput(f"run {number}: no such run")


def _runs_below(folder: Path, root: Path, depth: int) -> Iterator[Path]:
    """Run folders; a link that leads out of `root` is not followed, for the page shows what was named and nothing else."""
    if (folder / CONFIG).is_file() or (folder / METRICS).is_file():
        yield folder
        return
    try:
        below = sorted(folder.iterdir()) if depth else []
    except OSError:
        return
    for path in below:
        if not path.is_dir() or path.name.startswith("."):
            continue
        if not path.is_symlink() or path.resolve().is_relative_to(root):
            yield from _runs_below(path, root, depth - 1)


def metrics_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The numeric metrics of the runs: those of the report's panels in its order, then the rest by name."""
    names = set[str]().union(*(run.names() for run in runs))
    rows = [dict.fromkeys(names, 1.0)]
    specs = {key: spec for spec in reversed(SPECS) for key in matching(rows, spec.keys)}
    ordered = dict.fromkeys(key for spec in SPECS for key in matching(rows, spec.keys) if specs[key] is spec)
    found = []
    for key in [*ordered, *sorted(names - set(ordered))]:
        spec = specs.get(key)
        told: dict[str, Any] = {"key": key, "meaning": meaning(key)}
        if spec:
            told |= {"title": spec.title, "unit": spec.unit, "scale": spec.scale, "log": spec.log, "least": spec.least}
        found.append(told)
    return found


def curves(
    runs: Sequence[Run], keys: Sequence[str], points: int, start: float, end: float
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Metric → run number → `x`, `y` and running mean `m` of the steps from `start` to `end`, and of one more on each side.

    The mean is of the whole series, whatever part of it is asked for; of more than `points` values, `thin` chooses.
    """
    out: dict[str, dict[str, dict[str, list[float]]]] = {key: {} for key in keys}
    for run in runs:
        steps, columns = run.columns(keys)
        for key in keys:
            if key not in columns:
                continue
            there = np.isfinite(columns[key])
            x, y = steps[there], columns[key][there]
            mean = smooth(y)
            low = max(int(np.searchsorted(x, start)) - 1, 0)
            high = int(np.searchsorted(x, end, side="right")) + 1
            kept = low + thin(y[low:high], points)
            out[key][str(run.number)] = {
                "x": x[kept].tolist(),
                "y": y[kept].tolist(),
                "m": mean[kept].tolist(),
            }
    return out


def thin(values: np.ndarray, most: int) -> np.ndarray:
    """Places of at most `most` of the values `[n]`: first, last, least and largest of equal stretches, so that no peak is lost.

    Source: Jugel et al., M4: a visualization-oriented time series data aggregation, VLDB 2014.
    """
    n = len(values)
    if n <= most:
        return np.arange(n)
    edges = np.linspace(0, n, max(most // 4, 1) + 1).astype(int)
    kept = set[int]()
    for a, b in itertools.pairwise(edges):
        part = values[a:b]
        kept |= {int(a), int(b) - 1, int(a + part.argmin()), int(a + part.argmax())}
    return np.array(sorted(kept))


def differing(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Settings that the runs do not share, with the value of each run."""
    each = [run.settings() for run in runs]
    keys = dict.fromkeys(key for settings in each for key in settings)
    table = [{"key": key, "values": [_text(settings.get(key)) for settings in each]} for key in keys]
    return [row for row in table if len(set(row["values"])) > 1]


def _text(value: Any) -> str:
    return "none" if value is None else str(value)[:200]
