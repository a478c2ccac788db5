"""Kernels that leave the interpreter, over as many threads as torch has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def shares(size: int) -> list[tuple[int, int]]:
    """First and last + 1 of each thread's part of `size` things. Parts differ by one at most; a thread without a part is not listed."""
    threads = max(1, min(torch.get_num_threads(), size))
    return [(size * n // threads, size * (n + 1) // threads) for n in range(threads)]


def each(some: Callable[..., Any], parts: Sequence[tuple[Any, ...]]) -> None:
    """Call `some` with each of these arguments, all at the same time."""
    if len(parts) == 1:
        some(*parts[0])
    else:
        list(_threads(len(parts)).map(lambda part: some(*part), parts))


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "kernels")
