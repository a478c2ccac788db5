"""Deleting what a dead job left on the host: folders locked, linked away, or nested deeper than any recursion goes."""

from __future__ import annotations

import contextlib
import os


def remove(top: str) -> None:
    """Delete the folder `top` with all that is in it; what cannot be deleted stays. No process may be at work in it.

    Subfolders are moved up to `top` before they are emptied, so that no path grows and no more than two folders are open.
    Links are deleted, never followed.
    """
    with contextlib.suppress(OSError):
        root = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _empty(root)
        finally:
            os.close(root)
        os.rmdir(top)


def _empty(root: int) -> None:
    mark, moved, waiting = os.urandom(8).hex(), 0, [""]
    while waiting:
        name = waiting.pop()
        folder = os.open(name or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
        try:
            with os.scandir(folder) as found:
                entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
            for entry, is_folder in entries:
                if not is_folder:
                    os.unlink(entry, dir_fd=folder)
                    continue
                os.chmod(entry, 0o700, dir_fd=folder)
                moved += 1
                os.rename(entry, f"{mark}-{moved}", src_dir_fd=folder, dst_dir_fd=root)
                waiting.append(f"{mark}-{moved}")
        finally:
            os.close(folder)
        if name:
            os.rmdir(name, dir_fd=root)
