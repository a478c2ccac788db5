"""What an objective did to a batch, in numbers. Everything is read off the device in one synchronisation.

| metric | meaning |
|---|---|
| `loss/total`, `/policy`, `/kl`, `/gap_penalty`, `/entropy` | the loss and its terms, with their coefficients |
| `objective/kept` | fraction of tokens that every mask keeps |
| `objective/clamped_log_ratios` | log-ratios beyond ±20, each counted once |
| `clip/high`, `clip/low` | fraction of tokens cut on each side, by a surrogate or by a ratio clip that is a mask |
| `mask/<name>/kept`, `/dropped`, `/dropped_<threshold>` | fractions; the last where a mask has several thresholds |
| `mask/<name>/dropped_entropy`, `/dropped_probability`, `/dropped_gradient_mass` | means over dropped tokens (nats; p); Σ abs(A)(1−p) dropped / total |
| `mask/<name>/<threshold>` | its current value |
| `weight/mean`, `/max` | of the correction weight, over kept tokens |
| `controller/<mask>/bound`, `/acceptance`, `/target` | of a threshold that follows a drop rate; `controller/bound` … if it is the only one |
| `bias/delta_j` | Σ c·r·A·(1−ρ) (stability study eq. 10, on rollout samples) |
| `bias/delta_j_mask` | Σ c·r·A·(k·w−1) (eq. 35) |
| `bias/j` | Σ A·(φ−1), φ = δ where o < 0.1: the applied distortion, or a nominal one of δ = 2 (eq. 23) |

A mean over no tokens and a number that is not finite are left out. Where the batch has no recomputed o, p stands in its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rollkeel.objectives.reductions import Reductions
from rollkeel.objectives.surrogates import SurrogateValue
from rollkeel.objectives.terms import Terms, beyond_limit, bounded_exp, wide
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
    surrogate: SurrogateValue
    terms_of_loss: Mapping[str, torch.Tensor]
    loss: torch.Tensor


def measure(objective: Objective, tokens: TokenBatch, parts: Parts) -> dict[str, float]:
    """All metrics of the module's table that this objective and batch have."""
    scalars = Reductions()
    count = torch.tensor(float(tokens.logprobs.numel()), device=tokens.logprobs.device)
    scalars.add("loss/total", parts.loss)
    for name, term in parts.terms_of_loss.items():
        scalars.add(f"loss/{name}", term)
    scalars.add("objective/clamped_log_ratios", _clamped(objective, tokens, parts.terms))
    if parts.surrogate.clipped_high is not None and parts.surrogate.clipped_low is not None:
        scalars.add("clip/high", parts.surrogate.clipped_high.sum(), count)
        scalars.add("clip/low", parts.surrogate.clipped_low.sum(), count)
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
    logprobs = parts.terms.logprobs.detach().clamp(max=0.0)
    mass = parts.terms.advantages.abs() * -torch.expm1(logprobs)
    features = {"dropped_probability": logprobs.exp(), "dropped_gradient_mass": mass}
    if tokens.entropy is not None:
        features["dropped_entropy"] = wide(tokens.entropy.detach())
    total = mass.sum()
    table = torch.stack([f.to(logprobs.dtype) for f in features.values()])
    dropped = (~torch.stack(parts.keeps)).to(logprobs.dtype)
    sums, lost = table @ dropped.T, dropped.sum(1)
    for i, mask in enumerate(objective.masks):
        name = f"mask/{mask.name}"
        scalars.add(f"{name}/dropped", lost[i], count)
        scalars.add(f"{name}/kept", count - lost[i], count)
        for j, feature in enumerate(features):
            scalars.add(f"{name}/{feature}", sums[j, i], total if feature == "dropped_gradient_mass" else lost[i])
        for key, value in (mask.counts(parts.terms) if mask.counts else {}).items():
            scalars.add(f"{name}/{key}", value)
        for rule in mask.rules if len(mask.rules) > 1 else ():
            cut = (~rule.keep(parts.terms)).sum()
            scalars.add(f"{name}/dropped_{rule.parameter}", cut, count)
            if rule.parameter in ("clip_high", "clip_low"):
                scalars.add(rule.parameter.replace("_", "/"), cut, count)


def _add_bias(scalars: Reductions, objective: Objective, tokens: TokenBatch, parts: Parts) -> None:
    """The stability study's biases, from detached log-probs."""
    p = parts.terms.logprobs.detach()
    old = p if tokens.old_logprobs is None else wide(tokens.old_logprobs.detach())
    push = tokens.coefficients.detach() * parts.terms.advantages
    if tokens.old_logprobs is not None:
        push = push * bounded_exp(p - old)
    rho = bounded_exp(old - wide(tokens.rollout_logprobs.detach()))
    scalars.add("bias/delta_j", (push * (1.0 - rho)).sum())
    factor = torch.ones_like(push) if parts.weight is None else parts.weight
    factor = factor if parts.keep is None else torch.where(parts.keep, factor, 0.0)
    scalars.add("bias/delta_j_mask", (push * (factor - 1.0)).sum())
    applied = [f.parameters for f in objective.factors if f.name == "distort_low_probability"]
    distortion = applied[0] if applied else NOMINAL_DISTORTION
    rare = old < math.log(distortion["threshold"])
    scalars.add("bias/j", (distortion["delta"] - 1.0) * torch.where(rare, parts.terms.advantages, 0.0).sum())


def _clamped(objective: Objective, tokens: TokenBatch, terms: Terms) -> torch.Tensor:
    """Clamps among the log-ratios this objective exponentiates, each counted once."""
    anchor = objective.anchor
    total = beyond_limit(terms.log_ratio)
    pairs = {(anchor.target, anchor.reference)} if objective.masks else set()
    if objective.weight and objective.weight.level == "sequence" and tokens.old_logprobs is not None:
        gap = wide(tokens.old_logprobs.detach()) - wide(tokens.rollout_logprobs.detach())
        total = total + beyond_limit(terms.per_sequence(terms.sequence_sum(gap)))
    elif objective.weight:
        pairs.add(("old_logprobs", "rollout_logprobs"))
    for target, reference in sorted(pairs - {("logprobs", anchor.base)}):
        total = total + beyond_limit(wide(getattr(tokens, target)) - wide(getattr(tokens, reference)))
    if tokens.ref_logprobs is not None and objective.kl_coefficient > 0 and objective.kl_estimator == "k3":
        total = total + beyond_limit(terms.logprobs - wide(tokens.ref_logprobs))
    return total


def _thresholds(objective: Objective) -> dict[str, float]:
    """Current thresholds and what is known about the controllers among them; nothing here is on a device."""
    found: dict[str, float | None] = {}
    controllers: dict[str, Controller] = {}
    for mask in objective.masks:
        found.update({f"mask/{mask.name}/{key}": float(value) for key, value in mask.parameters.items()})
        for rule in mask.rules:
            found[f"mask/{mask.name}/{rule.parameter}"] = rule.threshold.value
    for name, rule in objective.rules():
        if isinstance(rule.threshold, Controller):
            several = sum(other == name for other, _ in objective.rules()) > 1
            controllers[f"{name}_{rule.parameter}" if several else name] = rule.threshold
    for name, controller in controllers.items():
        for prefix in {f"controller/{name}", "controller" if len(controllers) == 1 else f"controller/{name}"}:
            found[f"{prefix}/bound"] = controller.value
            found[f"{prefix}/acceptance"] = controller.acceptance
            found[f"{prefix}/target"] = controller.target
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}
