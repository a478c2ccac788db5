"""What happened, as it happened: an append-only `events.jsonl` and atomic file writes every stage shares."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from rollkeel.errors import BadInput


class EventLog:
    """Appends one JSON object per line, flushed at once, so that a killed process leaves a readable log."""

    def __init__(self, path: str | Path | None) -> None:
        """`path=None` keeps events in memory only (`.seen`), for tests and stages run alone."""
        self.path = Path(path) if path is not None else None
        self.seen: list[dict[str, Any]] = []

    def emit(self, kind: str, **fields: Any) -> None:
        """Record event `kind`. Fields must be JSON values."""
        row = {"time": round(time.time(), 6), "event": kind, **fields}
        if self.path is None:
            self.seen.append(row)
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise BadInput(
                f"cannot write {self.path}: {error.strerror or error}; free space or choose another folder"
            ) from None


def write_atomic(path: str | Path, data: bytes | str, *, sync: bool = True) -> None:
    """Write a file so that readers see the old content or the new, never half of it; `sync`: even after a power cut.

    Raises `BadInput` (one line) when the folder cannot be written or the disk is full; nothing is left behind.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # on a file system that is read-only, this as well
            temporary.unlink()
        raise BadInput(f"cannot write {path}: {error.strerror or error}; free space or choose another folder") from None
