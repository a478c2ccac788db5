"""What a dead job left: reading the files it was asked for, deleting folders locked, linked away, or nested beyond any recursion."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable

from rollkeel_sandbox.job import Job


def collect(job: Job, opened: Callable[[str], int]) -> dict[str, bytes]:
    """Files the job was asked for, read after its death: regular ones, within the limit. `opened` follows no link on the way.

    The job may have done anything to its folder, which is why nothing it did there is an error here.
    """
    out: dict[str, bytes] = {}
    left = job.limits.output_bytes
    for name in dict.fromkeys(job.collect):
        try:
            descriptor = opened(name)
        except OSError:
            continue
        try:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and found.st_size <= left and found.st_nlink == 1:
                out[name] = b"".join(iter(lambda: os.read(descriptor, 1 << 20), b""))  # noqa: B023
                left -= len(out[name])
        finally:
            os.close(descriptor)
    return out


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
    mark = os.urandom(8).hex()
    moved = 0
    waiting = [""]
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
