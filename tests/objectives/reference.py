"""An independent float64 reference of every recipe, in numpy alone: it imports nothing of the package.

Written from the papers' formulas, token by token: what multiplies ∇log p, which tokens are kept, and the detached weight.
Policies: p trains, o is p at the start of the batch, q sampled; r = p/o, ρ = o/q, u = p/q, log-ratios clamped to ±20.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from reference_tokens import Array, Tokens

LIMIT = 20.0


@dataclass(frozen=True)
class Reference:
    """`coefficient`: −d loss / d log p / c (with A in it); `keep`: bool; `weight`: w_t, 1 where a recipe has none."""

    coefficient: Array
    keep: Array
    weight: Array = field(default_factory=lambda: np.ones(()))


def ratio(a: Array, b: Array) -> Array:
    return np.exp(np.clip(a - b, -LIMIT, LIMIT))


def spread(values: Array, ids: Array, how: Callable[[Array], float]) -> Array:
    """One number per sequence, repeated over its tokens."""
    out = np.empty(len(values))
    for sequence in np.unique(ids):
        mine = ids == sequence
        out[mine] = how(values[mine])
    return out


# ---- divergences ---------------------------------------------------------------------------------------------------


def binary_kl(la: Array, lb: Array) -> Array:
    """D_B(a‖b) with (1−b)/(1−a) = 1 + (a−b)/(1−a): no difference of two nearly equal logarithms."""
    rest = -np.expm1(la)
    with np.errstate(divide="ignore", invalid="ignore"):
        gap = np.where(la == lb, 0.0, -np.exp(la) * np.expm1(lb - la) / rest)
        second = np.where(rest == 0, 0.0, -rest * np.log1p(gap))
    return np.maximum(np.exp(la) * (la - lb) + second, 0.0)


def symmetric(la: Array, lb: Array) -> Array:
    return np.maximum(binary_kl(la, lb), binary_kl(lb, la))


def binary_tv(la: Array, lb: Array) -> Array:
    return np.abs(np.exp(la) - np.exp(lb))


def bins(t: Tokens, sampled: Array, top: Array) -> Array:
    """Probabilities `[T, K+1]` of the top K and the sampled token (0 where it is among them)."""
    return np.column_stack([np.exp(top), np.where(t.top_has_sampled.any(1), 0.0, np.exp(sampled))])


def topk_bins(t: Tokens, which: str, other: bool) -> tuple[Array, Array]:
    """Behaviour (q, or o for which="old") and p over the bins, `[T, K+1]`, or `[T, K+2]` with the one of all others."""
    far = bins(t, t.q, t.top_q) if which == "p" else bins(t, t.o, t.top_o)
    near = bins(t, t.p, t.top_p)
    if not other:
        return far, near
    return np.column_stack([far, t.rest_q if which == "p" else t.rest_o]), np.column_stack([near, t.rest_p])


def topk_tv(t: Tokens, which: str = "p", other: bool = True) -> Array:
    """½ Σ|behaviour − policy|."""
    far, near = topk_bins(t, which, other)
    return 0.5 * np.abs(far - near).sum(1)


def topk_kl(t: Tokens, which: str = "p", other: bool = True) -> Array:
    """Σ behaviour·log(behaviour/policy)."""
    far, near = topk_bins(t, which, other)
    with np.errstate(invalid="ignore"):  # 0/0 in an empty bin
        return np.where(far > 0, far * np.log(np.where(far > 0, far / near, 1.0)), 0.0).sum(1)


# ---- pieces --------------------------------------------------------------------------------------------------------


def beyond(a: Array, x: Array, low: float | Array, high: float | Array) -> Array:
    """Already moved past [low, high] the way its advantage pushes."""
    return ((a > 0) & (x > high)) | ((a < 0) & (x < low))


def pushed_away(a: Array, x: Array) -> Array:
    return beyond(a, x, 1.0, 1.0)


def everything(t: Tokens) -> Array:
    return np.ones(len(t.p), bool)


def clipped(t: Tokens, low: float, high: float) -> Array:
    r = ratio(t.p, t.o)
    return np.where(beyond(t.a, r, 1 - low, 1 + high), 0.0, r * t.a)


def rollout(t: Tokens, keep: Array, cap: float | None) -> Reference:
    u = ratio(t.p, t.q)
    return Reference(np.where(keep, np.minimum(u, np.inf if cap is None else cap) * t.a, 0.0), keep)


# ---- recipes -------------------------------------------------------------------------------------------------------


def grpo(t: Tokens, clip_low: float = 0.2, clip_high: float = 0.2) -> Reference:
    return Reference(clipped(t, clip_low, clip_high), everything(t))


def dapo(t: Tokens, clip_low: float = 0.2, clip_high: float = 0.28) -> Reference:
    return grpo(t, clip_low, clip_high)


def tis(t: Tokens, cap: float = 2.0, clip_low: float = 0.2, clip_high: float = 0.2) -> Reference:
    w = np.minimum(ratio(t.o, t.q), cap)
    return Reference(w * clipped(t, clip_low, clip_high), everything(t), w)


def mis(t: Tokens, cap: float = 2.0, level: str = "token", weight: str = "token") -> Reference:
    gap = t.o - t.q
    whole = {"token": gap, "sequence": spread(gap, t.ids, np.sum), "geometric": spread(gap, t.ids, np.mean)}
    keep = np.exp(np.clip(whole[level], -LIMIT, LIMIT)) <= cap
    w = np.exp(np.clip(whole[weight], -LIMIT, LIMIT))
    return Reference(np.where(keep, w * clipped(t, 0.2, 0.2), 0.0), keep, w)


def icepop(t: Tokens, low: float = 0.5, high: float = 5.0, clip_low: float = 0.2, clip_high: float = 0.2) -> Reference:
    w = ratio(t.o, t.q)
    keep = (w >= low) & (w <= high)
    return Reference(np.where(keep, w * clipped(t, clip_low, clip_high), 0.0), keep, w)


def kpop(
    t: Tokens,
    phi: float = 0.1,
    mode: str = "decoupled",
    weight_cap: float | None = None,
    cap: float | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Reference:
    if mode == "rollout":
        return rollout(t, ~(symmetric(t.p, t.q) > phi), cap)
    keep = ~(symmetric(t.o, t.q) > phi)
    w = np.ones_like(t.p) if mode == "mask_only" else np.minimum(ratio(t.o, t.q), weight_cap or np.inf)
    return Reference(np.where(keep, w * clipped(t, clip_low, clip_high), 0.0), keep, w)


def gspo(t: Tokens, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Reference:
    """s = exp(mean log r); with one advantage and one coefficient in a sequence, every token's share of ∇s·A is s·A."""
    mean = spread(t.p - t.o, t.ids, np.mean)
    s = ratio(mean, np.zeros_like(mean))
    return Reference(np.where(beyond(t.a, s, 1 - clip_low, 1 + clip_high), 0.0, s * t.a), everything(t))


