"""Statistics: named numbers per token (or per sequence, given to each of its tokens) that masks compare with a threshold.

All are detached functions of `Terms`; "target" and "reference" are the pair of policies that the anchor lets masks judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollkeel.objectives.divergences import binary_kl, binary_tv, symmetric_binary_kl, topk_kl, topk_tv
from rollkeel.objectives.terms import LEVELS, TOPK_OF, WHOLE, Anchor, Terms, wide

Gather = Callable[[torch.Tensor], torch.Tensor]
"""1-D tensor of one data-parallel rank → the concatenation over all ranks, in any order."""
DEFAULT_TOPK = 20
"""Most likely tokens a rollout brings for a statistic that does not say how many it reads (DPPO paper, K = 20)."""
SAME_TOKEN = 1e-4
"""Two log-probs of one token, from two passes over the same logits, differ by less than this (nats)."""

ROWS = 2048
"""Positions whose top-K log-probs are compared at once."""


@dataclass(frozen=True)
class Statistic:
    """A named statistic."""

    name: str
    value: Callable[[Terms], torch.Tensor]
    """Terms → `[T]` float, detached; constant over each sequence if `level` is sequence."""
    level: str = "token"
    pair: bool = True
    """It reads target and reference."""
    topk: bool = False
    """It reads their log-probs at `topk_ids`."""
    k: int | None = None
    """The first so many of them; None for all there are."""
    needs: frozenset[str] = frozenset()
    """Further `TokenBatch` fields."""
    at: Callable[[Terms, torch.Tensor], torch.Tensor] | None = None
    """(Terms, int64 places `[n]`) → its values there alone, for one that costs too much to throw away."""

    def reads(self, anchor: Anchor) -> frozenset[str]:
        """Every log-prob field it looks at under `anchor`."""
        pair = {anchor.target, anchor.reference} if self.pair else set()
        return self.needs | pair | ({TOPK_OF[name] for name in pair} if self.topk else set())


def _move(terms: Terms) -> torch.Tensor:
    """`[T]` bool: the update pushes target further from reference, the way it already went. Never where A = 0."""
    gap, advantages = terms.log_correction, terms.advantages
    return ((advantages > 0) & (gap > 0)) | ((advantages < 0) & (gap < 0))


def moving_away(statistic: Statistic) -> Statistic:
    """−∞, so always kept, where the update does not move target away from reference."""
    return _where(statistic, _move)


def only_negative(statistic: Statistic) -> Statistic:
    """−∞, so always kept, where A ≥ 0."""
    return _where(statistic, lambda terms: terms.advantages < 0)


def relaxed(statistic: Statistic, below: float) -> Statistic:
    """−∞, so always kept, where the rollout probability q is < `below`."""
    return _where(statistic, lambda terms: wide(terms.tokens.rollout_logprobs.detach()).exp() >= below)


def _where(statistic: Statistic, judged: Callable[[Terms], torch.Tensor]) -> Statistic:
    inner, at = statistic.value, statistic.at

    def value(terms: Terms) -> torch.Tensor:
        where = judged(terms)
        if at is None or where.device.type != "cpu":  # how many places there are is not waited for
            return torch.where(where, inner(terms), -torch.inf)
        places = where.nonzero()[:, 0]
        found = wide(terms.target).new_full(where.shape, -torch.inf)
        return found.index_copy_(0, places, at(terms, places)) if len(places) else found

    return replace(statistic, value=value, at=None)


def topk(kind: str, other: bool = True, k: int | None = None) -> Statistic:
    """`topk_tv` or `topk_kl` of (reference‖target) over the first `k` (all when None) of `topk_ids`.

    Whether the sampled token is among the ids is known from `token_ids`. Without them it is read off the log-probs: it is if
    both policies give one of the ids what they give the sampled token, to within `SAME_TOKEN`. (Another token that both
    hold that equal would be taken for it; its bin then falls to the others.)
    """
    function = {"topk_tv": topk_tv, "topk_kl": topk_kl}[kind]

    def value(terms: Terms) -> torch.Tensor:
        return at(terms, None)

    def at(terms: Terms, places: torch.Tensor | None) -> torch.Tensor:
        tokens = terms.tokens
        top_p, top_q = (getattr(tokens, TOPK_OF[n]).detach() for n in (terms.anchor.target, terms.anchor.reference))
        fields = [terms.target, terms.reference, top_p, top_q]
        if tokens.topk_ids is not None and tokens.token_ids is not None:
            fields += [tokens.topk_ids, tokens.token_ids]
        # In pieces that stay in a core's cache.
        if places is None:
            pieces = zip(*(x.split(ROWS) for x in fields), strict=True)
        else:
            pieces = ([x.index_select(0, part) for x in fields] for part in places.split(ROWS))
        return torch.cat([part(*piece) for piece in pieces])

    def part(lp: Tensor, lq: Tensor, top_p: Tensor, top_q: Tensor, *ids: Tensor) -> Tensor:
        lp = wide(lp)
        lq = wide(lq)
        top_p = wide(top_p[:, :k])
        top_q = wide(top_q[:, :k])
        if ids:
            listed = (ids[0][:, :k] == ids[1][:, None]).any(1)
        else:
            same_p, same_q = ((t - s[:, None]).abs_() <= SAME_TOKEN for t, s in ((top_p, lp), (top_q, lq)))
            listed = same_p.logical_and_(same_q).any(1)
        return function(lp, lq, top_p, top_q, listed, other)

    return Statistic(kind, value, topk=True, k=k, at=at)


def _k3(terms: Terms) -> torch.Tensor:
    return terms.bounded(terms.log_correction).expm1() - terms.log_correction


TOKEN_KL: Mapping[str, Callable[[Terms], torch.Tensor]] = {
    "k1": lambda terms: -terms.log_correction,
    "k2": lambda terms: 0.5 * terms.log_correction.square(),
    "k3": _k3,
    "binary": lambda terms: binary_kl(terms.reference, terms.target),
    "tv": lambda terms: binary_tv(terms.target, terms.reference),
}
"""Token-wise estimates of KL(reference‖target) for tokens sampled from the reference; `tv` is |target − reference|."""
REDUCTIONS = ("max", "mean", "sum")


def sequence_kl(reduce: str, estimator: str) -> Statistic:
    """Max, mean or sum over the sequence of a `TOKEN_KL`."""
    token = TOKEN_KL[estimator]

    def value(terms: Terms) -> torch.Tensor:
        over = {"max": terms.sequence_max, "mean": terms.sequence_mean, "sum": terms.sequence_sum}
        return over[reduce](token(terms))

    return Statistic(f"{reduce}_{estimator}", value, level="sequence")


def _fall(terms: Terms) -> torch.Tensor:
    return wide(terms.reference).exp() - wide(terms.target).exp()


RATIO = Statistic("ratio", lambda terms: terms.correction)
SEGMENT_RATIO, GEOMETRIC_RATIO, SEQUENCE_RATIO = (
    Statistic(
        f"{level}_ratio",
        lambda terms, level=level: terms.bounded(terms.at_level(terms.log_correction, level)).exp(),
        level="sequence" if level in WHOLE else "token",
        needs=frozenset() if level in WHOLE else frozenset({"token_index"}),
    )
    for level in LEVELS[1:]
)
RATIO_LEVELS: Mapping[str, Statistic] = dict(
    zip(LEVELS, (RATIO, SEGMENT_RATIO, GEOMETRIC_RATIO, SEQUENCE_RATIO), strict=True)
)
ABS_LOG_GEOMETRIC = Statistic(
    "abs_log_geometric", lambda terms: terms.sequence_mean(terms.log_correction).abs(), level="sequence"
)
SQUARED_LOG_RATIO = Statistic("squared_log_ratio", lambda terms: terms.log_correction.square())
SYMMETRIC_BINARY_KL = Statistic("symmetric_binary_kl", lambda terms: symmetric_binary_kl(terms.target, terms.reference))
BINARY_KL = Statistic("binary_kl", lambda terms: binary_kl(terms.reference, terms.target))
BINARY_TV = Statistic("binary_tv", lambda terms: binary_tv(terms.target, terms.reference))
ENTROPY = Statistic(
    "entropy",
    lambda terms: wide(terms.tokens.entropy.detach()),  # type: ignore[union-attr]  # in `needs`
    pair=False,
    needs=frozenset({"entropy"}),
)
"""Of the training policy at the token's position, nats."""
FALL = Statistic("fall", _fall)
"""reference − target, a probability difference."""
CLIP_HIGH = Statistic(
    "clip_high",
    lambda terms: torch.where(terms.advantages > 0, terms.bounded(terms.log_correction).expm1(), -torch.inf),
)
"""ratio − 1 where A > 0."""
CLIP_LOW = Statistic(
    "clip_low",
    lambda terms: torch.where(terms.advantages < 0, -terms.bounded(terms.log_correction).expm1(), -torch.inf),
)
"""1 − ratio where A < 0."""

STATISTICS: Mapping[str, Statistic] = {
    statistic.name: statistic
    for statistic in (
        *RATIO_LEVELS.values(),
        ABS_LOG_GEOMETRIC,
        SQUARED_LOG_RATIO,
        SYMMETRIC_BINARY_KL,
        BINARY_KL,
        BINARY_TV,
        topk("topk_tv"),
        topk("topk_kl"),
        ENTROPY,
        FALL,
        CLIP_HIGH,
        CLIP_LOW,
    )
}
