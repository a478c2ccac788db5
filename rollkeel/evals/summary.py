"""From the records of a benchmark's items to what is reported, and from two folders to their difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollkeel.errors import BadInput
from rollkeel.evals import record
from rollkeel.evals.benchmarks import Loaded
from rollkeel.evals.estimators import RESAMPLES, estimate, majority_at_k, paired_difference, pass_at_k, powers
from rollkeel.evals.record import Record
from rollkeel.types import Status

HARMONIC_SHIFT = 0.01
"""Added to every group's mean before the harmonic mean, which a single 0 would make 0 (BBEH, Kazemi et al. 2025)."""


def summarize(loaded: Loaded, records: Sequence[Record], samples: int) -> dict[str, Any]:
    """Everything that is reported of one benchmark, JSON values. Failures are counted apart and are never zeros."""
    benchmark = loaded.benchmark
    kept = [r for r in records if rewards_of(r)]
    metrics: dict[str, Any] = {}
    if samples:
        metrics["avg@k"] = _over(kept, lambda r: float(np.mean(rewards_of(r))))
        for k in powers(samples):
            enough = [r for r in records if len(rewards_of(r)) >= k]
            metrics[f"pass@{k}"] = _over(enough, lambda r, k=k: pass_at_k(rewards_of(r), k))
            if benchmark.read is not None and k > 1:
                metrics[f"majority@{k}"] = _over(enough, lambda r, k=k: majority_at_k(votes_of(r), rewards_of(r), k))
    greedy = [r for r in records if r["greedy"] and r["greedy"]["reward"] is not None]
    if any(r["greedy"] for r in records):
        metrics["greedy"] = _over(greedy, lambda r: r["greedy"]["reward"])
    groups: dict[str, list[float]] = {}
    for r in kept:
        groups.setdefault(r["group"], []).append(float(np.mean(rewards_of(r))))
    if benchmark.aggregate == "effective" and kept:
        units: dict[str, float] = {}
        for r in kept:
            units[r["unit"]] = units.get(r["unit"], 1.0) * float(np.mean(rewards_of(r)))
        metrics["effective mean"] = estimate(list(units.values())).to_json()
    elif benchmark.aggregate != "items" and groups:
        combine = _harmonic if benchmark.aggregate == "harmonic" else _mean
        metrics[f"{benchmark.aggregate} mean"] = over_groups(list(groups.values()), combine)
    return {
        "title": benchmark.title,
        "judged": loaded.options.judge.get("model") if benchmark.judged else None,
        "source": {"digest": loaded.digest, "warning": loaded.warning, "options": loaded.options.model_dump()},
        "k": samples,
        "metrics": {name: value for name, value in metrics.items() if value is not None},
        "groups": {g: {"items": len(v), "avg@k": float(np.mean(v))} for g, v in sorted(groups.items())} if len(groups) > 1 else {},
        "counts": _counts(records, benchmark.read is not None),
    }  # fmt: skip


def rewards_of(r: Record) -> list[float]:
    """Rewards of the samples that have one."""
    return [s["reward"] for s in r["samples"] if s["reward"] is not None]


def votes_of(r: Record) -> list[str | None]:
    """What they vote for."""
    return [s["vote"] for s in r["samples"] if s["reward"] is not None]


def by_unit(records: Sequence[Record], score: Callable[[Record], float]) -> dict[str, float]:
    """Mean of `score` over the items of each unit."""
    units: dict[str, list[float]] = {}
    for r in records:
        units.setdefault(r["unit"], []).append(score(r))
    return {unit: float(np.mean(scores)) for unit, scores in units.items()}


def _over(records: Sequence[Record], score: Callable[[Record], float]) -> dict[str, float] | None:
    return estimate(list(by_unit(records, score).values())).to_json() if records else None


