"""Rollout-anchored objectives of the DPPO paper: the ratio is u = p/q, the trust region a mask, no recomputed o by default.

    gradient = Σ M_t · min(u, C) · A · ∇log p   (eq. 23), C = `cap`, M_t the mask; a sum over tokens, A = R − mean.

`preset="stability"` has the paper's defaults of Appendix D, `preset="scaling"` those of Appendix F; an option given
explicitly wins. None stands for the preset's value. Common options as in `recipes`.
"""

from __future__ import annotations

from typing import Any

from rollkeel.objectives import masks, surrogates
from rollkeel.objectives.assembly import assemble
from rollkeel.objectives.masks import Mask
from rollkeel.objectives.objective import Objective
from rollkeel.objectives.options import choice, starting_at
from rollkeel.objectives.registry import register
from rollkeel.objectives.surrogates import Surrogate
from rollkeel.objectives.terms import MASK_OLD, ROLLOUT

SCALING_CAP = 5.0
PRESETS = ("stability", "scaling")
AGGREGATE = "sequence_sum"


@register("pg_is")
def pg_is(
    *, cap: float | None = None, preset: str = "stability", aggregate: str = AGGREGATE, **common: Any
) -> Objective:
    """PG-IS: importance-sampled policy gradient without a trust region (DPPO paper Appendix D). M = 1, C = ∞.

    Gradient coefficient of A·∇log p: u. Drops nothing.
    """
    return _rollout("pg_is", (), cap, None, preset, aggregate, {}, common)


@register("pg_tis")
def pg_tis(
    *, cap: float | None = None, preset: str = "stability", aggregate: str = AGGREGATE, **common: Any
) -> Objective:
    """PG-TIS, which the DPPO paper also calls CISPO: stop_grad(min(u, C))·log p·A, C = 3 (Appendix D). M = 1.

    Gradient coefficient of A·∇log p: min(u, C). Drops nothing.
    """
    cap = _by_preset("pg_tis", preset, cap, 3.0, SCALING_CAP)
    surrogate = surrogates.weighted_logprob(high=cap)
    return _rollout("pg_tis", (), cap, None, preset, aggregate, {}, common, surrogate=surrogate)


@register("grpo_clip_higher")
def grpo_clip_higher(
    *,
    clip_low: Any = 0.2,
    clip_high: Any = None,
    cap: float | None = None,
    preset: str = "stability",
    aggregate: str = AGGREGATE,
    **common: Any,
) -> Objective:
    """GRPO-ClipHigher on the rollout ratio: PPO's clip of u as a mask, ε 0.2/0.28 (scaling 0.27) (DPPO paper App. D, F).

    Gradient coefficient of A·∇log p: min(u, C), 0 where A > 0, u > 1+clip_high or A < 0, u < 1−clip_low.
    """
    clip_high = _by_preset("grpo_clip_higher", preset, clip_high, 0.28, 0.27)
    mask = masks.ratio_clip("grpo_clip_higher", clip_low, clip_high)
    options = {"clip_low": clip_low, "clip_high": clip_high}
    return _rollout("grpo_clip_higher", (mask,), cap, None, preset, aggregate, options, common)


@register("minirl")
def minirl(
    *,
    clip_low: Any = 0.2,
    clip_high: Any = None,
    cap: float | None = None,
    preset: str = "stability",
    aggregate: str = AGGREGATE,
    **common: Any,
) -> Objective:
    """MiniRL: ratio u = p/q, PPO's clip as a mask on r = p/o (Zheng et al. 2025; DPPO paper Appendix D). C = ∞.

    Gradient coefficient of A·∇log p: u, 0 where A > 0, r > 1+clip_high or A < 0, r < 1−clip_low.
    """
    return _minirl("minirl", clip_low, clip_high, cap, None, preset, aggregate, common)


@register("minirl_tis")
def minirl_tis(
    *,
    clip_low: Any = 0.2,
    clip_high: Any = None,
    cap: float | None = None,
    preset: str = "stability",
    aggregate: str = AGGREGATE,
    **common: Any,
) -> Objective:
    """MiniRL with u capped at C = 3 (DPPO paper Appendix D): gradient coefficient min(u, C) under the same mask."""
    return _minirl("minirl_tis", clip_low, clip_high, cap, 3.0, preset, aggregate, common)


@register("dppo_binary_tv")
def dppo_binary_tv(
    *,
    delta: Any = None,
    anchor: str = "rollout",
    cap: float | None = None,
    preset: str = "stability",
    aggregate: str = AGGREGATE,
    **common: Any,
) -> Objective:
    """DPPO-Binary-TV: drop updates that move away where |p − q| > δ (DPPO paper eqs. 12–13). δ 0.15 (scaling 0.2; LoRA 0.15).

    Gradient coefficient of A·∇log p: min(u, C), 0 where (A > 0, u > 1) or (A < 0, u < 1) and the divergence is > δ.
    `anchor="old"`: divergence and direction between o and p (the ablation of Fig. 4; it needs `old_logprobs`).
    """
    delta = _by_preset("dppo_binary_tv", preset, delta, 0.15, 0.2)
    return _dppo("binary_tv", delta, anchor, cap, None, preset, aggregate, common)


@register("dppo_binary_kl")
def dppo_binary_kl(
    *,
    delta: Any = None,
    anchor: str = "rollout",
    cap: float | None = None,
    preset: str = "stability",
    aggregate: str = AGGREGATE,
    **common: Any,
) -> Objective:
    """DPPO-Binary-KL: as `dppo_binary_tv` with D_B(q‖p) > δ (DPPO paper eq. 14). δ 0.05."""
    delta = _by_preset("dppo_binary_kl", preset, delta, 0.05, 0.05)
    return _dppo("binary_kl", delta, anchor, cap, None, preset, aggregate, common)