def gmpo(t: Tokens, clip: float = 0.4) -> Reference:
    """Geometric mean of min(r·A, clip(r, e^−clip, e^clip)·A)/A; a clipped token is a constant in the product."""
    log_r = t.p - t.o
    cut = ((t.a > 0) & (log_r > clip)) | ((t.a < 0) & (log_r < -clip))
    mean = spread(np.where(cut, np.sign(t.a) * clip, log_r), t.ids, np.mean)
    return Reference(np.where(cut, 0.0, ratio(mean, np.zeros_like(mean)) * t.a), everything(t))


def pg_is(t: Tokens, cap: float | None = None) -> Reference:
    return rollout(t, everything(t), cap)


def pg_tis(t: Tokens, cap: float = 3.0) -> Reference:
    return rollout(t, everything(t), cap)


def grpo_clip_higher(t: Tokens, clip_low: float = 0.2, clip_high: float = 0.28, cap: float | None = None) -> Reference:
    return rollout(t, ~beyond(t.a, ratio(t.p, t.q), 1 - clip_low, 1 + clip_high), cap)


def minirl(t: Tokens, clip_low: float = 0.2, clip_high: float = 0.28, cap: float | None = None) -> Reference:
    return rollout(t, ~beyond(t.a, ratio(t.p, t.o), 1 - clip_low, 1 + clip_high), cap)


def minirl_tis(t: Tokens, clip_low: float = 0.2, clip_high: float = 0.28, cap: float = 3.0) -> Reference:
    return minirl(t, clip_low, clip_high, cap)


