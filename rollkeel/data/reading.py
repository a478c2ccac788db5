"""Rows of jsonl and parquet files in chunks, as they come; an unusable row is `Malformed`, with the reason, and stops nothing."""

from __future__ import annotations

import glob
import gzip
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollkeel.errors import BadInput

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_LINE_BYTES, _CHUNK_BYTES = 2**28, 2**26
_PARQUET_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive rows of one file, not yet parsed."""

    number: int
    """Place of the chunk in the whole input."""
    file: int
    """Index of its file."""
    first: int
    """1-based line or row of its first row."""
    lines: list[bytes] | list[dict[str, Any]]
    """Lines of a jsonl file, blank ones included, or rows of a parquet file."""


class Malformed(Exception):
    """A row that cannot be used; the message is the reason."""


def expand(patterns: Sequence[str], suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """Files behind paths, folders and glob patterns, in the order given and by name within one. Raises `BadInput` for none."""
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            matches = sorted(p for p in path.iterdir() if p.name.endswith(tuple(suffixes)))
        else:
            matches = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))
        if not matches:
            raise BadInput(
                f"{pattern}: no such file, and no folder or pattern with files ending in {', '.join(suffixes)}"
            )
        files += matches
    for file in files:
        if not file.name.endswith(tuple(suffixes)):
            raise BadInput(f"{file}: expected a file ending in {', '.join(suffixes)}")
    if twice := [file for at, file in enumerate(files) if file in files[:at]]:
        raise BadInput(f"{twice[0]}: given twice")
    return files


def chunks(files: Sequence[Path], rows: int, columns: Sequence[str]) -> Iterator[Chunk]:
    """The input in chunks of at most `rows` rows and 64 MiB or so; none spans files. Raises `BadInput` for an unreadable file."""
    number = 0
    for index, file in enumerate(files):
        first = 1
        for lines in _blocks(file, rows, columns):
            yield Chunk(number=number, file=index, first=first, lines=lines)
            number, first = number + 1, first + len(lines)


def records(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row number and row of a small file, all columns. Raises `BadInput` for the first that cannot be used."""
    for chunk in chunks([file], 10_000, ()):
        for number, line in enumerate(chunk.lines, chunk.first):
            if isinstance(line, dict) or line.strip():
                try:
                    yield number, parse(line)
                except Malformed as fault:
                    raise BadInput(f"{file} row {number}: {fault}") from None


def parse(line: bytes | dict[str, Any]) -> dict[str, Any]:
    """The object on a line. Raises `Malformed`."""
    if isinstance(line, dict):
        return line
    if len(line) >= _LINE_BYTES:
        raise Malformed("too long a line")
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise Malformed("not UTF-8") from None
    except (ValueError, RecursionError):
        raise Malformed("not JSON") from None
    if not isinstance(record, dict):
        raise Malformed("not an object")
    return record


def text_of(record: dict[str, Any], column: str) -> str:
    """A column's text; finite numbers count as their text, as in `rollkeel.tasks.data`. Raises `Malformed`."""
    value = record.get(column)
    if value is None:
        raise Malformed(f"{column}: {'null' if column in record else 'missing'}")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Malformed(f"{column}: lone surrogate") from None
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Malformed(f"{column}: not text")
    return str(value)


def _blocks(file: Path, rows: int, columns: Sequence[str]) -> Iterator[list[Any]]:
    block, size = list[Any](), 0
    try:
        for row, length in _sized(file, rows, columns):
            block.append(row)
            size += length
            if len(block) == rows or size >= _CHUNK_BYTES:
                yield block
                block, size = [], 0
    except (OSError, EOFError, pa.ArrowException) as error:
        raise BadInput(f"{file}: cannot be read: {' '.join(str(error).split())[:200]}") from None
    if block:
        yield block


def _sized(file: Path, rows: int, columns: Sequence[str]) -> Iterator[tuple[Any, float]]:
    """Lines or rows, and about how many bytes each takes."""
    if file.name.endswith(".parquet"):
        with pq.ParquetFile(file) as source:
            present = source.schema_arrow.names
            if absent := [c for c in columns if c not in present]:
                raise BadInput(f"{file}: no column {absent[0]!r}; present: {', '.join(map(repr, present))}")
            for batch in source.iter_batches(batch_size=min(rows, _PARQUET_ROWS), columns=list(columns) or None):
                yield from ((row, batch.nbytes / batch.num_rows) for row in batch.to_pylist())
    else:
        with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as stream:
            first = stream.readline(_LINE_BYTES).removeprefix(b"\xef\xbb\xbf")
            for line in chain([first] if first else (), iter(lambda: stream.readline(_LINE_BYTES), b"")):
                yield line, len(line)
