"""The cleaned rows as parquet, the list of removed ones, and the report; the report comes last and says that all is there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rollkeel.data.duplicates import CONFLICT, EXACT, KEPT, MIX, NEAR, Verdicts
from rollkeel.data.shards import Worker
from rollkeel.errors import BadInput
from rollkeel.events import write_atomic
from rollkeel.tasks.data import PART, REPORT

REMOVED = "removed.parquet"
_STAGES = {
    EXACT: ("exact duplicate", "same prompt and answer"),
    CONFLICT: ("exact duplicate", "same prompt, other answer"),
    NEAR: ("near duplicate", "same words, numbers and answer"),
    MIX: ("mix", "over the domain's share"),
}
ORDER = ("malformed", "harmful", "contaminated", "pass rate", "exact duplicate", "near duplicate", "mix")
"""Stages in the order in which a row meets them."""
_OPTIONS: dict[str, Any] = {"compression": "zstd", "compression_level": 3}
_COLUMNS = ("source", "row", "stage", "reason", "detail")
_REMOVED_SCHEMA = pa.schema([(name, pa.int64() if name == "row" else pa.string()) for name in _COLUMNS])


@final
class Parts:
    """Parquet files `part-00000.parquet`, … of at most `size` rows, each under its name once it is whole."""

    def __init__(self, out: Path, schema: pa.Schema, size: int) -> None:
        self.out = out
        self.schema = schema
        self.size = size
        self.written: list[dict[str, Any]] = []
        self._writer: pq.ParquetWriter | None = None
        self._rows = 0

    def add(self, table: pa.Table) -> None:
        while table.num_rows:
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._path(".tmp"), self.schema, **_OPTIONS)
            part = table.slice(0, self.size - self._rows)
            self._writer.write_table(part)
            self._rows, table = self._rows + part.num_rows, table.slice(part.num_rows)
            if self._rows == self.size:
                self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._path(".tmp").rename(self._path())
            self.written.append({"file": self._path().name, "rows": self._rows})
            self._writer, self._rows = None, 0

    def _path(self, suffix: str = "") -> Path:
        return self.out / (PART.format(len(self.written)) + suffix)


def write(
    folders: list[Path],
    offsets: NDArray[np.int64],
    verdicts: Verdicts,
    copies: NDArray[np.int64],
    report: dict[str, Any],
    out: Path,
    worker: Worker,
    progress: Callable[[str, int, int | None], None],
) -> dict[str, Any]:
    """Write everything into `out`; returns the whole report. `offsets`: first row of each shard; `copies [n]`: of each row."""
    if not copies.any():
        counts = Counter[str]()
        for (stage, _), n in report["removed"].items():
            counts[stage] += n
        raise BadInput(
            f"data: no row is left; removed {dict(counts)}, by duplicates and mixture {int((verdicts.state != KEPT).sum())}"
        )
    places = _Places(folders, offsets)
    parts = Parts(out, worker.schema(), worker.options.part_rows)
    with pq.ParquetWriter(out / f"{REMOVED}.tmp", _REMOVED_SCHEMA, **_OPTIONS) as removed:
        for number, folder in enumerate(folders):
            here = slice(int(offsets[number]), int(offsets[number + 1]))
            table = pq.read_table(folder / "rows.parquet")
            parts.add(table.take(np.repeat(np.arange(table.num_rows), copies[here])))
            rows = [*_local(folder, worker.names), *_global(here, verdicts, places)]
            rows.sort(key=lambda row: row["row"])
            removed.write_table(pa.Table.from_pylist(rows, schema=_REMOVED_SCHEMA))
            progress("writing", number + 1, len(folders))
    parts.close()
    (out / f"{REMOVED}.tmp").rename(out / REMOVED)
    counts = Counter(report["removed"])
    for state, key in _STAGES.items():
        if len(rows := np.flatnonzero(verdicts.state == state)):
            counts[key] = len(rows)
            report["examples"] += _examples(key, rows, verdicts, places, worker.options.examples)
    ordered = sorted(counts.items(), key=lambda pair: (ORDER.index(pair[0][0]), -pair[1], pair[0][1]))
    report["removed"] = [{"stage": stage, "reason": reason, "rows": n} for (stage, reason), n in ordered]
    report["rows"] |= {"removed": sum(counts.values()), "written": int(copies.sum()), "parts": len(parts.written)}
    report["parts"] = parts.written
    write_atomic(out / REPORT, json.dumps(report, indent=1, ensure_ascii=False))
    return report


class _Places:
    """Where rows came from, and their prompts."""

    def __init__(self, folders: list[Path], offsets: NDArray[np.int64]) -> None:
        self._offsets = offsets
        self._load = lru_cache(maxsize=4)(
            lambda shard: pq.read_table(folders[shard] / "rows.parquet", columns=["source", "row", "prompt"])
        )
        rows, sources = [np.zeros(0, np.int64)], []
        for folder in folders:
            table = pq.read_table(folder / "rows.parquet", columns=["source", "row"])
            rows.append(table["row"].to_numpy())
            sources.append(table["source"][0].as_py() if table.num_rows else "")
        self._rows, self._sources = np.concatenate(rows), sources

    def _shard(self, row: int) -> int:
        return int(np.searchsorted(self._offsets, row, side="right")) - 1

    def __call__(self, row: int) -> tuple[str, int]:
        return self._sources[self._shard(row)], int(self._rows[row])

    def prompt(self, row: int) -> str:
        shard = self._shard(row)
        return self._load(shard)["prompt"][row - int(self._offsets[shard])].as_py()


def _local(folder: Path, names: list[str]) -> Iterator[dict[str, Any]]:
    tally = json.loads((folder / "tally.json").read_text(encoding="utf-8"))
    for row, stage, reason, detail in tally["removed"]:
        yield {"source": names[tally["file"]], "row": row, "stage": stage, "reason": reason, "detail": detail}


def _global(here: slice, verdicts: Verdicts, places: _Places) -> Iterator[dict[str, Any]]:
    for i in (np.flatnonzero(verdicts.state[here] != KEPT) + here.start).tolist():
        stage, reason = _STAGES[int(verdicts.state[i])]
        source, row = places(i)
        yield {"source": source, "row": row, "stage": stage, "reason": reason, "detail": _detail(i, verdicts, places)}


def _detail(i: int, verdicts: Verdicts, places: _Places) -> str:
    if (other := int(verdicts.other[i])) < 0:
        return ""
    source, row = places(other)
    share = f"{verdicts.similarity[i]:.3f} " if i in verdicts.similarity else ""
    return f"{share}to {source} row {row}"


def _examples(
    key: tuple[str, str], rows: NDArray[np.int64], verdicts: Verdicts, places: _Places, count: int
) -> Iterator[Mapping[str, Any]]:
    for i in rows[:count].tolist():
        (source, row), other = places(i), int(verdicts.other[i])
        texts = {"text": places.prompt(i)[:300], "other": places.prompt(other)[:300] if other >= 0 else ""}
        detail = _detail(i, verdicts, places)
        yield {"stage": key[0], "reason": key[1], "detail": detail, "file": source, "row": row, **texts}
