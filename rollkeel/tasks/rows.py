"""Rows of public benchmark files, as they are published: jsonl, json, parquet, csv, one file or a folder of them, or the hub."""

from __future__ import annotations

import csv
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollkeel.errors import BadInput

Row = dict[str, Any]
SOURCE = "_source"
"""Key under which a row carries where it came from: its file, relative to the folder that was given, or its hub config."""
ALL_CONFIGS = "*"
_LINES = re.compile(r"\s*\{.*\}[ \t\r]*\n\s*\{")
"""Two objects on lines of their own: a file of lines that is called .json."""


def find_files(path: Path, patterns: Sequence[str], where: str) -> list[Path]:
    """The file itself, or the files below a folder that match the first of `patterns` that any file matches, sorted.

    Raises `BadInput` when there are none; `where` says where they are published.
    """
    if path.is_file():
        if path.suffix not in READERS:
            raise BadInput(f"{path}: expected a file ending in {', '.join(READERS)}, got {path.suffix!r}")
        return [path]
    if not path.is_dir():
        raise BadInput(f"{path}: no such file or folder; {where}")
    for pattern in patterns:
        if files := sorted(p for p in path.glob(pattern) if p.is_file()):
            return files
    raise BadInput(f"{path}: holds no file like {' or '.join(patterns)}; {where}")


def read_files(files: Sequence[Path], root: Path) -> Iterator[Row]:
    """Rows of `files` in their order, one at a time. Raises `BadInput` naming file and line of what is not readable."""
    for file in files:
        source = file.name if file == root else file.relative_to(root).as_posix()
        try:
            for row in READERS[file.suffix](file):
                if not isinstance(row, dict):
                    raise BadInput(f"{file}: expected rows that are objects, got {type(row).__name__}")
                yield {**row, SOURCE: source}
        except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException, RecursionError) as error:
            raise BadInput(f"{file}: cannot be read: {' '.join(str(error).split())[:200]}") from None


def read_hub(hub: str, config: str | None, split: str, where: str) -> Iterator[Row]:
    """Rows of a data set on the hub, through the optional `datasets` library; config `*` takes all of its configs.

    Raises `BadInput` when the library is not installed, or the data set cannot be had (offline, gated, gone).
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise BadInput(
            f"{hub}: reading from the hub needs the optional `datasets` library (pip install 'rollkeel[datasets]'); "
            f"or give --path: {where}"
        ) from None
    try:
        configs = datasets.get_dataset_config_names(hub) if config == ALL_CONFIGS else [config]
        for name in configs:
            for row in datasets.load_dataset(hub, name, split=split):
                yield {**row, SOURCE: name or hub}
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"{hub}: not there or not reachable ({reason}); download it and give --path: {where}") from None


def _jsonl(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parsed(line, f"{file} line {number}")


def _json(file: Path) -> Iterator[Row]:
    """A list of rows, an object with a list `examples`, an object that is the row, or in truth jsonl."""
    text = file.read_text(encoding="utf-8-sig")
    if _LINES.match(text):
        yield from _jsonl(file)
        return
    value = _parsed(text, str(file))
    if isinstance(value, dict) and isinstance(value.get("examples"), list):
        value = value["examples"]
    yield from value if isinstance(value, list) else [value]


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadInput(f"{where}: not valid JSON: {getattr(error, 'msg', error)}") from None


def _csv(file: Path) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        yield from csv.DictReader(lines)


def _parquet(file: Path) -> Iterator[Row]:
    with pq.ParquetFile(file) as stored:
        for batch in stored.iter_batches(batch_size=256):
            yield from batch.to_pylist()


READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": _jsonl, ".json": _json, ".parquet": _parquet, ".csv": _csv,
}  # fmt: skip
