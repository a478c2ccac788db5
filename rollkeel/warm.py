"""Processes that begin with rollkeel imported: a new interpreter imports for three seconds before it does anything.

A server imports once what this process has imported itself, and does nothing else; each process is a fork of it, with this process's
environment of the moment. It ends with this process, however that ends.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from rollkeel.host import signals_blocked

MOST_SHARED = 200
"""Tensors in shared memory that the arguments of a fork may have: each is a file, and more than 250 cannot be sent at a time."""
SLOW = ("rollkeel.engines.local", "rollkeel.train.parallel")
"""What takes long to import, and starts no thread: a fork would lack it."""


def context(*imports: str, forks: bool = True) -> BaseContext:
    """Of pipes and processes. `imports`: modules that these will need, besides those of `SLOW` that are loaded here. New interpreters
    where a fork is not safe: on other systems than Linux, and by `forks` for a process that is to use a GPU."""
    if not forks or sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload([*imports, *(name for name in SLOW if name in sys.modules)])
    return made


def started(
    how: BaseContext,
    target: Callable[..., None],
    args: tuple[Any, ...],
    *,
    threads: int,
    name: str,
    daemon: bool = True,
) -> BaseProcess:
    """A process that runs `target(*args)` and starts with Ctrl-C blocked. `threads`: its `OMP_NUM_THREADS`."""
    with _environment({"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}):
        process: BaseProcess = how.Process(  # pyright: ignore[reportAttributeAccessIssue]
            target=_enter, args=(dict(os.environ), target, args), daemon=daemon, name=name
        )
        with signals_blocked(signal.SIGINT):
            process.start()
    return process


def _enter(environment: Mapping[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    gc.freeze()  # what the server has imported
    os.environ.clear()  # the server's is that of when it began
    os.environ.update(environment)
    target(*args)


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """torch reads these when it is imported, which in a new interpreter is before any of our code runs."""
    before = {key: os.environ.get(key) for key in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)
