"""Correction weights: detached importance weights that repair the expectation, each a pure function of `Terms`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rollkeel.objectives.options import choice, optional_number
from rollkeel.objectives.terms import Terms, bounded_exp, wide


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
    """`sequence` if its ratio is the product over the sequence."""


def mismatch(cap: float | None = None, level: str = "token") -> Weight:
    """w = ρ = o/q, or min(ρ, cap) (truncated importance sampling, Yao et al. 2025).

    `level` sequence: ρ is the product over the sequence, for all of its tokens (Liu et al. 2025).
    """
    cap = optional_number("mismatch.cap", cap, above=0)
    level = choice("mismatch.level", level, ("token", "sequence"))

    def weight(terms: Terms) -> torch.Tensor:
        assert terms.tokens.old_logprobs is not None  # in `needs`, so checked with the batch
        gap = wide(terms.tokens.old_logprobs.detach()) - wide(terms.tokens.rollout_logprobs.detach())
        rho = bounded_exp(terms.sequence_sum(gap) if level == "sequence" else gap)
        return rho if cap is None else rho.clamp(max=cap)

    name = "mismatch" if level == "token" else "sequence_mismatch"
    return Weight(name, weight, frozenset({"old_logprobs", "rollout_logprobs"}), True, cap, level)


WEIGHTS: dict[str, Callable[..., Weight]] = {"mismatch": mismatch}
