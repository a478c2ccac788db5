"""Perturbations of an objective: detached factors on S that should not be there, to study what they do (stability study)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rollkeel.errors import BadInput
from rollkeel.objectives import draws
from rollkeel.objectives.draws import Draw
from rollkeel.objectives.options import named, number, whole
from rollkeel.objectives.terms import Terms, wide


@dataclass(frozen=True)
class Factor:
    """A named multiplier of the surrogate."""

    name: str
    multiplier: Callable[[Terms], torch.Tensor]
    """Terms → `[T]` float, detached."""
    parameters: Mapping[str, float] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    draw: Draw | None = None
    """The counter behind random multipliers; advances once per optimizer batch."""


def distort_low_probability(delta: float = 2.0, threshold: float = 0.1) -> Factor:
    """S times δ where o < threshold (stability study eqs. 17–18; its δ are 3, 2, 1.2 and 0)."""
    delta = number("distort_low_probability.delta", delta, at_least=0)
    threshold = number("distort_low_probability.threshold", threshold, above=0, at_most=1)
    limit = math.log(threshold)

    def multiplier(terms: Terms) -> torch.Tensor:
        assert terms.tokens.old_logprobs is not None  # in `needs`
        rare = terms.tokens.old_logprobs.detach() < limit
        return torch.ones_like(wide(terms.logprobs.detach())).masked_fill(rare, delta)

    parameters = {"delta": delta, "threshold": threshold}
    return Factor("distort_low_probability", multiplier, parameters, frozenset({"old_logprobs"}))


def weight_noise(sigma: float = 0.2, seed: int = 0) -> Factor:
    """S times ξ ~ N(1, σ²), independent per token and batch (stability study eq. 21).

    Keyed by seed, batch count, rollout id and position, so no packing or rank changes a draw.
    """
    sigma = number("weight_noise.sigma", sigma, at_least=0)
    draw = Draw(whole("weight_noise.seed", seed))

    def multiplier(terms: Terms) -> torch.Tensor:
        ids, index = draws.trajectory_ids(terms.tokens), draws.positions(terms.tokens)
        return (1.0 + sigma * draws.normal(draw.key, ids, index)).to(wide(terms.logprobs).dtype)

    return Factor("weight_noise", multiplier, {"sigma": sigma, "seed": float(seed)}, draw=draw)


PERTURBATIONS: dict[str, Callable[..., Factor]] = {
    "distort_low_probability": distort_low_probability,
    "weight_noise": weight_noise,
}


def perturbations(entries: Sequence[Any]) -> tuple[Factor, ...]:
    """Factors from a config's list of names or `{name: {options}}`. Raises `BadInput` naming the nearest."""
    if isinstance(entries, (str, Mapping)) or not isinstance(entries, Sequence):
        raise BadInput(f"perturb: expected a list such as [{{distort_low_probability: {{delta: 2}}}}], got {entries!r}")
    return tuple(e if isinstance(e, Factor) else named("perturb", e, PERTURBATIONS) for e in entries)
