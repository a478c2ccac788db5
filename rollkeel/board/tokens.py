"""Tokens of a run, page by page: a page decodes the row groups that it shows, a list of rollouts the columns that rank them."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as pq

from rollkeel.errors import BadInput, Corrupt
from rollkeel.record.rollout_store import check_types
from rollkeel.record.runfolder import rollout_files
from rollkeel.report.samples import token_texts, visible

pc: Any = compute  # its functions are made at import time

_ROW = ("id", "group", "member", "reward", "status", "train_version")
_TEXTS = ("prompt_text", "answer", "detail")
_EACH = (
    "token_ids",
    "logprobs",
    "train_logprobs",
    "entropy",
    "advantages",
    "versions",
    "keep",
    "cut",
    "sampled",
    "pieces",
)
_RANKED = ("id", "group", "member", "reward", "token_ids", "logprobs", "train_logprobs", "keep")
SORTS = ("order", "gap", "dropped", "reward", "length")
MOST_ROLLOUTS = 64
"""Rollouts on a page, however short."""
_MAX_TEXT = 4000
_FILES, _GROUPS = 64, 12
"""Most files whose rankings are kept, and most decoded row groups, of about 2¹⁷ tokens and 10 MB each."""


class Kept:
    """The `most` values that were asked for last. Every method may be called from any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of `key`, made where it is not kept."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()  # not under the lock: others need not wait for it
        with self._lock:
            self._values[key] = value
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value


_files, _groups = Kept(_FILES), Kept(_GROUPS)


@dataclass(frozen=True)
class Place:
    """A token of a step: of its file's row, counted from 0."""

    step: int
    row: int
    token: int

    def to_json(self) -> dict[str, int]:
        return {"step": self.step, "row": self.row, "token": self.token}


class StepFile:
    """The rollouts file of one step. Raises `Corrupt`, one line, for one that cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            meta = pq.read_metadata(path)
            self._schema = meta.schema.to_arrow_schema()
        except (pa.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise Corrupt(f"{path.name} cannot be read: {reason}") from None
        check_types(path, self._schema)
        if "token_ids" not in self._schema.names:
            raise Corrupt(f"{path.name}: column token_ids is missing; expected a file written by rollkeel")
        self._ends = np.cumsum([meta.row_group(i).num_rows for i in range(meta.num_row_groups)])

    @property
    def rows(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, at: int) -> tuple[pa.Table, int]:
        """The decoded row group that holds row `at`, and its place there."""
        number = int(np.searchsorted(self._ends, at, side="right"))
        table = _groups.get((self, number), lambda: self._read(number, (*_ROW, *_TEXTS, *_EACH)))
        return table, at - (int(self._ends[number - 1]) if number else 0)

    def length(self, at: int) -> int:
        """Tokens of row `at`."""
        table, i = self.row(at)
        return len(table["token_ids"][i].values or ())

    def row_of(self, rollout: int) -> int:
        """Row of the rollout with this id. Raises `BadInput` if there is none."""
        found = np.flatnonzero(self.ranked["id"] == rollout)
        if not len(found):
            raise BadInput(f"{self.path.name}: no rollout {rollout}")
        return int(found[0])

    @cached_property
    def ranked(self) -> dict[str, Any]:
        """What a list of the rollouts shows, `[rows]` each: numbers are NaN where the file does not say."""
        parts = [_ranks(self._read(i, _RANKED)) for i in range(len(self._ends))]
        return {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}

    def _read(self, group: int, names: Sequence[str]) -> pa.Table:
        try:
            with pq.ParquetFile(self.path) as file:
                return file.read_row_group(group, [name for name in names if name in self._schema.names])
        except (pa.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise Corrupt(f"{self.path.name} cannot be read: {reason}") from None


def _ranks(table: pa.Table) -> dict[str, np.ndarray]:
    lengths = pc.fill_null(pc.list_value_length(table["token_ids"]), 0).to_numpy().astype(np.int64)
    gap = np.abs(_flat(table, "train_logprobs", lengths) - _flat(table, "logprobs", lengths))
    dropped = 1 - _flat(table, "keep", lengths)
    found = {
        "length": lengths,
        "gap": _means(gap, lengths),
        "dropped": _means(dropped, lengths),
    }
    for name in ("id", "group", "member", "reward"):
        found[name] = np.full(len(table), np.nan)
        if name in table.column_names:
            found[name] = pc.cast(table[name], pa.float64()).to_numpy(zero_copy_only=False)
    return found


def _flat(table: pa.Table, name: str, lengths: np.ndarray) -> np.ndarray:
    """A list column token after token, NaN for a row without a value for each of its tokens."""
    out = np.full(int(lengths.sum()), np.nan, np.float32)
    if name in table.column_names and not pa.types.is_null(table.schema.field(name).type):
        whole = pc.fill_null(pc.list_value_length(table[name]), 0).to_numpy() == lengths
        flat = pc.list_flatten(table[name].filter(pa.array(whole)))
        out[np.repeat(whole, lengths)] = pc.cast(flat, pa.float32()).to_numpy(zero_copy_only=False)
    return out


def _means(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Mean of the known values of each row; NaN where there are none."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return _sums(np.where(known, values, 0), lengths) / _sums(known, lengths)


def _sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sum of the values of each row, which may have none."""
    ends = np.cumsum(lengths)
    running = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return running[ends] - running[ends - lengths]


