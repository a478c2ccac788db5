"""Keep masks: which tokens an update may learn from. Each is a pure function of `Terms`, and detached.

Band edges are inclusive; a divergence drops a token when it is strictly above its threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from rollkeel.objectives.divergences import at_floor, symmetric_binary_kl
from rollkeel.objectives.terms import Terms, bounded_exp


@dataclass(frozen=True)
class Mask:
    """A named keep mask; its metrics are `mask/<name>/*`."""

    name: str
    keep: Callable[[Terms], torch.Tensor]
    """Terms → `[T]` bool, True keeps."""
    parameters: Mapping[str, float] = field(default_factory=dict)
    """Thresholds, logged as `mask/<name>/<parameter>`."""
    counts: Callable[[Terms], Mapping[str, torch.Tensor]] | None = None
    """Terms → 0-d tensors, further counts logged as `mask/<name>/<count>`."""


def ratio_band(name: str, low: float, high: float) -> Mask:
    """Keep low ≤ target/reference ≤ high (IcePop, Ring-1T report eqs. 1–2: k inside [α, β], 0 outside)."""

    def keep(terms: Terms) -> torch.Tensor:
        ratio = bounded_exp(terms.log_correction)
        return (ratio >= low) & (ratio <= high)

    return Mask(name, keep, {"low": low, "high": high})


def binary_kl_bound(name: str, phi: float) -> Mask:
    """Keep max(D_B(target‖reference), D_B(reference‖target)) ≤ φ (KPop), in nats.

    For small gaps D_B ≈ (p−q)²/(2q(1−q)): a bound on |p−q| in standard deviations of the token's own draw.
    """

    def keep(terms: Terms) -> torch.Tensor:
        return ~(symmetric_binary_kl(terms.target, terms.reference) > phi)

    def counts(terms: Terms) -> Mapping[str, torch.Tensor]:
        return {"floored": (at_floor(terms.target) | at_floor(terms.reference)).sum()}

    return Mask(name, keep, {"phi": phi}, counts)


def outside(
    advantages: torch.Tensor, ratio: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a ratio has already moved beyond [low, high] in the direction its advantage pushes.

    Args: `[T]` advantages and detached ratios. Returns `[T]` bools: (A > 0 and ratio > high), (A < 0 and ratio < low).
    A = 0 is in neither.
    """
    return (advantages > 0) & (ratio > high), (advantages < 0) & (ratio < low)