@register("dppo_topk_tv")
def dppo_topk_tv(
    *,
    delta: Any = 0.2,
    k: int = 20,
    other: bool = True,
    anchor: str = "rollout",
    cap: float | None = None,
    preset: str = "scaling",
    aggregate: str = AGGREGATE,
    **common: Any,
) -> Objective:
    """DPPO-TopK-TV: as `dppo_binary_tv` with the TV over the rollout's K likeliest tokens, the sampled one and the rest.

    DPPO paper eq. 15 and Fig. 10 (K 20, δ 0.2, C 5: scaling experiments only). Eq. 15 as printed leaves the rest out:
    `other=False`; then the divergence can be below the binary one. Needs `topk_logprobs` and `rollout_topk_logprobs`.
    """
    return _dppo(
        "topk_tv", starting_at(0.2, delta), anchor, cap, SCALING_CAP, preset, aggregate, common, k=k, other=other
    )


@register("dppo_topk_kl")
def dppo_topk_kl(
    *,
    delta: Any = 0.05,
    k: int = 20,
    other: bool = True,
    anchor: str = "rollout",
    cap: float | None = None,
    preset: str = "scaling",
    aggregate: str = AGGREGATE,
    **common: Any,
) -> Objective:
    """DPPO-TopK-KL: as `dppo_topk_tv` with KL(q‖p) over the same bins (DPPO paper eq. 16). δ 0.05."""
    return _dppo(
        "topk_kl", starting_at(0.05, delta), anchor, cap, SCALING_CAP, preset, aggregate, common, k=k, other=other
    )


@register("mask_negative")
def mask_negative(
    *,
    delta: Any = 0.5,
    anchor: str = "rollout",
    cap: float | None = None,
    preset: str = "stability",
    aggregate: str = AGGREGATE,
    **common: Any,
) -> Objective:
    """The smallest mask that stabilises PG-IS: drop A < 0 where q − p ≥ δ (DPPO paper §5.3, Fig. 5). At equality too.

    Gradient coefficient of A·∇log p: min(u, C) where kept. The failing controls: `delta=0.8`, and `anchor="old"` (o − p ≥ δ).
    """
    mask = masks.fallen("mask_negative", delta)
    return _rollout("mask_negative", (mask,), cap, None, preset, aggregate, {"delta": delta}, common, anchor)


@register("relax_clip")
def relax_clip(
    *,
    alpha: float = 0.1,
    side: str = "both",
    clip_low: Any = 0.2,
    clip_high: Any = None,
    cap: float | None = None,
    preset: str = "stability",
    aggregate: str = AGGREGATE,
    **common: Any,
) -> Objective:
    """`grpo_clip_higher` without a clip for rare tokens: ε = ∞ where q < α (DPPO paper §6, Figs. 6–7).

    `side`: relax both, only the high or only the low clip. α = 0 is `grpo_clip_higher`.
    Gradient coefficient of A·∇log p: min(u, C) where kept.
    """
    clip_high = _by_preset("relax_clip", preset, clip_high, 0.28, 0.27)
    mask = masks.ratio_clip("relax_clip", clip_low, clip_high, relax_below=alpha, relax_side=side)
    options = {"alpha": alpha, "side": side, "clip_low": clip_low, "clip_high": clip_high}
    return _rollout("relax_clip", (mask,), cap, None, preset, aggregate, options, common)


def _minirl(
    name: str,
    clip_low: Any,
    clip_high: Any,
    cap: float | None,
    own_cap: float | None,
    preset: str,
    aggregate: str,
    common: Any,
) -> Objective:
    clip_high = _by_preset(name, preset, clip_high, 0.28, 0.27)
    mask = masks.ratio_clip(name, clip_low, clip_high)
    options = {"clip_low": clip_low, "clip_high": clip_high}
    return _rollout(name, (mask,), cap, own_cap, preset, aggregate, options, common, anchor="old")


def _dppo(
    kind: str,
    delta: Any,
    anchor: str,
    cap: float | None,
    own_cap: float | None,
    preset: str,
    aggregate: str,
    common: Any,
    **topk: Any,
) -> Objective:
    name = f"dppo_{kind}"
    mask = masks.divergence(name, kind, delta, **topk)
    return _rollout(name, (mask,), cap, own_cap, preset, aggregate, {"delta": delta, **topk}, common, anchor)


def _rollout(
    name: str,
    own_masks: tuple[Mask, ...],
    cap: float | None,
    own_cap: float | None,
    preset: str,
    aggregate: str,
    options: dict[str, Any],
    common: Any,
    anchor: str = "rollout",
    surrogate: Surrogate | None = None,
) -> Objective:
    """u·A under `own_masks`; C is `cap`, else the preset's: 5 for scaling, `own_cap` (None is ∞) for stability."""
    chosen = {"rollout": ROLLOUT, "old": MASK_OLD}[choice(f"{name}.anchor", anchor, ("rollout", "old"))]
    cap = _by_preset(name, preset, cap, own_cap, SCALING_CAP)
    return assemble(
        name,
        chosen,
        surrogate or surrogates.ratio(cap),
        *own_masks,
        aggregate=aggregate,
        advantage="dr_grpo",
        options={**options, "cap": cap, "preset": preset},
        common=common,
    )


def _by_preset(name: str, preset: str, given: Any, stability: Any, scaling: Any) -> Any:
    defaults = scaling if choice(f"{name}.preset", preset, PRESETS) == "scaling" else stability
    return defaults if given is None else starting_at(defaults, given)
