"""The tokens that carry evidence, in one order whatever files they came from, and statistics that respect their dependence."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from rollkeel_doctor import thresholds as limits
from rollkeel_doctor.traces.trace import OF_ALL, PER_TOKEN, FloatArray, IntArray, Trace

PER_SEQUENCE = {f.name for f in fields(Trace)} - PER_TOKEN - OF_ALL


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens with log-probs of both sides. All arrays `[N]`; the trace's sequences are ordered by step and id."""

    index: IntArray  # int64: place in the trace.
    token_ids: IntArray
    sequence: IntArray  # int32.
    bin: IntArray  # int32: which of `steps` it belongs to.
    steps: IntArray  # `[B]` first step of each bin.
    q: FloatArray
    """float32 in [−20, 0]: log q over the whole vocabulary, that is, with the recorded kept mass put back."""
    o: FloatArray  # float32, log o in [−20, 0].
    entropy: FloatArray | None  # float32, nats, of the distribution of o.
    lag: IntArray | None
    """int32: stated staleness in versions, of weights or KV, whichever is older; −1 where it is not known, None if nowhere."""
    flipped: IntArray | None  # int16, −1 where unknown.

    def __len__(self) -> int:
        return len(self.index)

    def where(self, chosen: np.ndarray) -> Tokens:
        """The tokens of a bool mask; itself if that is all of them."""
        if chosen.all():
            return self
        names = ("index", "token_ids", "sequence", "bin", "q", "o", "entropy", "lag", "flipped")
        return replace(self, **{n: v[chosen] for n in names if (v := getattr(self, n)) is not None})

    @property
    def fresh(self) -> Tokens:
        """Tokens whose stated version, and their KV's, is the trainer's; all of them where versions are not stated."""
        return self if self.lag is None else self.where(self.lag == 0)


def ordered(trace: Trace) -> Trace:
    """The same trace with its sequences by step and id, so that the order of files and rows changes nothing."""
    order = np.lexsort((trace.id, trace.step))
    return trace if np.array_equal(order, np.arange(trace.sequences)) else taken(trace, order)


def taken(trace: Trace, order: IntArray) -> Trace:
    """A trace of the sequences `order` (indices), in that order."""
    lengths = trace.lengths[order]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.repeat(trace.starts[order] - starts[:-1], lengths) + np.arange(starts[-1])
    changes: dict[str, Any] = {"starts": starts}
    for name in PER_TOKEN | PER_SEQUENCE:
        value = getattr(trace, name)
        if value is None:
            continue
        chosen = tokens if name in PER_TOKEN else order
        changes[name] = value[chosen] if isinstance(value, np.ndarray) else [value[i] for i in chosen]
    return trace.with_(**changes)


