"""Other readings of a recipe, each a change of its composition: what an implementation does that does not follow the equation.

Some are mistakes (a sign, a mask that keeps what it should drop), others what a library does on purpose under the same name.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from rollkeel.conformance.batch import Batch
from rollkeel.errors import BadInput
from rollkeel.objectives import Objective, registry, surrogates
from rollkeel.objectives.divergences import topk_kl, topk_tv
from rollkeel.objectives.kl import ESTIMATORS
from rollkeel.objectives.masks import Mask, ratio_band, ratio_cap, second_moment
from rollkeel.objectives.objective import _carried
from rollkeel.objectives.terms import ANCHORS, OLD, ROLLOUT, Anchor, Terms, make_terms
from rollkeel.objectives.weights import Weight, mismatch

Keep = Callable[[Terms], torch.Tensor]
AGGREGATES = ("token_mean", "sequence_mean", "sequence_sum", "token_sum", "prompt_mean")
CLAMP = 1e-8
"""How far some public implementations keep a probability from 0 and from 1. In float32, 1 − 1e-8 is 1."""


@dataclass(frozen=True)
class Change:
    """One step from a recipe to another reading of it."""

    kind: str
    """`sign`, `mask_direction`, `mask`, `clip`, `weight`, `ratio`, `recipe` or `denominator`."""
    says: str
    """What the implementation does, as a sentence about it."""
    apply: Callable[[Objective], Objective | None]
    """None where the change does not apply."""


@dataclass(frozen=True)
class Computed:
    """A reading of the tokens of one batch, `[T]` float64."""

    coefficient: torch.Tensor
    """What multiplies c·∇log p, so A is in it."""
    keep: torch.Tensor
    """bool: no mask dropped it."""


def compute(objective: Objective, batch: Batch) -> Computed:
    """The coefficients of an objective over the whole batch; its aggregate does not matter, and its state stays as it was."""
    tokens = batch.token_batch("token_sum")
    objective = replace(objective, denominator="original", _batch={})
    state = objective.state_dict()
    objective.prepare(tokens)
    (gradient,) = torch.autograd.grad(objective.loss(tokens), tokens.logprobs)
    keep = objective._keep(make_terms(tokens, objective.anchor))[1]
    objective.load_state_dict(state)
    return Computed(-gradient.double(), torch.ones_like(gradient, dtype=torch.bool) if keep is None else keep)


def denominators(batch: Batch, keep: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Words and `[T]` coefficients of every aggregation that is known, over all tokens and over those that masks kept."""
    for name in AGGREGATES:
        yield name, batch.coefficients(name)
    width = batch.mask.shape[1]
    yield "constant_length(padded width)", batch.coefficients(f"constant_length({width})")
    everything = batch.coefficients("token_mean")
    total, kept = _carried(everything, keep)
    yield "token_mean over the kept tokens", everything * (total / kept if kept > 0 else 0.0)
    ids = batch.flat(torch.arange(len(batch.groups)))
    counts = torch.zeros(len(batch.groups), dtype=torch.float64).index_add(0, ids, keep.double())
    yield "sequence_mean over the kept tokens", 1.0 / counts.clamp(min=1)[ids] / len(batch.groups)


# ---- changes of masks ------------------------------------------------------------------------------------------------


def _masks(change: Callable[[Mask], Keep]) -> Callable[[Objective], Objective | None]:
    def apply(o: Objective) -> Objective | None:
        masks = tuple(Mask(m.name, change(m), level=m.level, rules=()) for m in o.masks)
        return replace(o, masks=tuple(_seeing(old, new) for old, new in zip(o.masks, masks, strict=True)))

    return lambda o: apply(o) if o.masks else None


def _seeing(old: Mask, new: Mask) -> Mask:
    """The new mask over the old one's rules, so that their thresholds still see the whole batch."""
    return replace(new, rules=old.rules, needs=old.needs)


