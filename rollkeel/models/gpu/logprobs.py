"""Statistics of rows of logits in one read, and the gradient of what they are used for in one read and
one write.

`logits [n, V]` are float32, contiguous and as the head gave them; with `cap` > 0 kernels take `cap · tanh(scale · z)` for them, else
`scale · z`. The order of a row's sum does not depend on the other rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollkeel.models.gpu.sizes import power

BLOCK = 4096
"""Logits of one step of a program."""
LOWEST = tl.constexpr(-3.0e38)
"""Instead of −inf, which subtracted from itself is NaN."""


@triton.jit
def _tempered(z, scale, cap, CAPPED: tl.constexpr):
    """`cap · tanh(scale · z)`, or without a cap `scale · z`."""
    z = z * scale
    if CAPPED:
        t = tl.exp(-2.0 * tl.abs(z))
        z = tl.where(z < 0, -cap, cap) * (1.0 - t) / (1.0 + t)
    return z


@triton.jit
def _statistics(
    logits,
    targets,
    ids,
    normaliser,
    logprobs,
    entropies,
    topk,
    scale,
    cap,
    V: tl.constexpr,
    K: tl.constexpr,
    K_2: tl.constexpr,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its largest logit so far, and Σ e^(z − largest) and Σ e^(z − largest) (z − largest) of every lane."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        inside = start + lane < V
        z = _tempered(tl.load(logits + row * V + start + lane, mask=inside, other=0.0), scale, cap, CAPPED)
        higher = tl.where(inside, tl.maximum(top, z), top)
        fade = tl.exp(top - higher)
        e = tl.where(inside, tl.exp(z - higher), 0.0)
        if ENTROPY:
            moment = fade * (moment + (top - higher) * total) + tl.where(inside, e * (z - higher), 0.0)
        total = total * fade + e
        top = higher
    highest = tl.max(top, 0)
    share = tl.exp(top - highest)
    if ENTROPY:
        moment = tl.sum(share * (moment + (top - highest) * total), 0)
    total = tl.sum(share * total, 0)
    log_total = tl.log(total)
    tl.store(normaliser + row, highest + log_total)
    target = _tempered(tl.load(logits + row * V + tl.load(targets + row)), scale, cap, CAPPED)
    tl.store(logprobs + row, target - highest - log_total)
    if ENTROPY:
        tl.store(entropies + row, log_total - moment / total)
    if K:
        k = tl.arange(0, K_2)
        chosen = tl.load(ids + row * K + k, mask=k < K, other=0)
        z = _tempered(tl.load(logits + row * V + chosen), scale, cap, CAPPED)
        tl.store(topk + row * K + k, z - highest - log_total, mask=k < K)


@triton.jit
def _gradient(
    logits,
    targets,
    normaliser,
    entropies,
    d_logprobs,
    d_entropies,
    out,
    scale,
    cap,
    V: tl.constexpr,
    CAPPED: tl.constexpr,
    OF_LOGPROBS: tl.constexpr,
    OF_ENTROPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`BLOCK` logits of one row: d log p_y / dz = 1[y] − p and dH/dz = −p · (log p + H), for z as `_tempered` gives it."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = _tempered(tl.load(logits + row * V + lane, mask=lane < V, other=0.0), scale, cap, CAPPED)
    log_p = z - tl.load(normaliser + row)
    p = tl.exp(log_p)
    g = tl.zeros([BLOCK], tl.float32)
    if OF_ENTROPIES:
        g -= tl.load(d_entropies + row) * p * (log_p + tl.load(entropies + row))
    if OF_LOGPROBS:
        g += tl.load(d_logprobs + row) * (tl.where(lane == tl.load(targets + row), 1.0, 0.0) - p)
    g *= scale
    if CAPPED:
        g *= cap * (1.0 - (z / cap) * (z / cap))
    tl.store(out + row * V + lane, g.to(out.dtype.element_ty), mask=lane < V)


def statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    topk_ids: torch.Tensor | None,
    scale: float,
    cap: float,
    *,
    normaliser: torch.Tensor,
    logprobs: torch.Tensor,
    entropies: torch.Tensor,
    topk: torch.Tensor,
) -> None:
    """Fill `normaliser [n]`, `logprobs [n]` at `targets [n]`, `entropies [n]` if it has room, and `topk [n, K]` at `topk_ids`.

    All are float32 and contiguous; nothing is clamped.
    """
    count = 0 if topk_ids is None else topk_ids.shape[1]
    kernel: Any = _statistics[(len(logits),)]
    kernel(
        logits,
        targets,
        targets if topk_ids is None else topk_ids.contiguous(),
        normaliser,
        logprobs,
        entropies,
        topk,
        scale,
        cap,
        V=logits.shape[1],
        K=count,
        K_2=power(count),
        CAPPED=cap > 0,
        ENTROPY=entropies.numel() > 0,
        BLOCK=BLOCK,
        num_warps=8,
    )


def gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    normaliser: torch.Tensor,
    entropies: torch.Tensor,
    d_logprobs: torch.Tensor | None,
    d_entropies: torch.Tensor | None,
    scale: float,
    cap: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """`out [n, V]`, which may be `logits`, in its dtype: gradient with respect to these, from what `statistics` filled."""
    rows, vocabulary = logits.shape
    kernel: Any = _gradient[(rows, -(-vocabulary // BLOCK))]
    kernel(
        logits,
        targets,
        normaliser,
        entropies,
        normaliser if d_logprobs is None else d_logprobs.contiguous(),
        normaliser if d_entropies is None else d_entropies.contiguous(),
        out,
        scale,
        cap,
        V=vocabulary,
        CAPPED=cap > 0,
        OF_LOGPROBS=d_logprobs is not None,
        OF_ENTROPIES=d_entropies is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return out
