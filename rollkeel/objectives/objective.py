"""The one form of every objective, and what it did to a batch.

    loss = Σ_t  c_t · [ − stop_grad(k_t · w_t) · S_t(p)  +  γ · KL_t(p‖ref)  −  η · entropy_t ]

An `Objective` is a composition: an anchor (which policies are compared), keep masks k, a correction weight w, a surrogate S.
The loss is a plain sum with given coefficients c, so micro-batching and packing cannot change its gradient.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch

from rollkeel.errors import BadInput
from rollkeel.objectives.checks import check_part, check_tokens, check_whole
from rollkeel.objectives.kl import ESTIMATORS, RATIO_UNDER, estimated
from rollkeel.objectives.masks import Mask, Rule
from rollkeel.objectives.metrics import Parts, measure
from rollkeel.objectives.options import number
from rollkeel.objectives.perturbations import Factor
from rollkeel.objectives.statistics import Gather
from rollkeel.objectives.surrogates import Surrogate
from rollkeel.objectives.terms import WHOLE, Anchor, Terms, make_terms, wide
from rollkeel.objectives.weights import Weight
from rollkeel.types import TokenBatch

AGGREGATES = re.compile(r"token_mean|sequence_mean|prompt_mean|sequence_sum|token_sum|constant_length\([1-9]\d*\)")
DENOMINATORS = ("original", "kept")
_ALWAYS = frozenset({"logprobs", "rollout_logprobs"})
_NOT_A_FIELD = frozenset({"prepare"})


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
    cut: torch.Tensor | None = None
    """`[T]` bool: tokens whose gradient the surrogate's clip takes away; None if it has no clip."""