def _dppo(t: Tokens, divergence: Array, anchor: str, delta: float, cap: float | None) -> Reference:
    moved = pushed_away(t.a, ratio(t.p, t.q if anchor == "rollout" else t.o))
    return rollout(t, ~(moved & (divergence > delta)), cap)


def dppo_binary_tv(t: Tokens, delta: float = 0.15, anchor: str = "rollout", cap: float | None = None) -> Reference:
    return _dppo(t, binary_tv(t.q if anchor == "rollout" else t.o, t.p), anchor, delta, cap)


def dppo_binary_kl(t: Tokens, delta: float = 0.05, anchor: str = "rollout", cap: float | None = None) -> Reference:
    return _dppo(t, binary_kl(t.q if anchor == "rollout" else t.o, t.p), anchor, delta, cap)


def dppo_topk_tv(
    t: Tokens, delta: float = 0.2, anchor: str = "rollout", cap: float | None = 5.0, other: bool = True
) -> Reference:
    return _dppo(t, topk_tv(t, "p" if anchor == "rollout" else "old", other), anchor, delta, cap)


def dppo_topk_kl(
    t: Tokens, delta: float = 0.05, anchor: str = "rollout", cap: float | None = 5.0, other: bool = True
) -> Reference:
    return _dppo(t, topk_kl(t, "p" if anchor == "rollout" else "old", other), anchor, delta, cap)


def mask_negative(t: Tokens, delta: float = 0.5, anchor: str = "rollout", cap: float | None = None) -> Reference:
    fell = np.exp(t.q if anchor == "rollout" else t.o) - np.exp(t.p)
    return rollout(t, ~((t.a < 0) & (fell >= delta)), cap)


def relax_clip(
    t: Tokens,
    alpha: float = 0.1,
    side: str = "both",
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    cap: float | None = None,
) -> Reference:
    rare = np.exp(t.q) < alpha
    low = np.where(rare & (side in ("both", "low")), -np.inf, 1 - clip_low)
    high = np.where(rare & (side in ("both", "high")), np.inf, 1 + clip_high)
    return rollout(t, ~beyond(t.a, ratio(t.p, t.q), low, high), cap)


def _geometric(t: Tokens) -> Array:
    """log of the trajectory's geometric mean of u."""
    return spread(t.p - t.q, t.ids, np.mean)


def _token_band(t: Tokens, low: float, high: float) -> Array:
    u = ratio(t.p, t.q)
    return (u >= low) & (u <= high)


def mis_po(
    t: Tokens,
    low: float = 0.5,
    high: float = 2.0,
    trajectory_low: float = 0.996,
    trajectory_high: float = 1.001,
    cap: float | None = None,
) -> Reference:
    whole = np.exp(_geometric(t))
    keep = _token_band(t, low, high) & (whole >= trajectory_low) & (whole <= trajectory_high)
    return rollout(t, keep, cap)


def fixed_at_final_bound(t: Tokens) -> Reference:
    return mis_po(t, trajectory_low=0.9998, trajectory_high=1.0002)


def ac_mis_po_bounds(t: Tokens, steps: int, start: float = 0.4, end: float = 0.2, warmup: int = 200) -> list[float]:
    """b_1 … b_steps when every step sees this batch: b_0 = b_max, then eqs. 5–8 with k = 1, 2, …"""
    low, high, out = np.log(1.0002), np.log(1.01), []
    z = np.array([abs(np.mean((t.p - t.q)[t.ids == s])) for s in np.unique(t.ids)])
    b = high
    for k in range(1, steps + 1):
        target = start - (start - end) * min(k / warmup, 1.0)
        b = min(max(0.9 * b + 0.1 * float(np.quantile(z, target)), low), high)
        out.append(b)
    return out


def ac_mis_po(t: Tokens, bound: float, low: float = 0.5, high: float = 2.0, cap: float | None = None) -> Reference:
    return rollout(t, _token_band(t, low, high) & (np.abs(_geometric(t)) <= bound), cap)


def m2po(t: Tokens, tau: float = 0.04, cap: float | None = None) -> Reference:
    """In the active quadrant, the longest ascending run of (log u)² whose mean stays within τ is kept."""
    log_u = t.p - t.q
    active = np.flatnonzero(((t.a > 0) & (log_u > 0)) | ((t.a < 0) & (log_u < 0)))
    order = active[np.argsort(log_u[active] ** 2)]
    means = np.cumsum(log_u[order] ** 2) / np.arange(1, len(order) + 1)
    keep = everything(t)
    keep[order[np.count_nonzero(means <= tau) :]] = False
    return rollout(t, keep, cap)