def _judged_by(anchor: Anchor) -> Callable[[Objective], Objective | None]:
    change = _masks(lambda m: lambda t: m.keep(make_terms(t.tokens, anchor)))

    def apply(o: Objective) -> Objective | None:
        return None if (o.anchor.target, o.anchor.reference) == (anchor.target, anchor.reference) else change(o)

    return apply


def _inverted_pair(mask: Mask) -> Keep:
    def keep(t: Terms) -> torch.Tensor:
        return mask.keep(make_terms(t.tokens, replace(t.anchor, target=t.anchor.reference, reference=t.anchor.target)))

    return keep


def _turned(mask: Mask) -> Keep:
    return lambda t: mask.keep(replace(t, advantages=-t.advantages))


def _clamped(mask: Mask) -> Keep:
    """The binary KL of a rule with both probabilities clamped, in the log-probs' own precision."""
    statistic = mask.rules[0].statistic.name

    def keep(t: Terms) -> torch.Tensor:
        p, q = t.target.exp().clamp(CLAMP, 1 - CLAMP), t.reference.exp().clamp(CLAMP, 1 - CLAMP)

        def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log()

        value = torch.maximum(kl(p, q), kl(q, p)) if statistic == "symmetric_binary_kl" else kl(q, p)
        bound = mask.rules[0].threshold.value
        assert bound is not None
        return value <= bound  # a NaN drops the token

    return keep


def _unbinned(mask: Mask) -> Keep:
    """The top-K divergence without a bin for a sampled token that is not among the K: it counts with all others."""
    rule = mask.rules[0]
    function = topk_tv if rule.statistic.name == "topk_tv" else topk_kl

    def keep(t: Terms) -> torch.Tensor:
        top_p, top_q = t.tokens.topk_logprobs, t.tokens.rollout_topk_logprobs
        assert top_p is not None
        assert top_q is not None
        listed = torch.ones_like(t.target, dtype=torch.bool)
        value = function(t.target, t.reference, top_p, top_q, listed)
        away = (t.advantages * (t.target - t.reference)) > 0
        return ~(away & (value > (rule.threshold.value or 0.0)))

    return keep


def _where(test: Callable[[Mask], bool], change: Callable[[Mask], Keep]) -> Callable[[Objective], Objective | None]:
    def apply(o: Objective) -> Objective | None:
        fits = all(len(m.rules) == 1 and test(m) for m in o.masks)
        return _masks(change)(o) if fits else None

    return apply


def _mask_level(level: str) -> Callable[[Objective], Objective | None]:
    def apply(o: Objective) -> Objective | None:
        named = {m.name: {r.parameter: r.threshold.value for r in m.rules} for m in o.masks}
        if len(named) != 1:
            return None
        ((name, values),) = named.items()
        if set(values) == {"cap"}:
            return replace(o, masks=(ratio_cap(name, values["cap"], level),))
        return replace(o, masks=(ratio_band(name, **values, level=level),)) if set(values) == {"low", "high"} else None

    return apply


# ---- changes of the clip, the ratio and the weight -----------------------------------------------------------------------


def _clip(dual: float | None, swap: bool = False) -> Callable[[Objective], Objective | None]:
    def apply(o: Objective) -> Objective | None:
        if o.surrogate.name != "ppo_clip":
            return None
        high, low = (rule.threshold.value for rule in o.surrogate.rules)
        if swap and high == low:
            return None
        return replace(o, surrogate=surrogates.ppo_clip(*((high, low) if swap else (low, high)), dual))

    return apply


def _surrogate(surrogate: surrogates.Surrogate) -> Callable[[Objective], Objective | None]:
    return lambda o: None if o.surrogate.name == surrogate.name else replace(o, surrogate=surrogate)


def _capped(cap: float) -> Callable[[Objective], Objective | None]:
    return lambda o: replace(o, surrogate=surrogates.ratio(cap)) if o.surrogate.name == "ratio" else None


