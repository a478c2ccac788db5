"""Is a fault real at its magnitude? What each run's tokens and rewards say, by measures that are not the doctor's.

`real` is decided before the doctor is asked: a run whose fault left nothing in what it recorded is no fault, and does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.doctor.cases import HEALTHY, Case
from rollkeel_doctor.traces.read import read_trace
from rollkeel_doctor.traces.trace import Trace

ALWAYS = (
    "reward_failures",
    "nothing_trained",
    "wrong_advantages",
    "duplicates",
    "cut_off_answers",
    "no_reward_signal",
    "reward_lost",
)
"""Faults that are there or not, whatever came of them."""


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
    ended = np.array([s == "length" for s in trace.status or ()])
    each = [float(np.nanmean(trace.reward[trace.step == s])) for s in steps]
    best = max(float(np.mean(each[i : i + 3])) for i in range(max(len(each) - 2, 1)))
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
        "reward_best": best,
        "reward_cut": float(np.nanmean(trace.reward[ended])) if ended.any() else float("nan"),
        "reward_rest": float(np.nanmean(trace.reward[~ended])) if not ended.all() else float("nan"),
        "cut": float(ended.mean()),
        "far": float((np.abs(gap) > np.log(2)).mean()),
        "bf16": float(trace.facts.engine_dtype == "bf16"),
        "flips": flips,
    }


def real(fault: str, e: Mapping[str, float]) -> bool:
    """Whether the fault did what it is there for, in whole-run averages.

    A gap: k3 twice that of honest bf16 (2e-5 where fp32 is stated), E[ρ] off by 0.004, or −log o off the entropy by 4 %.
    Settings: the harm that the fault is named for. Lost rewards are real where any was lost.
    """
    if fault == "policy_lag":
        return e["k3"] > 0.05 or e["far"] > 0.02
    if fault == "entropy_collapse":
        return e["entropy_last"] < 0.5 * e["entropy_first"] and e["reward_last"] < 0.75
    if fault == "length_truncation":
        return e["cut"] > 0.05 and e["reward_cut"] < e["reward_rest"] - 0.05
    if fault == "learning_rate":
        return e["reward_last"] < 0.6 * e["reward_best"]
    if fault in ALWAYS:
        return True
    honest = 1e-3 if e["bf16"] else 2e-5
    return e["k3"] > honest or abs(e["ratio"] - 1) > 0.004 or abs(e["surprise"] / e["entropy"] - 1) > 0.04


def show(cases: Sequence[Case], root: Path) -> list[dict[str, Any]]:
    """One line per run."""
    rows = []
    for case in cases:
        e = effects(read_trace(case.path(root)))
        kept = case.fault == HEALTHY or real(case.fault, e)
        rows.append({"real": kept, "fault": case.fault, "kind": case.kind, "base": case.base, "model": case.model, **e})
        print(
            f"{case.fault:>17} {case.model:>5} {case.kind[:34]:>34} {case.base:>9}  {e['tokens']:6.0f} tokens"
            f" {e['steps']:3.0f} steps  k3 {e['k3']:8.5f}  E[ρ] {e['ratio']:7.3f}  median |gap| {e['gap']:.4f}"
            f"  −log o {e['surprise']:.3f} H {e['entropy']:.3f}  reward {e['reward_first']:.2f}→{e['reward_last']:.2f}"
            f"  H {e['entropy_first']:.2f}→{e['entropy_last']:.2f}  cut {e['cut']:.2f}  flips {e['flips']:.3f}"
            f"{'' if kept else '  NOT REAL'}",
            flush=True,
        )
    ill = [row["real"] for row in rows if row["fault"] != HEALTHY]
    print(f"{sum(ill)} of {len(ill)} faults are real")
    return rows
