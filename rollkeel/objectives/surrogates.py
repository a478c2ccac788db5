"""Surrogates S_t(p): the only part of an objective that carries the policy gradient, each a pure function of `Terms`.

`clip_low` and `clip_high` take a number or a drop rate (`{drop_rate: 0.01}`), as masks do; what drops nothing takes a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from rollkeel.errors import BadInput
from rollkeel.objectives.masks import Rule, outside
from rollkeel.objectives.options import choice, number, optional_number, threshold
from rollkeel.objectives.statistics import Statistic
from rollkeel.objectives.terms import WHOLE, Terms, bounded_exp, bounded_expm1


@dataclass(frozen=True)
class SurrogateValue:
    """`[T]` tensors: the surrogate, and (bool) where it was cut on its high and low side; None if it never cuts.

    The value of a token carries the gradient of that token's log p alone, so that masks and weights act on tokens.
    """

    value: torch.Tensor
    clipped_high: torch.Tensor | None = None
    clipped_low: torch.Tensor | None = None
    ratio: torch.Tensor | None = None
    """Detached: what multiplies A·∇log p before any cut; None for p/base. The bias metrics compare it with p/q."""
    beyond: torch.Tensor | None = None
    """Bool: a ratio outside PPO's band whatever the sign of A, which the clip cuts only where A pushes it further out."""

    @property
    def cut(self) -> torch.Tensor | None:
        """Cut on either side."""
        if self.clipped_high is None or self.clipped_low is None:
            return None
        return self.clipped_high | self.clipped_low


@dataclass(frozen=True)
class Surrogate:
    """A named surrogate: Terms → `SurrogateValue`."""

    name: str
    evaluate: Callable[[Terms], SurrogateValue]
    rules: tuple[Rule, ...] = ()
    """The clips, whose thresholds may follow a drop rate."""


def ppo_clip(clip_low: Any = 0.2, clip_high: Any = 0.2, dual: float | None = None) -> Surrogate:
    """min(r·A, clip(r, 1−clip_low, 1+clip_high)·A) with r = p/base (Schulman et al. 2017, eq. 7).

    Gradient with respect to log p: r·A, and 0 where A > 0 and r > 1+clip_high or A < 0 and r < 1−clip_low.
    At a band edge the token still counts. `dual` > 1 cuts A < 0 with r > dual as well, at the value dual·A (dual-clip PPO, Ye
    et al. 2020, its c; verl's `clip_ratio_c` is 3; TRL's two-sided `delta` is the same cut).
    """
    high, low = _clips("ppo_clip", clip_low, clip_high, _token_ratio, "token", bounded_expm1, (0.2, 0.2))
    dual = optional_number("ppo_clip.dual", dual, above=1)

    def evaluate(terms: Terms) -> SurrogateValue:
        cut = _clipped(terms.bounded(terms.log_ratio).exp(), terms, 1.0 - _value(low), 1.0 + _value(high))
        if dual is None:
            return cut
        far = (terms.advantages < 0) & (bounded_exp(terms.log_ratio.detach()) > dual)
        value = torch.where(far, dual * terms.advantages, cut.value)
        return replace(cut, value=value, clipped_high=cut.clipped_high | far)  # type: ignore[operator]

    return Surrogate("ppo_clip", evaluate, (high, low))


def sequence_ppo_clip(clip_low: Any = 3e-4, clip_high: Any = 4e-4) -> Surrogate:
    """PPO's clip on the sequence ratio s = exp(mean over the sequence of log r) (GSPO; stability study eq. 16).

    Each token's value is min(s_t·A, clip(s_t)·A) with s_t = stop_grad(s/p_t)·p_t (GSPO's token form). Its gradient
    coefficient is s·A, and 0 for a sequence that is cut. With one advantage, coefficient and factor per sequence that is
    the gradient of min(s·A, clip(s)·A); otherwise each token's own count, which is what a perturbation of tokens needs.
    """
    high, low = _clips(
        "sequence_ppo_clip", clip_low, clip_high, _mean_log_ratio, "sequence", bounded_expm1, (3e-4, 4e-4)
    )

    def evaluate(terms: Terms) -> SurrogateValue:
        ratio = terms.bounded(terms.sequence_mean(terms.log_ratio.detach())).exp()
        cut = _clipped(ratio * _one(terms), terms, 1.0 - _value(low), 1.0 + _value(high))
        return replace(cut, ratio=ratio)

    return Surrogate("sequence_ppo_clip", evaluate, (high, low))


