"""Named objectives of the KPop blog, the Ring-1T report and the stability study: each a few lines that put parts together.

Common keyword arguments of all recipes: `aggregate` (token_mean, sequence_mean, sequence_sum, constant_length(n)),
`denominator` (original, kept), `perturb` (a list of perturbations), `kl_coefficient` γ ≥ 0, `kl_estimator` (see `kl`),
`entropy_coefficient` η ≥ 0, `allow_double_correction`. The thresholds of masks and clips that drop also take `{drop_rate: 0.01}`, see
`options.threshold`. All raise `BadInput` for a wrong value. p, o, q: training policy now, at the start of the batch, and
the sampler; r = p/o, ρ = o/q, u = p/q.
"""

from __future__ import annotations

from typing import Any

from rollkeel.errors import BadInput
from rollkeel.objectives import masks, surrogates, weights
from rollkeel.objectives.assembly import assemble
from rollkeel.objectives.objective import Objective
from rollkeel.objectives.options import choice, number, starting_at, whole
from rollkeel.objectives.registry import register
from rollkeel.objectives.terms import DECOUPLED, OLD, ROLLOUT

KPOP_MODES = ("decoupled", "rollout", "mask_only")


@register("grpo")
def grpo(*, clip_low: Any = 0.2, clip_high: Any = 0.2, aggregate: str = "sequence_mean", **common: Any) -> Objective:
    """GRPO: PPO-clip on r = p/o, blind to the gap between engines (Shao et al. 2024; stability study eqs. 1–3).

    Gradient coefficient of A·∇log p: r, and 0 where A > 0, r > 1+clip_high or A < 0, r < 1−clip_low.
    """
    return _ppo("grpo", clip_low, clip_high, aggregate, common)


@register("dapo")
def dapo(*, clip_low: Any = 0.2, clip_high: Any = 0.28, aggregate: str = "token_mean", **common: Any) -> Objective:
    """DAPO: GRPO with a higher upper clip and a mean over tokens (Yu et al. 2025, eq. 8).

    Gradient coefficient of A·∇log p: as `grpo`. Its dynamic sampling and soft overlong penalty belong to collecting and
    rewards: `rollout.zero_variance` and `reward.overlong` of a config.
    """
    return _ppo("dapo", clip_low, starting_at(0.28, clip_high), aggregate, common)


@register("dr_grpo")
def dr_grpo(
    *,
    length: int | None = None,
    clip_low: Any = 0.2,
    clip_high: Any = 0.2,
    aggregate: str | None = None,
    **common: Any,
) -> Objective:
    """Dr. GRPO: no division by the response's length or the group's std (Liu et al. 2025): A = R − mean.

    Gradient coefficient of A·∇log p: as `grpo`. `length` (1024) is the constant in the place of |y|, usually max_new_tokens;
    it gives `aggregate` = constant_length(length), so only one of the two is set.
    """
    if length is not None and aggregate is not None:
        raise BadInput(f"dr_grpo.length: aggregate={aggregate} has no such constant, got {length}; set one of the two")
    length = whole("dr_grpo.length", 1024 if length is None else length, at_least=1)
    aggregate = f"constant_length({length})" if aggregate is None else aggregate
    return _ppo("dr_grpo", clip_low, clip_high, aggregate, common, advantage="dr_grpo")


@register("tis")
def tis(
    *,
    cap: float = 2.0,
    clip_low: Any = 0.2,
    clip_high: Any = 0.2,
    aggregate: str = "sequence_mean",
    **common: Any,
) -> Objective:
    """Truncated importance sampling: PPO-clip on r, every token weighted by min(ρ, cap) (Yao et al. 2025).

    Gradient coefficient of A·∇log p: min(ρ, cap)·r inside the PPO clip, else 0. Drops nothing.
    """
    cap = number("tis.cap", cap, above=0)
    return assemble(
        "tis",
        DECOUPLED,
        surrogates.ppo_clip(clip_low, clip_high),
        weight=weights.mismatch(cap),
        aggregate=aggregate,
        options={"cap": cap, "clip_low": clip_low, "clip_high": clip_high},
        common=common,
    )


MIS_CAPS = {"token": 2.0, "sequence": 2.0, "geometric": 1.001}


@register("mis")
def mis(
    *,
    cap: Any = None,
    level: str = "token",
    weight: str = "token",
    clip_low: Any = 0.2,
    clip_high: Any = 0.2,
    aggregate: str = "sequence_mean",
    **common: Any,
) -> Objective:
    """Masked importance sampling: keep ρ ≤ cap, weight kept tokens by ρ (Liu et al. 2025, "When speed kills stability").

    `level`: what is compared with `cap` (2; 1.001 for geometric): ρ of the token, its product over the sequence, or the
    product's geometric mean; the latter two drop whole sequences. `weight`: ρ of the token, or of the `sequence`.
    Gradient coefficient of A·∇log p: ρ·r where kept and inside the PPO clip, else 0.
    """
    own = MIS_CAPS[choice("mis.level", level, tuple(MIS_CAPS))]
    cap = own if cap is None else starting_at(own, cap)
    return assemble(
        "mis",
        DECOUPLED,
        surrogates.ppo_clip(clip_low, clip_high),
        masks.ratio_cap("mis", cap, level),
        weight=weights.mismatch(level=choice("mis.weight", weight, ("token", "sequence"))),
        aggregate=aggregate,
        options={"cap": cap, "level": level, "weight_level": weight, "clip_low": clip_low, "clip_high": clip_high},
        common=common,
    )


