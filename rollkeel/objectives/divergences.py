"""Exact binary divergences between two policies at a sampled token: the token against everything else.

All functions take log-probs (natural log, ≤ 0) of any one shape and are elementwise. Probabilities are never clamped.
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
