"""What rollkeel asks of the operating system, process by process."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> None:
    """Make glibc keep large blocks it frees instead of returning them to the kernel; elsewhere, do nothing.

    A training step on a CPU allocates the same large tensors again and again; given back each time, they cost a page fault
    per 4 KB (up to a third of a step). Resident memory stays at its peak instead of falling between peaks.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl and others
        return
    mallopt(_MMAP_THRESHOLD, 32 << 20)  # glibc refuses more
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 64 << 20)