def _base(base: str) -> Callable[[Objective], Objective | None]:
    def apply(o: Objective) -> Objective | None:
        anchor = replace(o.anchor, base=base)
        return None if base == o.anchor.base else replace(o, anchor=anchor, allow_double_correction=True)

    return apply


def _at_rollout(o: Objective) -> Objective | None:
    same = o.anchor == ROLLOUT or not o.masks
    return None if same else replace(o, anchor=ROLLOUT, surrogate=surrogates.ratio(), weight=None)


def _weight(weight: Weight | None) -> Callable[[Objective], Objective | None]:
    return lambda o: (
        None if (o.weight is None) == (weight is None) else replace(o, weight=weight, allow_double_correction=True)
    )


def _other_weight(weight: Weight) -> Callable[[Objective], Objective | None]:
    return lambda o: None if o.weight is None else replace(o, weight=weight)


def _inverse(o: Objective) -> Objective | None:
    old = o.weight
    return None if old is None else replace(o, weight=replace(old, weight=lambda t: 1.0 / old.weight(t)))


def _normalised(o: Objective) -> Objective | None:
    return None if o.weight is None else replace(o, weight=replace(o.weight, normalise=True))


def _negated(o: Objective) -> Objective:
    inner = o.surrogate

    def evaluate(terms: Terms) -> surrogates.SurrogateValue:
        value = inner.evaluate(terms)
        return replace(value, value=-value.value)

    return replace(o, surrogate=replace(inner, evaluate=evaluate))


def _second_moment(anchor: Anchor | None) -> Callable[[Objective], Objective | None]:
    """M2PO's budget over all tokens, on the pair of another anchor if one is given."""
    mask = second_moment("m2po", directional=False)

    def apply(o: Objective) -> Objective | None:
        made = replace(o, masks=(mask,)) if o.name == "m2po" else None
        return made if made is None or anchor is None else replace(made, anchor=replace(anchor, base=o.anchor.base))

    return apply


