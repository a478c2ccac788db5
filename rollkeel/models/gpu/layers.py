"""Norms, rotary embeddings and SwiGLU of the trainer's layers, forward and backward, each in one pass over memory.

They round where the engine's forward does: a norm with its weight once; a head's norm, its weight and its cosine each. Gradients are
those of the unrounded functions. Scales are computed again in the backward instead of kept.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollkeel.models.gpu.sizes import power

ROWS = 16
"""Rows of one program in a norm's backward; there is one sum of weight gradients for each program."""
HEADS = 32
"""Rows, each a token's head, of one program of rotary embeddings."""
BLOCK = 2048
"""Elements of one program of SwiGLU."""


@triton.jit
def _norm(x, weight, out, eps, D: tl.constexpr, D_2: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D_2)
    v = tl.load(x + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(v * v, 0) / D + eps)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out + row * D + d, (v * scale * w).to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["rows"])
def _norm_gradient(
    grad, x, weight, dx, parts, rows, eps, D: tl.constexpr, D_2: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D_2)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    of_weight = tl.zeros([D_2], tl.float32)
    for i in range(0, ROWS):
        row = program * ROWS + i
        inside = (d < D) & (row < rows)
        v = tl.load(x + row * D + d, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row * D + d, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(v * v, 0) / D + eps)
        hat = v * scale
        of_weight += g * hat
        g = g * w
        back = scale * (g - hat * (tl.sum(g * hat, 0) / D))
        tl.store(dx + row * D + d, back.to(dx.dtype.element_ty), mask=inside)
    tl.store(parts + program * D + d, of_weight, mask=d < D)


