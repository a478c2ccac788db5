"""What stands between the matrix products of a layer, one kernel each.

Values are rounded where PyTorch's operations round them, so both paths have the same bits but for the order of a sum of squares and
the last place of an exponential. A row's bits do not depend on the other rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollkeel.models.gpu.sizes import power

HEADS = 8
"""Heads of one token in a program."""
BLOCK = 1024
"""Gated elements of a program."""


@triton.jit
def _rounded(x, like):
    """float32 `x` as the dtype of the pointer `like` holds it."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _rotate(
    qkv, norms, cos, sin, slots, query, keys, values, eps,
    Q: tl.constexpr, KV: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr,
    WIDTH_2: tl.constexpr,
):  # fmt: skip
    """Some heads of one token, of which the first `Q` are queries, then come keys and then values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH_2)
    across = (d + WIDTH // 2) % WIDTH
    wide = (d < WIDTH)[None, :]
    inside = (head < Q + 2 * KV)[:, None] & wide
    row = qkv + (token * (Q + 2 * KV) + head)[:, None] * WIDTH
    x = tl.load(row + d[None, :], mask=inside, other=0.0)
    a = x.to(tl.float32)
    b = tl.load(row + across[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(a * a, 1) / WIDTH + eps)[:, None]
        weights = norms + tl.where(head < Q, 0, WIDTH)[:, None]
        a = _rounded(a * scale, query) * tl.load(weights + d[None, :], mask=inside, other=0.0).to(tl.float32)
        b = _rounded(b * scale, query) * tl.load(weights + across[None, :], mask=inside, other=0.0).to(tl.float32)
        a, b = _rounded(a, query), _rounded(b, query)
    c = tl.load(cos + token * WIDTH + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    s = tl.load(sin + token * WIDTH + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    rotated = (_rounded(a * c[None, :], query) + b * s[None, :]).to(query.dtype.element_ty)
    tl.store(query + (token * Q + head)[:, None] * WIDTH + d[None, :], rotated, mask=(head < Q)[:, None] & wide)
    slot = tl.load(slots + token)
    key, value = head - Q, head - Q - KV
    line = (slot // SIZE * KV + key) * SIZE + slot % SIZE
    is_key = (key >= 0) & (key < KV)
    tl.store(keys + line[:, None] * WIDTH + d[None, :], rotated, mask=is_key[:, None] & wide)
    line = (slot // SIZE * KV + value) * SIZE + slot % SIZE
    is_value = (value >= 0) & (value < KV)
    tl.store(values + line[:, None] * WIDTH + d[None, :], x, mask=is_value[:, None] & wide)


@triton.jit
def _gate(wide, out, stride, WIDTH: tl.constexpr, ONCE: tl.constexpr, BLOCK: tl.constexpr):
    """`BLOCK` elements of one row of silu(gate) · up, rounded `ONCE` or like two operations."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(wide + row * stride + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(wide + row * stride + WIDTH + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
    active = gate / (1.0 + tl.exp(-gate))
    if not ONCE:
        active = _rounded(active, out)
    tl.store(out + row * WIDTH + lane, (active * up).to(out.dtype.element_ty), mask=lane < WIDTH)


@triton.jit
def _add_norm(x, y, weight, total, normed, eps, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr):
    """One row: the sum as it is stored, and its norm."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH_2)
    inside = lane < WIDTH
    at = row * WIDTH + lane
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    a += tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, a.to(total.dtype.element_ty), mask=inside)
    a = _rounded(a, total)
    scale = tl.rsqrt(tl.sum(a * a, 0) / WIDTH + eps)
    a = a * scale * tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, a.to(normed.dtype.element_ty), mask=inside)


def rotate(
    qkv: torch.Tensor,
    norms: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
    eps: float,
) -> torch.Tensor:
    """Rotated queries `[N, heads, d]` of `qkv [N, heads + 2 KV, d]`, whose keys, rotated too, and values go to `slots [N]`.

    `norms [2, d]`: of queries and of keys before they are rotated; `cos`, `sin`: `[N, 1, d]`, with the sign in the sine; `keys`,
    `values`: `[num_blocks * KV, block_size, d]`, contiguous.
    """
    tokens, total, width = qkv.shape
    qkv = qkv.contiguous()
    query = qkv.new_empty(tokens, heads, width)
    kernel: Any = _rotate[(tokens, -(-total // HEADS))]
    kernel(
        qkv,
        qkv if norms is None else norms,
        cos,
        sin,
        slots,
        query,
        keys,
        values,
        eps,
        Q=heads,
        KV=(total - heads) // 2,
        SIZE=keys.shape[1],
        WIDTH=width,
        NORM=norms is not None,
        HEADS=HEADS,
        WIDTH_2=power(width),
    )
    return query


def gated(wide: torch.Tensor, once: bool = False) -> torch.Tensor:
    """silu(gate) · up `[N, W]` of `wide [N, 2 W]`, the gates first; rounded `once`, or each as PyTorch would."""
    rows, width = len(wide), wide.shape[1] // 2
    wide = wide if wide.stride(1) == 1 else wide.contiguous()
    out = wide.new_empty(rows, width)
    kernel: Any = _gate[(rows, -(-width // BLOCK))]
    kernel(wide, out, wide.stride(0), WIDTH=width, ONCE=once, BLOCK=BLOCK)
    return out


def add_norm(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`x + y [N, D]`, and the RMS norm of that."""
    rows, width = x.shape
    x, y = x.contiguous(), y.contiguous()
    total, normed = torch.empty_like(x), torch.empty_like(x)
    wide = power(width)
    kernel: Any = _add_norm[(rows,)]
    kernel(x, y, weight, total, normed, eps, WIDTH=width, WIDTH_2=wide, num_warps=4 if wide <= 2048 else 8)
    return total, normed
