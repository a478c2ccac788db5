"""Prompt/answer rows from jsonl, parquet, CSV or Hugging Face data, refused with one line when they are not what they should be."""

from __future__ import annotations

import csv
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollkeel.config_data import Rows, SourceConfig
from rollkeel.errors import BadInput, nearest
from rollkeel.tasks.base import hash_fraction
from rollkeel.tasks.lines import Lines
from rollkeel.types import GraderSpec

SUFFIXES = (".jsonl", ".parquet", ".csv")
BATCH = 1024
"""Rows of parquet that are Python objects of the reader's at one time."""
REPORT, PART = "report.json", "part-{:05d}.parquet"
"""Files of a folder that `rollkeel data clean` has finished."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt with its answer."""

    number: int
    """1-based line (jsonl) or row of the source."""
    prompt: str
    answer: str
    solution: str | None = None
    """What a demonstration shows, where `data.solution_column` names it."""
    grader: GraderSpec | None = None
    """Its own, where `grader_column` names a column of them."""
    key: str = ""
    """What makes it like other rows: the value of `draw_by`, where that names a column."""
    messages: tuple[dict[str, str], ...] = ()
    """The conversation (`role`, `content`) whose next turn is asked for, where the prompt column holds one; else empty."""
    grader: GraderSpec | None = None
    """Who grades answers to it, where the row says so."""


def load_rows(config: Rows, keep: Callable[[Row], bool] | None = None) -> Sequence[Row]:
    """All rows of `config.path` in file order, or those that `keep` says; all of them are checked.

    Rows of `.jsonl` stay in their file, which must not be changed meanwhile (`BadInput` at the row), others are in memory. Strings are taken as they are and numbers as text. Raises `BadInput` for a missing file, missing columns (naming those
    present), empty data, malformed lines, nulls, empty or other values, each with the row, and when `datasets` is not installed.
    """
    if config.path is None:
        raise BadInput("data.path: expected a file, folder or data set id, got null")
    path = Path(config.path).expanduser()
    if path.suffix in SUFFIXES:
        if not path.is_file():
            raise BadInput(f"data.path {config.path!r}: no such file")
        if path.suffix == ".jsonl":
            return _jsonl(path, config, keep)
        found = _csv(path, config) if path.suffix == ".csv" else _parquet([path], config)
    elif path.is_file():
        raise BadInput(
            f"data.path {config.path!r}: expected a file ending in {' or '.join(SUFFIXES)}, got {path.suffix!r}"
        )
    elif (path / REPORT).is_file():
        found = _parquet(sorted(path.glob(PART.replace("{:05d}", "*"))), config)
    elif (path / "work").is_dir():
        raise BadInput(f"data.path {config.path!r}: `rollkeel data clean` has not finished it; run that again")
    else:
        found = _hugging_face(config, path)
    total, rows = 0, list[Row]()
    for number, values in found:
        row, total = _row(config, number, values), total + 1
        if keep is None or keep(row):
            rows.append(row)
    _check_any(config, total)
    return rows


def side(row: Row, eval_fraction: float, sft_fraction: float = 0.0) -> str:
    """`eval`, `sft` or `train`, by the hash of the prompt with whitespace normalised: duplicates never straddle the split.

    `sft_fraction`: share of the rows that are not `eval` which is `sft`.
    """
    text = " ".join(row.prompt.split())
    if hash_fraction("data", text) < eval_fraction:
        return "eval"
    return "sft" if hash_fraction("sft", text) < sft_fraction else "train"


def _columns(config: Rows) -> dict[str, str]:
    """Field of `Row` → column that it is read from."""
    columns = {"prompt": config.prompt_column, "answer": config.answer_column, "solution": config.solution_column}
    if isinstance(config, SourceConfig):
        columns |= {"grader": config.grader_column, "key": None if config.draw_by == "row" else config.draw_by}
    return {field: column for field, column in columns.items() if column is not None}


def _heads(config: Rows, present: Sequence[str]) -> list[str]:
    """The columns to read: of `reward_model.ground_truth`, where no column has that name, `reward_model`."""
    return list(dict.fromkeys(c if c in present else c.split(".")[0] for c in _columns(config).values()))


def _row(config: Rows, number: int, values: Mapping[str, Any]) -> Row:
    found: dict[str, Any] = {}
    for field, column in _columns(config).items():
        value = _inner(config, number, column, values)
        if field == "grader":
            found[field] = _grader(config, number, column, value)
            continue
        if isinstance(value, list):
            spoken = _conversation(config, number, column, value)
            if field == "prompt" and config.chat_template:
                found["messages"] = spoken
            value = "\n\n".join(message["content"] for message in spoken)
            if len(spoken) != 1 and "messages" not in found:
                raise BadInput(
                    f"data.path {config.path!r} row {number}: column {column!r} holds {len(spoken)} messages;"
                    + (" set data.chat_template=true" if field == "prompt" else " expected one")
                )
        found[field] = _text(config, number, column, value)
    return Row(number=number, **found)


def _grader(config: Rows, number: int, column: str, value: Any) -> GraderSpec:
    """`math`, or `{name: math, options: {…}}`; the source's own options where it is the source's own grader."""
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return GraderSpec(name=value["name"], options=value.get("options") or {})
    name = _text(config, number, column, value)
    return GraderSpec(name=name, options=config.grader_options if name == config.grader else {})