def geometric_ppo_clip(clip_low: Any = 0.4, clip_high: Any = 0.4) -> Surrogate:
    """A times the geometric mean over the sequence of r, each token's log r clipped where PPO would (GMPO, eq. 4).

    log r is held at +clip_high where A > 0 and at −clip_low where A < 0 beyond it, so the band is [e^−clip_low, e^clip_high].
    Gradient coefficient of a token that is not cut: geometric mean · A, of one that is cut: 0. A token form as that of
    `sequence_ppo_clip`: the mean is detached and each token carries its own share, so that masks and weights act on it.
    """
    high, low = _clips(
        "geometric_ppo_clip", clip_low, clip_high, _token_ratio, "token", lambda log: log, (0.4, 0.4), math.inf
    )

    def evaluate(terms: Terms) -> SurrogateValue:
        log_ratio = terms.log_ratio.detach()
        top = _value(high)
        bottom = -_value(low)
        cut_high, cut_low = outside(terms.advantages, log_ratio, bottom, top)
        held = torch.where(cut_high, top, torch.where(cut_low, bottom, log_ratio))
        mean = terms.bounded(terms.sequence_mean(held)).exp()
        own = torch.where(cut_high | cut_low, 1.0, _one(terms))
        whole = bounded_exp(terms.sequence_mean(log_ratio))
        return SurrogateValue(mean * own * terms.advantages, cut_high, cut_low, whole)

    return Surrogate("geometric_ppo_clip", evaluate, (high, low))


def ratio(cap: float | None = None) -> Surrogate:
    """u·A with u = p/base; under a cap the value and the gradient coefficient are min(u, cap)·A.

    The cap is C of the DPPO paper's eq. 23: beyond it u is a constant and log p carries the gradient.
    """
    cap = optional_number("ratio.cap", cap, above=0)

    def evaluate(terms: Terms) -> SurrogateValue:
        u = terms.bounded(terms.log_ratio).exp()
        if cap is not None:
            u = u.detach().clamp(max=cap) * _one(terms)
        return SurrogateValue(u * terms.advantages)

    return Surrogate("ratio", evaluate)


def weighted_logprob(low: float = 0.0, high: float | None = None) -> Surrogate:
    """stop_grad(clip(p/base, low, high))·log p·A (CISPO, MiniMax-M1 eqs. 4–5): a clipped token keeps its gradient.

    Gradient coefficient of A·∇log p: the clipped ratio. `clip/*` counts ratios beyond the bounds, whatever A's sign.
    """
    low, high = number("weighted_logprob.low", low, at_least=0), optional_number("weighted_logprob.high", high, above=0)
    if high is not None and low > high:
        raise BadInput(f"weighted_logprob: expected low ≤ high, got low={low} and high={high}")

    def evaluate(terms: Terms) -> SurrogateValue:
        u = terms.bounded(terms.log_ratio.detach()).exp()
        value = u.clamp(min=low, max=high) * terms.logprobs * terms.advantages
        return SurrogateValue(value, u > (torch.inf if high is None else high), u < low)

    return Surrogate("weighted_logprob", evaluate)


def soft_gate(tau_positive: float = 1.0, tau_negative: float = 1.05) -> Surrogate:
    """(4/τ)·σ(τ(r−1))·A with r = p/base and τ by the sign of A (SAPO, eqs. 4–6): a gate in the place of a clip.

    Gradient coefficient of A·∇log p: 4σ(1−σ)·r, which is 1 at r = 1 and falls smoothly on both sides.
    """
    positive = number("soft_gate.tau_positive", tau_positive, above=0)
    negative = number("soft_gate.tau_negative", tau_negative, above=0)

    def evaluate(terms: Terms) -> SurrogateValue:
        tau = torch.full_like(terms.log_ratio.detach(), negative).masked_fill(terms.advantages > 0, positive)
        return SurrogateValue(
            4.0 / tau * torch.sigmoid(tau * terms.bounded(terms.log_ratio).expm1()) * terms.advantages
        )

    return Surrogate("soft_gate", evaluate)


def logprob() -> Surrogate:
    """log p·A, no ratio at all (REINFORCE; GPG, Chu et al. 2025). Gradient coefficient of A·∇log p: 1."""

    def evaluate(terms: Terms) -> SurrogateValue:
        return SurrogateValue(terms.logprobs * terms.advantages, ratio=torch.ones_like(terms.logprobs.detach()))

    return Surrogate("logprob", evaluate)


