"""SwiGLU experts of small models on a CPU in float32, differentiable: the kernels of `kernels_experts.py`, over as many threads as torch
has."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rollkeel.models import jit, kernels_experts
from rollkeel.models.fused import swiglu_backward
from rollkeel.models.jit import array as _np
from rollkeel.models.threads import each
from rollkeel.models.tiles import COLUMNS, ROWS, up

MOST = 2**18
"""Elements of a projection. A larger one stays in no cache, and a product per expert is as fast."""
Bounds = Sequence[tuple[int, int, int]]
"""Expert, first and last + 1 of its pairs."""


def fits(size: int, width: int) -> bool:
    """Whether experts of `width`, of tokens of so many numbers, are computed here."""
    return jit.FOUND and size * width <= MOST and size % COLUMNS == width % COLUMNS == 0


def suits(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    here = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in (x, gate_up, down))
    dense = gate_up.is_contiguous() and down.is_contiguous()
    return here and dense and fits(*down.shape[1:])


class TiledExperts(torch.autograd.Function):
    """`x [N, D]`, `weights [N, K]`, `order [N·K]` sorts (token, slot) pairs by expert; `gate_up [E, 2W, D]`, `down [E, D, W]`.

    Threads have experts of their own, and add up what tokens come to each for itself: with another number of them, sums may round
    differently."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: torch.Tensor,
        order: torch.Tensor,
        bounds: Bounds,
        gate_up: torch.Tensor,
        down: torch.Tensor,
    ) -> torch.Tensor:
        x = x.contiguous()
        weights = weights.contiguous()
        parts, rows = _parts(bounds)
        hidden = x.new_empty(rows, 2 * down.shape[2])
        out = [torch.zeros_like(x) for _ in parts]
        given = [_np(t) for t in (x, weights, order)]
        held = [_np(t) for t in (gate_up, down, hidden)]

        def some(part: np.ndarray, own: torch.Tensor) -> None:
            kernels_experts.forward(*given, part, *held, _np(own))

        each(some, list(zip(parts, out, strict=True)))
        ctx.save_for_backward(x, weights, order, hidden, gate_up, down)
        ctx.parts = parts
        return functools.reduce(torch.Tensor.add_, out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights, order, hidden, gate_up, down = ctx.saved_tensors
        d_x = [torch.zeros_like(x) for _ in ctx.parts]
        d_weights = torch.empty_like(weights)
        learnt = ctx.needs_input_grad[4]  # with its down projection
        d_gate_up, d_down = (torch.zeros_like(w) if learnt else w.new_empty(0, 0, 0) for w in (gate_up, down))
        given = [_np(t) for t in (grads[0].contiguous(), x, weights, order)]
        held = [_np(t) for t in (gate_up, down, hidden)]
        made = [_np(t) for t in (d_weights, d_gate_up, d_down)]

        def some(part: np.ndarray, own: torch.Tensor) -> None:
            kernels_experts.backward(*given, part, *held, _np(own), *made)

        each(some, list(zip(ctx.parts, d_x, strict=True)))
        learns = (d_gate_up, d_down) if learnt else (None, None)
        return functools.reduce(torch.Tensor.add_, d_x), d_weights, None, None, *learns


def grouped(rows: torch.Tensor, bounds: Bounds, weight: torch.Tensor) -> torch.Tensor:
    """`[P, M]` of `rows [P, D]` sorted by expert and `weight [E, M, D]`, with the bits of `TiledExperts`; not differentiable."""
    out = rows.new_empty(len(rows), weight.shape[1])
    x, held, made = (_np(t) for t in (rows.contiguous(), weight, out))
    each(lambda part: kernels_experts.grouped(x, part, held, made), [(part,) for part in _parts(bounds)[0]])
    return out


class Gate(torch.autograd.Function):
    """silu(gate) · up of `hidden [P, 2W]` = [gate | up], with the bits of `TiledExperts`."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.contiguous()
        out = hidden.new_empty(len(hidden), hidden.shape[1] // 2)
        kernels_experts.gated(_np(hidden), _np(out))
        ctx.save_for_backward(hidden)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor | None:
        return swiglu_backward(grads[0].contiguous(), *ctx.saved_tensors)


class Combined(torch.autograd.Function):
    """`[N, D]` of `rows [N · K, D]` sorted by expert and `weights [N, K]`, with the bits of `TiledExperts`."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, bounds: Bounds
    ) -> torch.Tensor:
        weights = weights.contiguous()
        given = [_np(t) for t in (rows.contiguous(), weights, order)]
        parts, _ = _parts(bounds)
        out = [rows.new_zeros(len(weights), rows.shape[1]) for _ in parts]

        def some(part: np.ndarray, own: torch.Tensor) -> None:
            kernels_experts.combined(*given, part, _np(own))

        each(some, list(zip(parts, out, strict=True)))
        ctx.save_for_backward(rows, weights, order)
        return functools.reduce(torch.Tensor.add_, out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights, order = ctx.saved_tensors
        d_rows = grads[0].index_select(0, order // weights.shape[1])
        d_weights = torch.empty_like(weights)
        d_weights.view(-1)[order] = torch.linalg.vecdot(d_rows, rows)
        return d_rows.mul_(weights.view(-1)[order, None]), d_weights, None, None


def _parts(bounds: Bounds) -> tuple[list[np.ndarray], int]:
    """What each thread does of `bounds`, about as many pairs, as the kernels want it; and the rows of all whole tiles."""
    sizes = np.array(bounds, np.int64).reshape(-1, 3)
    whole = [up(int(end - first), ROWS) for _, first, end in sizes]
    places = np.cumsum([0, *whole])
    table = np.ascontiguousarray(np.column_stack([sizes, places[:-1]]))
    threads = max(1, min(torch.get_num_threads(), len(table)))
    even = [places[-1] * n / threads for n in range(1, threads)]
    cuts = np.searchsorted(places[1:], even)
    return np.split(table, cuts), int(places[-1])
