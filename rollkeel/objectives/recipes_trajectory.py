"""Objectives that filter trajectories under high staleness (AC-MIS-PO paper), all rollout-anchored: S = u·A, u = p/q.

Mean over tokens, A = (R − mean)/std. Common options as in `recipes`; `cap` bounds the gradient coefficient at min(u, cap).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rollkeel.errors import BadInput
from rollkeel.objectives import masks, surrogates
from rollkeel.objectives.assembly import assemble
from rollkeel.objectives.masks import Mask
from rollkeel.objectives.objective import Objective
from rollkeel.objectives.options import number, optional_number, starting_at, whole
from rollkeel.objectives.registry import build, register
from rollkeel.objectives.rejection import random_rejection_mask
from rollkeel.objectives.terms import ROLLOUT
from rollkeel.objectives.thresholds import Controller

BOUND_LOW, BOUND_HIGH = math.log(1.0002), math.log(1.01)
"""AC-MIS-PO's b_min and b_max."""


@register("mis_po")
def mis_po(
    *,
    low: Any = 0.5,
    high: Any = 2.0,
    trajectory_low: Any = 0.996,
    trajectory_high: Any = 1.001,
    cap: float | None = None,
    aggregate: str = "token_mean",
    **common: Any,
) -> Objective:
    """MIS-PO: keep tokens with low ≤ u ≤ high, in trajectories whose geometric mean of u is inside its own band (eqs. 1–3).

    Gradient coefficient of A·∇log p: u where both hold, else 0. Not directional.
    """
    band = (0.996, 1.001)
    return _fixed("mis_po", low, high, trajectory_low, trajectory_high, cap, aggregate, common, band)


@register("fixed_at_final_bound")
def fixed_at_final_bound(
    *,
    low: Any = 0.5,
    high: Any = 2.0,
    trajectory_low: Any = 0.9998,
    trajectory_high: Any = 1.0002,
    cap: float | None = None,
    aggregate: str = "token_mean",
    **common: Any,
) -> Objective:
    """`mis_po` at the bound that AC-MIS-PO's controller ends at, the ablation of its Table 2."""
    band = (0.9998, 1.0002)
    return _fixed("fixed_at_final_bound", low, high, trajectory_low, trajectory_high, cap, aggregate, common, band)


@register("ac_mis_po")
def ac_mis_po(
    *,
    low: Any = 0.5,
    high: Any = 2.0,
    acceptance_start: float = 0.4,
    acceptance_end: float = 0.2,
    steps: int = 200,
    momentum: float = 0.9,
    bound_low: float = BOUND_LOW,
    bound_high: float = BOUND_HIGH,
    cap: float | None = None,
    aggregate: str = "token_mean",
    **common: Any,
) -> Objective:
    """AC-MIS-PO: `mis_po` with trajectories kept where |log geometric mean of u| ≤ b_k, b_k from a controller (eqs. 4–8).

    b_0 = `bound_high` = ln 1.01; candidate = the A*-quantile of the batch's |log ρ̄|; b = clip(0.9·b + 0.1·candidate, ln 1.0002,
    ln 1.01), found before it filters that batch; A* falls linearly from 0.4 to 0.2 over 200 batches. The bound is state.
    Gradient coefficient of A·∇log p: u where kept, else 0. Metrics `controller/bound`, `/acceptance`, `/target`.
    """
    name = "ac_mis_po"
    controller = Controller(
        number(f"{name}.acceptance_start", acceptance_start, above=0, at_most=1),
        number(f"{name}.acceptance_end", acceptance_end, above=0, at_most=1),
        whole(f"{name}.steps", steps, at_least=0),
        number(f"{name}.momentum", momentum, at_least=0),
        low=number(f"{name}.bound_low", bound_low, at_least=0),
        high=number(f"{name}.bound_high", bound_high, above=0),
        initial=bound_high,
    )
    options = {
        "low": low,
        "high": high,
        "acceptance_start": acceptance_start,
        "acceptance_end": acceptance_end,
        "steps": steps,
        "momentum": momentum,
        "bound_low": bound_low,
        "bound_high": bound_high,
    }
    own = (masks.ratio_band("token", low, starting_at(2.0, high)), masks.trajectory_bound("trajectory", controller))
    return _filtered(name, own, cap, aggregate, options, common)


@register("m2po")
def m2po(*, tau: float = 0.04, cap: float | None = None, aggregate: str = "token_mean", **common: Any) -> Objective:
    """M2PO: among tokens moving away, drop the largest (log u)² until the mean of the rest is ≤ τ (Zheng et al. 2025).

    Moving away: (A > 0, u > 1) or (A < 0, u < 1); the budget is that of the whole optimizer batch.
    Gradient coefficient of A·∇log p: u where kept, else 0.
    """
    return _filtered("m2po", (masks.second_moment("m2po", tau),), cap, aggregate, {"tau": tau}, common)


@register("random_rejection")
def random_rejection(
    *,
    acceptance: float | None = None,
    like: Any = None,
    seed: int = 0,
    cap: float | None = None,
    aggregate: str = "token_mean",
    **common: Any,
) -> Objective:
    """The control every filter must beat: a random part of the trajectories is rejected, whatever their ratios.

    Exactly round(acceptance·N) of the batch's N trajectories are kept. `acceptance`: a number, or `like`: that of another
    objective on the same batch (a name, or a mapping of name and options; `mis_po` if neither is given): of trajectories
    where it filters those, else of tokens. Gradient coefficient of A·∇log p: u where kept, else 0.
    """
    if acceptance is not None and like is not None:
        raise BadInput(f"random_rejection: expected acceptance or like, got both ({acceptance}, {like!r}); drop one")
    rule = None
    if acceptance is None:
        named = {"name": "mis_po" if like is None else like} if not isinstance(like, Mapping) else dict(like)
        if not isinstance(named.get("name"), str):
            raise BadInput(f"random_rejection.like: expected a name or {{name: …, options}}, got {like!r}")
        rule = build(named.pop("name"), named)
        if not rule.masks:
            raise BadInput(f"random_rejection.like: expected an objective that drops something, got {rule.name}")
    else:
        acceptance = number("random_rejection.acceptance", acceptance, at_least=0, at_most=1)
    mask = random_rejection_mask(acceptance, rule, whole("random_rejection.seed", seed))
    shown = {"acceptance": acceptance, "like": rule.describe() if rule else None, "seed": seed}
    return _filtered("random_rejection", (mask,), cap, aggregate, shown, common)


def _fixed(
    name: str,
    low: Any,
    high: Any,
    trajectory_low: Any,
    trajectory_high: Any,
    cap: Any,
    aggregate: str,
    common: Any,
    band: tuple[float, float],
) -> Objective:
    given = (trajectory_low, trajectory_high)
    own = (
        masks.ratio_band("token", low, starting_at(2.0, high)),
        masks.geometric_band("trajectory", *(starting_at(b, v) for b, v in zip(band, given, strict=True))),
    )
    options = {"low": low, "high": high, "trajectory_low": trajectory_low, "trajectory_high": trajectory_high}
    return _filtered(name, own, cap, aggregate, options, common)


def _filtered(
    name: str,
    own_masks: tuple[Mask, ...],
    cap: float | None,
    aggregate: str,
    options: Mapping[str, Any],
    common: Any,
) -> Objective:
    cap = optional_number(f"{name}.cap", cap, above=0)
    return assemble(
        name,
        ROLLOUT,
        surrogates.ratio(cap),
        *own_masks,
        aggregate=aggregate,
        options={**options, "cap": cap},
        common=common,
    )