def bins(trace: Trace) -> tuple[IntArray, IntArray]:
    """Bin of each sequence and first step of each bin: one bin a step, or `MAX_BINS` runs of steps."""
    steps, which = np.unique(trace.step, return_inverse=True)
    if len(steps) <= limits.MAX_BINS:
        return which.astype(np.int32), steps
    coarse = (np.arange(len(steps)) * limits.MAX_BINS // len(steps)).astype(np.int32)
    first = np.searchsorted(coarse, np.arange(limits.MAX_BINS))
    return coarse[which], steps[first]


def select(trace: Trace) -> Tokens:
    """Tokens inside the mask that both sides have a log-prob for."""
    trained = trace.trained
    index = np.flatnonzero(trained)
    which, steps = bins(trace)
    sequence = trace.sequence[index]
    lag = None
    if trace.versions is not None and trace.train_version is not None:
        stated = trace.versions[index]
        if trace.kv_versions is not None:
            kv = trace.kv_versions[index]
            stated = np.where(kv >= 0, np.minimum(kv, stated), stated)
        lag = (trace.train_version[sequence] - stated).astype(np.int32)
        lag[(stated < 0) | (trace.train_version[sequence] < 0)] = -1
        if (lag < 0).all():
            lag = None

    def taken(values: FloatArray | None) -> FloatArray | None:
        return None if values is None else values[index]

    entropy = taken(trace.entropy)
    if entropy is not None and not np.isfinite(entropy).any():
        entropy = None
    o = trace.train_logprobs
    q = trace.rollout_logprobs[index]
    if trace.kept_mass is not None:
        q = q + np.log(np.nan_to_num(trace.kept_mass[index], nan=1.0).clip(1e-6, 1))
    return Tokens(
        index=index,
        token_ids=trace.token_ids[index],
        sequence=sequence,
        bin=which[sequence],
        steps=steps,
        q=np.clip(q, -limits.CLAMP, 0, dtype=np.float32),
        o=np.zeros(0, np.float32) if o is None else np.clip(o[index], -limits.CLAMP, 0, dtype=np.float32),
        entropy=entropy,
        lag=lag,
        flipped=taken(trace.flipped_layers),
    )


class Mean(NamedTuple):
    """A mean with a standard error that takes the tokens of one sequence for dependent."""

    value: float
    error: float

    @property
    def z(self) -> float:
        return (
            self.value / self.error if self.error > 0 else 0.0 if self.value == 0 else float(np.sign(self.value)) * 99.0
        )


def clustered(values: FloatArray, cluster: IntArray) -> Mean:
    """Mean of `values` and its error from sums over clusters (sequences, groups)."""
    if len(values) == 0:
        return Mean(float("nan"), float("nan"))
    mean = float(values.mean(dtype=np.float64))
    first = cluster - cluster.min()
    counts = np.bincount(first)
    sums, clusters = np.bincount(first, values) - mean * counts, int((counts > 0).sum())
    if clusters == 1:
        return Mean(mean, float("inf"))
    return Mean(mean, float(np.sqrt(np.square(sums).sum() * clusters / (clusters - 1))) / len(values))


def logit(logprob: FloatArray) -> FloatArray:
    """log(p / (1 − p)) of a log-prob below 0."""
    return logprob - np.log(-np.expm1(logprob))


class Gap(NamedTuple):
    """How far the trainer and the engine are apart on some tokens."""

    tokens: int
    excess: Mean
    """E_q[ρ] − 1: 0 for honest, untruncated sampling whatever the weights, and with recorded kept mass near 0 too."""
    k3: float  # mean(ρ − 1 − log ρ).
    rms: float  # of log ρ.
    far: float  # Share of tokens with |log ρ| > ln 2.
    informed: int  # Tokens with q between 0.02 and 0.98, on which the next three stand.
    noise: float
    """1.4826 × median absolute deviation of logit o − logit q: the gap in logits, blind to tails and to confidence."""
    bias: float  # Median of logit o − logit q: above 0 where the trainer is the sharper one.
    slope: float  # of logit q on logit o.
    by_token: float
    """Share of the variance of logit o − logit q that lies between token ids, less what chance gives; NaN where ids seldom
    repeat. Rounding errors hardly know which token they are about, a tensor that is another one's does."""
    tails: float
    """Standard deviation of logit o − logit q over `noise`: 1 for a normal error, large where few tokens have all of it."""
    spread: float
    """1.4826 × median |logit o − logit q| over all tokens whose log-probs tell a logit, the sure ones among them.

    A policy that sharpens leaves few tokens of middling probability, and those are the ones it is torn about: their noise grows
    tenfold under a rounding that does to all other tokens what it always did. What a load did wrong it did to all.
    """
    k3_least: float
    """Lower bound of `k3`: of a token no more than 1 is counted, three standard errors off, tokens of a sequence taken for dependent."""


def gap(tokens: Tokens) -> Gap:
    """Statistics of log ρ = log o − log q. NaN where there are too few tokens."""
    if len(tokens) == 0:
        nan = float("nan")
        return Gap(0, Mean(nan, nan), nan, nan, nan, 0, *[nan] * 7)
    log_ratio = tokens.o - tokens.q
    rest = np.expm1(log_ratio)
    excess = clustered(rest, tokens.sequence)
    k3 = float((rest - log_ratio).mean(dtype=np.float64))
    bounded = clustered(np.minimum(rest - log_ratio, 1), tokens.sequence)
    least = bounded.value - 3 * bounded.error
    del rest
    rms = float(np.sqrt(np.square(log_ratio).mean(dtype=np.float64)))
    far = float((np.abs(log_ratio) > np.log(2)).mean())
    readable = (tokens.q > np.log(0.02)) & (tokens.q < -limits.SURE) & (tokens.o < -1e-6)
    x, y = logit(tokens.q[readable]), logit(tokens.o[readable])
    spread = 1.4826 * float(np.median(np.abs(y - x))) if len(x) >= limits.MIN_INFORMED else float("nan")
    informed = readable & (tokens.q < np.log(0.98))
    x, y = x[informed[readable]], y[informed[readable]]
    if len(x) < limits.MIN_INFORMED:
        return Gap(len(tokens), excess, k3, rms, far, len(x), *[float("nan")] * 5, spread=spread, k3_least=least)
    bias = float(np.median(y - x))
    noise = 1.4826 * float(np.median(np.abs(y - x - bias)))
    slope = float((x * y).sum(dtype=np.float64) / max(np.square(y).sum(dtype=np.float64), 1e-12))
    between = _between(y - x, tokens.token_ids[informed])
    tails = float((y - x).std(dtype=np.float64)) / max(noise, 1e-9)
    return Gap(len(tokens), excess, k3, rms, far, len(x), noise, bias, slope, between, tails, spread, least)


def _between(values: FloatArray, ids: IntArray) -> float:
    """Share of the variance of `values` between `ids`, less what chance gives; ids seen too rarely are left out."""
    counts = np.bincount(np.maximum(ids, -1) + 1)  # of unknown ids in the first place
    counts[0] = 0
    often = counts[ids + 1] >= limits.OFTEN
    groups = int((counts >= limits.OFTEN).sum())
    if often.mean() < 0.5 or groups < 3:
        return float("nan")
    ids, values = ids[often] + 1, values[often].astype(np.float64)
    values = np.clip(values, *np.quantile(values, (0.001, 0.999)))
    means = np.bincount(ids, values) / np.maximum(np.bincount(ids), 1)
    total, n = float(np.square(values - values.mean()).sum()), len(values)
    within = float(np.square(values - means[ids]).sum()) / (n - groups)
    return max(1.0 - within * (n - 1) / total, 0.0) if total > 0 else 0.0


def by_bin(tokens: Tokens) -> list[Gap]:
    """One `Gap` for every bin of `tokens.steps`."""
    edges = np.searchsorted(tokens.bin, np.arange(len(tokens.steps) + 1))
    out = []
    for first, last in itertools.pairwise(edges):
        part = slice(int(first), int(last))
        names = ("index", "token_ids", "sequence", "bin", "q", "o")
        few = {n: getattr(tokens, n)[part] for n in names}
        out.append(gap(replace(tokens, **few, entropy=None, lag=None, flipped=None)))
    return out
