"""Sums over tokens of what an objective did to them; sums of steps add up to those of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, final

import numpy as np

PROBABILITY_EDGES = tuple(round(0.1 * i, 1) for i in range(11))
ENTROPY_EDGES = (0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0, float("inf"))
"""Nats."""
SIGNS = ("positive", "negative")
_MAX_ID = 1 << 22
"""Token ids up to here are counted."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The tokens of an optimizer batch, `[T]` each, as an objective judged them."""

    dropped: np.ndarray
    """bool: nothing of the policy gradient is left."""
    weight: np.ndarray | None
    """float64: what multiplies A·∇log p where A ≠ 0, NaN elsewhere; None where that is not known."""
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    probability: np.ndarray
    """p, as the objective saw it."""
    token_ids: np.ndarray
    entropy: np.ndarray | None


@final
@dataclass
class Tally:
    """What one objective did, summed."""

    numbers: dict[str, float] = field(default_factory=dict)
    bins: dict[str, np.ndarray] = field(default_factory=dict)
    """`<by>/<what>`: `tokens`, `dropped`, `weighted` (tokens with a weight) and `weight` per bin."""

    def add(self, batch: Judged) -> None:
        """Count the tokens of one batch."""
        dropped = batch.dropped
        a = batch.advantages
        w = batch.weight
        mass = np.abs(a.astype(np.float64)) * (1.0 - batch.probability)
        q = np.exp(batch.rollout_logprobs.astype(np.float64))
        self._number("tokens", len(a))
        self._number("dropped", dropped.sum())
        self._number("dropped_q", q[dropped].sum())
        for sign, chosen in zip(SIGNS, (a > 0, a < 0), strict=True):
            self._number(f"{sign}_tokens", chosen.sum())
            self._number(f"{sign}_dropped", (dropped & chosen).sum())
        self._number("mass", mass.sum())
        self._number("mass_dropped", mass[dropped].sum())
        if batch.entropy is not None:
            known = np.isfinite(batch.entropy)
            self._number("dropped_entropy", batch.entropy[dropped & known].sum(dtype=np.float64))
            self._number("dropped_with_entropy", (dropped & known).sum())
            self._bin("entropy", np.where(known, batch.entropy, -1.0), ENTROPY_EDGES, dropped, w)
        if w is not None:
            live = ~dropped & np.isfinite(w)
            self._number("weighted", live.sum())
            self._number("weight", w[live].sum())
            self._number("weight_squared", np.square(w[live]).sum())
            self._number("mass_weighted", (mass[live] * w[live]).sum())
            top = float(w[live].max()) if live.any() else 0.0
            self.numbers["weight_max"] = max(self.numbers.get("weight_max", 0.0), top)
        self._bin("probability", q, PROBABILITY_EDGES, dropped, w)

    def merge(self, other: Tally) -> None:
        """Add what another one counted."""
        for name, value in other.numbers.items():
            if name == "weight_max":
                self.numbers[name] = max(self.numbers.get(name, 0.0), value)
            else:
                self._number(name, value)
        for name, value in other.bins.items():
            self.bins[name] = self.bins.get(name, 0) + value

    def summary(self) -> dict[str, float]:
        """Shares and means; those over no tokens are left out.

        `dropped`, `dropped_positive`, `dropped_negative`: share of tokens, and of those with A > 0 and A < 0.
        `gradient_mass_dropped`: of Σ|A|(1 − p), and `gradient_mass`: what is left of it under the weights.
        `weight_mean`, `weight_max`, `ess` = (Σw)²/(nΣw²): over kept tokens with A ≠ 0.
        `dropped_probability` (mean q) and `dropped_entropy` (nats): means over dropped tokens.
        """
        n = self.numbers
        pairs = {
            "dropped": ("dropped", "tokens"),
            "dropped_positive": ("positive_dropped", "positive_tokens"),
            "dropped_negative": ("negative_dropped", "negative_tokens"),
            "gradient_mass_dropped": ("mass_dropped", "mass"),
            "gradient_mass": ("mass_weighted", "mass"),
            "weight_mean": ("weight", "weighted"),
            "dropped_probability": ("dropped_q", "dropped"),
            "dropped_entropy": ("dropped_entropy", "dropped_with_entropy"),
        }
        out = {"tokens": n.get("tokens", 0.0)}
        out |= {name: n[a] / n[b] for name, (a, b) in pairs.items() if a in n and n.get(b)}
        if n.get("weighted"):
            out["weight_max"] = n["weight_max"]
            if n["weight_squared"]:
                out["ess"] = n["weight"] ** 2 / (n["weighted"] * n["weight_squared"])
        return out

    def by(self, what: str) -> list[dict[str, float]]:
        """Per bin of `probability` (of q) or `entropy`: `low`, `high`, `tokens`, and where there are any `dropped`,
        `weight_mean`."""
        edges = PROBABILITY_EDGES if what == "probability" else ENTROPY_EDGES
        if f"{what}/tokens" not in self.bins:
            return []
        rows = []
        for i, (low, high) in enumerate(pairwise(edges)):
            sums = {k: float(self.bins[f"{what}/{k}"][i]) for k in ("tokens", "dropped", "weighted", "weight")}
            row = {"low": low, "high": high, "tokens": sums["tokens"]}
            row |= {"dropped": sums["dropped"] / sums["tokens"]} if sums["tokens"] else {}
            row |= {"weight_mean": sums["weight"] / sums["weighted"]} if sums["weighted"] else {}
            rows.append(row)
        return rows

    def _number(self, name: str, value: Any) -> None:
        self.numbers[name] = self.numbers.get(name, 0.0) + float(value)

    def _bin(
        self, by: str, values: np.ndarray, edges: tuple[float, ...], dropped: np.ndarray, weight: np.ndarray | None
    ) -> None:
        count = len(edges) - 1
        place = np.searchsorted(np.asarray(edges[1:-1]), values, side="right")
        inside = values >= edges[0]
        live = np.zeros(0, bool) if weight is None else ~dropped & np.isfinite(weight) & inside
        sums = {
            "tokens": np.bincount(place[inside], minlength=count),
            "dropped": np.bincount(place[dropped & inside], minlength=count),
            "weighted": np.zeros(count) if weight is None else np.bincount(place[live], minlength=count),
            "weight": np.zeros(count)
            if weight is None
            else np.bincount(place[live], weights=weight[live], minlength=count),
        }
        for name, value in sums.items():
            self.bins[f"{by}/{name}"] = self.bins.get(f"{by}/{name}", 0) + value.astype(np.float64)


