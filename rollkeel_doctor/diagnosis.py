"""What the doctor says: causes with their evidence, or healthy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Kind = Literal["bug", "numerics", "dynamics"]

CAUSES: Mapping[str, Kind] = {
    "alignment": "bug",
    "mask": "bug",
    "retokenised": "bug",
    "temperature": "bug",
    "truncation": "bug",
    "wrong_weights": "bug",
    "stale_version": "bug",
    "stale_kv": "bug",
    "reward_failures": "bug",
    "wrong_advantages": "bug",
    "nothing_trained": "bug",
    "duplicates": "bug",
    "cut_off_answers": "bug",
    "unexplained": "bug",
    "quantisation": "numerics",
    "routing": "numerics",
    "policy_lag": "dynamics",
    "learning_rate": "dynamics",
    "entropy_collapse": "dynamics",
    "length_truncation": "dynamics",
    "no_reward_signal": "dynamics",
    "reward_lost": "dynamics",
}
"""Every cause the doctor can name, and what kind of trouble it is."""

CANDIDATES = ("wrong_weights", "quantisation", "routing", "stale_version", "unexplained", "mask", "retokenised")
"""Causes that may look alike in tokens: `recompute` tells them apart where a run has a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One cause that is over its threshold."""

    id: str
    score: float
    """In (0, 1]: how far over its threshold and how much of the evidence it accounts for; comparable within a kind."""
    evidence: str  # One sentence with the numbers that name it.
    advice: str  # One sentence: what to do.
    positions: Sequence[Mapping[str, int]] = ()  # Tokens that show it, clearest first: `step`, `id`, `token`.

    @property
    def kind(self) -> Kind:
        return CAUSES[self.id]

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "kind": self.kind,
            "score": round(float(self.score), 4),
            "evidence": self.evidence,
            "advice": self.advice,
            "positions": [dict(p) for p in self.positions],
        }


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Causes, likeliest first; none means healthy."""

    source: str
    path: str
    tokens: int
    sequences: int
    steps: int
    causes: Sequence[Cause]
    observed: Sequence[str] = ()  # What was measured and is as it should be, or is worth knowing without being a fault.
    not_examined: Mapping[str, str] = field(default_factory=dict)  # Cause → what it would have needed.
    notes: Sequence[str] = ()  # What could not be read.
    lost: bool = False  # The reward fell for good.

    @property
    def healthy(self) -> bool | None:
        """No cause is over its threshold; None where most causes could not be examined either. Those stand in `not_examined`."""
        if not self.causes and 2 * len(self.not_examined) > len(CAUSES):
            return None
        return not self.causes

    @property
    def verdict(self) -> str:
        """One line: the first cause with its evidence, or in how far the run is healthy."""
        if self.causes:
            first, more = self.causes[0], len(self.causes) - 1
            return f"{first.id} ({first.kind}): {first.evidence}{f' {more} more found.' if more else ''}"
        missing = len(self.not_examined)
        if self.healthy is None:
            return f"not examined: {missing} of {len(CAUSES)} causes could not be tested"
        unread = [f"{missing} of {len(CAUSES)} causes were not"] if missing else []
        unread += ["parts could not be read"] if self.notes else []
        return f"healthy as far as was examined ({', '.join(unread)})" if unread else "healthy"

    @property
    def in_doubt(self) -> bool:
        """A cause that others look like: a checkpoint may tell which it is."""
        return any(cause.id in CANDIDATES for cause in self.causes)

    def settled(self, cause: Cause) -> Diagnosis:
        """With `cause` in the place of those that looked alike."""
        return replace(self, causes=[cause, *(c for c in self.causes if c.id not in CANDIDATES)])

    def cleared(self, why: str) -> Diagnosis:
        """Without the causes that are the engine's numbers alone, which are those that were stated."""
        return replace(self, causes=[c for c in self.causes if c.kind != "numerics"], observed=[why, *self.observed])

    def to_json(self) -> dict[str, Any]:
        return {
            "healthy": self.healthy,
            "causes": [cause.to_json() for cause in self.causes],
            "observed": list(self.observed),
            "not_examined": dict(self.not_examined),
            "notes": list(self.notes),
            "source": self.source,
            "path": self.path,
            "tokens": self.tokens,
            "sequences": self.sequences,
            "steps": self.steps,
        }
