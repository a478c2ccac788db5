"""An objective from plain config values, for people who invent their own.

objective:
  name: composed
  anchor: decoupled
  masks: [{binary_kl_bound: {phi: 0.2}}, {trajectory_bound: {bound: {drop_rate: 0.1}}}]
  weight: {mismatch: {cap: 2}}
  surrogate: {ppo_clip: {clip_high: 0.28}}
  aggregate: token_mean
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rollkeel.errors import BadInput
from rollkeel.objectives import masks as mask_module
from rollkeel.objectives.assembly import assemble
from rollkeel.objectives.covariance import clip_cov, kl_cov
from rollkeel.objectives.masks import Mask
from rollkeel.objectives.objective import Objective
from rollkeel.objectives.options import choice, named
from rollkeel.objectives.registry import OTHERS
from rollkeel.objectives.surrogates import SURROGATES, Surrogate
from rollkeel.objectives.terms import ANCHORS
from rollkeel.objectives.weights import WEIGHTS, Weight

MASKS: dict[str, Callable[..., Mask]] = {
    f.__name__: f
    for f in (
        mask_module.ratio_band,
        mask_module.geometric_band,
        mask_module.ratio_cap,
        mask_module.binary_kl_bound,
        mask_module.trajectory_bound,
        mask_module.sequence_kl,
        mask_module.at_most,
        mask_module.ratio_clip,
        mask_module.divergence,
        mask_module.fallen,
        mask_module.second_moment,
        mask_module.top_entropy,
        clip_cov,
    )
}
"""Name in a config → builder; each takes a `name` of its own for its metrics, needed when one kind is used twice."""


def compose(
    name: str = "composed",
    *,
    masks: Sequence[Any] = (),
    weight: Any = None,
    surrogate: Any = "ppo_clip",
    anchor: str = "decoupled",
    aggregate: str = "sequence_mean",
    advantage: str = "grpo",
    gap_penalty: float = 0.0,
    positive_nll: float = 0.0,
    **common: Any,
) -> Objective:
    """Put an objective together by names.

    Args: `masks`: names of `MASKS`, each alone or as `{name: {options}}`; `weight`: `mismatch` or None; `surrogate`: a name of
    `SURROGATES`; `anchor`: old, decoupled, rollout or mask_old. Parts made in Python are taken as they are. Common
    options as in `recipes`. Raises `BadInput` for an unknown name (with the nearest), two masks of one name, or two
    corrections of the same gap.
    """
    if isinstance(masks, str) or not isinstance(masks, Sequence):
        raise BadInput(f"objective.masks: expected a list such as [{{ratio_band: {{low: 0.5}}}}], got {masks!r}")
    return assemble(
        name,
        ANCHORS[choice("objective.anchor", anchor, tuple(ANCHORS))],
        surrogate if isinstance(surrogate, Surrogate) else named("objective.surrogate", surrogate, SURROGATES),
        *(m if isinstance(m, Mask) else named("objective.masks", m, MASKS) for m in masks),
        weight=weight if weight is None or isinstance(weight, Weight) else named("objective.weight", weight, WEIGHTS),
        aggregate=aggregate,
        advantage=advantage,
        gap_penalty=gap_penalty,
        positive_nll=positive_nll,
        options={"options": {"masks": masks, "weight": weight, "surrogate": surrogate}},
        common=common,
    )


SURROGATES["kl_cov"] = kl_cov
OTHERS["composed"] = functools.partial(compose, "composed")