@triton.jit(do_not_specialize=["rows"])
def _rotary(
    x, weight, cos, sin, out, rows, eps, angle_row,
    COUNT: tl.constexpr, D: tl.constexpr, HALF_2: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`COUNT` heads of a token lie side by side."""
    kind = out.dtype.element_ty
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, HALF_2)
    inside = (r < rows)[:, None] & (d < D // 2)[None, :]
    at = r[:, None] * D + d[None, :]
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + at + D // 2, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)
        wa = tl.load(weight + d, mask=d < D // 2, other=0.0).to(tl.float32)
        wb = tl.load(weight + D // 2 + d, mask=d < D // 2, other=0.0).to(tl.float32)
        a = ((a * scale[:, None]).to(kind).to(tl.float32) * wa[None, :]).to(kind).to(tl.float32)
        b = ((b * scale[:, None]).to(kind).to(tl.float32) * wb[None, :]).to(kind).to(tl.float32)
    angle = (r // COUNT)[:, None] * angle_row + d[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, ((a * c).to(kind).to(tl.float32) - b * s).to(kind), mask=inside)
    tl.store(out + at + D // 2, ((b * c).to(kind).to(tl.float32) + a * s).to(kind), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _rotary_gradient(
    grad, x, weight, cos, sin, dx, parts, rows, eps, angle_row,
    COUNT: tl.constexpr, D: tl.constexpr, HALF_2: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    kind = dx.dtype.element_ty
    r = program * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, HALF_2)
    inside = (r < rows)[:, None] & (d < D // 2)[None, :]
    at = r[:, None] * D + d[None, :]
    ga = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    gb = tl.load(grad + at + D // 2, mask=inside, other=0.0).to(tl.float32)
    angle = (r // COUNT)[:, None] * angle_row + d[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    da = ga * c + gb * s
    db = gb * c - ga * s
    if NORM:
        a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x + at + D // 2, mask=inside, other=0.0).to(tl.float32)
        scale = (1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps))[:, None]
        a = a * scale
        b = b * scale
        part = parts + program * D + d
        tl.store(part, tl.sum(da * a, 0), mask=d < D // 2)
        tl.store(part + D // 2, tl.sum(db * b, 0), mask=d < D // 2)
        da = da * tl.load(weight + d, mask=d < D // 2, other=0.0).to(tl.float32)[None, :]
        db = db * tl.load(weight + D // 2 + d, mask=d < D // 2, other=0.0).to(tl.float32)[None, :]
        mean = ((tl.sum(da * a, 1) + tl.sum(db * b, 1)) / D)[:, None]
        da = scale * (da - a * mean)
        db = scale * (db - b * mean)
    tl.store(dx + at, da.to(kind), mask=inside)
    tl.store(dx + at + D // 2, db.to(kind), mask=inside)


@triton.jit
def _swiglu(gate, up, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + i, mask=i < count, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=i < count, other=0.0).to(tl.float32)
    active = (g * tl.sigmoid(g)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + i, (active * u).to(out.dtype.element_ty), mask=i < count)


@triton.jit
def _swiglu_gradient(grad, gate, up, d_gate, d_up, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o = tl.load(grad + i, mask=i < count, other=0.0).to(tl.float32)
    g = tl.load(gate + i, mask=i < count, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=i < count, other=0.0).to(tl.float32)
    on = tl.sigmoid(g)
    tl.store(d_up + i, (o * g * on).to(d_up.dtype.element_ty), mask=i < count)
    tl.store(d_gate + i, (o * u * on * (1.0 + g * (1.0 - on))).to(d_gate.dtype.element_ty), mask=i < count)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out, width = torch.empty_like(x), x.shape[1]
        kernel: Any = _norm[(len(x),)]
        kernel(x, weight, out, eps, D=width, D_2=power(width), num_warps=_warps(width))
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, width = x.shape
        dx, parts = torch.empty_like(x), x.new_empty(-(-rows // ROWS), width, dtype=torch.float32)
        kernel: Any = _norm_gradient[(len(parts),)]
        about: Any = {"D": width, "D_2": power(width), "ROWS": ROWS, "num_warps": _warps(width)}
        kernel(grads[0].contiguous(), x, weight, dx, parts, rows, ctx.eps, **about)
        return dx, parts.sum(0), None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        kernel: Any = _rotary[(-(-len(x) // HEADS),)]
        kernel(
            x, x if weight is None else weight, cos, sin, out, len(x), eps, cos.stride(0), **_about(x, weight, heads)
        )
        # Without a norm the gradient needs no more than angles.
        ctx.save_for_backward(*((cos, sin) if weight is None else (cos, sin, x, weight)))
        ctx.eps, ctx.heads = eps, heads
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin, *normed = ctx.saved_tensors
        grad = grads[0].contiguous()
        x, weight = normed or (grad, None)
        dx = torch.empty_like(grad)
        parts = grad.new_empty(-(-len(grad) // HEADS), grad.shape[1] if normed else 0, dtype=torch.float32)
        kernel: Any = _rotary_gradient[(len(parts),)]
        held = x if weight is None else weight
        kernel(grad, x, held, cos, sin, dx, parts, len(grad), ctx.eps, cos.stride(0), **_about(grad, weight, ctx.heads))
        return dx, parts.sum(0) if normed else None, None, None, None, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(gate)
        kernel: Any = _swiglu[(-(-gate.numel() // BLOCK),)]
        kernel(gate, up, out, gate.numel(), BLOCK=BLOCK)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        kernel: Any = _swiglu_gradient[(-(-gate.numel() // BLOCK),)]
        kernel(grads[0].contiguous(), gate, up, d_gate, d_up, gate.numel(), BLOCK=BLOCK)
        return d_gate, d_up


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x [N, D]` → x · weight / rms(x)."""
    return _Norm.apply(x.contiguous(), weight, eps)  # type: ignore[return-value]


def rotary(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, heads: int, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """`x [N · heads, d]` → head norm, if there is a `weight [d]`, then rotary embedding by `cos`, `sin` `[N, d/2]`, whose rows lie
    equally far apart."""
    return _Rotary.apply(x.contiguous(), weight, eps, heads, cos, sin)  # type: ignore[return-value]


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(`gate`) · `up`, of one shape."""
    return _Swiglu.apply(gate.contiguous(), up.contiguous())  # type: ignore[return-value]


def _about(x: torch.Tensor, weight: torch.Tensor | None, heads: int) -> Any:
    width = x.shape[1]
    return {"COUNT": heads, "D": width, "HALF_2": power(width // 2), "NORM": weight is not None, "ROWS": HEADS}


def _warps(width: int) -> int:
    return 4 if width <= 1024 else 8
