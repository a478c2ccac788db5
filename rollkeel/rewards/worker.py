"""The inside of a grader's process: one grading after another, until it is killed or nobody asks any more.

Started as a file by `workers.py`, so that nothing but the grader's own module is imported. Lines of JSON in both directions.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
from typing import Any

PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serve until the channel closes. The process dies with the thread that started it, even in the middle of a computation."""
    with contextlib.suppress(OSError, AttributeError):  # not a Linux: an orphan then ends with its item
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    stream = socket.socket(fileno=descriptor).makefile("rwb")
    setup = json.loads(stream.readline())
    sys.path[:] = setup["path"]
    functions: dict[str, Any] = {}
    for line in stream:
        stream.write(
            json.dumps(_answer(json.loads(line), functions, setup["memory_mb"]), default=float).encode() + b"\n"
        )
        stream.flush()


def _answer(asked: dict[str, Any], functions: dict[str, Any], memory_mb: int) -> dict[str, Any]:
    from rollkeel import plugins  # now that the path is known where it lies

    name = asked["function"]
    try:
        if name not in functions:
            functions[name] = plugins.load(name, "grader")
            _limit(memory_mb)
        if "text" not in asked:
            return {}
        result = functions[name](asked["text"], asked["answer"], asked["options"])
        value, detail = result if isinstance(result, tuple) and len(result) == 2 else (result, "")
        json.dumps(value, default=float)
    except MemoryError:
        return {"memory": True}
    except Exception as error:  # whatever a grader throws is an answer here: the caller counts it as a failure
        return {"error": plugins.trouble(error, functions.get(name))}
    return {"value": value, "detail": str(detail), "rss_mb": _pages()[1] * resource.getpagesize() / 2**20}


def _pages() -> tuple[int, int]:
    """Address space and resident memory now. The kernel's maximum would be that of the process that started this one."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            size, resident, *_ = map(int, file.read().split())
    except (OSError, ValueError):  # not a Linux: only the deadline holds
        return 0, 0
    return size, resident


def _limit(memory_mb: int) -> None:
    """Address space of what is there now and `memory_mb` more."""
    if size := _pages()[0]:
        with contextlib.suppress(OSError, ValueError):
            limit = size * resource.getpagesize() + (memory_mb << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
