"""What was promised and what came of it, in a folder: an append-only file of JSON lines that outlives the server.

Each line is written by one call before anybody is told of what it says, so a killed server forgets nothing that it said. It
is not forced to the disk: it outlives the process, not a power cut. The file is cut into pieces; the oldest is deleted
as soon as no job that is still known has a line in it. Oldest first, or the end of a job could be forgotten before its start.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections import deque
from pathlib import Path
from typing import Any

from rollkeel_sandbox.errors import BadInput, RunStopped

PIECE_BYTES = 16 << 20
PREFIX, SUFFIX = "ledger-", ".jsonl"


class Ledger:
    """Lines `{"id": …, "event": …, …}`. Not thread-safe: the caller locks."""

    def __init__(self, folder: Path) -> None:
        """Raises `BadInput` if the folder cannot be used or another server uses it."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"sandbox: another server uses {folder}; give this one a state folder of its own") from None
        except OSError as error:
            raise BadInput(f"sandbox: state folder {folder}: {error.strerror}; name another") from None
        self._folder = folder
        self._pieces: deque[tuple[Path, set[str]]] = deque()
        """Oldest first, with the ids of known jobs that have a line in it."""
        self._file = -1
        self._size = 0
        names = sorted(p for p in folder.iterdir() if p.name.startswith(PREFIX) and p.name.endswith(SUFFIX))
        self._number = int(names[-1].name[len(PREFIX) : -len(SUFFIX)]) if names else 0
        self._old = names

    def load(self) -> list[dict[str, Any]]:
        """All lines, oldest first; a last one that was cut off by the end of its writer is left out."""
        out = []
        for path in self._old:
            known = set()
            for line in path.read_bytes().split(b"\n"):
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                known.add(row["id"])
                out.append(row)
            self._pieces.append((path, known))
        self._old = []
        try:
            self._next_piece()
        except OSError as error:
            raise BadInput(f"sandbox: state folder {self._folder}: {error.strerror}; name another") from None
        return out

    def append(self, id: str, event: str, **fields: Any) -> None:
        """Raises `RunStopped` if the line cannot be written; the file is as before then."""
        line = json.dumps({"id": id, "event": event, **fields}).encode() + b"\n"
        try:
            written = os.write(self._file, line)
            if written < len(line):
                os.ftruncate(self._file, self._size)
                raise OSError(28, "no space left on device")
        except OSError as error:
            raise RunStopped(f"sandbox: cannot write to {self._folder}: {error.strerror}; free space") from None
        self._size += written
        self._pieces[-1][1].add(id)
        if self._size >= PIECE_BYTES:
            with contextlib.suppress(OSError):  # then this piece grows on
                self._next_piece()

    def forget(self, id: str) -> None:
        """Nobody will ask for this job again: pieces that held only such jobs are deleted."""
        for _, known in self._pieces:
            known.discard(id)
        while len(self._pieces) > 1 and not self._pieces[0][1]:
            self._pieces.popleft()[0].unlink(missing_ok=True)

    def close(self) -> None:
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1

    def _next_piece(self) -> None:
        path = self._folder / f"{PREFIX}{self._number + 1:08d}{SUFFIX}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if self._file >= 0:
            os.close(self._file)
        self._file = file
        self._size = 0
        self._number = self._number + 1
        self._pieces.append((path, set()))
