"""Problems that say how they are graded, out of files, and what becomes of rows that are none."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from rollkeel.config_data import Rows
from rollkeel.errors import BadInput
from rollkeel.tasks.base import excerpt
from rollkeel.tasks.data import Row
from rollkeel.tasks.published import Issue, Pair, read
from rollkeel.tasks.tests_form import Refused, code_row
from rollkeel.types import GraderSpec

T = TypeVar("T")
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv")


def load_graded(config: Rows, keep: Callable[[Row], bool] | None = None) -> list[Row]:
    """Problems of `config.path` that say how they are graded: with `data.grader=code` those with tests, with `row` all forms of
    `published.py`, where `data.grader_options` (`grader`, `options`) grades rows that name none.

    A warning of one line says how many rows were refused, and why. Raises `BadInput` for a file that cannot be read and for one
    without a usable row.
    """
    default = _default(config) if config.grader == "row" else None

    def problem(record: Any, number: int) -> Row:
        if config.grader == "code":
            return code_row(record, number=number, prompt_column=config.prompt_column)
        row = _problem(read(record, number), default, config)
        by = getattr(config, "draw_by", "row")
        return row if by == "row" else replace(row, key=str(record.get(by, "")))

    kept, refused = convert(records(Path(str(config.path)).expanduser()), problem)
    rows_of: dict[str, list[int]] = {}
    for number, reason in refused:
        rows_of.setdefault(reason, []).append(number)
    most = sorted(rows_of.items(), key=lambda item: -len(item[1]))[:3]
    reasons = "; ".join(f"{reason} ({len(rows)}, first row {rows[0]})" for reason, rows in most)
    if not kept:
        total, what = len(refused), "tests" if config.grader == "code" else "a grader"
        raise BadInput(
            f"data.path {config.path!r}: expected rows with {what}, none of {total} is usable: {reasons or 'empty data'}"
        )
    if refused:
        total = len(kept) + len(refused)
        warnings.warn(f"data.path {config.path!r}: {len(refused)} of {total} rows refused: {reasons}", stacklevel=2)
    return list(filter(keep, kept)) if keep else kept


def convert(rows: Iterable[tuple[int, Any]], form: Callable[[Any, int], T]) -> tuple[list[T], list[tuple[int, str]]]:
    """What `form` makes of numbered rows, in order; and the numbers of those that it refuses, each with its reason."""
    kept: list[T] = []
    refused: list[tuple[int, str]] = []
    for number, record in rows:
        try:
            kept.append(form(record, number))
        except Refused as reason:
            refused.append((number, str(reason)))
    return kept, refused


def as_ours(row: Row) -> dict[str, Any]:
    """A problem as a row that `read` takes for the same."""
    line: dict[str, Any] = {
        "prompt": list(row.messages) or row.prompt,
        "answer": row.answer or None,
        "solution": row.solution,
    }
    if row.grader is not None:
        line |= {"grader": row.grader.name, "grader_options": dict(row.grader.options)}
    return {column: value for column, value in line.items() if value is not None}


def _default(config: Rows) -> GraderSpec | None:
    if unknown := sorted(set(config.grader_options) - {"grader", "options"}):
        raise BadInput(f"data.grader_options: with data.grader=row expected grader and options, got {unknown[0]!r}")
    name = config.grader_options.get("grader")
    return GraderSpec(name=name, options=config.grader_options.get("options", {})) if name else None


def _problem(row: Row | Pair | Issue, default: GraderSpec | None, config: Rows) -> Row:
    if not isinstance(row, Row):
        raise Refused(f"expected a problem, got a {'preference pair' if isinstance(row, Pair) else 'repository issue'}")
    if row.grader is None and default is None:
        raise Refused("names no grader; set data.grader_options.grader")
    if len(row.messages) > 1 and not config.chat_template:
        raise Refused(f"holds {len(row.messages)} messages; set data.chat_template=true")
    return replace(row, grader=row.grader or default)


def records(path: Path) -> Iterator[tuple[int, Any]]:
    """Numbers and rows of a file; None for a line that is no JSON. Raises `BadInput` for a file that cannot be read."""
    try:
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                yield from ((number, _line(line)) for number, line in enumerate(file, 1) if line.strip())
        elif path.suffix == ".json":
            rows = json.loads(path.read_text(encoding="utf-8-sig"))
            yield from enumerate(rows if isinstance(rows, list) else [rows], 1)
        elif path.suffix == ".parquet":
            import pyarrow.parquet as pq

            with pq.ParquetFile(path) as table:
                batches = (batch.to_pylist() for batch in table.iter_batches(256))
                yield from enumerate(chain.from_iterable(batches), 1)
        elif path.suffix == ".csv":
            csv.field_size_limit(sys.maxsize)
            with path.open(encoding="utf-8-sig", newline="") as file:
                lines = csv.DictReader(file, strict=True)
                yield from enumerate(({k: v or None for k, v in row.items() if k} for row in lines), 1)
        else:
            raise BadInput(f"{path}: expected a file ending in {', '.join(SUFFIXES)}")
    except (OSError, EOFError, ValueError, RecursionError, csv.Error) as error:
        raise BadInput(f"{path}: cannot be read: {excerpt(str(error), 200)}") from None


def _line(line: bytes) -> Any:
    try:
        return json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError):
        return None
