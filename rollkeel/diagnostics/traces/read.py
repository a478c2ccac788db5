"""Recorded tokens from any path that a reader knows."""

from __future__ import annotations

from pathlib import Path

from rollkeel.diagnostics.traces.run import is_run, read_run_trace
from rollkeel.diagnostics.traces.trace import Trace
from rollkeel.errors import BadInput


def read_trace(path: str | Path, *, last: int | None = None) -> Trace:
    """The trace at `path`: a run folder of rollkeel, or one of its rollouts files.

    `last`: only the last so many steps. Raises `BadInput` where there is nothing to read, in one line.
    """
    path = Path(path)
    if not path.exists():
        raise BadInput(f"{path}: no such file or folder; expected a run folder or a trace")
    if is_run(path):
        return read_run_trace(path, last=last)
    raise BadInput(f"{path}: no known trace; expected a folder made by rollkeel train")
