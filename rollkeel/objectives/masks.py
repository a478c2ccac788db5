"""Keep masks: which tokens an update may learn from. Each is a function of `Terms` and its thresholds' values, detached.

A mask is a set of rules `statistic ≤ threshold` (`statistics.py`, `thresholds.py`) that must all hold. Band edges are inclusive
and a divergence drops a token when it is strictly above its threshold, unless a builder says otherwise. Directional masks
never drop A = 0.
Wherever a builder takes a threshold, it takes a number, or a mapping `{drop_rate: 0.01}` for one that follows a drop rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rollkeel.errors import BadInput
from rollkeel.objectives import statistics as stats
from rollkeel.objectives.divergences import at_floor
from rollkeel.objectives.options import choice, flag, number, threshold, whole
from rollkeel.objectives.statistics import Gather, Statistic
from rollkeel.objectives.terms import LEVELS, Anchor, Terms
from rollkeel.objectives.thresholds import Budget, Share, Threshold


@dataclass(frozen=True)
class Rule:
    """Keep a token where its statistic is on the right side of the threshold."""

    parameter: str
    """Name of the threshold in options and metrics."""
    statistic: Statistic
    threshold: Threshold
    strict: bool = False
    """Drop at equality too."""

    def values(self, terms: Terms) -> torch.Tensor:
        """The statistic once per unit that the threshold counts: `[T]`, or `[N]` for a sequence statistic."""
        statistic = self.statistic.value(terms)
        return terms.per_sequence(statistic) if self.statistic.level == "sequence" else statistic

    def prepare(self, terms: Terms, gather: Gather) -> None:
        """Let the threshold see the whole optimizer batch."""
        if self.threshold.adaptive:
            self.threshold.update(gather(self.values(terms)))

    def keep(self, terms: Terms) -> torch.Tensor:
        """`[T]` bool."""
        value = self.threshold.value
        if value is None:
            value = self.threshold.solve(self.values(terms))
        return self.threshold.keeps(self.statistic.value(terms), value, self.strict)

    @property
    def topk(self) -> int:
        """Most likely tokens per position that it reads log-probs of."""
        return (self.statistic.k or stats.DEFAULT_TOPK) if self.statistic.topk else 0

    def needs(self, anchor: Anchor) -> frozenset[str]:
        """`TokenBatch` fields the statistic reads; `prepare` too if the threshold must see those of the current weights."""
        read = self.statistic.reads(anchor)
        return read | {"prepare"} if self.threshold.adaptive and CURRENT & read else read

    def state_dict(self) -> dict[str, Any]:
        return self.threshold.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.threshold.load_state_dict(state)


CURRENT = frozenset({"logprobs", "topk_logprobs", "entropy"})
"""Fields that only a pass with the current weights fills."""


def _own_rules(rules: tuple[Rule, ...]) -> Callable[[Terms], torch.Tensor]:
    def keep(terms: Terms) -> torch.Tensor:
        found = [rule.keep(terms) for rule in rules]
        return found[0] if len(found) == 1 else torch.stack(found).all(0)

    return keep


@dataclass(frozen=True)
class Mask:
    """A named keep mask; its metrics are `mask/<name>/*`. Give `rules`, or `keep` for a test that is none."""

    name: str
    keep: Callable[[Terms], torch.Tensor] = None  # type: ignore[assignment]
    """Terms → `[T]` bool, True keeps; from `rules` if not given."""
    parameters: Mapping[str, float] = field(default_factory=dict)
    """Numbers logged as `mask/<name>/<parameter>` beside the rules' thresholds."""
    counts: Callable[[Terms], Mapping[str, torch.Tensor]] | None = None
    """Terms → 0-d tensors, further counts logged as `mask/<name>/<count>`."""
    needs: frozenset[str] = frozenset()
    """`TokenBatch` fields that `keep` reads beside the anchor's pair and the rules' own."""
    rules: tuple[Rule, ...] = ()
    level: str = "token"
    """`sequence` if a sequence is kept or dropped as a whole."""

    def __post_init__(self) -> None:
        if self.keep is None:
            object.__setattr__(self, "keep", _own_rules(self.rules))

    @property
    def threshold(self) -> Threshold | None:
        """The threshold of a mask with one rule."""
        return self.rules[0].threshold if len(self.rules) == 1 else None

    def reads(self, anchor: Anchor) -> frozenset[str]:
        """Every `TokenBatch` field this mask looks at under `anchor`, and `prepare` if a rule must see current log-probs."""
        own = frozenset().union(*(rule.needs(anchor) for rule in self.rules))
        return self.needs | (own if self.rules else frozenset({anchor.target, anchor.reference}))


