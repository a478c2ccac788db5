"""What an objective did to a batch, in numbers. Everything is read off the device in one synchronisation.

The metrics are those of `record/glossary.py` under `loss/`, `objective/`, `clip/`, `mask/`, `weight/`, `controller/`, `bias/`. A
mean over no tokens, a number that is not finite, and the bias of a part that the objective does not have are left out. Where the
batch has no recomputed o, p stands in its place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from rollkeel.objectives.kl import RATIO_UNDER
from rollkeel.objectives.reductions import Reductions
from rollkeel.objectives.surrogates import SurrogateValue
from rollkeel.objectives.terms import LOG_RATIO_LIMIT, Terms, bounded_exp, make_terms, wide
from rollkeel.objectives.thresholds import Controller
from rollkeel.types import TokenBatch

if TYPE_CHECKING:
    from rollkeel.objectives.objective import Objective

NOMINAL_DISTORTION = {"delta": 2.0, "threshold": 0.1}


@dataclass(frozen=True)
class Parts:
    """An objective evaluated on a batch."""

    terms: Terms
    keeps: tuple[torch.Tensor, ...]
    """`[T]` bool of each mask."""
    keep: torch.Tensor | None
    """`[T]` bool of all masks; None without masks."""
    weight: torch.Tensor | None
    scale: torch.Tensor
    """`[T]`: what multiplies the surrogate, c·k·w·x."""
    surrogate: SurrogateValue
    terms_of_loss: Mapping[str, torch.Tensor]
    loss: torch.Tensor


def measure(objective: Objective, tokens: TokenBatch, parts: Parts) -> dict[str, float]:
    """All metrics that this objective and batch have."""
    scalars = Reductions()
    count = torch.tensor(float(tokens.logprobs.numel()), device=tokens.logprobs.device)
    scalars.add("loss/total", parts.loss)
    for name, term in parts.terms_of_loss.items():
        scalars.add(f"loss/{name}", term)
    scalars.add("objective/clamped_log_ratios", _clamped(objective, tokens, parts.terms))
    if parts.surrogate.clipped_high is not None and parts.surrogate.clipped_low is not None:
        scalars.add("clip/high", parts.surrogate.clipped_high.sum(), count)
        scalars.add("clip/low", parts.surrogate.clipped_low.sum(), count)
        cut = parts.surrogate.clipped_high | parts.surrogate.clipped_low
        _add_features(scalars, ["clip/cut"], cut[None].to(parts.terms.logprobs.dtype), tokens, parts, count)
    scalars.add("objective/kept", count if parts.keep is None else parts.keep.sum(), count)
    if parts.keeps:
        _add_masks(scalars, objective, tokens, parts, count)
    if parts.weight is not None and tokens.logprobs.numel():
        kept = parts.weight if parts.keep is None else torch.where(parts.keep, parts.weight, 0.0)
        scalars.add("weight/mean", kept.sum(), count if parts.keep is None else parts.keep.sum())
        scalars.add("weight/max", kept.max())
    _add_bias(scalars, objective, tokens, parts)
    return {**scalars.read(), **_thresholds(objective)}


def _add_masks(
    scalars: Reductions, objective: Objective, tokens: TokenBatch, parts: Parts, count: torch.Tensor
) -> None:
    dropped = (~torch.stack(parts.keeps)).to(parts.terms.logprobs.dtype)
    _add_features(scalars, [f"mask/{mask.name}/dropped" for mask in objective.masks], dropped, tokens, parts, count)
    for i, mask in enumerate(objective.masks):
        name = f"mask/{mask.name}"
        scalars.add(f"{name}/kept", count - dropped[i].sum(), count)
        for key, value in (mask.counts(parts.terms) if mask.counts else {}).items():
            scalars.add(f"{name}/{key}", value)
        for rule in mask.rules if len(mask.rules) > 1 else ():
            cut = (~rule.keep(parts.terms)).sum()
            scalars.add(f"{name}/dropped_{rule.parameter}", cut, count)
            if rule.parameter in ("clip_high", "clip_low") and parts.surrogate.clipped_high is None:
                scalars.add(rule.parameter.replace("_", "/"), cut, count)


def _add_features(
    scalars: Reductions,
    names: Sequence[str],
    selected: torch.Tensor,
    tokens: TokenBatch,
    parts: Parts,
    count: torch.Tensor,
) -> None:
    """The share of tokens in each row of `selected [n, T]`, and what they are like."""
    logprobs = parts.terms.logprobs.detach().clamp(max=0.0)
    mass = parts.terms.advantages.abs() * -torch.expm1(logprobs)
    features = {
        "probability": logprobs.exp(),
        "rollout_probability": wide(tokens.rollout_logprobs.detach()).clamp(max=0.0).exp(),
        "gradient_mass": mass,
    }
    if tokens.entropy is not None:
        features["entropy"] = wide(tokens.entropy.detach())
    total, size = mass.sum(), selected.sum(1)
    sums = torch.stack([f.to(logprobs.dtype) for f in features.values()]) @ selected.T
    for i, name in enumerate(names):
        scalars.add(name, size[i], count)
        for j, feature in enumerate(features):
            scalars.add(f"{name}_{feature}", sums[j, i], total if feature == "gradient_mass" else size[i])


def _add_bias(scalars: Reductions, objective: Objective, tokens: TokenBatch, parts: Parts) -> None:
    """The stability study's biases, from detached log-probs."""
    terms, c = parts.terms, tokens.coefficients.detach()
    p, q = terms.logprobs.detach(), wide(tokens.rollout_logprobs.detach())
    base = bounded_exp(terms.log_ratio.detach()) if parts.surrogate.ratio is None else parts.surrogate.ratio
    weight = torch.ones_like(p) if parts.weight is None else parts.weight
    slope = _slope(objective, tokens)
    # Each stage is what multiplies ∇log p, from the importance-sampled objective's to this one's.
    stages = [("ratio", c * terms.advantages * bounded_exp(p - q)), ("weight", c * terms.advantages * base)]
    stages += [("clip", stages[1][1] * weight), ("mask", c * weight * slope)]
    stages += [("perturb", stages[3][1] if parts.keep is None else torch.where(parts.keep, stages[3][1], 0.0))]
    stages += [("", parts.scale * slope)]
    absent = {"weight": objective.weight is None, "mask": not objective.masks}
    absent["perturb"] = not objective.factors and objective.denominator == "original"
    scalars.add("bias/delta_j", (stages[-1][1] - stages[0][1]).sum(dtype=torch.float64))
    for (name, before), (_, after) in itertools.pairwise(stages):
        if not absent.get(name):
            scalars.add(f"bias/delta_j_{name}", (after - before).sum(dtype=torch.float64))
    if parts.surrogate.beyond is not None:
        scalars.add("bias/delta_clip", -torch.where(parts.surrogate.beyond, stages[1][1], 0.0).sum())
    if objective.factors:
        factor = torch.stack([f.multiplier(terms) for f in objective.factors]).prod(0)
        scalars.add("bias/delta_inj", (c * parts.surrogate.value.detach() * (factor - 1.0)).sum())
    old = p if tokens.old_logprobs is None else wide(tokens.old_logprobs.detach())
    applied = [f.parameters for f in objective.factors if f.name == "distort_low_probability"]
    distortion = applied[0] if applied else NOMINAL_DISTORTION
    rare = old < math.log(distortion["threshold"])
    scalars.add("bias/j", (distortion["delta"] - 1.0) * torch.where(rare, parts.terms.advantages, 0.0).sum())