@final
class Words:
    """How often each token was dropped, by the sign of its advantage."""

    def __init__(self) -> None:
        self._counts: dict[str, np.ndarray] = {}

    def add(self, batch: Judged) -> None:
        """Count the dropped tokens of one batch, and all of them."""
        known = (batch.token_ids >= 0) & (batch.token_ids < _MAX_ID)
        for sign, side in zip(SIGNS, (batch.advantages > 0, batch.advantages < 0), strict=True):
            for what, chosen in (("all", known & side), ("dropped", known & side & batch.dropped)):
                self._grow(f"{sign}/{what}", np.bincount(batch.token_ids[chosen]))

    def top(self, sign: str, count: int, pieces: Mapping[int, str]) -> list[dict[str, Any]]:
        """The most frequently dropped tokens: `id`, `piece` (None if unknown), `dropped`, and `share` of its occurrences."""
        dropped, every = (self._counts.get(f"{sign}/{w}", np.zeros(0, np.int64)) for w in ("dropped", "all"))
        order = np.lexsort((np.arange(len(dropped)), -dropped))[:count]
        return [
            {
                "id": int(i),
                "piece": pieces.get(int(i)),
                "dropped": int(dropped[i]),
                "share": float(dropped[i] / every[i]),
            }
            for i in order
            if dropped[i]
        ]

    def _grow(self, name: str, counts: np.ndarray) -> None:
        old = self._counts.get(name, np.zeros(0, np.int64))
        if len(old) < len(counts):
            old = np.concatenate([old, np.zeros(len(counts) - len(old), np.int64)])
        old[: len(counts)] += counts
        self._counts[name] = old
