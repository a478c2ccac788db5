"""Graders that misbehave in every way found, for workers that must survive them. Called as `module:function` in another process."""

from __future__ import annotations

import ctypes
import inspect
import os
import random
import sys
import time
from collections.abc import Mapping
from typing import Any

_KEPT: list[bytes] = []


def length(text: str, answer: str, options: Mapping[str, Any]) -> tuple[float, str]:
    return float(len(text) == len(answer)), f"{len(text)} characters"


def by_command(text: str, answer: str, options: Mapping[str, Any]) -> Any:
    """Does what the response says; anything else is its length."""
    if text == "hang":
        while True:
            pass
    if text == "hang in C":
        return 9 ** (9**9)
    if text == "exit":
        os._exit(3)
    if text == "crash":
        ctypes.string_at(0)
    if text == "nan":
        return float("nan")
    if text == "raise":
        raise ValueError("two\nlines")
    if text == "torch":
        return float("torch" in sys.modules), "torch"
    if text == "greedy":
        return float(len(bytearray(4 << 30)))
    if text == "leak":
        _KEPT.append(os.urandom(24 << 20))
        return 1.0
    if text == "fill":
        _KEPT.append(bytes(200 << 20))
        return 1.0
    if text == "print":
        print("x" * 100_000, flush=True)
        sys.stderr.write("y" * 100_000)
        return 1.0
    if text.startswith("sleep "):
        time.sleep(float(text.split()[1]))
        return 1.0, "slept"
    if text == "random":
        return random.random()
    if text == "pid":
        return 1.0, str(os.getpid())
    return len(text)


def patient(text: str, answer: str, options: Mapping[str, Any]) -> tuple[float, str]:
    """What `digits` in test_overlapped_run.py says, after a while that differs from response to response."""
    time.sleep(0.002 * (len(text) % 4))
    return float(sum(map(ord, text)) % 3 == 0), text[:9]


_RAISES = by_command.__code__.co_firstlineno + inspect.getsource(by_command).partition("raise Value")[0].count("\n")
AT = f"({__file__}:{_RAISES} in by_command)"
"""Place of what `raise` raises."""
