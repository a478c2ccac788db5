"""The books of a simulation: where every token went, and the figures over the iterations after the warm-up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rollkeel.rollout.scenario import Lengths

LENGTH_BINS = 10


@dataclass(frozen=True, kw_only=True)
class Row:
    """One iteration. Times in seconds, work in tokens."""

    rollout_s: float
    """Time in which the engines generate."""
    step_s: float
    """Time until the next iteration begins."""
    busy: float
    """Sequence-seconds."""
    generated: int
    trained: int


@dataclass
class _Life:
    length: int
    tokens: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens sampled under it), in order."""


@dataclass
class Ledger:
    """Where every token went. A rollout that is trained or dropped is gone, so nothing counts twice (`KeyError`)."""

    lengths: Lengths
    version: int = 0
    counting: bool = False
    """False while warming up: totals run, the distributions do not."""
    generated: int = 0
    trained: int = 0
    dropped: int = 0
    live: dict[int, _Life] = field(default_factory=dict)
    issued_lengths: list[int] = field(default_factory=list)
    trained_lengths: list[int] = field(default_factory=list)
    dropped_lengths: list[int] = field(default_factory=list)
    """True lengths, those the rollouts would have reached."""
    staleness: dict[int, int] = field(default_factory=dict)
    """Versions between sampling and training → trained tokens."""

    def issue(self, id: int, prompt: int) -> int:
        """A rollout enters the engine for the first time; its true length."""
        length = self.lengths.of(prompt, id)
        self.live[id] = _Life(length)
        if self.counting:
            self.issued_lengths.append(length)
        return length

    def note(self, tokens: Mapping[int, int]) -> None:
        """Tokens so far; what is new was sampled under the current version."""
        for id, total in tokens.items():
            life = self.live[id]
            new = total - life.tokens
            if new:
                life.versions.append((self.version, new))
                life.tokens = total
                self.generated += new

    def train(self, ids: Iterable[int]) -> int:
        """Train on complete rollouts under the current version; their tokens."""
        total = 0
        for id in ids:
            life = self.live.pop(id)
            assert life.tokens == life.length, f"rollout {id} is trained with {life.tokens} of {life.length} tokens"
            total += life.tokens
            if self.counting:
                self.trained_lengths.append(life.length)
                for version, tokens in life.versions:
                    lag = self.version - version
                    self.staleness[lag] = self.staleness.get(lag, 0) + tokens
        self.trained += total
        return total

    def drop(self, ids: Iterable[int]) -> None:
        """Throw rollouts away: purged, discarded or too stale."""
        for id in ids:
            life = self.live.pop(id)
            self.dropped += life.tokens
            if self.counting:
                self.dropped_lengths.append(life.length)


@dataclass
class Result:
    """What one policy did. `rows` and the ledger's distributions are those after the warm-up."""

    name: str
    slots: int
    """Sequences in all engines together."""
    peak: float
    """Tokens per second that the engines could generate."""
    ledger: Ledger
    rows: list[Row] = field(default_factory=list)
    trace: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the iteration began, running sequences) in the last iteration."""

    def metrics(self) -> dict[str, float]:
        """Figures over the rows; shares in [0, 1], lengths in tokens, staleness in versions."""
        rollout, step = (sum(getattr(r, name) for r in self.rows) for name in ("rollout_s", "step_s"))
        trained, generated = sum(r.trained for r in self.rows), sum(r.generated for r in self.rows)
        book = self.ledger
        issued, used = _mean(book.issued_lengths), _mean(book.trained_lengths)
        gone, lag = len(book.dropped_lengths), book.staleness
        return {
            "slots": float(self.slots),
            "rollout_s": rollout / len(self.rows),
            "step_s": step / len(self.rows),
            "trained_tokens": trained / len(self.rows),
            "rollout_tokens_s": trained / rollout,
            "step_tokens_s": trained / step,
            "idle_share": max(0.0, 1 - sum(r.busy for r in self.rows) / (self.slots * rollout)),
            "lost_throughput": max(0.0, 1 - generated / (self.peak * rollout)),
            "issued_length_mean": issued,
            "finished_length_mean": used,
            "length_bias": used / issued if issued else 0.0,
            "purge_rate": gone / max(1, gone + len(book.trained_lengths)),
            "staleness_mean": sum(k * n for k, n in lag.items()) / max(1, sum(lag.values())),
            "staleness_max": float(max(lag, default=0)),
        }

    def purge_rate_by_length(self) -> list[tuple[float, float]]:
        """(upper edge in tokens, purged / (purged + trained)) for equal shares of the issued lengths."""
        edges = np.unique(np.quantile(self.ledger.issued_lengths or [1], np.linspace(0, 1, LENGTH_BINS + 1)[1:]))
        gone, used = (
            np.bincount(np.minimum(np.searchsorted(edges, values), len(edges) - 1), minlength=len(edges))
            for values in (
                np.array(self.ledger.dropped_lengths, int),
                np.array(self.ledger.trained_lengths, int),
            )
        )
        return [(float(e), float(g / max(1, g + u))) for e, g, u in zip(edges, gone, used, strict=True)]


def _mean(values: list[int]) -> float:
    return float(np.mean(values)) if values else 0.0
