"""JSON lines as other programs leave them: cut short, mixed, badly encoded. What can be read is read, the rest is noted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rollkeel_doctor.traces.build import Notes

MAX_LINE: Final = 1 << 28  # Bytes of one line; longer lines are skipped.


def records(path: Path, notes: Notes) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, object) of every line that can be read; what cannot goes to `notes`."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE):
                number += 1
                where = f"{path.name}:{number}"
                if len(line) == MAX_LINE and not line.endswith(b"\n"):
                    notes.add(f"a line of more than {MAX_LINE} bytes; skipped", where)
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_LINE)
                    continue
                if line.strip() and (found := _parse(line, where, notes)) is not None:
                    yield where, found
    except OSError as error:
        notes.add(f"cannot be read: {error.strerror or error}", str(path))


def _parse(line: bytes, where: str, notes: Notes) -> dict[str, Any] | None:
    try:
        text = line.decode()
    except UnicodeDecodeError:
        notes.add("not UTF-8; what is not was replaced", where)
        text = line.decode(errors="replace")
    try:
        found = json.loads(text)
    except RecursionError:
        notes.add("nested too deeply; left out", where)
        return None
    except ValueError:
        cut = not line.endswith(b"\n")
        notes.add("the last line is cut short; left out" if cut else "not JSON; left out", where)
        return None
    if not isinstance(found, dict):
        notes.add("not a JSON object; left out", where)
        return None
    return found


def first_record(path: Path) -> dict[str, Any]:
    """The first object of a file, or an empty one; what is wrong with it is not noted here."""
    if not path.is_file():
        return {}
    return next((found for _, found in records(path, Notes())), {})
