"""Is a fault real at its magnitude? What each run's tokens and rewards say, fault beside healthy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.doctor.cases import Case
from rollkeel.diagnostics.traces.read import read_trace
from rollkeel.diagnostics.traces.trace import Trace


def effects(trace: Trace) -> dict[str, float]:
    """k3 and E[ρ] (ρ = o/q) over trained tokens; −log o beside the entropy; reward and entropy of the first and last steps."""
    m = trace.trained
    q = trace.rollout_logprobs[m].astype(np.float64)
    o = q if trace.train_logprobs is None else trace.train_logprobs[m].astype(np.float64)
    gap = o - q
    step = trace.step[trace.sequence]
    steps = np.unique(trace.step)
    entropy = np.full(len(trace), np.nan) if trace.entropy is None else trace.entropy
    parts = (steps[:3], steps[-3:])
    reward = [float(np.nanmean(trace.reward[np.isin(trace.step, p)])) for p in parts]
    spread = [float(np.nanmean(entropy[np.isin(step, p)])) for p in parts]
    cut = float(np.mean([s == "length" for s in trace.status or ()]))
    ratio = np.exp(np.minimum(gap, 50))
    flips = -1.0
    if trace.flipped_layers is not None and (known := trace.flipped_layers >= 0).any():
        flips = float((trace.flipped_layers[known] > 0).mean())
    return {
        "tokens": float(len(trace)),
        "steps": float(len(steps)),
        "k3": float(np.mean(ratio - 1 - gap)),
        "ratio": float(ratio.mean()),
        "gap": float(np.median(np.abs(gap))),
        "surprise": float(-o.mean()),
        "entropy": float(np.nanmean(entropy)),
        "reward_first": reward[0],
        "reward_last": reward[1],
        "entropy_first": spread[0],
        "entropy_last": spread[1],
        "cut": cut,
        "flips": flips,
    }


def show(cases: Sequence[Case], root: Path) -> list[dict[str, Any]]:
    """One line per run."""
    rows = []
    for case in cases:
        e = effects(read_trace(case.path(root)))
        rows.append({"fault": case.fault, "kind": case.kind, "base": case.base, "model": case.model, **e})
        print(
            f"{case.fault:>17} {case.model:>5} {case.kind[:34]:>34} {case.base:>9}  {e['tokens']:6.0f} tokens"
            f" {e['steps']:3.0f} steps  k3 {e['k3']:8.5f}  E[ρ] {e['ratio']:7.3f}  median |gap| {e['gap']:.4f}"
            f"  −log o {e['surprise']:.3f} H {e['entropy']:.3f}  reward {e['reward_first']:.2f}→{e['reward_last']:.2f}"
            f"  H {e['entropy_first']:.2f}→{e['entropy_last']:.2f}  cut {e['cut']:.2f}  flips {e['flips']:.3f}",
            flush=True,
        )
    return rows
