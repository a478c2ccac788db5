"""One number per metric for a step of several optimizer updates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def merge_updates(
    updates: Sequence[Mapping[str, float]], tokens: Sequence[int], bounds: Collection[str] = ()
) -> dict[str, float]:
    """Metrics of a step from those of its updates, which saw `tokens` each.

    Means weighted by the tokens behind them, maxima for `…max`, sums for counts, the last for the learning rate and for
    controllers' bounds (`bounds` names more of these): what the next update begins with.
    """
    merged: dict[str, float] = {}
    for name in dict.fromkeys(k for metrics in updates for k in metrics):
        have = [(m[name], n * _share(name, m)) for m, n in zip(updates, tokens, strict=True) if name in m]
        values = [value for value, _ in have]
        bound = name in bounds or (name.startswith("controller/") and name.endswith(("bound", "target")))
        if name.endswith("max"):
            merged[name] = max(values)
        elif name == "optimizer/lr" or bound:
            merged[name] = values[-1]
        elif name.endswith(("clamped_log_ratios", "floored")):
            merged[name] = sum(values)
        else:
            mean = sum(v * n for v, n in have) / sum(n for _, n in have)
            # A constant (φ, say) stays what it is, without a rounding residue.
            merged[name] = min(max(mean, min(values)), max(values))
    return merged


def _share(name: str, metrics: Mapping[str, float]) -> float:
    """The fraction of an update's tokens that a metric is a mean over; those on which there is the metric, so not 0."""
    for share in ("dropped", "cut"):
        if f"/{share}_" in name and name.endswith(("_entropy", "probability")):
            return metrics[f"{name.rpartition('/')[0]}/{share}"]
    return metrics["objective/kept"] if name == "weight/mean" else 1.0
