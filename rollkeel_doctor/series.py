"""Rewards, lengths, entropy and update statistics over the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollkeel_doctor import thresholds as limits
from rollkeel_doctor.tokens import Mean, bins
from rollkeel_doctor.traces.trace import FloatArray, IntArray, Trace


@dataclass(frozen=True, kw_only=True)
class Series:
    """One entry per bin of steps, NaN where nothing is known."""

    steps: IntArray
    reward: FloatArray  # Mean reward of the bin's sequences.
    reward_error: FloatArray  # Its standard error, groups taken for dependent.
    entropy: FloatArray
    """Mean entropy of trained tokens, nats; without recorded entropy the mean of −log o, else of −log q."""
    entropy_of: str  # Which of the three.
    same: FloatArray  # Share of groups whose rewards are all equal.
    cut: FloatArray  # Share of responses at the length limit.
    grad_norm: FloatArray  # As the metrics say, by bin; NaN without metrics.
    clipped: FloatArray  # Share of tokens outside PPO's band, both sides, as the metrics say.
    low: float  # Least reward of the trace.
    high: float  # Largest reward of the trace.

    def early(self, values: FloatArray) -> FloatArray:
        """The first quarter, at least one entry."""
        return values[: max(len(values) // 4, 1)]

    def late(self, values: FloatArray) -> FloatArray:
        """The last quarter, at least one entry."""
        return values[-max(len(values) // 4, 1) :]


def series(trace: Trace) -> Series:
    which, steps = bins(trace)
    size = len(steps)
    reward, error = _rewards(trace, which, size)
    entropy, of = _entropies(trace, which, size)
    graded = trace.reward[np.isfinite(trace.reward)]
    at_limit = cut_responses(trace)
    nothing = np.full(size, np.nan)
    return Series(
        steps=steps,
        reward=reward,
        reward_error=error,
        entropy=entropy,
        entropy_of=of,
        same=_same(trace, which, size),
        cut=nothing if at_limit is None else _mean(at_limit.astype(float), which, size),
        grad_norm=_metric(trace.metrics, steps, ("optimizer/grad_norm",), np.nanmax),
        clipped=_metric(trace.metrics, steps, ("clip/high", "clip/low"), np.nanmax),
        low=float(graded.min()) if len(graded) else float("nan"),
        high=float(graded.max()) if len(graded) else float("nan"),
    )


def cut_responses(trace: Trace) -> np.ndarray | None:
    """`[S]` bool: responses that ended at the length limit; None where neither status nor limit is known."""
    if trace.status is not None and any(trace.status):
        return np.array([s == "length" for s in trace.status])
    limit = trace.facts.max_new_tokens
    return None if limit is None else trace.lengths >= limit


def too_short(trace: Trace, cut: np.ndarray) -> bool:
    """Whether the responses `cut` are no longer than the right answers: then the limit is below those."""
    if trace.answer is None or trace.text is None or not any(trace.answer):
        return False
    short = np.array([len(t.strip()) <= len(a.strip()) for t, a in zip(trace.text, trace.answer, strict=True)])
    return bool(short[cut].mean() > limits.CUT_ALL)


def known_mean(values: FloatArray) -> float:
    """Mean of what is not NaN; NaN where nothing is known."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def extremes(values: FloatArray, group: IntArray) -> tuple[FloatArray, FloatArray, IntArray]:
    """Least and largest of `values` and their count, by group."""
    _, which, count = np.unique(group, return_inverse=True, return_counts=True)
    low, high = np.full(len(count), np.inf), np.full(len(count), -np.inf)
    np.minimum.at(low, which, values)
    np.maximum.at(high, which, values)
    return low, high, count


def difference(s: Series, first: slice, second: slice) -> Mean:
    def mean(part: slice) -> Mean:
        values, errors = s.reward[part], s.reward_error[part]
        known = np.isfinite(values)
        count = max(int(known.sum()), 1)
        return Mean(float(values[known].sum()) / count, float(np.sqrt(np.square(errors[known]).sum())) / count)

    a, b = mean(first), mean(second)
    return Mean(b.value - a.value, float(np.hypot(a.error, b.error)))