def sapo(t: Tokens, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Reference:
    """Gate (4/τ)·σ(τ(r−1)): its slope is 4σ(1−σ), 1 at r = 1."""
    r = ratio(t.p, t.o)
    x = np.where(t.a > 0, tau_positive, tau_negative) * (r - 1)
    sech = 1.0 / np.cosh(np.minimum(np.abs(x) / 2, 300))
    return Reference(sech**2 * r * t.a, everything(t))


def cispo(t: Tokens, low: float = 0.0, high: float = 5.0) -> Reference:
    """stop_grad(clip(r, low, high))·log p·A (MiniMax-M1): no token is dropped."""
    return Reference(np.clip(ratio(t.p, t.o), low, high) * t.a, everything(t))


def ipo(t: Tokens, delta: float = 0.3, gap_penalty: float = 0.0, directional: bool = False) -> Reference:
    """Keep |p − q| ≤ δ, whatever the advantage unless `directional`; every token pays gap_penalty·(log u)²."""
    away = pushed_away(t.a, ratio(t.p, t.q)) if directional else everything(t)
    kept = rollout(t, ~(away & (binary_tv(t.p, t.q) > delta)), None)
    return Reference(kept.coefficient - 2 * gap_penalty * (t.p - t.q), kept.keep)


def opsm(t: Tokens, delta: float = 1e-4, anchor: str = "rollout") -> Reference:
    """Tokens of A < 0 go when their sequence's mean log q − log p is above δ (DeepSeek-V3.2); PPO-clip on u."""
    behaviour = t.q if anchor == "rollout" else t.o
    u = ratio(t.p, behaviour)
    keep = ~((t.a < 0) & (spread(behaviour - t.p, t.ids, np.mean) > delta))
    return Reference(np.where(keep & ~beyond(t.a, u, 0.8, 1.2), u * t.a, 0.0), keep)


def trm(t: Tokens, delta: float = 0.05, reduce: str = "max", estimator: str = "k3") -> Reference:
    """A whole sequence goes when the largest (or mean) estimate of its tokens' KL(q‖p) is above δ."""
    log_u = t.p - t.q
    token = {
        "k2": log_u**2 / 2,
        "k3": np.expm1(np.clip(log_u, -LIMIT, LIMIT)) - log_u,
        "binary": binary_kl(t.q, t.p),
    }[estimator]
    return rollout(t, ~(spread(token, t.ids, np.max if reduce == "max" else np.mean) > delta), None)


def luspo(t: Tokens, clip_low: float = 2e-3, clip_high: float = 2.5e-3) -> Reference:
    """GSPO's sequence ratio; the length enters by the aggregation alone."""
    return gspo(t, clip_low, clip_high)


def gpg(t: Tokens) -> Reference:
    """Plain REINFORCE: A·∇log p."""
    return Reference(t.a.copy(), everything(t))


def topr(t: Tokens, low: float = 0.0, high: float = 1.0, level: str = "sequence") -> Reference:
    """ΣR·∇log p over good trajectories, [π/μ]_low^high·R·∇log p over bad ones (TOPR)."""
    log_u = t.p - t.q
    whole = {"sequence": spread(log_u, t.ids, np.sum), "geometric": spread(log_u, t.ids, np.mean), "token": log_u}
    weight = np.clip(ratio(whole[level], np.zeros_like(log_u)), low, high)
    return Reference(np.where(t.a < 0, weight, 1.0) * t.a, everything(t))


def vespo(
    t: Tokens,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Reference:
    """φ(W) = W^k·exp(λ(1−W)) on the whole trajectory's ratio."""
    w = ratio(spread(t.p - t.q, t.ids, np.sum), np.zeros_like(t.p))
    k, lam = np.where(t.a >= 0, k_positive, k_negative), np.where(t.a >= 0, lambda_positive, lambda_negative)
    return Reference(w**k * np.exp(lam * (1 - w)) * t.a, everything(t))


def distortion(t: Tokens, delta: float, threshold: float = 0.1) -> Array:
    return np.where(np.exp(t.o) < threshold, delta, 1.0)