KL_SAYS = {
    "k1": "log p - log ref (Schulman 2020)",
    "k2": "(log p - log ref)^2 / 2 (Schulman 2020)",
    "k3": "ref/p - 1 - log(ref/p) (Schulman 2020)",
    "rk3": "k3 times p/o, differentiated",
    "uk3": "k3 times p/q, differentiated",
    "sk3": "k3 with the score function's gradient beside its own, which together are the gradient of k2",
}
DUAL = Change("clip", "A < 0 is cut where r > 3 as well: dual clip (Ye et al. 2020), c = 3", _clip(3.0))
"""A default of several libraries, so it is tried beside two more changes."""
CHANGES: Sequence[Change] = (
    Change("sign", "the gradient has the opposite sign: it descends where it should ascend", _negated),
    Change(
        "mask_direction",
        "the mask keeps what the rule drops and drops what it keeps",
        _masks(lambda m: lambda t: ~m.keep(t)),
    ),
    Change(
        "mask_direction",
        "the mask judges A > 0 as the rule judges A < 0, and the other way round",
        _masks(_turned),
    ),
    Change("mask", "no token is dropped: the mask is missing", lambda o: replace(o, masks=()) if o.masks else None),
    Change("mask", "the mask judges o against q", _judged_by(ANCHORS["decoupled"])),
    Change("mask", "the mask judges p against q", _judged_by(ROLLOUT)),
    Change("mask", "the mask judges p against o", _judged_by(OLD)),
    Change("mask", "the mask judges the inverse ratio, q/o where the rule has o/q", _masks(_inverted_pair)),
    Change(
        "mask",
        "probabilities are clamped to 1 - 1e-8, which is 1 in float32: certain tokens get NaN and are dropped",
        _where(lambda m: "binary_kl" in m.rules[0].statistic.name, _clamped),
    ),
    Change(
        "mask",
        "a sampled token that is not among the top K has no bin of its own: it counts with all others",
        _where(lambda m: m.rules[0].statistic.topk, _unbinned),
    ),
    Change(
        "mask",
        "the whole answer is judged by the geometric mean of its ratios, not by their product",
        _mask_level("geometric"),
    ),
    Change("mask", "the whole answer is judged by the product of its ratios", _mask_level("sequence")),
    Change("mask", "every token is judged by its own ratio", _mask_level("token")),
    Change("mask", "the second-moment budget is taken over all tokens, not over moves away", _second_moment(None)),
    Change(
        "mask",
        "the second-moment budget is taken over all tokens, of o against q",
        _second_moment(ANCHORS["decoupled"]),
    ),
    DUAL,
    Change("clip", "the lower and the upper clip are exchanged", _clip(None, swap=True)),
    Change("clip", "the clip is missing: S = ratio·A", _surrogate(surrogates.ratio())),
    Change("ratio", "the ratio is capped: its gradient is min(ratio, 3)", _capped(3.0)),
    Change("ratio", "the ratio is capped: its gradient is min(ratio, 20)", _capped(20.0)),
    Change("ratio", "the ratio is p/q and not p/o", _base("rollout_logprobs")),
    Change("ratio", "the ratio is p/o and not p/q", _base("old_logprobs")),
    Change(
        "ratio", "mask and ratio are those of p/q, without o, clip and weight: S = p/q·A under the mask", _at_rollout
    ),
    Change("weight", "the weight o/q is missing", _weight(None)),
    Change("weight", "every token is weighed by o/q as well", _weight(mismatch())),
    Change("weight", "the weight is q/o, the inverse of o/q", _inverse),
    Change("weight", "the weight is min(o/q, 2)", _other_weight(mismatch(2.0))),
    Change("weight", "the weight is min(o/q, 3)", _other_weight(mismatch(3.0))),
    Change("weight", "the weight is each token's own o/q", _other_weight(mismatch())),
    Change(
        "weight", "the weight is the geometric mean of o/q over the answer", _other_weight(mismatch(level="geometric"))
    ),
    Change("weight", "the weight is the product of o/q over the answer", _other_weight(mismatch(level="sequence"))),
    Change(
        "weight",
        "the weight is the geometric mean of o/q over the answer, at most 2",
        _other_weight(mismatch(2.0, "geometric")),
    ),
    Change(
        "weight",
        "the weight is the product of o/q over the answer, at most 2",
        _other_weight(mismatch(2.0, "sequence")),
    ),
    Change("weight", "weights are divided by their mean over the batch", _normalised),
)


def candidates(objective: Objective) -> Iterator[tuple[tuple[Change, ...], Objective]]:
    """The recipe itself, each change, each other recipe, then two changes of different kinds, then the dual clip and two
    more; the fewest changes first."""
    yield (), objective
    if objective.kl_coefficient:
        for name in sorted(ESTIMATORS, key="k2".__eq__):
            says = f"it is {name}: {KL_SAYS[name]}"
            yield (Change("kl", says, lambda o: None),), replace(objective, kl_estimator=name)
        return
    singles = [(change, made) for change in CHANGES if (made := change.apply(objective)) is not None]
    yield from (((change,), made) for change, made in singles)
    for name in registry.RECIPES:
        if name not in (objective.name, "random_rejection"):
            yield (Change("recipe", f"it does what {name} says", lambda o: None),), registry.build(name)
    pairs = [pair for pair in itertools.combinations([c for c, _ in singles], 2) if pair[0].kind != pair[1].kind]
    triples = [(DUAL, *pair) for pair in pairs if DUAL.kind not in (pair[0].kind, pair[1].kind)]
    for changes in (*pairs, *triples):
        if (made := _all(objective, changes)) is not None:
            yield changes, made


def _all(objective: Objective, changes: Sequence[Change]) -> Objective | None:
    made: Objective | None = objective
    for change in changes:
        with contextlib.suppress(BadInput):
            made = change.apply(made)
        if made is None:
            return None
    return made