@register("icepop")
def icepop(
    *,
    low: Any = 0.5,
    high: Any = 5.0,
    clip_low: Any = 0.2,
    clip_high: Any = 0.2,
    aggregate: str = "sequence_mean",
    **common: Any,
) -> Objective:
    """IcePop: keep low ≤ ρ ≤ high, weight kept tokens by ρ = o/q (Ring-1T report, eqs. 1–2; its α and β).

    Gradient coefficient of A·∇log p: ρ·r inside the band and the PPO clip, else 0. The paper does not give the clip's ε.
    """
    return assemble(
        "icepop",
        DECOUPLED,
        surrogates.ppo_clip(clip_low, clip_high),
        masks.ratio_band("icepop", low, high),
        weight=weights.mismatch(),
        aggregate=aggregate,
        options={"low": low, "high": high, "clip_low": clip_low, "clip_high": clip_high},
        common=common,
    )


@register("kpop")
def kpop(
    *,
    phi: Any = 0.1,
    mode: str = "decoupled",
    clip_low: Any = 0.2,
    clip_high: Any = 0.2,
    weight_cap: float | None = None,
    cap: float | None = None,
    aggregate: str = "sequence_mean",
    **common: Any,
) -> Objective:
    """KPop: keep max(D_B(a‖b), D_B(b‖a)) ≤ φ, the binary KL at the sampled token (KPop blog; weight as its public code).

    * `mode="decoupled"`: a, b = o, q; PPO-clip on r = p/o; kept tokens weigh ρ = o/q, at most `weight_cap` when given.
      Gradient coefficient of A·∇log p: ρ·r where kept and inside the PPO clip, else 0.
    * `mode="mask_only"`: the same mask and clip with weight 1.
    * `mode="rollout"`: a, b = p, q; S = u·A with u = p/q, at most `cap` when given; no PPO clip, no recomputed o.
      A `weight_cap` here asks for ρ = o/q on top of p/q and raises unless `allow_double_correction`.

    Public ports disagree on φ (0.1, 2.0), so it is part of every metrics row as `mask/kpop/phi`.
    """
    mode = choice("kpop.mode", mode, KPOP_MODES)
    rollout = mode == "rollout"
    clip = {"clip_low": clip_low, "clip_high": clip_high}
    if mode == "mask_only" and weight_cap is not None:
        raise BadInput(f"kpop.weight_cap: mode=mask_only has no weight to cap, got {weight_cap}; use mode=decoupled")
    if not rollout and cap is not None:
        raise BadInput(
            f"kpop.cap: bounds p/q of mode=rollout, got {cap} with mode={mode}; use weight_cap or mode=rollout"
        )
    if rollout and clip != {"clip_low": 0.2, "clip_high": 0.2}:
        raise BadInput(f"kpop: mode=rollout has no PPO clip, got clip_low={clip_low}, clip_high={clip_high}; use cap")
    weighted = mode == "decoupled" or (rollout and weight_cap is not None)
    return assemble(
        "kpop",
        ROLLOUT if rollout else DECOUPLED,
        surrogates.ratio(cap) if rollout else surrogates.ppo_clip(**clip),
        masks.binary_kl_bound("kpop", phi),
        weight=weights.mismatch(weight_cap) if weighted else None,
        aggregate=aggregate,
        options={"phi": phi, "mode": mode, "weight_cap": weight_cap, **({"cap": cap} if rollout else clip)},
        common=common,
    )


@register("gspo")
def gspo(*, clip_low: Any = 3e-4, clip_high: Any = 4e-4, aggregate: str = "sequence_mean", **common: Any) -> Objective:
    """GSPO: PPO-clip on the sequence ratio s = exp(mean log r) (Zheng et al. 2025; stability study eq. 16 and §4.1).

    Gradient coefficient of A·∇log p: s for every token of the sequence, 0 where A > 0, s > 1+clip_high or A < 0,
    s < 1−clip_low. One advantage per sequence is assumed.
    """
    return assemble(
        "gspo",
        OLD,
        surrogates.sequence_ppo_clip(clip_low, clip_high),
        aggregate=aggregate,
        options={"clip_low": clip_low, "clip_high": clip_high},
        common=common,
    )


@register("gmpo")
def gmpo(*, clip: Any = 0.4, aggregate: str = "sequence_mean", **common: Any) -> Objective:
    """GMPO: the geometric mean of r over the sequence, each token clipped to [e^−clip, e^clip] (Zhao et al. 2025, eq. 4).

    Gradient coefficient of A·∇log p: the clipped geometric mean, for tokens that are not cut themselves; else 0.
    """
    return assemble(
        "gmpo",
        OLD,
        surrogates.geometric_ppo_clip(clip, clip),
        aggregate=aggregate,
        options={"clip": clip},
        common=common,
    )


def _ppo(name: str, clip_low: Any, clip_high: Any, aggregate: str, common: Any, advantage: str = "grpo") -> Objective:
    return assemble(
        name,
        OLD,
        surrogates.ppo_clip(clip_low, clip_high),
        aggregate=aggregate,
        advantage=advantage,
        options={"clip_low": clip_low, "clip_high": clip_high},
        common=common,
    )
