"""Causal attention of a packed row on a CPU in float32, differentiable: the kernels of `kernels_attention.py`, over as many threads as torch has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rollkeel.models import jit, kernels_attention
from rollkeel.models.jit import array as _np
from rollkeel.models.threads import each, shares

_LIBRARY = torch.library.Library("rollkeel", "DEF")
NAME = "rollkeel::packed_attention"
"""One operation, so that selective checkpointing can keep what it comes to."""
_LIBRARY.define("packed_attention(Tensor q, Tensor k, Tensor v, Tensor spans, float scale) -> (Tensor, Tensor)")


def suits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `attend` computes these heads."""
    return (
        jit.FOUND
        and q.shape[-1] == k.shape[-1] == v.shape[-1]
        and all(x.device.type == "cpu" and x.dtype == torch.float32 for x in (q, k, v))
    )


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Queries `[N, H, d]` over keys and values `[N, KV, d]` → `[N, H · d]`. `spans [S, 4]`: see `Layout`."""
    return _Attention.apply(q, k, v, spans, q.shape[-1] ** -0.5 if scale is None else scale)  # type: ignore[return-value]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor, scale: float
    ) -> torch.Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, sums = torch.ops.rollkeel.packed_attention(q, k, v, spans, scale)
        ctx.save_for_backward(q, k, v, spans, sums)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, spans, sums = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        flat = [_flat(x) for x in (grads[0].contiguous(), q, k, v)]
        outs = [_np(sums), *(_flat(x) for x in (dq, dk, dv))]
        _over_heads(kernels_attention.attend_backward, q, k, flat, spans, ctx.scale, outs)
        return dq, dk, dv, None, None


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, sums = q.new_empty(len(q), q.shape[1] * q.shape[2]), q.new_empty(q.shape[1], len(q), 2)
    _over_heads(kernels_attention.attend, q, k, [_flat(x) for x in (q, k, v)], spans, scale, [_np(out), _np(sums)])
    return out, sums


_LIBRARY.impl("packed_attention", _forward, "CPU")


def _over_heads(
    kernel: Callable[..., None],
    q: torch.Tensor,
    k: torch.Tensor,
    taken: list[np.ndarray],
    spans: torch.Tensor,
    scale: float,
    outs: list[np.ndarray],
) -> None:
    """Heads of keys are dealt to threads: no two of them write to one place."""
    heads, kv_heads, width = q.shape[1], k.shape[1], q.shape[2]

    def some(first: int, end: int) -> None:
        shape = np.array([heads, kv_heads, width, first, end])
        kernel(*taken, _np(spans), shape, np.float32(scale), *outs)

    each(some, shares(kv_heads))


def _flat(tensor: torch.Tensor) -> np.ndarray:
    return _np(tensor.view(len(tensor), -1))
