"""What rollkeel asks of the operating system, process by process."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

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


@contextmanager
def signals_blocked(*numbers: signal.Signals) -> Iterator[None]:
    """A process started in here begins with these blocked, until it says what they are to it: Ctrl-C in a terminal goes to
    every process, and one that is still importing would die of it with a traceback. They reach the caller afterwards."""
    resource_tracker.ensure_running()  # starting it later would lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Late(BaseException):
    """Not an `Exception`: what hangs may swallow those."""


@contextmanager
def within(seconds: float, error: Exception) -> Iterator[None]:
    """Raise `error` in what runs inside when it takes longer than that. For calls of this process that nobody can wait for
    with a deadline. Works in the main thread, where signals arrive; a call that never returns to Python is not reached."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: Any) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, late)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _Late:
        raise error from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, before)
