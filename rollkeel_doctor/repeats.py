"""Whether the engine gives the same token the same log-prob when it is asked the same thing twice.

Sequences of one prompt begin alike: same weights, same tokens so far, same token. Whatever rounds or is loaded wrong does so each
time in the same way; noise does not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rollkeel_doctor.tokens import Tokens
from rollkeel_doctor.traces.trace import IntArray, Trace


class Repeats(NamedTuple):
    """Of tokens sampled at least twice behind the same tokens, of one prompt and by one version."""

    repeated: int  # Tokens that repeat one before them.
    differ: float
    """Root of the share of the gap's variance that lies between repeats of one token: 0 for an engine that is a function of its
    input, about 1 for noise. NaN where nothing repeats."""


def repeats(tokens: Tokens, trace: Trace) -> Repeats:
    """Informed tokens only: where both sides are all but certain there is nothing to differ by."""
    informed = (tokens.q > np.log(0.02)) & (tokens.q < np.log(0.98))
    index = tokens.index[informed]
    if len(index) == 0:
        return Repeats(0, float("nan"))
    gap = (tokens.o - tokens.q)[informed].astype(np.float64)
    version = np.zeros(len(trace), np.int64) if trace.versions is None else trace.versions
    group = np.unique(trace.group, return_inverse=True)[1]
    _, place, size = np.unique(contexts(trace, group, version)[index], return_inverse=True, return_counts=True)
    again = size[place] > 1
    count = int((size[size > 1] - 1).sum())
    total = float(np.square(gap[again]).sum() / max(again.sum(), 1))
    if count == 0 or total <= 0:
        return Repeats(count, float("nan"))
    means = np.bincount(place, gap) / size
    within = float(np.square(gap - means[place])[again].sum()) / count
    return Repeats(count, float(np.sqrt(within / total)))


def contexts(trace: Trace, prompt: IntArray, version: IntArray | int = 0) -> IntArray:
    """`[T]` uint64: a hash of a number of each sequence's prompt, of a version, and of all tokens up to this one.

    A polynomial modulo 2⁶⁴.
    """
    odd = np.uint64(0xD1342543DE82EF95)
    powers = np.cumprod(np.full(int(trace.lengths.max(initial=0)) + 3, odd))
    sums = np.cumsum((trace.token_ids + 2).astype(np.uint64) * powers[trace.position + 3])
    before = np.concatenate([np.zeros(1, np.uint64), sums])[trace.starts[:-1]]
    return (
        sums
        - before[trace.sequence]
        + prompt.astype(np.uint64)[trace.sequence] * powers[0]
        + np.asarray(version + 2).astype(np.uint64) * powers[1]
        + trace.position.astype(np.uint64) * powers[2]
    )