def from_rules(name: str, *rules: Rule, **more: Any) -> Mask:
    """A mask that keeps what all `rules` keep; of level sequence if all of them are."""
    level = "sequence" if all(rule.statistic.level == "sequence" for rule in rules) else "token"
    return Mask(name, rules=rules, level=level, **more)


# ---- masks that judge every token alike ----------------------------------------------------------------------------


def ratio_band(name: str = "ratio_band", low: Any = 0.5, high: Any = 5.0, level: str = "token") -> Mask:
    """Keep low ≤ target/reference ≤ high (IcePop, Ring-1T report eqs. 1–2: k inside [α, β], 0 outside).

    `level`: the ratio of the token, its geometric mean over the segment (one turn) or the sequence, or its product over the
    `sequence`.
    """
    return _band(name, _ratio_at(name, level), low, high, 0.5, 5.0)


def geometric_band(name: str = "geometric_band", low: Any = 0.996, high: Any = 1.001) -> Mask:
    """Keep sequences with low ≤ geometric mean of target/reference ≤ high (AC-MIS-PO eqs. 2–3)."""
    return _band(name, stats.GEOMETRIC_RATIO, low, high, 0.996, 1.001)


def _band(name: str, statistic: Statistic, low: Any, high: Any, first_low: float, first_high: float) -> Mask:
    bottom = threshold(f"{name}.low", low, default=first_low, side="lower", at_least=0)
    top = threshold(f"{name}.high", high, default=first_high, at_least=0)
    if not bottom.adaptive and not top.adaptive and bottom.value > top.value:  # type: ignore[operator]
        raise BadInput(f"{name}: expected low ≤ high, got low={low} and high={high}")
    return from_rules(name, Rule("low", statistic, bottom), Rule("high", statistic, top))


def _ratio_at(name: str, level: str) -> Statistic:
    return stats.RATIO_LEVELS[choice(f"{name}.level", level, LEVELS)]


def ratio_cap(name: str = "ratio_cap", cap: Any = 2.0, level: str = "token") -> Mask:
    """Keep target/reference ≤ cap (MIS); `level` as for `ratio_band`."""
    bound = threshold(f"{name}.cap", cap, default=2.0, above=0)
    return from_rules(name, Rule("cap", _ratio_at(name, level), bound))


def binary_kl_bound(name: str = "binary_kl_bound", phi: Any = 0.1) -> Mask:
    """Keep max(D_B(target‖reference), D_B(reference‖target)) ≤ φ (KPop), in nats.

    For small gaps D_B ≈ (p−q)²/(2q(1−q)): a bound on |p−q| in standard deviations of the token's own draw.
    """

    def counts(terms: Terms) -> Mapping[str, torch.Tensor]:
        return {"floored": (at_floor(terms.target) | at_floor(terms.reference)).sum()}

    bound = threshold(f"{name}.phi", phi, default=0.1, above=0)
    return from_rules(name, Rule("phi", stats.SYMMETRIC_BINARY_KL, bound), counts=counts)


def trajectory_bound(name: str = "trajectory_bound", bound: Any = 0.01) -> Mask:
    """Keep sequences with |log geometric mean of target/reference| ≤ bound (AC-MIS-PO eqs. 4–5)."""
    return from_rules(
        name, Rule("bound", stats.ABS_LOG_GEOMETRIC, threshold(f"{name}.bound", bound, default=0.01, at_least=0))
    )


def sequence_kl(
    name: str = "sequence_kl",
    delta: Any = 0.05,
    reduce: str = "max",
    estimator: str = "k3",
    negative_only: bool = False,
) -> Mask:
    """Keep sequences whose `reduce` (max, mean or sum) of a token-wise estimate of KL(reference‖target) is ≤ δ, in nats.

    `estimator`: k1 = log(reference/target), k2 = half its square, k3 = x − 1 − log x with x = target/reference, `binary`, or
    `tv`, the probability |target − reference|.
    `negative_only`: judge tokens with A < 0 only (off-policy sequence masking).
    """
    statistic = stats.sequence_kl(
        choice(f"{name}.reduce", reduce, stats.REDUCTIONS),
        choice(f"{name}.estimator", estimator, tuple(stats.TOKEN_KL)),
    )
    statistic = stats.only_negative(statistic) if flag(f"{name}.negative_only", negative_only) else statistic
    return from_rules(name, Rule("delta", statistic, threshold(f"{name}.delta", delta, default=0.05, at_least=0)))