def _inner(config: Rows, number: int, column: str, values: Mapping[str, Any]) -> Any:
    """The value of a column, or of a place inside one: `reward_model.ground_truth`."""
    if column in values:
        return values[column]
    found: Any = values
    for part in column.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise BadInput(f"data.path {config.path!r} row {number}: column {column!r} has no {part!r}")
        found = found[part]
    return found


def _conversation(config: Rows, number: int, column: str, value: list[Any]) -> tuple[dict[str, str], ...]:
    for message in value or [None]:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise BadInput(
                f"data.path {config.path!r} row {number}: column {column!r}: expected text, a number or a list of messages"
                f" with role and content, got {str(value)[:80]}"
            )
    return tuple({"role": m["role"], "content": m["content"]} for m in value)


def _text(config: Rows, number: int, column: str, value: Any) -> str:
    where = f"data.path {config.path!r} row {number}: column {column!r}"
    if value is None:
        raise BadInput(f"{where}: expected text, got null; fill or drop the row")
    if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise BadInput(f"{where}: expected a finite number or text, got {value}")
        value = str(value)
    if not isinstance(value, str):
        raise BadInput(f"{where}: expected text or a number, got {type(value).__name__}")
    if not value.strip():
        raise BadInput(f"{where}: expected text, got an empty string; fill or drop the row")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{where}: holds a lone surrogate, which is not Unicode text") from None
    return value


def _check_columns(config: Rows, present: Sequence[str], where: str = "") -> None:
    for field, column in _columns(config).items():
        if column not in present and ("." not in column or column.split(".")[0] not in present):
            there = ", ".join(repr(c) for c in sorted(map(str, present))) or "none"
            guess = nearest(column, [str(c) for c in present])
            hint = guess if guess.startswith("; did") else f"; set data.{field}_column"
            raise BadInput(f"data.path {config.path!r}{where}: no column {column!r}; present: {there}{hint}")


def _check_any(config: Rows, total: int) -> None:
    if not total:
        raise BadInput(f"data.path {config.path!r}: expected at least one row, got empty data")


def _jsonl(path: Path, config: Rows, keep: Callable[[Row], bool] | None) -> Lines[Row]:
    try:
        rows = Lines(path, partial(_parsed, config), keep)
    except OSError as error:
        raise BadInput(f"data.path {config.path!r}: cannot be read: {error.strerror}") from None
    _check_any(config, rows.total)
    return rows


def _parsed(config: Rows, number: int, line: bytes) -> Row:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # bad UTF-8 and bad JSON are both ValueErrors
        reason = getattr(error, "msg", None) or getattr(error, "reason", None) or str(error)
        raise BadInput(f"data.path {config.path!r} line {number}: not valid JSON: {reason}") from None
    if not isinstance(record, dict):
        raise BadInput(f"data.path {config.path!r} line {number}: expected an object, got {type(record).__name__}")
    _check_columns(config, list(record), f" line {number}")
    return _row(config, number, record)


def _parquet(files: Sequence[Path], config: Rows) -> Iterator[tuple[int, Mapping[str, Any]]]:
    number = 0
    for path in files:
        try:
            with pq.ParquetFile(path) as file:
                _check_columns(config, file.schema_arrow.names)
                columns = _heads(config, file.schema_arrow.names)
                for batch in file.iter_batches(batch_size=BATCH, columns=columns):
                    yield from _numbered({c: batch.column(c).to_pylist() for c in columns}, number + 1)
                    number += batch.num_rows
        except (OSError, pa.ArrowException) as error:
            raise BadInput(f"data.path {config.path!r}: not readable as parquet: {_line(error)}") from None


def _csv(path: Path, config: Rows) -> Iterator[tuple[int, Mapping[str, Any]]]:
    csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            _check_columns(config, reader.fieldnames or [])
            for number, values in enumerate(reader, 1):
                if None in values:
                    raise BadInput(f"data.path {config.path!r} row {number}: more fields than the header has columns")
                yield number, values
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"data.path {config.path!r}: not readable as CSV: {_line(error)}") from None


def _hugging_face(config: Rows, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Folders written by `save_to_disk`, folders of data files, and hub ids, through the optional `datasets` library."""
    text = str(config.path)
    if text.startswith((".", "/", "~")) and not path.exists():
        raise BadInput(f"data.path {text!r}: no such file or folder")
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise BadInput(
            f"data.path {text!r}: a Hugging Face data set needs the optional `datasets` library; "
            "install it with: pip install 'rollkeel[datasets]'"
        ) from None
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path) if path.exists() else text, split=config.split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise BadInput(f"data.path {text!r}: datasets cannot load it: {_line(error)}") from None
    if isinstance(loaded, Mapping):
        if config.split not in loaded:
            raise BadInput(f"data.split {config.split!r}: not in {text!r}{nearest(config.split, list(loaded))}")
        loaded = loaded[config.split]
    _check_columns(config, list(loaded.column_names))
    yield from _numbered({c: loaded[c] for c in _heads(config, loaded.column_names)}, 1)


def _numbered(columns: Mapping[str, Iterable[Any]], first: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, values in enumerate(zip(*columns.values(), strict=True), first):
        yield number, dict(zip(columns, values, strict=True))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