def over_groups(
    groups: Sequence[Sequence[float]], combine: Callable[[np.ndarray], np.ndarray], seed: int = 0
) -> dict[str, float]:
    """`combine` of the groups' means; error and interval by resampling the items inside each group, as groups are fixed."""
    rng = np.random.default_rng(seed)
    means = np.empty((RESAMPLES, len(groups)))
    for at, group in enumerate(groups):
        values = np.asarray(group, dtype=np.float64)
        rows = max(1, (1 << 22) // values.size)
        for start in range(0, RESAMPLES, rows):
            count = min(rows, RESAMPLES - start)
            means[start : start + count, at] = values[rng.integers(values.size, size=(count, values.size))].mean(axis=1)
    drawn = combine(means)
    low, high = np.quantile(drawn, [0.025, 0.975])
    value = combine(np.array([[np.mean(group) for group in groups]]))[0]
    return {
        "value": float(value),
        "se": float(drawn.std(ddof=1)),
        "low": float(low),
        "high": float(high),
        "items": sum(map(len, groups)),
    }


def _mean(means: np.ndarray) -> np.ndarray:
    return means.mean(axis=1)


def _harmonic(means: np.ndarray) -> np.ndarray:
    return means.shape[1] / (1.0 / (means + HARMONIC_SHIFT)).sum(axis=1)


def _counts(records: Sequence[Record], reads: bool) -> dict[str, Any]:
    answers = [s for r in records for s in [*r["samples"], *([r["greedy"]] if r["greedy"] else [])]]
    ended = [s for s in answers if s["status"] in (Status.FINISHED, Status.LENGTH, Status.GRADER_FAILURE)]
    failed = [record.failures(r) for r in records]
    return {
        "items": len(records),
        "items_without_score": sum(not rewards_of(r) for r in records),
        "answers": len(answers),
        "grader_failures": sum(f["grader"] for f in failed),
        "engine_failures": sum(f["engine"] for f in failed),
        "length_limited": sum(s["status"] == Status.LENGTH for s in answers) / max(1, len(ended)),
        "unread": sum(s["vote"] is None for s in ended) / max(1, len(ended)) if reads else None,
        "tokens_mean": float(np.mean([s["tokens"] for s in ended])) if ended else math.nan,
    }


def compare(one: Path, other: Path) -> dict[str, Any]:
    """`other − one` per benchmark that both folders have: avg@k and greedy, paired by item. JSON values.

    Raises `BadInput` when they have none in common, or an item was not the same question in both.
    """
    results = [record.read_results(folder)["benchmarks"] for folder in (one, other)]
    shared = [name for name in results[0] if name in results[1]]
    if not shared:
        raise BadInput(
            f"comparison: expected a benchmark in both, got {', '.join(results[0])} and {', '.join(results[1])}"
        )
    found: dict[str, Any] = {}
    for name in shared:
        sides = [record.load(folder / name / record.ITEMS) for folder in (one, other)]
        both = [key for key in sides[0] if key in sides[1]]
        for key in both:
            if sides[0][key]["hash"] != sides[1][key]["hash"]:
                raise BadInput(f"comparison: {name} item {key} was not the same question in both; evaluate them alike")
        found[name] = {"k": [r[name]["k"] for r in results]}
        for metric, score in _PAIRED.items():
            kept = [k for k in both if all(score(side[k]) is not None for side in sides)]
            if kept:
                values = [by_unit([side[k] for k in kept], lambda r, score=score: score(r) or 0.0) for side in sides]
                means: Mapping[str, float] = {
                    f: float(np.mean(list(v.values()))) for f, v in zip("ab", values, strict=True)
                }
                found[name][metric] = {**means, "difference": paired_difference(*values).to_json()}
    return found


_PAIRED: dict[str, Callable[[Record], float | None]] = {
    "avg@k": lambda r: float(np.mean(rewards_of(r))) if rewards_of(r) else None,
    "greedy": lambda r: r["greedy"]["reward"] if r["greedy"] else None,
}