def lost(s: Series) -> tuple[float, float, float, int] | None:
    """Best level the reward held for an eighth of the steps, the level at the end, z-score of the fall, and where the best ended.

    None while it holds two thirds of what it had.
    """
    size = max(len(s.steps) // 8, 3)
    if len(s.steps) < 2 * size or not s.high > s.low:
        return None
    known = np.isfinite(s.reward)
    filled, counts = np.where(known, s.reward - s.low, 0.0), np.convolve(known, np.ones(size), "valid")
    levels = np.convolve(filled, np.ones(size), "valid") / np.maximum(counts, 1)
    at = int(levels[:-size].argmax()) if len(levels) > size else 0
    fall = difference(s, slice(at, at + size), slice(-size, None))
    if fall.z > -limits.LOST_Z or -fall.value < limits.LOST_SHARE * levels[at]:
        return None
    return s.low + float(levels[at]), s.low + float(levels[-1]), fall.z, int(s.steps[at + size - 1])


def _mean(values: FloatArray, which: IntArray, size: int) -> FloatArray:
    known = np.isfinite(values)
    counts = np.bincount(which[known], minlength=size)
    sums = np.bincount(which[known], values[known], size)
    return np.divide(sums, counts, out=np.full(size, np.nan), where=counts > 0)


def _rewards(trace: Trace, which: IntArray, size: int) -> tuple[FloatArray, FloatArray]:
    mean = _mean(trace.reward, which, size)
    known = np.isfinite(trace.reward)
    _, group = np.unique(trace.group, return_inverse=True)
    place = group[known].astype(np.int64) * size + which[known]
    cells, cell = np.unique(place, return_inverse=True)
    sums = np.bincount(cell, trace.reward[known] - mean[which[known]])
    squares = np.bincount(cells % size, sums**2, size)
    counts = np.bincount(which[known], minlength=size)
    error = np.divide(np.sqrt(squares), counts, out=np.full(size, np.nan), where=counts > 0)
    groups = np.bincount(cells % size, minlength=size)
    error *= np.sqrt(groups / np.maximum(groups - 1, 1))
    changes = np.diff(mean[counts > 0])
    # A step of one group says nothing of its own error: what steps differ by does.
    error[groups == 1] = np.sqrt(np.square(changes).mean() / 2) if len(changes) else np.inf
    return mean, error


def _same(trace: Trace, which: IntArray, size: int) -> FloatArray:
    """Groups of one sequence have nothing to differ from and do not count."""
    known = np.isfinite(trace.reward)
    if not known.any():
        return np.full(size, np.nan)
    _, first = np.unique(trace.group[known], return_index=True)
    low, high, count = extremes(trace.reward[known], trace.group[known])
    return _mean((low == high)[count > 1].astype(float), which[known][first][count > 1], size)


def _entropies(trace: Trace, which: IntArray, size: int) -> tuple[FloatArray, str]:
    choices = (
        ("entropy", trace.entropy, 1.0),
        ("−log o", trace.train_logprobs, -1.0),
        ("−log q", trace.rollout_logprobs, -1.0),
    )
    for name, values, sign in choices:
        if values is None:
            continue
        known = np.isfinite(values) if trace.mask is None else np.isfinite(values) & trace.mask
        if known.any():
            return sign * _mean(values[known], np.repeat(which, trace.lengths)[known], size), name
    return np.full(size, np.nan), "nothing"


def _metric(rows: Sequence[Mapping[str, Any]], steps: IntArray, names: tuple[str, ...], join: Any) -> FloatArray:
    """Sum of some metrics in each row, joined over the rows of each bin."""
    found: list[list[float]] = [[] for _ in steps]
    for row in rows:
        step, values = row.get("step"), [row.get(name) for name in names]
        numbers = [float(v) for v in values if isinstance(v, int | float) and np.isfinite(v)]
        if not isinstance(step, int) or not numbers or len(steps) == 0 or step < steps[0]:
            continue
        found[int(np.searchsorted(steps, step, side="right")) - 1].append(sum(numbers))
    return np.array([join(values) if values else np.nan for values in found])