@final
@dataclass(frozen=True, kw_only=True)
class Objective:
    """anchor × masks × weight × factors × surrogate, plus the KL and entropy terms; see `rollkeel.objectives` for recipes.

    The composition is immutable; thresholds that follow the batches and counters of random draws live inside its parts,
    change in `prepare` alone and are in `state_dict`.
    Raises `BadInput` when a correction weight meets a surrogate whose ratio already is p/q, unless
    `allow_double_correction`; and for an unknown aggregate, estimator or a negative coefficient.
    """

    name: str
    anchor: Anchor
    surrogate: Surrogate
    masks: tuple[Mask, ...] = ()
    weight: Weight | None = None
    factors: tuple[Factor, ...] = ()
    """Perturbations: detached multipliers of S."""
    aggregate: str = "sequence_mean"
    """How `batch/` makes coefficients: token_mean, sequence_mean, prompt_mean, sequence_sum, token_sum or
    constant_length(n)."""
    advantage: str = "grpo"
    """Name in `rollkeel.advantages` that the recipe's paper uses."""
    kl_coefficient: float = 0.0
    """γ ≥ 0."""
    kl_estimator: str = "k3"
    entropy_coefficient: float = 0.0
    """η ≥ 0."""
    gap_penalty: float = 0.0
    """τ ≥ 0 of a further term τ·(log p − log q)², not masked, that pulls p back to q."""
    positive_nll: float = 0.0
    """μ ≥ 0 of a further term −μ·log p over tokens with A > 0, not masked: their likelihood (VAPO, Yue et al. 2025). Their
    coefficients are rescaled to carry what all tokens of the batch carry."""
    denominator: str = "original"
    """`kept`: rescale coefficients so that kept tokens carry what all tokens carried, over the batch for token_mean and
    inside each sequence for sequence_mean."""
    allow_double_correction: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's resolved options, for logs."""
    _batch: dict[str, float] = field(default_factory=dict, repr=False, compare=False)
    """What `prepare` found for the current optimizer batch."""

    def __post_init__(self) -> None:
        self._check_parts()
        if self.weight and self.weight.corrects_gap and self.anchor.corrects_gap and not self.allow_double_correction:
            raise BadInput(
                f"objective {self.name}: expected one correction of the train/rollout gap, got two (the ratio p/q and the"
                " weight o/q); drop one or set allow_double_correction=true"
            )
        if not isinstance(self.aggregate, str) or not AGGREGATES.fullmatch(self.aggregate):
            raise BadInput(
                f"objective {self.name}: aggregate expected token_mean, sequence_mean, prompt_mean, sequence_sum, token_sum or"
                " constant_length(n),"
                f" got {self.aggregate!r}"
            )
        if self.kl_estimator not in tuple(ESTIMATORS):
            raise BadInput(
                f"objective {self.name}: kl_estimator expected {', '.join(ESTIMATORS)}, got {self.kl_estimator!r}"
            )
        if self.denominator not in DENOMINATORS:
            raise BadInput(f"objective {self.name}: denominator expected original or kept, got {self.denominator!r}")
        if self.denominator == "kept" and self.aggregate not in ("token_mean", "sequence_mean"):
            raise BadInput(
                f"objective {self.name}: denominator=kept expected aggregate token_mean or sequence_mean, got"
                f" {self.aggregate}; their sums have no denominator of kept tokens"
            )
        names = [mask.name for mask in self.masks]
        if len(set(names)) < len(names):
            raise BadInput(f"objective {self.name}: expected masks of different names, got {', '.join(names)}")
        stateful = [label for label, _ in self._stateful()]
        if len(set(stateful)) < len(stateful):  # one would be saved in the place of the other
            raise BadInput(
                f"objective {self.name}: expected parts with thresholds or draws under different names, got"
                f" {', '.join(stateful)}; give the mask another name or drop one perturbation"
            )
        for name in ("kl_coefficient", "entropy_coefficient", "gap_penalty", "positive_nll"):
            number(f"objective {self.name}: {name}", getattr(self, name), at_least=0)

    @property
    def needs(self) -> frozenset[str]:
        """Optional `TokenBatch` fields that must be filled; `entropy` must then carry its gradient.

        With `prepare` among them, `prepare` must be given log-probs of the current weights and not a stand-in.
        """
        names = self.anchor.fields | (self.weight.needs if self.weight else frozenset())
        names = names.union(*(mask.reads(self.anchor) for mask in self.masks), *(f.needs for f in self.factors))
        names -= {"entropy"}  # a mask reads a detached one, which every pass has
        if any(rule.threshold.adaptive for rule in self.surrogate.rules):
            names |= {"prepare"}
        if self._kept_over_batch and any("logprobs" in mask.reads(self.anchor) for mask in self.masks):
            names |= {"prepare"}
        if self.kl_coefficient > 0:
            names |= {"ref_logprobs", RATIO_UNDER.get(self.kl_estimator, "ref_logprobs")}
        if self.entropy_coefficient > 0:
            names |= {"entropy"}
        return names - _ALWAYS

    @property
    def pays_credit_alone(self) -> bool:
        """True if a token without advantage has no part in the loss."""
        return not (self.kl_coefficient or self.entropy_coefficient or self.gap_penalty)

    @property
    def looks_ahead(self) -> bool:
        """True if `prepare` finds something for the batch in the old or current log-probs: no stand-in for either will do."""
        by_weight = self.weight is not None and self.weight.normalise
        return self.denominator == "kept" or by_weight or any(rule.threshold.adaptive for _, rule in self.rules())

    @property
    def left(self) -> float:
        """Share of the tokens that masks leave where the options name the shares they drop; 1 if none does."""
        return math.prod(rule.threshold.left for mask in self.masks for rule in mask.rules)

    @property
    def fields(self) -> frozenset[str]:
        """What `loss` needs of a batch: also the detached entropy that a mask reads."""
        read = frozenset().union(*(mask.reads(self.anchor) for mask in self.masks))
        return (self.needs | (read & {"entropy"})) - _NOT_A_FIELD

    @property
    def topk(self) -> int:
        """Most likely tokens per position that rollouts must bring with their log-probs (`topk_ids`); 0 for none."""
        return max((rule.topk for _, rule in self.rules()), default=0)

    def prepare(self, batch: TokenBatch, gather: Gather | None = None) -> None:
        """See the whole optimizer batch once, without gradient, before its first micro-batch.

        Refuses a batch with a hole in it (`BadInput`, `NonFinite`) while the weights are still untouched. `entropy`
        belongs to the differentiated pass and is not asked for here. Then finds the thresholds of this batch: controllers,
        M2PO's cutoff, random draws, the kept share. `gather`: with data parallelism, a function that concatenates a 1-D
        tensor over all ranks; every rank must call `prepare` then.
        """
        differentiated = {"entropy"} if self.entropy_coefficient > 0 and batch.entropy is None else set()
        check_tokens(batch, self.fields - differentiated, self.name)
        check_whole(batch, self.name)
        gather = gather or (lambda values: values)
        with torch.no_grad():
            terms = make_terms(batch, self.anchor)
            for _, rule in self.rules():
                rule.prepare(terms, gather)
            for factor in self.factors:
                if factor.draw is not None:
                    factor.draw.advance()
            if self._kept_over_batch:
                keep = self._keep(terms)[1]
                sums = _carried(batch.coefficients.detach(), keep)
                everything, kept = (gather(total[None].double()).sum().item() for total in sums)
                self._batch["kept_scale"] = everything / kept if kept > 0 else 0.0
            if self.positive_nll > 0:
                sums = _carried(batch.coefficients.detach(), batch.advantages > 0)
                everything, positive = (gather(total[None].double()).sum().item() for total in sums)
                self._batch["positive_scale"] = everything / positive if positive > 0 else 0.0
            if self.weight is not None and self.weight.normalise:
                self._batch["weight_mean"] = gather(self._units(terms, self.weight.weight(terms))).mean().item()

    def loss(self, tokens: TokenBatch) -> torch.Tensor:
        """0-d loss of a micro-batch: checked, one synchronisation, no metrics. Sums over micro-batches to the batch's loss.

        Raises `BadInput` (missing field, lengths, positive log-probs) or `NonFinite`, naming sequence and position.
        """
        check_tokens(tokens, self.fields, self.name)
        self._check_entropy_gradient(tokens)
        return self._evaluate(tokens).loss

    def __call__(self, tokens: TokenBatch) -> ObjectiveOutput:
        """Loss, masks, weights and metrics of a batch (`[T]` tensors). Raises as `loss` does."""
        check_tokens(tokens, self.fields, self.name)
        self._check_entropy_gradient(tokens)
        parts = self._evaluate(tokens)
        with torch.no_grad():
            metrics = measure(self, tokens, parts)
        ones = torch.ones_like(parts.terms.logprobs, requires_grad=False)
        return ObjectiveOutput(
            loss=parts.loss,
            keep=parts.keep if parts.keep is not None else ones.bool(),
            weight=parts.weight if parts.weight is not None else ones,
            metrics=metrics,
            cut=parts.surrogate.cut,
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON values that, loaded into an objective built alike, continue this one with the same bounds and draws."""
        state = {label: part.state_dict() for label, part in self._stateful()}
        state = {label: part for label, part in state.items() if part}
        return {"name": self.name, **({"state": state} if state else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `BadInput` if `state` is that of another objective, or damaged."""
        own = self.state_dict()
        if state.get("name") != self.name or set(state.get("state", {})) != set(own.get("state", {})):
            raise BadInput(f"objective {self.name}: expected state {own}, got {dict(state)}; resume with the same")
        for label, part in self._stateful():
            if label in state.get("state", {}):
                try:
                    part.load_state_dict(state["state"][label])
                except (KeyError, TypeError, ValueError) as error:
                    raise BadInput(
                        f"objective {self.name}: the saved state of {label} is damaged"
                        f" ({type(error).__name__}: {error}); resume from another checkpoint"
                    ) from error

    def describe(self) -> dict[str, Any]:
        """Resolved parameters as JSON values, for the log's first lines."""
        return {
            "name": self.name,
            **self.parameters,
            "anchor": self.anchor.name,
            "surrogate": self.surrogate.name,
            "masks": [m.name for m in self.masks],
            "weight": self.weight.name if self.weight else None,
            "perturb": [{f.name: dict(f.parameters)} for f in self.factors],
            "aggregate": self.aggregate,
            "advantage": self.advantage,
            "kl_coefficient": self.kl_coefficient,
            "kl_estimator": self.kl_estimator,
            "entropy_coefficient": self.entropy_coefficient,
            "gap_penalty": self.gap_penalty,
            "positive_nll": self.positive_nll,
            "denominator": self.denominator,
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

    def _check_parts(self) -> None:
        masks = self.masks if isinstance(self.masks, (tuple, list)) else (self.masks,)
        parts = [("anchor", self.anchor, Anchor), ("surrogate", self.surrogate, Surrogate)]
        parts += [("weight", self.weight, Weight)] if self.weight is not None else []
        for part, value, kind in (*parts, *(("masks", mask, Mask) for mask in masks)):
            if not isinstance(value, kind):
                raise BadInput(f"objective {self.name}: expected {part} to be {kind.__name__}, got {value!r}")
        object.__setattr__(self, "masks", tuple(masks))

    @property
    def _kept_over_batch(self) -> bool:
        return self.denominator == "kept" and self.aggregate == "token_mean" and bool(self.masks)

    def rules(self) -> list[tuple[str, Rule]]:
        """Every rule under the name of its mask, or of the surrogate."""
        rules = [(mask.name, rule) for mask in self.masks for rule in mask.rules]
        return rules + [(self.surrogate.name, rule) for rule in self.surrogate.rules]

    def _stateful(self) -> list[tuple[str, Any]]:
        parts: list[tuple[str, Any]] = [(f"{name}/{rule.parameter}", rule) for name, rule in self.rules()]
        return parts + [(f.name, f.draw) for f in self.factors if f.draw is not None]

    def _keep(self, terms: Terms) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """What each mask keeps, and all of them together; None without masks."""
        keeps = tuple(mask.keep(terms) for mask in self.masks)
        for mask, keep in zip(self.masks, keeps, strict=True):
            check_part(keep, terms.logprobs, f"mask {mask.name}", self.name, truth=True)
        return keeps, (torch.stack(keeps).all(0) if len(keeps) > 1 else (keeps[0] if keeps else None))

    def _rescaled(self, terms: Terms, keep: torch.Tensor | None) -> torch.Tensor:
        """Coefficients under `denominator`."""
        coefficients = terms.tokens.coefficients.detach()
        if keep is None or self.denominator == "original":
            return coefficients
        if self._kept_over_batch:
            if "kept_scale" in self._batch:
                return coefficients * self._batch["kept_scale"]
            everything, kept = _carried(coefficients, keep)
        else:
            kept = terms.sequence_sum(torch.where(keep, coefficients, 0.0))
            everything = terms.sequence_sum(coefficients)
        return coefficients * torch.where(kept > 0, everything / kept, 0.0)

    def _weigh(self, terms: Terms) -> torch.Tensor | None:
        """`[T]`: the correction weight, over its batch's mean if it is normalised."""
        if self.weight is None:
            return None
        weight = self.weight.weight(terms)
        check_part(weight, terms.logprobs, f"weight {self.weight.name}", self.name)
        if not self.weight.normalise:
            return weight
        mean = self._batch.get("weight_mean")
        mean = self._units(terms, weight).mean().item() if mean is None and weight.numel() else mean
        return weight / mean if mean else weight

    def _units(self, terms: Terms, weight: torch.Tensor) -> torch.Tensor:
        """Weights once per token, or per sequence where a sequence has one; float64."""
        whole = self.weight is not None and self.weight.level in WHOLE
        return (terms.per_sequence(weight) if whole else weight).double()

    def _evaluate(self, tokens: TokenBatch) -> Parts:
        terms = make_terms(tokens, self.anchor)
        with torch.no_grad():
            keeps, keep = self._keep(terms)
            weight = self._weigh(terms)
            scale = self._rescaled(terms, keep)
            for factor in self.factors:
                scale = scale * factor.multiplier(terms)
            scale = scale if weight is None else scale * weight
            # `where` and not a product: a dropped token contributes exactly nothing, whatever its weight.
            scale = scale if keep is None else torch.where(keep, scale, torch.zeros_like(scale))
        surrogate = self.surrogate.evaluate(terms)
        check_part(getattr(surrogate, "value", None), terms.logprobs, f"surrogate {self.surrogate.name}", self.name)
        extra, c = {}, tokens.coefficients.detach()
        if self.kl_coefficient > 0:
            assert tokens.ref_logprobs is not None  # in `needs`
            estimate = estimated(self.kl_estimator, terms.logprobs, wide(tokens.ref_logprobs).detach(), tokens)
            extra["kl"] = self.kl_coefficient * (c * estimate).sum()
        if self.gap_penalty > 0:
            gap = terms.logprobs - wide(tokens.rollout_logprobs).detach()
            extra["gap_penalty"] = self.gap_penalty * (c * gap.square()).sum()
        if self.positive_nll > 0:
            everything, positive = _carried(c, terms.advantages > 0)
            scale_up = self._batch.get("positive_scale", torch.where(positive > 0, everything / positive, 0.0))
            nll = -torch.where(terms.advantages > 0, c * terms.logprobs, 0.0).sum()
            extra["positive_nll"] = self.positive_nll * scale_up * nll
        if self.entropy_coefficient > 0:
            assert tokens.entropy is not None  # in `needs`
            extra["entropy"] = -self.entropy_coefficient * (c * wide(tokens.entropy)).sum()
        policy = -(scale * surrogate.value).sum()
        loss = policy
        for term in extra.values():
            loss = loss + term
        return Parts(terms, keeps, keep, weight, scale, surrogate, {"policy": policy, **extra}, loss)


def _carried(coefficients: torch.Tensor, keep: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """0-d: the sum of all coefficients, and of the kept ones."""
    return coefficients.sum(), (coefficients if keep is None else torch.where(keep, coefficients, 0.0)).sum()
