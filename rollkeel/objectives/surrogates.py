"""Surrogates S_t(p): the only part of an objective that carries the policy gradient, each a pure function of `Terms`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rollkeel.objectives.masks import outside
from rollkeel.objectives.terms import Terms, bounded_exp


@dataclass(frozen=True)
class SurrogateValue:
    """`[T]` tensors: the surrogate, and (bool) where it was cut on its high and low side; None if it never cuts."""

    value: torch.Tensor
    clipped_high: torch.Tensor | None = None
    clipped_low: torch.Tensor | None = None


@dataclass(frozen=True)
class Surrogate:
    """A named surrogate: Terms → `SurrogateValue`."""

    name: str
    evaluate: Callable[[Terms], SurrogateValue]


def ppo_clip(clip_low: float, clip_high: float) -> Surrogate:
    """min(r·A, clip(r, 1−clip_low, 1+clip_high)·A) with r = p/base (Schulman et al. 2017, eq. 7).

    Gradient with respect to log p: r·A, and 0 where A > 0 and r > 1+clip_high or A < 0 and r < 1−clip_low.
    At a band edge the token still counts.
    """
    low, high = 1.0 - clip_low, 1.0 + clip_high

    def evaluate(terms: Terms) -> SurrogateValue:
        ratio = bounded_exp(terms.log_ratio)
        cut_high, cut_low = outside(terms.advantages, ratio.detach(), low, high)
        value = torch.where(cut_high, high, torch.where(cut_low, low, ratio)) * terms.advantages
        return SurrogateValue(value, cut_high, cut_low)

    return Surrogate("ppo_clip", evaluate)


def ratio(cap: float | None = None) -> Surrogate:
    """u·A with u = p/base; under a cap the value and the gradient coefficient are min(u, cap)·A.

    The cap is C of the stability study's eq. 23: beyond it u is a constant and log p carries the gradient.
    """

    def evaluate(terms: Terms) -> SurrogateValue:
        u = bounded_exp(terms.log_ratio)
        if cap is not None:
            u = u.detach().clamp(max=cap) * torch.exp(terms.logprobs - terms.logprobs.detach())
        return SurrogateValue(u * terms.advantages)

    return Surrogate("ratio", evaluate)
