"""One writer per run folder: a POSIX record lock that the kernel drops when the process dies."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from pathlib import Path

from rollkeel.errors import BadInput

NAME = ".lock"
# Record locks belong to a process and vanish when *any* descriptor of the file is closed in it. So this process must
# neither open a lock file it holds again nor believe that it could take the lock twice. (flock would not do: worker
# processes inherit it and would keep it after their parent was killed.)
_HELD: set[tuple[int, int, int]] = set()


class RunLock:
    """Held from construction to `release` or the end of the process. Raises `BadInput` if another process holds it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        if held_here(folder):
            raise BadInput(f"run folder {folder}: in use by this process; close that run first")
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise BadInput(
                f"run folder {folder}: cannot be written ({error.strerror}); choose another folder"
            ) from None
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(self._descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            if not isinstance(error, BlockingIOError | PermissionError):
                raise BadInput(f"run folder {folder}: cannot be locked ({error.strerror}); use a local disk") from None
            raise BadInput(f"run folder {folder}: in use by process {owner}; wait for it or choose another") from None
        os.ftruncate(self._descriptor, 0)
        try:
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(self._descriptor)
            self.path.unlink(missing_ok=True)
            raise BadInput(f"cannot write {self.path}: {error.strerror}; free space or choose another folder") from None
        self._key = _key(os.fstat(self._descriptor))
        _HELD.add(self._key)

    def release(self, *, delete: bool = False) -> None:
        """Give the lock up; `delete` also removes the lock file (only when the whole folder is being taken back)."""
        _HELD.discard(self._key)
        if delete:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def held_here(folder: Path) -> bool:
    """True if this process holds the lock of `folder`."""
    try:
        return _key((folder / NAME).stat()) in _HELD
    except OSError:
        return False


def is_locked(folder: Path) -> bool | None:
    """True if some living process on this machine holds the run; None where that cannot be asked (not Linux)."""
    if held_here(folder):
        return True
    if not sys.platform.startswith("linux"):
        return None
    try:
        with (folder / NAME).open("rb") as file:
            layout = "hhqqi4x"  # struct flock
            # A shared lock would conflict exactly with the writer's exclusive one; asking takes nothing.
            asked = struct.pack(layout, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
            answer = fcntl.fcntl(file.fileno(), fcntl.F_GETLK, asked)
    except OSError:
        return False
    return struct.unpack(layout, answer)[0] != fcntl.F_UNLCK


def _key(status: os.stat_result) -> tuple[int, int, int]:
    # The process id: a forked child inherits this module's set but not the lock.
    return os.getpid(), status.st_dev, status.st_ino
