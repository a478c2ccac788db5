"""Prompt/answer rows from jsonl, parquet or Hugging Face data, refused with one line when they are not what they should be."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollkeel.config import DataConfig
from rollkeel.errors import BadInput
from rollkeel.tasks.base import hash_fraction, nearest

SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt with its answer."""

    number: int
    """1-based line (jsonl) or row of the source."""
    prompt: str
    answer: str


def load_rows(config: DataConfig) -> list[Row]:
    """All rows of `config.path` in file order.

    Strings are taken as they are and numbers as text. Raises `BadInput` for a missing file, missing columns (naming those
    present), empty data, malformed lines, nulls, empty or other values, each with the row, and when `datasets` is not installed.
    """
    if config.path is None:
        raise BadInput("data.path: expected a file, folder or data set id, got null")
    path = Path(config.path).expanduser()
    if path.suffix in SUFFIXES:
        if not path.is_file():
            raise BadInput(f"data.path {config.path!r}: no such file")
        pairs = _jsonl(path, config) if path.suffix == ".jsonl" else _parquet(path, config)
    elif path.is_file():
        raise BadInput(
            f"data.path {config.path!r}: expected a file ending in {' or '.join(SUFFIXES)}, got {path.suffix!r}"
        )
    else:
        pairs = _hugging_face(config, path)
    rows = [_row(config, number, prompt, answer) for number, prompt, answer in pairs]
    if not rows:
        raise BadInput(f"data.path {config.path!r}: expected at least one row, got empty data")
    return rows


def side(row: Row, eval_fraction: float) -> str:
    """`eval` or `train`, by the hash of the prompt with whitespace normalised: duplicates never straddle the split."""
    return "eval" if hash_fraction("data", " ".join(row.prompt.split())) < eval_fraction else "train"


def _row(config: DataConfig, number: int, prompt: Any, answer: Any) -> Row:
    return Row(
        number=number,
        prompt=_text(config, number, config.prompt_column, prompt),
        answer=_text(config, number, config.answer_column, answer),
    )


def _text(config: DataConfig, number: int, column: str, value: Any) -> str:
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


def _check_columns(config: DataConfig, present: Sequence[str], where: str = "") -> None:
    for key, column in (("prompt_column", config.prompt_column), ("answer_column", config.answer_column)):
        if column not in present:
            there = ", ".join(repr(c) for c in sorted(map(str, present))) or "none"
            guess = nearest(column, [str(c) for c in present])
            hint = guess if guess.startswith("; did") else f"; set data.{key}"
            raise BadInput(f"data.path {config.path!r}{where}: no column {column!r}; present: {there}{hint}")


def _jsonl(path: Path, config: DataConfig) -> Iterator[tuple[int, Any, Any]]:
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise BadInput(f"data.path {config.path!r}: cannot be read: {error.strerror}") from None
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            record = json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError) as error:  # bad UTF-8 and bad JSON are both ValueErrors
            reason = getattr(error, "msg", None) or getattr(error, "reason", None) or str(error)
            raise BadInput(f"data.path {config.path!r} line {number}: not valid JSON: {reason}") from None
        if not isinstance(record, dict):
            raise BadInput(f"data.path {config.path!r} line {number}: expected an object, got {type(record).__name__}")
        _check_columns(config, list(record), f" line {number}")
        yield number, record[config.prompt_column], record[config.answer_column]


def _parquet(path: Path, config: DataConfig) -> Iterator[tuple[int, Any, Any]]:
    try:
        with pq.ParquetFile(path) as file:
            _check_columns(config, file.schema_arrow.names)
            columns = list(dict.fromkeys((config.prompt_column, config.answer_column)))
            table = file.read(columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise BadInput(f"data.path {config.path!r}: not readable as parquet: {_line(error)}") from None
    prompts, answers = (table[c].to_pylist() for c in (config.prompt_column, config.answer_column))
    yield from _numbered(prompts, answers)


def _hugging_face(config: DataConfig, path: Path) -> Iterator[tuple[int, Any, Any]]:
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
    yield from _numbered(loaded[config.prompt_column], loaded[config.answer_column])


def _numbered(prompts: Iterable[Any], answers: Iterable[Any]) -> Iterator[tuple[int, Any, Any]]:
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), 1):
        yield number, prompt, answer


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
