"""Divergences between two policies at a sampled token: exact binary ones (the token against everything else) and top-K ones.

All functions take log-probs (natural log, ≤ 0). The binary ones are elementwise on any one shape; probabilities are never
clamped. The top-K ones (DPPO paper eqs. 15–16) take `[T]` and `[T, K]`.
"""

from __future__ import annotations

import math

import torch

LOG_HALF = -math.log(2.0)
FLOOR = 2.0**-24
"""A float32 log-prob of exactly 0 only says that 1 − p is below this (half a unit in the last place of 1)."""
_LOG_OF_FLOORED = math.log1p(-FLOOR)


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 − eˣ) for x ≤ 0, accurate at both ends (Mächler 2012); −∞ at x = 0. Same shape and dtype as `x`."""
    return torch.where(x > LOG_HALF, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def at_floor(logprobs: torch.Tensor) -> torch.Tensor:
    """bool, shape of `logprobs`: entries whose 1 − p is floored, i.e. log-probs that rounding brought to 0 (or above).

    float64 resolves 1 − p itself, so nothing is floored there.
    """
    if logprobs.dtype == torch.float64:
        return torch.zeros_like(logprobs, dtype=torch.bool)
    return logprobs >= 0


def floor_logprobs(logprobs: torch.Tensor) -> torch.Tensor:
    """Log-probs ≤ 0: positive rounding becomes 0, and a 0 that only rounding made (`at_floor`) becomes log(1 − 2⁻²⁴).

    Without the floor a confident token (p rounds to 1 in one engine, 1 − 10⁻⁷ in the other) has an infinite divergence.
    """
    if logprobs.dtype == torch.float64:
        return logprobs.clamp(max=0.0)
    logprobs = logprobs if logprobs.dtype == torch.float32 else logprobs.float()
    return torch.where(logprobs >= 0, torch.full_like(logprobs, _LOG_OF_FLOORED), logprobs)


def binary_kl(lp: torch.Tensor, lq: torch.Tensor) -> torch.Tensor:
    """D_B(p‖q) = p·log(p/q) + (1−p)·log((1−p)/(1−q)) from log-probs; ≥ 0, possibly +∞, never NaN.

    Args: `lp`, `lq`: log p and log q, same shape, finite. Values above 0 count as 0; see `floor_logprobs` for float32.
    Returns: nats, same shape, in the promoted dtype.
    """
    lp, lq = floor_logprobs(lp), floor_logprobs(lq)
    return _binary_kl(lp, lq, log1mexp(lp), log1mexp(lq))


def symmetric_binary_kl(lp: torch.Tensor, lq: torch.Tensor) -> torch.Tensor:
    """max(D_B(p‖q), D_B(q‖p)), the quantity KPop compares with φ. Arguments and result as in `binary_kl`."""
    lp, lq = floor_logprobs(lp), floor_logprobs(lq)
    mp, mq = log1mexp(lp), log1mexp(lq)
    return torch.maximum(_binary_kl(lp, lq, mp, mq), _binary_kl(lq, lp, mq, mp))


def _binary_kl(lp: torch.Tensor, lq: torch.Tensor, mp: torch.Tensor, mq: torch.Tensor) -> torch.Tensor:
    """`mp`, `mq`: log(1−p), log(1−q)."""
    rest = -torch.expm1(lp) * (mp - mq)
    # At p = 1 the second term is 0 by continuity; the product would be 0·∞.
    rest = torch.where(lp == 0, torch.zeros_like(rest), rest)
    return (torch.exp(lp) * (lp - lq) + rest).clamp(min=0.0)


def binary_tv(lp: torch.Tensor, lq: torch.Tensor) -> torch.Tensor:
    """|p − q| = TV of (p, 1−p) and (q, 1−q) from log-probs, without cancellation (DPPO paper eq. 13). Same shape, in [0, 1]."""
    if lp.dtype != torch.float64:
        lp, lq = lp.float(), lq.float()
    return torch.exp(torch.maximum(lp, lq).clamp(max=0.0)) * -torch.expm1(
        -(lp.clamp(max=0.0) - lq.clamp(max=0.0)).abs()
    )


def topk_tv(
    lp: torch.Tensor,
    lq: torch.Tensor,
    topk_lp: torch.Tensor,
    topk_lq: torch.Tensor,
    listed: torch.Tensor,
    other: bool = True,
) -> torch.Tensor:
    """½ Σ|p − q| over the bins: the K ids, the sampled token, and all others together (DPPO paper eq. 15).

    Args: `lp`, `lq`: `[T]` log-probs of the sampled token; `topk_lp`, `topk_lq`: `[T, K]` log-probs at the K ids, −∞ allowed;
    `listed`: `[T]` bool, the sampled token is one of the K ids; `other`: count the bin of all others (eq. 15 as printed
    leaves it out; without it the result can fall below the binary TV).
    Returns: `[T]` in [0, 1]. binary ≤ this ≤ full TV.
    """
    gap = topk_lp.exp().sub_(topk_lq.exp())
    extra = torch.where(listed, 0.0, lp.exp() - lq.exp())
    # What the listed tokens gained together the others lost: no difference of sums near 1.
    net = (gap.sum(1) + extra).abs() if other else 0.0
    return 0.5 * (gap.abs_().sum(1) + extra.abs() + net)


def topk_kl(
    lp: torch.Tensor,
    lq: torch.Tensor,
    topk_lp: torch.Tensor,
    topk_lq: torch.Tensor,
    listed: torch.Tensor,
    other: bool = True,
) -> torch.Tensor:
    """Σ q·log(q/p) over the same bins (DPPO paper eq. 16): KL(q‖p), behaviour first. Arguments as in `topk_tv`.

    Returns: `[T]` nats ≥ 0; +∞ where p is 0 at an id that q can sample. binary ≤ this ≤ full KL with `other`. The mass of all
    others is a difference; below its own rounding it is held there, so that no infinity comes from a float's last place.
    """
    q = topk_lq.exp()
    extra = torch.where(listed, 0.0, lq.exp() * (lq - lp))
    # 0·(−∞) of an id that q cannot sample is not a number, and counts 0.
    total = (q * (topk_lq - topk_lp)).nansum(1) + extra
    if other:
        p_other, p_least = _others(lp, topk_lp, topk_lp.exp(), listed)
        q_other, q_least = _others(lq, topk_lq, q, listed)
        p_other, q_other = torch.maximum(p_other, p_least), torch.maximum(q_other, q_least)
        total = total + q_other * torch.log(q_other / p_other)
    return total.clamp(min=0.0)


def _others(
    sampled: torch.Tensor, top: torch.Tensor, top_p: torch.Tensor, listed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[T]`: the mass of all other tokens, and the size of its rounding; `top_p` = exp(`top`).

    A bin above ½ enters by its complement, so that a rest of 10⁻¹⁰ keeps its digits.
    """
    sampled_p = torch.where(listed, 0.0, sampled.exp())
    large = torch.nn.functional.hardshrink(top_p, 0.5)
    small = (top_p - large).sum(1) + torch.where(sampled_p > 0.5, 0.0, sampled_p)
    # At most one of a distribution's tokens is above ½, so a sum finds its log-prob, much faster than a maximum.
    listed_most = torch.nn.functional.threshold(top, LOG_HALF, 0.0).sum(1)
    most = torch.where(sampled_p > 0.5, sampled, listed_most)
    head = torch.where((large.sum(1) > 0) | (sampled_p > 0.5), -torch.expm1(floor_logprobs(most)), 1.0)
    least = FLOOR if top.dtype == torch.float32 else torch.finfo(top.dtype).tiny
    rounding = head * ((top.shape[1] + 1) * torch.finfo(top.dtype).eps)
    return (head - small).clamp(min=0.0), rounding.clamp(min=least)
