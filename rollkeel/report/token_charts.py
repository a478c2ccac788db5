"""Charts of recorded tokens: what the two engines say about them, and which of them the objective drops.

q is the engine that samples, o the trainer at the start of the step; ρ = o/q.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from matplotlib.axes import Axes

from rollkeel.report.charts import GRID, INK, SERIES, Chart, drawing, log_axis, log_scale
from rollkeel_doctor.traces.trace import Trace

BINS = 10
MIN_TOKENS = 20
"""Fewer tokens in a bin or a step say nothing about its spread."""
SAME = 1e-3
_CELLS = 48
_DOTS = 2500
_TOP, _FINE = 0.875, 8
"""The histogram near 1 begins here, and has so many bars to a number of bfloat16."""
_KEPT, _DROPPED = SERIES[0], SERIES[1]
_Paint = Callable[[Axes], None]


def token_charts(trace: Trace) -> list[Chart]:
    """Every chart that the trace has the fields for; none without tokens of both engines, or where these agree."""
    seen = trace.trained
    if trace.train_logprobs is None or not seen.any() or agreement(trace):
        return []
    q, o = (np.exp(x[seen].astype(np.float64)) for x in (trace.rollout_logprobs, trace.train_logprobs))
    step = np.repeat(trace.step, trace.lengths)[seen]
    found: list[tuple[str, str, _Paint]] = []
    for at in dict.fromkeys((int(step.min()), int(step.max()))):
        here = step == at
        title = f"Probabilities under both engines, step {at}"
        caption = "Of the sampled tokens, darker for more of them; the line is where engine and trainer agree."
        found.append((title, caption, partial(_plane, q=q[here], o=o[here])))
    ratio = o / np.maximum(q, np.finfo(np.float64).tiny)
    gap = trace.train_logprobs[seen].astype(np.float64) - trace.rollout_logprobs[seen]
    found += [
        (
            "Log-probability gap of each token",
            "log ρ of up to a few thousand sampled tokens; the line is the mean of abs(log ρ) per step.",
            partial(_gaps, step=step, gap=gap),
        ),
        (
            "Probabilities near 1",
            "Tokens per 1/2048 of probability: numbers of bfloat16 are 8 bars apart, and what is rounded to them stands in spikes.",
            partial(_spikes, values={"q, sampler": q, "o, trainer": o}),
        ),
        (
            "Ratio by probability",
            "ρ by the trainer's probability: median, and the middle 50 and 98 % of tokens.",
            partial(_boxes, o=o, ratio=ratio),
        ),
        (
            "Ratio and total variation by probability",
            "99th percentile of abs(ρ−1) and of abs(o−q) by the sampler's probability: the ratio explodes where tokens are rare.",
            partial(_spreads, q=q, o=o, ratio=ratio),
        ),
    ]
    if trace.keep is not None and not trace.keep[seen].all():
        keep = trace.keep[seen]
        found.append(
            (
                "Dropped tokens in the plane",
                "Dropped by a mask of the objective, over tokens that were kept; corners are where the engines differ most.",
                partial(_dropped_plane, q=q, o=o, keep=keep),
            )
        )
        over = partial(_over_steps, step=step, keep=keep)
        found.append(("Probability of dropped tokens", "Mean q per step.", partial(over, values=q, unit="mean q")))
        if trace.entropy is not None:
            entropy = trace.entropy[seen].astype(np.float64)
            caption = "Mean entropy of the trainer's distribution there."
            found.append(("Entropy at dropped tokens", caption, partial(over, values=entropy, unit="nats")))
    return [drawing(title, caption, paint) for title, caption, paint in found]


def agreement(trace: Trace) -> str:
    """One line in place of the charts where no token's ρ is off 1 by more than `SAME` and no mask drops any; else empty."""
    seen = trace.trained
    if trace.train_logprobs is None or not seen.any() or (trace.keep is not None and not trace.keep[seen].all()):
        return ""
    gap = trace.train_logprobs[seen].astype(np.float64) - trace.rollout_logprobs[seen]
    far = float(np.abs(np.expm1(gap)).max())
    return f"ρ of all {len(gap):,} tokens within {far:.1g} of 1: engine and trainer agree" if far < SAME else ""


def _plane(axes: Axes, q: np.ndarray, o: np.ndarray) -> None:
    counts, _, _ = np.histogram2d(o, q, bins=_CELLS, range=((0, 1), (0, 1)))
    x, y = np.nonzero(counts.T)
    shade = np.log1p(counts.T[x, y])
    centres = (np.arange(_CELLS) + 0.5) / _CELLS
    # A few shades, so that each is one path of the SVG.
    level = np.ceil(4 * shade / shade.max()).astype(int)
    for i in range(1, 5):
        at = level == i
        axes.scatter(centres[x[at]], centres[y[at]], s=22, marker="s", c=_KEPT, alpha=0.25 * i, linewidths=0)
    axes.plot([0, 1], [0, 1], color=INK, lw=0.8, ls="--")
    _unit_square(axes)
    if len(q) > 1 and min(q.var(), o.var()) > 1e-12:
        axes.set_title(f"correlation {np.corrcoef(q, o)[0, 1]:.4f}", loc="left", fontsize=9)