def at_most(name: str = "at_most", statistic: str = "ratio", value: Any = 1.0, directional: bool = False) -> Mask:
    """Keep where a named statistic (see `statistics.STATISTICS`) is ≤ value; `directional`: only judge moves away."""
    chosen = stats.STATISTICS[choice(f"{name}.statistic", statistic, tuple(stats.STATISTICS))]
    chosen = stats.moving_away(chosen) if flag(f"{name}.directional", directional) else chosen
    return from_rules(name, Rule("value", chosen, threshold(f"{name}.value", value, default=1.0)))


def top_entropy(name: str = "top_entropy", share: float = 0.2) -> Mask:
    """Keep the `share` of the batch's tokens at which the policy's entropy is largest (Wang et al. 2025, "Beyond the 80/20
    rule"; 0.2 is theirs)."""
    share = number(f"{name}.share", share, above=0, at_most=1)
    return from_rules(name, Rule("cutoff", stats.ENTROPY, Share(share)), parameters={"share": share})


# ---- directional masks ---------------------------------------------------------------------------------------------


def ratio_clip(
    name: str = "ratio_clip",
    clip_low: Any = 0.2,
    clip_high: Any = 0.28,
    relax_below: float = 0.0,
    relax_side: str = "both",
) -> Mask:
    """Drop (A > 0, target/reference > 1+clip_high) and (A < 0, target/reference < 1−clip_low): PPO's clip as a mask.

    Where q < `relax_below` the clip of `relax_side` (both, high, low) is infinite (DPPO paper §6).
    """
    side = choice(f"{name}.relax_side", relax_side, ("both", "high", "low"))
    rare = number(f"{name}.relax_below", relax_below, at_least=0, at_most=1)
    high, low = stats.CLIP_HIGH, stats.CLIP_LOW
    high = stats.relaxed(high, rare) if rare > 0 and side in ("both", "high") else high
    low = stats.relaxed(low, rare) if rare > 0 and side in ("both", "low") else low
    return from_rules(
        name,
        Rule("clip_high", high, threshold(f"{name}.clip_high", clip_high, default=0.28, at_least=0)),
        Rule("clip_low", low, threshold(f"{name}.clip_low", clip_low, default=0.2, at_least=0, at_most=1)),
    )


def divergence(
    name: str = "divergence",
    kind: str = "binary_tv",
    delta: Any = 0.15,
    directional: bool = True,
    other: bool = True,
    k: int | None = None,
) -> Mask:
    """Drop where the divergence between reference and target is > δ and the update moves away (DPPO paper eq. 12).

    `kind`: binary_tv, binary_kl (D_B(reference‖target)), topk_tv, topk_kl. Moving away: (A > 0, target > reference) or
    (A < 0, target < reference); `directional=False` judges every token. `other`, `k`: of the top-K kinds, see `topk_tv`.
    """
    choice(f"{name}.kind", kind, ("binary_tv", "binary_kl", "topk_tv", "topk_kl"))
    other, k = flag(f"{name}.other", other), None if k is None else whole(f"{name}.k", k, at_least=1)
    statistic = stats.topk(kind, other, k) if kind.startswith("topk") else stats.STATISTICS[kind]
    statistic = stats.moving_away(statistic) if flag(f"{name}.directional", directional) else statistic
    return from_rules(name, Rule("delta", statistic, threshold(f"{name}.delta", delta, default=0.15, at_least=0)))


def fallen(name: str = "fallen", delta: Any = 0.5) -> Mask:
    """Drop A < 0 where reference − target ≥ δ, at equality too (DPPO paper §5.3)."""
    statistic = stats.only_negative(stats.FALL)
    return from_rules(
        name, Rule("delta", statistic, threshold(f"{name}.delta", delta, default=0.5, above=0), strict=True)
    )


def second_moment(name: str = "second_moment", tau: float = 0.04, directional: bool = True) -> Mask:
    """Among tokens moving away, drop the largest (log ratio)² until the mean of the rest is ≤ τ (M2PO), over the batch.

    `directional=False` judges every token, as AReaL does.
    """
    tau, statistic = number(f"{name}.tau", tau, above=0), stats.SQUARED_LOG_RATIO
    statistic = stats.moving_away(statistic) if flag(f"{name}.directional", directional) else statistic
    return from_rules(name, Rule("cutoff", statistic, Budget(tau)), parameters={"tau": tau})


def outside(
    advantages: torch.Tensor, ratio: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a ratio has already moved beyond [low, high] in the direction its advantage pushes.

    Args: `[T]` advantages and detached ratios. Returns `[T]` bools: (A > 0 and ratio > high), (A < 0 and ratio < low).
    A = 0 is in neither.
    """
    return (advantages > 0) & (ratio > high), (advantages < 0) & (ratio < low)
