"""Clip-Cov and KL-Cov: hold back the tokens whose log-prob and advantage vary together most, which lower entropy most.

cov_t = (A_t − mean A)·(log p_t − mean log p), means over the optimizer batch (Cui et al. 2025, "The entropy mechanism of
reinforcement learning for reasoning language models", eqs. 10–13).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from rollkeel.errors import BadInput
from rollkeel.objectives import draws
from rollkeel.objectives.draws import Draw
from rollkeel.objectives.masks import Mask, Rule, from_rules, outside
from rollkeel.objectives.options import number, whole
from rollkeel.objectives.statistics import Gather, Statistic
from rollkeel.objectives.surrogates import Surrogate, SurrogateValue
from rollkeel.objectives.terms import Terms, bounded_exp
from rollkeel.objectives.thresholds import Top


class Covariance:
    """cov_t of a batch whose means `see` has found; without them the tokens at hand are the batch."""

    def __init__(self) -> None:
        self.means: torch.Tensor | None = None

    def see(self, terms: Terms, gather: Gather) -> None:
        self.means = _means(gather(_sums(terms)))

    def __call__(self, terms: Terms) -> torch.Tensor:
        advantage, logprob = _means(_sums(terms)) if self.means is None else self.means
        return (terms.advantages - advantage) * (terms.logprobs.detach() - logprob)


def _sums(terms: Terms) -> torch.Tensor:
    """`[3]` float64: number of tokens, ΣA, Σ log p."""
    values = (torch.ones_like(terms.advantages), terms.advantages, terms.logprobs.detach())
    return torch.stack([v.double().sum() for v in values])


def _means(sums: torch.Tensor) -> torch.Tensor:
    """`[2]`: mean A and mean log p, from the `_sums` of any number of ranks in a row."""
    count, *totals = sums.view(-1, 3).sum(0)
    return torch.stack(totals) / count.clamp(min=1)


@dataclass(frozen=True)
class CovarianceRule(Rule):
    """A rule whose statistic reads a `Covariance`, and whose ties are drawn."""

    covariance: Covariance = field(default_factory=Covariance)
    draw: Draw | None = None

    def prepare(self, terms: Terms, gather: Gather) -> None:
        if self.draw is not None:
            self.draw.advance()
        self.covariance.see(terms, gather)
        super().prepare(terms, gather)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.draw is None else {"draw": self.draw.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        if self.draw is not None:
            self.draw.load_state_dict(state["draw"])


def clip_cov(
    name: str = "clip_cov",
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    seed: int = 0,
) -> Mask:
    """Drop a random `share` of the batch's tokens (at least one) among those with low < cov < high (Clip-Cov, eqs. 10–11).

    Tokens that PPO's clip [1−clip_low, 1+clip_high] on p/base cuts anyway are not among them. The defaults are verl's. Keyed by
    seed, batch, rollout and position.
    """
    share = number(f"{name}.share", share, above=0, at_most=1)
    low, high = number(f"{name}.low", low), number(f"{name}.high", high)
    if low >= high:
        raise BadInput(f"{name}: expected low < high, got low={low} and high={high}")
    bottom, top = 1 - number(f"{name}.clip_low", clip_low, at_least=0), 1 + number(f"{name}.clip_high", clip_high)
    covariance, draw = Covariance(), Draw(whole(f"{name}.seed", seed))

    def value(terms: Terms) -> torch.Tensor:
        cov = covariance(terms)
        cut_high, cut_low = outside(terms.advantages, bounded_exp(terms.log_ratio.detach()), bottom, top)
        judged = (cov > low) & (cov < high) & ~cut_high & ~cut_low
        return torch.where(judged, draws.uniform_at(draw.key, terms.tokens), -torch.inf)

    statistic = Statistic("covariance_draw", value, pair=False, needs=frozenset({"logprobs"}))
    rule = CovarianceRule("cutoff", statistic, Top(share), covariance=covariance, draw=draw)
    return from_rules(name, rule, parameters={"share": share, "low": low, "high": high})


def kl_cov(share: float = 2e-4, coefficient: float = 1.0) -> Surrogate:
    """r·A, less coefficient·|log r| at the `share` of the batch's tokens (at least one) with the largest cov (KL-Cov, eqs. 12–13).

    r = p/base; the paper's KL(base‖p) of one token is verl's |log r|, and so are the defaults. Gradient of a token: r·A, at those
    tokens r·A − coefficient·sign(log r), which is r·A as long as p = base.
    """
    share = number("kl_cov.share", share, above=0, at_most=1)
    coefficient = number("kl_cov.coefficient", coefficient, at_least=0)
    covariance = Covariance()
    statistic = Statistic("covariance", covariance, pair=False, needs=frozenset({"logprobs"}))
    rule = CovarianceRule("cutoff", statistic, Top(share), covariance=covariance)

    def evaluate(terms: Terms) -> SurrogateValue:
        penalty = torch.where(rule.keep(terms), 0.0, coefficient * terms.log_ratio.abs())
        return SurrogateValue(terms.bounded(terms.log_ratio).exp() * terms.advantages - penalty)

    return Surrogate("kl_cov", evaluate, (rule,))
