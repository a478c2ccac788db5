"""Files that another process appends to, read once each line."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any


class Tail:
    """Whole lines of `path`, from where the last call ended. A file that is missing, or leads out of `root`, has none."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self.root = root
        self.problem = ""
        """What cannot be read, one line; empty if all is well."""
        self._file = 0
        self._at = 0

    def size(self) -> int:
        """Bytes of the file, 0 where there is none."""
        return self.path.stat().st_size if self.path.is_file() else 0

    def changed(self) -> float:
        """Seconds since the epoch of the last write, 0 where there is none."""
        return self.path.stat().st_mtime if self.path.is_file() else 0.0

    def end(self, size: int) -> list[bytes]:
        """Lines of the last `size` bytes, the first and the last of which may be parts."""
        with suppress(OSError):
            if self.path.resolve().is_relative_to(self.root):
                with self.path.open("rb") as file:
                    file.seek(max(self.size() - size, 0))
                    return file.read().split(b"\n")
        return []

    def read(self) -> tuple[bool, list[bytes]]:
        """Whether the file was replaced or cut, so that these are its lines from the first; and the new lines."""
        try:
            with self.path.open("rb") as file:
                status = self.path.stat()
                if not self.path.resolve().is_relative_to(self.root):
                    self.problem = f"{self.path.name} is a link out of the run folder: not read"
                    return False, []
                anew = bool(self._at) and (status.st_ino != self._file or status.st_size < self._at)
                self._at = 0 if anew else self._at
                self._file = status.st_ino
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            gone, self._at = bool(self._at), 0
            return gone, []
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {error.strerror}"
            return False, []
        *lines, half = data.split(b"\n")
        self._at += len(data) - len(half)
        return anew, lines


def json_object(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None for anything else."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