def _slope(objective: Objective, tokens: TokenBatch) -> torch.Tensor:
    """`[T]`: dS/d log p of every token, whatever the surrogate is; 0 where it does not depend on log p."""
    leaf = wide(tokens.logprobs.detach()).clone().requires_grad_()
    with torch.enable_grad():
        value = objective.surrogate.evaluate(make_terms(replace(tokens, logprobs=leaf), objective.anchor)).value
        return torch.autograd.grad(value.sum(), leaf)[0] if value.requires_grad else torch.zeros_like(leaf)


def _clamped(objective: Objective, tokens: TokenBatch, terms: Terms) -> torch.Tensor:
    """Clamps among the log-ratios this objective exponentiated; one that several parts share counts once at each token."""
    taken, kind = list(terms.exponents), objective.kl_estimator
    if objective.kl_coefficient > 0 and kind.endswith("k3"):
        bases = ("ref_logprobs", *([RATIO_UNDER[kind]] if kind in RATIO_UNDER else []))
        taken += [terms.logprobs.detach() - wide(getattr(tokens, base).detach()) for base in bases]
    if not taken:
        return torch.zeros((), device=terms.logprobs.device)
    ordered = torch.stack(taken).sort(0).values
    beyond = ordered.abs() > LOG_RATIO_LIMIT
    return beyond.sum() - (beyond[1:] & (ordered[1:] == ordered[:-1])).sum()


def _thresholds(objective: Objective) -> dict[str, float]:
    """Current thresholds and what is known about the controllers among them; nothing here is on a device."""
    thresholds: dict[str, float | None] = {}
    controllers: dict[str, Controller] = {}
    for mask in objective.masks:
        thresholds.update({f"mask/{mask.name}/{key}": float(value) for key, value in mask.parameters.items()})
        for rule in mask.rules:
            thresholds[f"mask/{mask.name}/{rule.parameter}"] = rule.threshold.value
    for name, rule in objective.rules():
        if isinstance(rule.threshold, Controller):
            several = sum(other == name for other, _ in objective.rules()) > 1
            controllers[f"{name}_{rule.parameter}" if several else name] = rule.threshold
    for name, controller in controllers.items():
        for prefix in {f"controller/{name}", "controller" if len(controllers) == 1 else f"controller/{name}"}:
            thresholds[f"{prefix}/bound"] = controller.value
            thresholds[f"{prefix}/acceptance"] = controller.acceptance
            thresholds[f"{prefix}/target"] = controller.target
    return {name: value for name, value in thresholds.items() if value is not None and math.isfinite(value)}
