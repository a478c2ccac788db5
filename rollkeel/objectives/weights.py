"""Correction weights: detached importance weights that repair the expectation, each a pure function of `Terms`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rollkeel.errors import BadInput
from rollkeel.objectives.options import choice, flag, number, optional_number
from rollkeel.objectives.terms import LEVELS, Terms, wide


@dataclass(frozen=True)
class Weight:
    """A named correction weight."""

    name: str
    weight: Callable[[Terms], torch.Tensor]
    """Terms → `[T]` float ≥ 0, detached."""
    needs: frozenset[str] = frozenset()
    corrects_gap: bool = False
    """True if it corrects the gap between training and rollout policy."""
    cap: float | None = None
    level: str = "token"
    """One of `terms.LEVELS`: what its ratio is taken over."""
    normalise: bool = False
    """Divided by its mean over the optimizer batch: over tokens, or over sequences at the levels that give each one number."""


def mismatch(cap: float | None = None, level: str = "token", floor: float = 0.0, normalise: bool = False) -> Weight:
    """w = ρ = o/q, clamped to [floor, cap] (truncated importance sampling, Yao et al. 2025).

    `level`: ρ of the token, its geometric mean over the segment (one turn) or the sequence, or its product over the `sequence`
    (Liu et al. 2025). `normalise`: divided by its mean over the batch, so that the weights average 1.
    """
    cap, floor = optional_number("mismatch.cap", cap, above=0), number("mismatch.floor", floor, at_least=0)
    if cap is not None and floor > cap:
        raise BadInput(f"mismatch: expected floor ≤ cap, got floor={floor} and cap={cap}")
    level, normalise = choice("mismatch.level", level, LEVELS), flag("mismatch.normalise", normalise)

    def weight(terms: Terms) -> torch.Tensor:
        assert terms.tokens.old_logprobs is not None  # in `needs`, so checked with the batch
        gap = wide(terms.tokens.old_logprobs.detach()) - wide(terms.tokens.rollout_logprobs.detach())
        return terms.bounded(terms.at_level(gap, level)).exp().clamp(min=floor, max=cap)

    name = "mismatch" if level == "token" else f"{level}_mismatch"
    needs = {"old_logprobs", "rollout_logprobs"} | ({"token_index"} if level == "segment" else set())
    return Weight(name, weight, frozenset(needs), True, cap, level, normalise)


WEIGHTS: dict[str, Callable[..., Weight]] = {"mismatch": mismatch}
