"""What rollkeel asks of the operating system, process by process."""

from __future__ import annotations

import atexit
import ctypes
import gc
import mmap
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from multiprocessing import resource_tracker
from typing import Any

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_FIXED = 0x10
"""`MAP_FIXED`, which `mmap` lacks."""
_USUALLY, _RARELY = gc.get_threshold(), (50_000, 20, 1_000)
_PART = 1 << 28
"""Most bytes of one read or write."""


def versions() -> dict[str, str]:
    """Installed versions of what decides a run's bits, as a checkpoint records them."""
    installed = {}
    for package in ("rollkeel", "torch", "transformers", "safetensors"):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = "not installed"
    return installed


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


def collect_later() -> None:
    """Hardly look for cycles until `collect_as_usual`: importing makes half a million objects, and looking at them all again and again
    is a sixth of a start. At its end a process of rollkeel does not look at all, which would take a second."""
    gc.set_threshold(*_RARELY)
    atexit.register(gc.freeze)


def collect_as_usual() -> None:
    """Undo `collect_later`, if it was called; but what there is by now is never looked at again."""
    if gc.get_threshold() == _RARELY:
        gc.freeze()
        gc.set_threshold(*_USUALLY)


def give_back_freed_memory() -> None:
    """Return to the kernel what glibc keeps of memory that was freed."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def resident(pid: int | None = None) -> tuple[int, int]:
    """Bytes of memory that a process, this one if not given, holds now, and the most since `forget_peak`. Files that are mapped into
    it and memory that it shares are left out. (0, 0) where there is no `/proc`, and for a process that is gone."""
    try:
        with open(f"/proc/{pid or 'self'}/status", encoding="ascii") as file:
            found = dict(line.split(":", 1) for line in file if line.startswith(("VmHWM", "Rss")))
    except OSError:
        return 0, 0
    size = {name: int(text.split()[0]) << 10 for name, text in found.items()}
    if "RssAnon" not in size:
        return 0, 0
    return size["RssAnon"], max(size["RssAnon"], size["VmHWM"] - size["RssFile"] - size["RssShmem"])


def forget_peak(pid: int | None = None) -> None:
    """Begin anew with the peak of `resident`."""
    with suppress(OSError), open(f"/proc/{pid or 'self'}/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def whole_pages(address: int, size: int) -> tuple[int, int]:
    """Address and bytes of the pages that lie wholly inside of this memory."""
    start, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    return start, max(0, end - start)


def untouched(size: int) -> mmap.mmap | bytearray:
    """Memory of this process that reads as zeros. On Linux a page takes memory only once it is written to."""
    if not sys.platform.startswith("linux"):
        return bytearray(size)
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def forget_pages(address: int, size: int) -> None:
    """Give whole pages back; they read as zeros from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def write_pages(file: int, offset: int, address: int, size: int) -> None:
    """Write memory to a file."""
    view, done = _memory(address, size), 0
    while done < size:
        done += os.pwrite(file, view[done : done + _PART], offset + done)


def put_pages_in(file: int, offset: int, address: int, size: int) -> None:
    """Have the file's pages, which `write_pages` wrote from there, in the place of whole pages: they are read when they are touched,
    and what is written to them goes to memory, not to the file."""
    _map(address, size, mmap.MAP_PRIVATE, file, offset)


def share_pages(file: int, offset: int, address: int, size: int) -> None:
    """Have the file's pages from there in the place of whole pages, also for what is written to them."""
    _map(address, size, mmap.MAP_SHARED, file, offset)


def take_pages_out(file: int, offset: int, address: int, size: int) -> None:
    """Undo `put_pages_in`: memory again, with what the file holds. After an error the pages are still the file's."""
    _map(address, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    try:
        view, done = _memory(address, size), 0
        while done < size:
            if not (read := os.preadv(file, [view[done : done + _PART]], offset + done)):
                raise OSError(f"a file of offloaded memory has ended after {offset + done} bytes")
            done += read
    except BaseException:
        put_pages_in(file, offset, address, size)
        raise


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _map(address: int, size: int, kind: int, file: int, offset: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    if libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, kind | _FIXED, file, offset) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


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