def tapered(low: float = 0.0, high: float = 1.0, level: str = "sequence") -> Surrogate:
    """log p·A for A > 0, stop_grad(clip(p/base, low, high))·log p·A for A < 0 (TOPR, Le Roux et al. 2025, eq. 8).

    `level`: the ratio of the token, its geometric mean over the sequence, or its product over the `sequence`, the paper's.
    Gradient coefficient of A·∇log p: 1 where A > 0, else the clipped ratio.
    """
    low, high = number("tapered.low", low, at_least=0), number("tapered.high", high, above=0)
    level = choice("tapered.level", level, ("token", *WHOLE))
    if low > high:
        raise BadInput(f"tapered: expected low ≤ high, got low={low} and high={high}")

    def evaluate(terms: Terms) -> SurrogateValue:
        log_ratio = terms.at_level(terms.log_ratio.detach(), level)
        ratio = terms.bounded(torch.where(terms.advantages > 0, 0.0, log_ratio)).exp()
        judged = terms.advantages < 0
        weight = torch.where(judged, ratio.clamp(low, high), ratio)
        value = weight * terms.logprobs * terms.advantages
        return SurrogateValue(value, judged & (ratio > high), judged & (ratio < low), ratio)

    return Surrogate("tapered", evaluate)


def gamma_weight(
    k_positive: float = 2.0, lambda_positive: float = 3.0, k_negative: float = 3.0, lambda_negative: float = 2.0
) -> Surrogate:
    """stop_grad(φ(W))·log p·A with φ(W) = W^k·e^(λ(1−W)), W the product of p/base over the sequence (VESPO, 2026).

    k and λ by the sign of A (0 counts as positive). Gradient coefficient of A·∇log p: φ(W), 1 at W = 1, largest at W = k/λ.
    """
    names = ("k_positive", "lambda_positive", "k_negative", "lambda_negative")
    given = (k_positive, lambda_positive, k_negative, lambda_negative)
    k_up, l_up, k_down, l_down = (
        number(f"gamma_weight.{name}", value, at_least=0) for name, value in zip(names, given, strict=True)
    )

    def evaluate(terms: Terms) -> SurrogateValue:
        log_w = terms.bounded(terms.sequence_sum(terms.log_ratio.detach()))
        up, phi = terms.advantages >= 0, (k_up * log_w - l_up * log_w.expm1()).exp()
        phi = torch.where(up, phi, (k_down * log_w - l_down * log_w.expm1()).exp())
        return SurrogateValue(phi * terms.logprobs * terms.advantages, ratio=log_w.exp())

    return Surrogate("gamma_weight", evaluate)


SURROGATES: dict[str, Callable[..., Surrogate]] = {
    f.__name__: f
    for f in (
        ppo_clip,
        sequence_ppo_clip,
        geometric_ppo_clip,
        ratio,
        weighted_logprob,
        soft_gate,
        logprob,
        tapered,
        gamma_weight,
    )
}


def _one(terms: Terms) -> torch.Tensor:
    """1 with the gradient of log p."""
    return torch.exp(terms.logprobs - terms.logprobs.detach())


def _token_ratio(terms: Terms) -> torch.Tensor:
    return terms.log_ratio.detach()


def _mean_log_ratio(terms: Terms) -> torch.Tensor:
    return terms.sequence_mean(terms.log_ratio.detach())


def _value(rule: Rule) -> float:
    assert rule.threshold.value is not None  # a number or a controller, which starts with one
    return rule.threshold.value


def _clipped(ratio: torch.Tensor, terms: Terms, low: float, high: float) -> SurrogateValue:
    cut_high, cut_low = outside(terms.advantages, ratio.detach(), low, high)
    value = torch.where(cut_high, high, torch.where(cut_low, low, ratio)) * terms.advantages
    return SurrogateValue(value, cut_high, cut_low, beyond=(ratio.detach() > high) | (ratio.detach() < low))


def _clips(
    name: str,
    clip_low: Any,
    clip_high: Any,
    log_ratio: Callable[[Terms], torch.Tensor],
    level: str,
    distance: Callable[[torch.Tensor], torch.Tensor],
    first: tuple[float, float],
    lowest: float = 1.0,
) -> tuple[Rule, Rule]:
    """Rules (clip_high, clip_low): how far the ratio has moved the way A pushes, `distance` of its log.

    `first`: clips (low, high) that drop rates begin at; `lowest`: the largest clip_low that leaves a ratio.
    """

    def up(terms: Terms) -> torch.Tensor:
        return torch.where(terms.advantages > 0, distance(log_ratio(terms)), -torch.inf)

    def down(terms: Terms) -> torch.Tensor:
        return torch.where(terms.advantages < 0, -distance(log_ratio(terms)), -torch.inf)

    needs = frozenset({"logprobs"})
    return (
        Rule(
            "clip_high",
            Statistic("clip_high", up, level, pair=False, needs=needs),
            threshold(f"{name}.clip_high", clip_high, default=first[1], at_least=0),
        ),
        Rule(
            "clip_low",
            Statistic("clip_low", down, level, pair=False, needs=needs),
            threshold(f"{name}.clip_low", clip_low, default=first[0], at_least=0, at_most=lowest),
        ),
    )
