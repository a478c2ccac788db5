"""Single tokens that the trainer finds absurd, and what stands around them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rollkeel_doctor import thresholds as limits
from rollkeel_doctor.tokens import Mean, Tokens, clustered


class Odd(NamedTuple):
    """Single tokens the trainer finds absurd in sequences that otherwise agree."""

    chosen: np.ndarray  # `[N]` bool.
    rest: float  # Median |log ρ| of all tokens over that of the odd ones.
    excess: Mean  # E[ρ] − 1 without them.


def odd_tokens(tokens: Tokens) -> Odd:
    log_ratio = np.abs(tokens.o - tokens.q)
    chosen = log_ratio > limits.OUTLIER
    if not chosen.any():
        return Odd(chosen, 1.0, Mean(0.0, 0.0))
    rest = float(np.median(log_ratio) / np.median(log_ratio[chosen]))
    kept = tokens.where(~chosen)
    return Odd(chosen, rest, clustered(np.expm1(kept.o - kept.q), kept.sequence))


def around(tokens: Tokens, odd: np.ndarray) -> tuple[Tokens, Tokens]:
    """Of sequences with an odd token: those before the first one, and those behind it that are not odd themselves."""
    if len(tokens) == 0:
        return tokens, tokens
    starts = np.flatnonzero(np.diff(tokens.sequence, prepend=-1))
    lengths = np.diff(np.append(starts, len(tokens)))
    total = np.cumsum(odd)
    seen = total - np.repeat(total[starts] - odd[starts], lengths)
    any_ = np.repeat(np.add.reduceat(odd.astype(np.int64), starts) > 0, lengths)
    return tokens.where(any_ & (seen == 0)), tokens.where((seen > 0) & ~odd)
