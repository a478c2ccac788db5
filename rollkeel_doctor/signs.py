"""Signs of log-probs that are not of the token, or not of the distribution, they are said to be of.

Each looks for one pattern and returns what it found in numbers; `causes_logging.py` judges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from rollkeel_doctor import thresholds as limits
from rollkeel_doctor.tokens import Mean, Tokens, clustered, gap
from rollkeel_doctor.traces.trace import FloatArray, IntArray, Trace


class Shift(NamedTuple):
    """Sequences whose log q fit the log o of neighbours, from their first token or from a later one on."""

    lag: int  # log q at t is of the token at t + lag; of `displaced` only the sign, 0 of `broken`.
    apart: float  # Mean |log ρ| of those sequences, nats.
    fits: float  # What is left of it where log q are moved; of `broken`, before the first shifted token.
    sequences: IntArray
    first: IntArray  # `[len(sequences)]` index into the trace: first shifted token.
    control: float  # What a shift the other way would leave.
    among: int  # Sequences that were looked at.
    whole: bool = False  # From the first token on.

    @property
    def share(self) -> float:
        return len(self.sequences) / max(self.among, 1)


def shifted(tokens: Tokens) -> Shift | None:
    """Sequences shifted as a whole by the lag that puts most of them right, if any."""
    near = _suspects(tokens)
    if len(near) == 0:
        return None
    starts = np.flatnonzero(np.diff(near.sequence, prepend=-1))
    costs = {lag: _moved(near, lag) for lag in limits.SHIFT_LAGS}
    lag = _exact_lag(costs)
    if lag is None:
        found = {lag: _whole(near, starts, costs[lag]) for lag in costs}
        counts = {lag: int(found[lag].sum()) for lag in found}
        lag = max(counts, key=lambda k: counts[k])
        # A large honest gap makes every lag fit some sequence by chance.
        if counts[lag] <= limits.SHIFT_CONTRAST * sorted(counts.values())[-2]:
            return None
        chosen = found[lag]
    else:
        straight, there = (np.add.reduceat(x, starts, dtype=np.float64) for x in costs[lag])
        chosen = (straight > 0) & (there < limits.SHIFT_FITS * straight)

    def left(moved: tuple[FloatArray, FloatArray]) -> tuple[float, float]:
        straight, there = (np.add.reduceat(x, starts)[chosen].sum() for x in moved)
        count = max(int(np.add.reduceat(np.isfinite(moved[1]), starts)[chosen].sum()), 1)
        return float(straight) / count, float(there) / count

    apart, fits = left(costs[lag])
    return Shift(
        lag,
        apart,
        fits,
        near.sequence[starts[chosen]],
        near.index[starts[chosen]],
        left(costs[-lag])[1],
        _count(tokens),
        True,
    )


def _exact_lag(costs: Mapping[int, tuple[FloatArray, FloatArray]]) -> int | None:
    """The lag at which next to nothing is left of |log ρ| over all pairs.

    Short turns between what an environment wrote leave few pairs in a sequence, so that sequences one by one say little.
    """
    for lag, (straight, there) in costs.items():
        paired = (straight > 0) | (there > 0)
        apart = float(straight.sum(dtype=np.float64))
        large = paired.sum() >= limits.MIN_INFORMED and apart > limits.SHIFT_APART * paired.sum()
        if large and float(there.sum(dtype=np.float64)) < limits.SHIFT_EXACT * apart:
            return lag
    return None


def displaced(tokens: Tokens) -> Shift | None:
    """Sequences whose log q run ahead of, or behind, the tokens from some token on, by one place or a few.

    A text encoded anew has other tokens at places where it could be split in two ways; all that follow have moved.
    """
    near = _suspects(tokens)
    if len(near) == 0:
        return None
    starts = np.flatnonzero(np.diff(near.sequence, prepend=-1))
    sides = {sign: _displaced(near, starts, sign) for sign in (-1, 1)}
    ends = np.append(starts[1:], len(near))
    straight = np.add.reduceat(np.abs(near.q - near.o), starts, dtype=np.float64)
    fitting = {}
    for sign, (cost, at) in sides.items():
        better = cost < limits.DISPLACED_FITS * np.minimum(straight, sides[-sign][0])
        fitting[sign] = better & (ends - at >= limits.SHIFT_LENGTH - 1)
    sign = max(fitting, key=lambda k: int(fitting[k].sum()))
    chosen = fitting[sign]
    (cost, at) = sides[sign]
    (other, _) = sides[-sign]
    if chosen.sum() <= limits.SHIFT_CONTRAST * fitting[-sign].sum() + limits.DISPLACED_CHANCE:
        return None
    count = int((ends - starts)[chosen].sum())
    apart, fits, control = (float(x[chosen].sum()) / count for x in (straight, cost, other))
    return Shift(sign, apart, fits, near.sequence[starts[chosen]], near.index[at[chosen]], control, _count(tokens))


def broken(tokens: Tokens) -> Shift | None:
    """Sequences that agree up to a token and from it on hardly at all, the trainer finding most tokens absurd.

    That is what ids do which the policy would not write: the trainer scores them and all that follows in a context the
    sampler never had. `lag` is 0.
    """
    near = _suspects(tokens)
    if len(near) == 0:
        return None
    starts = np.flatnonzero(np.diff(near.sequence, prepend=-1))
    ends = np.append(starts[1:], len(near))
    log_ratio = near.o - near.q
    absurd = np.flatnonzero(log_ratio < -limits.BREAK)
    place = np.searchsorted(absurd, starts)
    at = (
        np.where(place < len(absurd), absurd[np.minimum(place, max(len(absurd) - 1, 0))], ends) if len(absurd) else ends
    )
    at = np.minimum(at, ends)
    total = np.append(0.0, np.cumsum(np.abs(log_ratio), dtype=np.float64))
    apart = np.append(0, np.cumsum(np.abs(log_ratio) > limits.OUTLIER))
    before = (total[at] - total[starts]) / np.maximum(at - starts, 1)
    after = (apart[ends] - apart[at]) / np.maximum(ends - at, 1)
    chosen = (at > starts) & (ends - at >= 3) & (before < limits.BREAK_BEFORE) & (after > limits.BREAK_AFTER)
    if not chosen.any():
        return None
    intact = np.repeat(chosen, ends - starts) & (np.arange(len(near)) < np.repeat(at, ends - starts))
    if gap(near.where(intact)).noise > limits.BREAK_NOISE:
        return None  # the policies differ before the token too, so that is no break
    behind = total[ends] - total[at]
    return Shift(
        0,
        float(behind[chosen].sum() / (ends - at)[chosen].sum()),
        float((total[at] - total[starts])[chosen].sum() / (at - starts)[chosen].sum()),
        near.sequence[starts[chosen]],
        near.index[at[chosen]],
        float("nan"),
        _count(tokens),
    )


def left_later(tokens: Tokens, shift: Shift) -> float:
    """What a whole shift leaves of |log ρ| in its sequences against what one from a free token on leaves: 1 for no better."""
    near = tokens.where(np.isin(tokens.sequence, shift.sequences))
    starts = np.flatnonzero(np.diff(near.sequence, prepend=-1))
    straight, there = _moved(near, shift.lag)
    whole = float(there.sum(dtype=np.float64))
    if whole < limits.SHIFT_EXACT * float(straight.sum(dtype=np.float64)):
        return 1.0
    return float(_displaced(near, starts, int(np.sign(shift.lag)))[0].sum()) / whole


def _count(tokens: Tokens) -> int:
    return len(np.unique(tokens.sequence))


def _suspects(tokens: Tokens) -> Tokens:
    """Tokens of the sequences whose mean |log ρ| is large: only they can be shifted."""
    counts = np.bincount(tokens.sequence)
    sums = np.bincount(tokens.sequence, np.abs(tokens.q - tokens.o))
    apart = (sums > limits.SHIFT_APART * counts) & (counts >= limits.SHIFT_LENGTH)
    return tokens.where(apart[tokens.sequence])


def _moved(tokens: Tokens, lag: int, alone: float = 0.0) -> tuple[FloatArray, FloatArray]:
    """|log q − log o| at the same token and `lag` further on; `alone` for both where a token has no such neighbour."""
    there = np.clip(np.arange(len(tokens)) + lag, 0, len(tokens) - 1)
    paired = (tokens.sequence[there] == tokens.sequence) & (tokens.index[there] - tokens.index == lag)
    straight = np.where(paired, np.abs(tokens.q - tokens.o), alone)
    return straight, np.where(paired, np.abs(tokens.q - tokens.o[there]), alone)


def _whole(tokens: Tokens, starts: IntArray, moved: tuple[FloatArray, FloatArray]) -> np.ndarray:
    straight, there = (np.add.reduceat(x, starts, dtype=np.float64) for x in moved)
    lengths = np.diff(np.append(starts, len(tokens)))
    return (straight > limits.SHIFT_APART * lengths) & (there < limits.SHIFT_FITS * straight)


def straight(tokens: Tokens, lag: int) -> np.ndarray:
    """`[N]` bool: tokens of sequences whose log q fit their own log o clearly better than those `lag` further on.

    Short sequences, and those of all but certain tokens, fit both; where others are shifted they are no evidence.
    """
    out = np.zeros(len(tokens), bool)
    if len(tokens):
        starts = np.flatnonzero(np.diff(tokens.sequence, prepend=-1))
        here, there = (np.add.reduceat(x, starts, dtype=np.float64) for x in _moved(tokens, lag))
        out = np.repeat(here < limits.SHIFT_FITS * there, np.diff(np.append(starts, len(tokens))))
    return out


def _displaced(tokens: Tokens, starts: IntArray, sign: int) -> tuple[FloatArray, IntArray]:
    """Lowest cost of "straight before a token, displaced from it on" and that token, for each sequence."""
    straight = np.abs(tokens.q - tokens.o).astype(np.float64)
    there = np.full(len(tokens), np.inf)
    for lag in (1, 2, 3):
        there = np.minimum(there, _moved(tokens, sign * lag, np.inf)[1])
    there = np.where(np.isinf(there), straight, there)
    ends = np.append(starts[1:], len(tokens))
    lengths = ends - starts
    before = np.cumsum(straight) - straight
    before -= np.repeat(before[starts], lengths)
    after = np.append(np.cumsum(there[::-1])[::-1], 0)
    cost = before + after[:-1] - np.repeat(after[ends], lengths)
    best = np.minimum.reduceat(cost, starts)
    at = np.flatnonzero(cost == np.repeat(best, lengths))
    return best, at[np.searchsorted(at, starts)]


def correlations(tokens: Tokens) -> dict[int, float]:
    """Correlation of log q at t with log o at t + lag inside sequences, for 0 and `SHIFT_LAGS`."""
    out = {}
    for lag in sorted((0, *limits.SHIFT_LAGS)):
        left = slice(max(-lag, 0), len(tokens) - max(lag, 0))
        right = slice(max(lag, 0), len(tokens) - max(-lag, 0))
        same = (tokens.sequence[left] == tokens.sequence[right]) & (tokens.index[right] - tokens.index[left] == lag)
        x, y = tokens.q[left][same].astype(np.float64), tokens.o[right][same].astype(np.float64)
        varied = len(x) > 2 and x.std() > 0 and y.std() > 0
        out[lag] = float(np.corrcoef(x, y)[0, 1]) if varied else float("nan")
    return out


class Foreign(NamedTuple):
    """Tokens inside the mask that the engine never sampled."""

    chosen: np.ndarray  # `[N]` bool: those among the tokens with both log-probs.
    without: IntArray  # Index into the trace of tokens in the mask without log q, in sequences that have some.
    silent: int  # Sequences without any log q: the engine reported none, which says nothing about the mask.
    fill: float  # The log q that many of them share; NaN if they share none.
    at_start: float  # Share that stands in a run from the first token of its response.

    @property
    def total(self) -> int:
        return int(self.chosen.sum()) + len(self.without)


def foreign(trace: Trace, tokens: Tokens) -> Foreign:
    """Three ways to notice: no log q at all, one value for many, runs that are all but impossible under the trainer."""
    inside = np.ones(len(trace), bool) if trace.mask is None else trace.mask
    known = np.isfinite(trace.rollout_logprobs)
    heard = np.bincount(trace.sequence[known], minlength=trace.sequences) > 0
    missing = inside & ~known & heard[trace.sequence]
    if trace.mask is None and trace.train_logprobs is not None:
        missing &= np.isfinite(trace.train_logprobs)
    chosen, fill = _filled(tokens)
    runs = _impossible(tokens)
    if len(runs) and runs.mean() > limits.FOREIGN_RUNS:
        chosen |= runs
    without = np.flatnonzero(missing)
    silent = int((~heard & (trace.lengths > 0)).sum())
    return Foreign(chosen, without, silent, fill, _from_start(trace, np.concatenate([without, tokens.index[chosen]])))


def carried(trace: Trace, tokens: Tokens, strange: Foreign, lag: int) -> Foreign:
    """`strange` less the tokens whose log q is that of an unsampled one `lag` further on: what a shift carried into the mask."""
    inside = np.ones(len(trace), bool) if trace.mask is None else trace.mask
    source = tokens.index + lag
    ends = trace.starts[tokens.sequence + 1]
    within = (source >= trace.starts[tokens.sequence]) & (source < ends)
    chosen = strange.chosen & (within & inside[np.clip(source, 0, len(trace) - 1)])
    return strange._replace(
        chosen=chosen, at_start=_from_start(trace, np.concatenate([strange.without, tokens.index[chosen]]))
    )


def _filled(tokens: Tokens) -> tuple[np.ndarray, float]:
    """Tokens that share one exact log q far from log o."""
    apart = np.abs(tokens.q - tokens.o) > limits.FOREIGN_APART
    if apart.sum() < limits.FOREIGN_COUNT:
        return np.zeros(len(tokens), bool), float("nan")
    values, counts = np.unique(tokens.q[apart], return_counts=True)
    value, count = values[counts.argmax()], counts.max()
    # 1 % of log-probs may well be exactly 0 in float32; then log o is near 0 as well and they are not apart.
    if count < limits.FOREIGN_COUNT or count < limits.FOREIGN_SHARE * len(tokens):
        return np.zeros(len(tokens), bool), float("nan")
    return (tokens.q == value) & (tokens.o < -0.5 if value > -0.5 else True), float(value)


def _impossible(tokens: Tokens) -> np.ndarray:
    """Neighbours that both are all but impossible to either side, and that much more than the trainer's entropy allows.

    Where q says otherwise they may well have been sampled, from another policy.
    """
    low = np.maximum(tokens.o, tokens.q) < -limits.FOREIGN_SURPRISAL
    if tokens.entropy is not None:
        low &= -tokens.o > 2 * tokens.entropy + limits.FOREIGN_SURPRISAL
    pair = low[1:] & low[:-1] & (tokens.sequence[1:] == tokens.sequence[:-1]) & (np.diff(tokens.index) == 1)
    out = np.zeros(len(tokens), bool)
    out[1:] |= pair
    out[:-1] |= pair
    return out


def _from_start(trace: Trace, index: IntArray) -> float:
    if len(index) == 0:
        return 0.0
    index = np.sort(index)
    sequence = np.searchsorted(trace.starts, index, side="right") - 1
    place = index - trace.starts[sequence]
    rank = np.arange(len(index)) - np.searchsorted(sequence, sequence)
    return float((place == rank).mean())


class Tempered(NamedTuple):
    """log q − log o against log o + H: a straight line where one side has another temperature."""

    temperature: float  # Temperature that turns the distribution of q into that of o; 1 for the same.
    explained: float  # Share of the variance of log ρ that the line explains.
    exact: bool  # Entropy was recorded; without it the estimate is rough.


def tempered(tokens: Tokens) -> Tempered:
    """If q ∝ o^T in every context, log q = T log o + (T − 1) H + O((T − 1)²), H the entropy of o.

    For q = o^T / Z, log Z = log E_o[o^(T − 1)], whose first-order term is −(T − 1) H.
    """
    y = tokens.q - tokens.o
    exact = tokens.entropy is not None
    x = tokens.o + (tokens.entropy if tokens.entropy is not None else -tokens.o.sum() / max(len(tokens), 1))
    known = np.isfinite(x) & (np.abs(y) < limits.CLAMP / 2)
    x, y = x[known].astype(np.float64), y[known].astype(np.float64)
    if len(x) < limits.MIN_INFORMED:
        return Tempered(1.0, 0.0, exact)
    y -= y.mean()
    squares, total = float((x * x).sum()), float((y * y).sum())
    if squares <= 0 or total <= 0:
        return Tempered(1.0, 0.0, exact)
    slope = float((x * y).sum()) / squares
    rest = y - slope * x
    return Tempered(1.0 + slope, 1.0 - float(np.square(rest - rest.mean()).sum()) / total, exact)


class Surprisal(NamedTuple):
    """mean(−log o) against the entropy of o: equal where tokens were drawn from q, whatever q is, when weighted by ρ."""

    difference: Mean  # nats per token.
    entropy: float
    inverse_temperature: float  # 1 / T at which tokens seem to have been drawn.
    cut: float  # Log-likelihood of truncation minus that of a temperature, for the rare branch of two-way contexts.
    lost: float  # Probability below which branches seem to be cut.


def surprisal(tokens: Tokens) -> Surprisal | None:
    """None where entropy was not recorded."""
    if tokens.entropy is None:
        return None
    known = np.isfinite(tokens.entropy)
    tokens = tokens.where(known)
    entropy = tokens.entropy
    assert entropy is not None
    ratio = np.exp(np.minimum(tokens.o - tokens.q, 5))
    difference = clustered(ratio * -tokens.o - entropy, tokens.sequence)
    spread = float(np.square(tokens.o + entropy).mean(dtype=np.float64))
    beta = 1.0 - difference.value / max(spread, 1e-9)
    cut, lost = _cut_or_cold(tokens.o, entropy)
    return Surprisal(difference, float(entropy.mean(dtype=np.float64)), beta, cut, lost)


_BRANCH = np.linspace(1e-5, 0.5, 4000)
_BRANCH_ENTROPY = -_BRANCH * np.log(_BRANCH) - (1 - _BRANCH) * np.log1p(-_BRANCH)
_MOST_TOKENS = 500_000


def _cut_or_cold(o: FloatArray, entropy: FloatArray) -> tuple[float, float]:
    """Contexts are read as two branches of the recorded entropy: is the rare one absent, or only rarer?"""
    stride = max(len(o) // _MOST_TOKENS, 1)
    o, entropy = o[::stride], entropy[::stride]
    two = (entropy > 0.005) & (entropy < np.log(2))
    rare = np.interp(entropy[two], _BRANCH_ENTROPY, _BRANCH)
    chance = np.exp(o[two])
    # With more than two branches of weight, the sampled one has neither probability that the entropy asks for.
    fits = np.minimum(np.abs(chance - rare), np.abs(1 - chance - rare)) < 0.25 * rare
    rare, seen = rare[fits], chance[fits] < 0.5
    if len(rare) < limits.MIN_INFORMED:
        return 0.0, float("nan")

    def likelihood(chance: FloatArray) -> float:
        return float(np.where(seen, np.log(chance), np.log1p(-chance)).sum())

    cold = max(likelihood(rare**b / (rare**b + (1 - rare) ** b)) for b in np.linspace(1.05, 4, 30))
    cuts = np.array([0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3])
    each = [likelihood(np.where(rare >= c, rare, 0.002 * rare)) for c in cuts]
    return max(each) - cold, float(cuts[int(np.argmax(each))])