class Tokens:
    """The recorded tokens of the run in folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._texts: Callable[[int], str] | None = None
        self.problems: list[str] = []

    def steps(self) -> list[int]:
        """Steps whose rollouts were recorded."""
        return [step for step, _ in rollout_files(self.path)]

    def file(self, step: int) -> StepFile:
        """Raises `BadInput` for a step without a file, `Corrupt` for one that is damaged or lies elsewhere."""
        path = dict(rollout_files(self.path)).get(step)
        if path is None:
            raise BadInput(f"step {step}: no rollouts were recorded")
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise Corrupt(f"{path.name} is a link out of the run folder: not read")
        status = path.stat()
        return _files.get((path, status.st_mtime_ns, status.st_size), lambda: StepFile(path))

    def rollouts(self, step: int, sort: str, first: int, count: int) -> dict[str, Any]:
        """`count` rollouts of a step from the `first` on, in file order or by the largest `sort`; and totals of the step."""
        ranked = self.file(step).ranked
        n = len(ranked.get("id", ()))
        order = np.arange(n)
        if sort != "order" and n:
            order = np.argsort(-np.nan_to_num(ranked[sort].astype(float), nan=-np.inf), kind="stable")
        rows = []
        for i in order[first : first + count]:
            rows.append({"row": int(i)} | {name: plain(values[i]) for name, values in ranked.items()})
        return {"count": n, "tokens": int(ranked["length"].sum()) if n else 0, "rollouts": rows}

    def page(self, start: Place, count: int) -> dict[str, Any]:
        """`count` tokens of a step from `start` on, over as many rollouts as that takes; and where the next page begins."""
        file = self.file(start.step)
        parts: list[dict[str, Any]] = []
        left = count
        row, token = start.row, start.token
        while left > 0 and row < file.rows and len(parts) < MOST_ROLLOUTS:
            length = file.length(row)
            token = min(token, length)
            end = min(token + left, length)
            parts.append(self._part(file, row, token, end, length))
            left -= end - token
            if end < length:
                token = end
                break
            row, token = row + 1, 0
        following = self._neighbour(start.step, 1)
        if row < file.rows:
            following = Place(start.step, row, token)
        return {
            "parts": parts,
            "rows": file.rows,
            "start": start.to_json(),
            "next": following and following.to_json(),
            "first": (start.row, start.token) == (0, 0) and self._neighbour(start.step, -1) is None,
        }

    def before(self, start: Place, count: int) -> Place | None:
        """Where a page begins that ends at `start`; None before the first token of the run."""
        row, token = start.row, start.token
        if (row, token) == (0, 0):
            last = self._neighbour(start.step, -1)
            if last is None:
                return None
            rows = self.file(last.step).rows
            return self.before(Place(last.step, rows, 0), count) if rows else Place(last.step, 0, 0)
        file = self.file(start.step)
        row = min(row, file.rows)
        left = count - min(token, count)
        token -= min(token, count)
        seen = 1
        while left > 0 and row > 0 and token == 0 and seen < MOST_ROLLOUTS:
            row -= 1
            token = max(file.length(row) - left, 0)
            left -= file.length(row) - token
            seen += 1
        return Place(start.step, row, token)

    def _neighbour(self, step: int, way: int) -> Place | None:
        steps = self.steps()
        at = steps.index(step) + way
        return Place(steps[at], 0, 0) if 0 <= at < len(steps) else None

    def _part(self, file: StepFile, row: int, start: int, end: int, length: int) -> dict[str, Any]:
        """Tokens `start` to `end` of a rollout, a list for each column that has a value for every token."""
        table, i = file.row(row)
        part: dict[str, Any] = {"row": row, "start": start, "length": length, "token_ids": []}
        for name in table.column_names:
            if name in _ROW:
                part[name] = plain(table[name][i].as_py())
            elif name in _TEXTS and start == 0:
                text = table[name][i].as_py() or ""
                part[name] = text[:_MAX_TEXT]
            elif name in _EACH:
                values = _slice(table[name][i], start, end, length)
                part |= {} if values is None else {name: values}
        pieces = part.pop("pieces", None) or map(self._text, part["token_ids"])
        part["texts"] = [visible(piece or "") for piece in pieces]
        return part

    def _text(self, token: int) -> str:
        if self._texts is None:
            self._texts = token_texts(self.path, self.problems)
        return self._texts(token)


def _slice(cell: pa.Scalar, start: int, end: int, length: int) -> list[Any] | None:
    """Part of a list that has a value for each of `length` tokens; None for another."""
    values = getattr(cell, "values", None)
    if values is None or len(values) != length:
        return None
    shown = values.slice(start, end - start)
    return list(map(plain, shown.to_pylist()))


def plain(value: Any) -> Any:
    """A value that JSON has: None for what is not finite."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.7g}")
    return value
