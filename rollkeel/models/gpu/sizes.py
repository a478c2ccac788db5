"""Sizes that kernels take."""

from __future__ import annotations

CORE = 16
"""Least rows and columns of a product on tensor cores."""


def power(count: int, least: int = 1) -> int:
    """The power of two that `count` elements fit into, at least `least`."""
    return max(least, 1 << max(0, count - 1).bit_length())
