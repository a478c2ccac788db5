"""The one form of every objective, and what it did to a batch.

    loss = Σ_t  c_t · [ − stop_grad(k_t · w_t) · S_t(p)  +  γ · KL_t(p‖ref)  −  η · entropy_t ]

An `Objective` is a composition: an anchor (which policies are compared), keep masks k, a correction weight w, a surrogate S.
The loss is a plain sum with given coefficients c, so micro-batching and packing cannot change its gradient.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch

from rollkeel.errors import BadInput
from rollkeel.objectives.checks import check_tokens
from rollkeel.objectives.kl import ESTIMATORS
from rollkeel.objectives.masks import Mask
from rollkeel.objectives.reductions import Reductions
from rollkeel.objectives.surrogates import Surrogate, SurrogateValue
from rollkeel.objectives.terms import Anchor, Terms, beyond_limit, make_terms, wide
from rollkeel.objectives.weights import Weight
from rollkeel.types import TokenBatch

AGGREGATES = re.compile(r"token_mean|sequence_mean|sequence_sum|constant_length\([1-9]\d*\)")
_ALWAYS = frozenset({"logprobs", "rollout_logprobs"})


@dataclass(frozen=True)
class ObjectiveOutput:
    """What an objective made of a batch."""

    loss: torch.Tensor
    """0-d, with the gradient of `logprobs` (and of `entropy` when it has a coefficient)."""
    keep: torch.Tensor
    """`[T]` bool: tokens that every mask kept."""
    weight: torch.Tensor
    """`[T]` float ≥ 0, detached: w_t, also where `keep` is False."""
    metrics: Mapping[str, float]
    """Finite floats; the keys of a mean over no tokens are left out."""


@dataclass(frozen=True)
class _Parts:
    terms: Terms
    keeps: tuple[torch.Tensor, ...]
    keep: torch.Tensor | None
    weight: torch.Tensor | None
    surrogate: SurrogateValue
    policy: torch.Tensor
    kl: torch.Tensor | None
    entropy: torch.Tensor | None
    loss: torch.Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Objective:
    """anchor × masks × weight × surrogate, plus the KL and entropy terms. Immutable; see `rollkeel.objectives` for recipes.

    Raises `BadInput` when a correction weight meets a surrogate whose ratio already is p/q, unless
    `allow_double_correction`; and for an unknown aggregate, estimator or a negative coefficient.
    """

    name: str
    anchor: Anchor
    surrogate: Surrogate
    masks: tuple[Mask, ...] = ()
    weight: Weight | None = None
    aggregate: str = "sequence_mean"
    """How `batch/` makes coefficients: token_mean, sequence_mean, sequence_sum or constant_length(n)."""
    advantage: str = "grpo"
    """Name in `rollkeel.advantages` that the recipe's paper uses."""
    kl_coefficient: float = 0.0
    """γ ≥ 0."""
    kl_estimator: str = "k3"
    entropy_coefficient: float = 0.0
    """η ≥ 0."""
    allow_double_correction: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's resolved options, for logs."""

    def __post_init__(self) -> None:
        if self.weight and self.weight.corrects_gap and self.anchor.corrects_gap and not self.allow_double_correction:
            raise BadInput(
                f"objective {self.name}: expected one correction of the train/rollout gap, got two (the ratio p/q and the"
                " weight o/q); drop one or set allow_double_correction=true"
            )
        if not isinstance(self.aggregate, str) or not AGGREGATES.fullmatch(self.aggregate):
            raise BadInput(
                f"objective {self.name}: aggregate expected token_mean, sequence_mean, sequence_sum or constant_length(n),"
                f" got {self.aggregate!r}"
            )
        if self.kl_estimator not in tuple(ESTIMATORS):
            raise BadInput(
                f"objective {self.name}: kl_estimator expected {', '.join(ESTIMATORS)}, got {self.kl_estimator!r}"
            )

    @property
    def needs(self) -> frozenset[str]:
        """Optional `TokenBatch` fields that must be filled; `entropy` must then carry its gradient."""
        names = self.anchor.fields | (self.weight.needs if self.weight else frozenset())
        if self.kl_coefficient > 0:
            names |= {"ref_logprobs"}
        if self.entropy_coefficient > 0:
            names |= {"entropy"}
        return names - _ALWAYS

    def prepare(self, batch: TokenBatch) -> None:
        """See the whole optimizer batch once, without gradient, before its first micro-batch.

        Refuses a batch with a hole in it (`BadInput`, `NonFinite`) while the weights are still untouched. `entropy`
        belongs to the differentiated pass and is not asked for here.
        """
        check_tokens(batch, self.needs - {"entropy"}, self.name)

    def loss(self, tokens: TokenBatch) -> torch.Tensor:
        """0-d loss of a micro-batch: checked, one synchronisation, no metrics. Sums over micro-batches to the batch's loss.

        Raises `BadInput` (missing field, lengths, positive log-probs) or `NonFinite`, naming sequence and position.
        """
        check_tokens(tokens, self.needs, self.name)
        self._check_entropy_gradient(tokens)
        return self._evaluate(tokens).loss

    def __call__(self, tokens: TokenBatch) -> ObjectiveOutput:
        """Loss, masks, weights and metrics of a batch (`[T]` tensors). Raises as `loss` does."""
        check_tokens(tokens, self.needs, self.name)
        self._check_entropy_gradient(tokens)
        parts = self._evaluate(tokens)
        with torch.no_grad():
            metrics = self._metrics(tokens, parts)
        ones = torch.ones_like(parts.terms.logprobs, requires_grad=False)
        return ObjectiveOutput(
            loss=parts.loss,
            keep=parts.keep if parts.keep is not None else ones.bool(),
            weight=parts.weight if parts.weight is not None else ones,
            metrics=metrics,
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON values that, loaded into an objective built alike, continue this one."""
        return {"name": self.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `BadInput` if `state` is that of another objective."""
        if dict(state) != self.state_dict():
            raise BadInput(
                f"objective {self.name}: expected state {self.state_dict()}, got {dict(state)}; resume with the same"
            )

    def describe(self) -> dict[str, Any]:
        """Resolved parameters as JSON values, for the log's first lines."""
        return {
            "name": self.name,
            **self.parameters,
            "anchor": self.anchor.name,
            "surrogate": self.surrogate.name,
            "masks": [m.name for m in self.masks],
            "weight": self.weight.name if self.weight else None,
            "aggregate": self.aggregate,
            "advantage": self.advantage,
            "kl_coefficient": self.kl_coefficient,
            "kl_estimator": self.kl_estimator,
            "entropy_coefficient": self.entropy_coefficient,
            "allow_double_correction": self.allow_double_correction,
        }

    def _check_entropy_gradient(self, tokens: TokenBatch) -> None:
        if self.entropy_coefficient == 0 or tokens.entropy is None or not torch.is_grad_enabled():
            return
        if tokens.logprobs.requires_grad and not tokens.entropy.requires_grad:
            raise BadInput(
                f"objective {self.name}: entropy_coefficient={self.entropy_coefficient} expected an entropy with gradient,"
                " got a detached one that would change nothing; compute it inside the differentiated pass"
            )

    def _evaluate(self, tokens: TokenBatch) -> _Parts:
        terms = make_terms(tokens, self.anchor)
        with torch.no_grad():
            keeps = tuple(mask.keep(terms) for mask in self.masks)
            keep = torch.stack(keeps).all(0) if len(keeps) > 1 else (keeps[0] if keeps else None)
            weight = self.weight.weight(terms) if self.weight else None
            scale = tokens.coefficients.detach()
            scale = scale if weight is None else scale * weight
            # `where` and not a product: a dropped token contributes exactly nothing, whatever its weight.
            scale = scale if keep is None else torch.where(keep, scale, torch.zeros_like(scale))
        surrogate = self.surrogate.evaluate(terms)
        policy = -(scale * surrogate.value).sum()
        loss, kl, entropy = policy, None, None
        if self.kl_coefficient > 0:
            assert tokens.ref_logprobs is not None  # in `needs`
            estimate = ESTIMATORS[self.kl_estimator](terms.logprobs, wide(tokens.ref_logprobs).detach())
            kl = self.kl_coefficient * (tokens.coefficients.detach() * estimate).sum()
            loss = loss + kl
        if self.entropy_coefficient > 0:
            assert tokens.entropy is not None  # in `needs`
            entropy = -self.entropy_coefficient * (tokens.coefficients.detach() * wide(tokens.entropy)).sum()
            loss = loss + entropy
        return _Parts(terms, keeps, keep, weight, surrogate, policy, kl, entropy, loss)

    def _metrics(self, tokens: TokenBatch, parts: _Parts) -> dict[str, float]:
        scalars = Reductions()
        count = torch.tensor(float(tokens.logprobs.numel()), device=tokens.logprobs.device)
        scalars.add("loss/total", parts.loss)
        scalars.add("loss/policy", parts.policy)
        if parts.kl is not None:
            scalars.add("loss/kl", parts.kl)
        if parts.entropy is not None:
            scalars.add("loss/entropy", parts.entropy)
        scalars.add("objective/clamped_log_ratios", self._clamped(tokens, parts.terms))
        if parts.surrogate.clipped_high is not None and parts.surrogate.clipped_low is not None:
            scalars.add("clip/high", parts.surrogate.clipped_high.sum(), count)
            scalars.add("clip/low", parts.surrogate.clipped_low.sum(), count)
        for mask, keep in zip(self.masks, parts.keeps, strict=True):
            _mask_metrics(scalars, mask, ~keep, tokens, parts.terms, count)
        if parts.weight is not None and tokens.logprobs.numel():
            kept = parts.weight if parts.keep is None else torch.where(parts.keep, parts.weight, 0.0)
            scalars.add("weight/mean", kept.sum(), count if parts.keep is None else parts.keep.sum())
            scalars.add("weight/max", kept.max())
        found = scalars.read()
        for mask in self.masks:
            found.update({f"mask/{mask.name}/{key}": float(value) for key, value in mask.parameters.items()})
        return found

    def _clamped(self, tokens: TokenBatch, terms: Terms) -> torch.Tensor:
        """Clamps among the log-ratios this objective exponentiates, each counted once."""
        total = beyond_limit(terms.log_ratio)
        pairs = {(self.anchor.target, self.anchor.reference)} if self.masks else set()
        if self.weight:
            pairs.add(("old_logprobs", "rollout_logprobs"))
        for target, reference in sorted(pairs - {("logprobs", self.anchor.base)}):
            total = total + beyond_limit(wide(getattr(tokens, target)) - wide(getattr(tokens, reference)))
        if tokens.ref_logprobs is not None and self.kl_coefficient > 0 and self.kl_estimator == "k3":
            total = total + beyond_limit(terms.logprobs - wide(tokens.ref_logprobs))
        return total


def _mask_metrics(
    scalars: Reductions, mask: Mask, dropped: torch.Tensor, tokens: TokenBatch, terms: Terms, count: torch.Tensor
) -> None:
    """Fraction, mean entropy and mean training probability of dropped tokens, and their share of Σ|A|(1−p)."""
    name = f"mask/{mask.name}"
    lost = dropped.sum()
    scalars.add(f"{name}/dropped", lost, count)
    if tokens.entropy is not None:
        scalars.add(f"{name}/dropped_entropy", torch.where(dropped, wide(tokens.entropy), 0.0).sum(), lost)
    probability = terms.logprobs.clamp(max=0.0).exp()
    scalars.add(f"{name}/dropped_probability", torch.where(dropped, probability, 0.0).sum(), lost)
    mass = terms.advantages.abs() * -torch.expm1(terms.logprobs.clamp(max=0.0))
    scalars.add(f"{name}/dropped_gradient_mass", torch.where(dropped, mass, 0.0).sum(), mass.sum())
    for key, value in (mask.counts(terms) if mask.counts else {}).items():
        scalars.add(f"{name}/{key}", value)