def _unit_square(axes: Axes) -> None:
    axes.set(xlabel="q, sampler", ylabel="o, trainer", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))


def _bins(by: np.ndarray) -> list[tuple[float, np.ndarray]]:
    """`(centre, indices)` of each bin of a probability with enough tokens."""
    bin_of = np.minimum((by * BINS).astype(int), BINS - 1)
    found = [((i + 0.5) / BINS, np.flatnonzero(bin_of == i)) for i in range(BINS)]
    return [(centre, at) for centre, at in found if len(at) >= MIN_TOKENS]


def _boxes(axes: Axes, o: np.ndarray, ratio: np.ndarray) -> None:
    for centre, at in _bins(o):
        low, first, middle, third, high = np.quantile(ratio[at], (0.01, 0.25, 0.5, 0.75, 0.99))
        axes.plot([centre, centre], [low, high], color=_KEPT, lw=1.2)
        axes.plot([centre, centre], [first, third], color=_KEPT, lw=6, alpha=0.55, solid_capstyle="butt")
        axes.plot(centre, middle, marker="o", ms=3, color=_KEPT)
    axes.axhline(1.0, color=INK, lw=0.8, ls="--")
    axes.set(xlabel="o, trainer's probability", ylabel="ρ = o/q", xlim=(0, 1))


def _spreads(axes: Axes, q: np.ndarray, o: np.ndarray, ratio: np.ndarray) -> None:
    bins = _bins(q)
    floor = 1e-12
    for values, label, color in ((np.abs(ratio - 1), "abs(ρ−1)", _DROPPED), (np.abs(o - q), "abs(o−q)", _KEPT)):
        spread = [max(float(np.quantile(values[at], 0.99)), floor) for _, at in bins]
        axes.plot([centre for centre, _ in bins], spread, marker="o", ms=3, color=color, label=label)
    if bins:
        log_scale(axes)
    axes.set(xlabel="q, sampler's probability", ylabel="99th percentile", xlim=(0, 1))


def _gaps(axes: Axes, step: np.ndarray, gap: np.ndarray) -> None:
    at = slice(None, None, -(-len(gap) // _DOTS))
    axes.scatter(step[at], gap[at], s=3, color=_KEPT, alpha=0.35, linewidths=0, label="log ρ", rasterized=True)
    steps, which = np.unique(step, return_inverse=True)
    mean = np.bincount(which, np.abs(gap)) / np.bincount(which)
    axes.plot(steps, mean, color=_DROPPED, lw=1.5, marker="o", ms=3, label="mean abs(log ρ)")
    axes.set(xlabel="step", ylabel="log o − log q (nats)")


def _spikes(axes: Axes, values: Mapping[str, np.ndarray]) -> None:
    # Edges lie between the numbers of bfloat16, which are 2⁻⁸ apart below 1: each of them is in the middle of a bar.
    edges = _TOP + (np.arange(round((1 - _TOP) * 256 * _FINE) + 2) - 0.5) / (256 * _FINE)
    for (label, probabilities), color in zip(values.items(), (_KEPT, _DROPPED), strict=True):
        counts = np.histogram(probabilities, edges)[0]
        axes.stairs(np.maximum(counts, 0.5), edges, color=color, lw=0.7, baseline=None, label=label)
    axes.set(xlabel="probability", ylabel="tokens", xlim=(_TOP, 1.001))
    log_axis(axes, "y")


def _dropped_plane(axes: Axes, q: np.ndarray, o: np.ndarray, keep: np.ndarray) -> None:
    for which, color, label in ((keep, GRID, "kept"), (~keep, _DROPPED, "dropped")):
        at = np.flatnonzero(which)
        at = at[:: -(-len(at) // _DOTS) or 1]
        alpha = 0.35 if label == "kept" else 0.8
        axes.scatter(q[at], o[at], s=3, color=color, alpha=alpha, linewidths=0, label=label, rasterized=True)
    axes.plot([0, 1], [0, 1], color=INK, lw=0.8, ls="--")
    _unit_square(axes)


def _over_steps(axes: Axes, step: np.ndarray, keep: np.ndarray, values: np.ndarray, unit: str) -> None:
    at = step - step.min()
    steps = np.arange(step.min(), step.max() + 1)
    for which, color, label in ((keep, GRID, "kept"), (~keep, _DROPPED, "dropped")):
        counts = np.bincount(at[which], minlength=len(steps))
        sums = np.bincount(at[which], values[which], minlength=len(steps))
        there = counts > 0
        style = "." if label == "dropped" else "-"
        axes.plot(steps[there], sums[there] / counts[there], style, ms=3, color=color, lw=1, label=label)
    axes.set(xlabel="step", ylabel=unit)
