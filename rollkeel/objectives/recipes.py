"""Named objectives: each a few lines that put an anchor, masks, a weight and a surrogate together.

Common keyword arguments of all recipes: `aggregate` (token_mean, sequence_mean, sequence_sum, constant_length(n)),
`kl_coefficient` γ ≥ 0, `kl_estimator` (k1, k2, k3), `entropy_coefficient` η ≥ 0. All raise `BadInput` for a wrong value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollkeel.errors import BadInput
from rollkeel.objectives import masks, surrogates, weights
from rollkeel.objectives.objective import Objective
from rollkeel.objectives.options import choice, flag, nearest, number, optional_number
from rollkeel.objectives.terms import DECOUPLED, OLD, ROLLOUT

KPOP_MODES = ("decoupled", "rollout", "mask_only")


def grpo(
    *, clip_low: float = 0.2, clip_high: float = 0.2, aggregate: str = "sequence_mean", **common: Any
) -> Objective:
    """GRPO: PPO-clip on r = p/o, blind to the gap between engines (Shao et al. 2024; stability study eqs. 1–3).

    Gradient coefficient of A·∇log p: r, and 0 where A > 0, r > 1+clip_high or A < 0, r < 1−clip_low.
    """
    clip = _clip("grpo", clip_low, clip_high)
    return Objective(
        name="grpo",
        anchor=OLD,
        surrogate=surrogates.ppo_clip(**clip),
        aggregate=aggregate,
        parameters=clip,
        **_common("grpo", common),
    )


def icepop(
    *,
    low: float = 0.5,
    high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregate: str = "sequence_mean",
    **common: Any,
) -> Objective:
    """IcePop: keep low ≤ ρ ≤ high, weight kept tokens by ρ = o/q (Ring-1T report, eqs. 1–2; its α and β).

    Gradient coefficient of A·∇log p: ρ·r inside the band and the PPO clip, else 0. The paper does not give the clip's ε.
    """
    band = {"low": number("icepop.low", low, at_least=0), "high": number("icepop.high", high, at_least=0)}
    if band["low"] > band["high"]:
        raise BadInput(f"icepop: expected low ≤ high, got low={low} and high={high}")
    clip = _clip("icepop", clip_low, clip_high)
    return Objective(
        name="icepop",
        anchor=DECOUPLED,
        surrogate=surrogates.ppo_clip(**clip),
        masks=(masks.ratio_band("icepop", **band),),
        weight=weights.mismatch(),
        aggregate=aggregate,
        parameters={**band, **clip},
        **_common("icepop", common),
    )


def kpop(
    *,
    phi: float = 0.1,
    mode: str = "decoupled",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weight_cap: float | None = None,
    cap: float | None = None,
    aggregate: str = "sequence_mean",
    allow_double_correction: bool = False,
    **common: Any,
) -> Objective:
    """KPop: keep max(D_B(a‖b), D_B(b‖a)) ≤ φ, the binary KL at the sampled token (KPop blog; weight as its public code).

    * `mode="decoupled"`: a, b = o, q; PPO-clip on r = p/o; kept tokens weigh ρ = o/q, at most `weight_cap` when given.
    * `mode="mask_only"`: the same mask and clip with weight 1.
    * `mode="rollout"`: a, b = p, q; S = u·A with u = p/q, at most `cap` when given; no PPO clip, no recomputed o.
      A `weight_cap` here asks for ρ = o/q on top of p/q and raises unless `allow_double_correction`.

    Public ports disagree on φ (0.1, 2.0), so it is part of every metrics row as `mask/kpop/phi`.
    """
    mode = choice("kpop.mode", mode, KPOP_MODES)
    phi = number("kpop.phi", phi, above=0)
    weight_cap = optional_number("kpop.weight_cap", weight_cap, above=0)
    cap = optional_number("kpop.cap", cap, above=0)
    clip = _clip("kpop", clip_low, clip_high)
    if mode == "mask_only" and weight_cap is not None:
        raise BadInput(f"kpop.weight_cap: mode=mask_only has no weight to cap, got {weight_cap}; use mode=decoupled")
    if mode != "rollout" and cap is not None:
        raise BadInput(
            f"kpop.cap: bounds p/q of mode=rollout, got {cap} with mode={mode}; use weight_cap or mode=rollout"
        )
    if mode == "rollout" and clip != {"clip_low": 0.2, "clip_high": 0.2}:
        raise BadInput(f"kpop: mode=rollout has no PPO clip, got clip_low={clip_low}, clip_high={clip_high}; use cap")
    rollout = mode == "rollout"
    weighted = mode == "decoupled" or (rollout and weight_cap is not None)
    return Objective(
        name="kpop",
        anchor=ROLLOUT if rollout else DECOUPLED,
        surrogate=surrogates.ratio(cap) if rollout else surrogates.ppo_clip(**clip),
        masks=(masks.binary_kl_bound("kpop", phi),),
        weight=weights.mismatch(weight_cap) if weighted else None,
        aggregate=aggregate,
        allow_double_correction=flag("kpop.allow_double_correction", allow_double_correction),
        parameters={"phi": phi, "mode": mode, "weight_cap": weight_cap, **({"cap": cap} if rollout else clip)},
        **_common("kpop", common),
    )


RECIPES: Mapping[str, Callable[..., Objective]] = {"grpo": grpo, "icepop": icepop, "kpop": kpop}
_TRAINER_OPTIONS = ("kl_coefficient", "kl_estimator", "entropy_coefficient")


def build(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    kl_coefficient: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coefficient: float = 0.0,
) -> Objective:
    """The recipe `name` with `options` (its keyword arguments), as a config names it.

    Raises `BadInput` for an unknown recipe or option (naming the nearest), a wrong type or a value out of range.
    """
    if name not in RECIPES:
        raise BadInput(f"objective.name {name!r}: unknown{nearest(name, list(RECIPES))}")
    recipe = RECIPES[name]
    known = list(recipe.__kwdefaults__ or {})
    for option in options or {}:
        if option in _TRAINER_OPTIONS:
            raise BadInput(f"objective.{option}: not an option of {name}; set train.{option}")
        if option not in known:
            raise BadInput(f"objective.{option}: not an option of {name}{nearest(option, known)}")
    return recipe(
        **(options or {}),
        kl_coefficient=kl_coefficient,
        kl_estimator=kl_estimator,
        entropy_coefficient=entropy_coefficient,
    )


def _clip(recipe: str, clip_low: float, clip_high: float) -> dict[str, float]:
    return {
        "clip_low": number(f"{recipe}.clip_low", clip_low, at_least=0, at_most=1),
        "clip_high": number(f"{recipe}.clip_high", clip_high, at_least=0),
    }


def _common(recipe: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """KL and entropy options of every recipe, checked."""
    for option in options:
        if option not in _TRAINER_OPTIONS:
            known = [*(RECIPES[recipe].__kwdefaults__ or {}), *_TRAINER_OPTIONS]
            raise BadInput(f"objective {recipe}: {option} is not one of its options{nearest(option, known)}")
    checked = dict(options)
    for option in ("kl_coefficient", "entropy_coefficient"):
        if option in checked:
            checked[option] = number(f"{recipe}.{option}", checked[option], at_least=0)
    return checked
