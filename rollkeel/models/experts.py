"""Mixture-of-experts layer for training on CPU: tokens sorted by expert once, one matrix product per expert, backward by hand.

The stock implementations either search the tokens of every expert with `where`, or sort and then let autograd fill
zero gradients for slices and copies. Here the forward keeps what the backward needs and nothing is filled twice.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate, grouped_mm_experts_forward

from rollkeel.models.fused import swiglu_backward
from rollkeel.models.products import add_mm, mm
from rollkeel.models.tiled_experts import TiledExperts, suits

SORTED_EXPERTS = "rollkeel_sorted"
"""Name of the implementation in transformers' experts interface."""
_LATER_FLAGS = ("_is_expert_parallel", "has_post_expert_norm")
"""What experts of transformers 5.18 and 5.20 may have besides; those before have neither."""


class SortedExperts(torch.autograd.Function):
    """SwiGLU experts. `x [N, D]`, `weights [N, K]`, `order [N·K]` sorts (token, slot) pairs by expert."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: torch.Tensor,
        order: torch.Tensor,
        bounds: list[tuple[int, int, int]],
        gate_up: torch.Tensor,
        down: torch.Tensor,
    ) -> torch.Tensor:
        top_k, width = weights.shape[1], down.shape[2]
        rows = x.index_select(0, order // top_k)
        hidden = rows.new_empty(rows.shape[0], 2 * width)
        for expert, a, b in bounds:
            mm(rows[a:b], gate_up[expert].t(), hidden[a:b])
        active = F.silu(hidden[:, :width]).mul_(hidden[:, width:])
        out = torch.empty_like(rows)
        for expert, a, b in bounds:
            mm(active[a:b], down[expert].t(), out[a:b])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        ctx.save_for_backward(rows, weights, order, inverse, hidden, active, out, gate_up, down)
        ctx.bounds = bounds
        pairs = out.index_select(0, inverse).view(-1, top_k, x.shape[1])
        return pairs.mul_(weights.unsqueeze(2)).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights, order, inverse, hidden, active, out, gate_up, down = ctx.saved_tensors
        top_k = weights.shape[1]
        d_out = grads[0].index_select(0, order // top_k)
        d_weights = (d_out * out).sum(-1).index_select(0, inverse).view_as(weights)
        d_out.mul_(weights.reshape(-1).index_select(0, order).unsqueeze(1))
        d_active = torch.empty_like(active)
        learnt = ctx.needs_input_grad[4]  # with its down projection
        d_down, d_gate_up = (torch.zeros_like(w) if learnt else None for w in (down, gate_up))
        for expert, a, b in ctx.bounds:
            mm(d_out[a:b], down[expert], d_active[a:b])
            if d_down is not None:
                add_mm(d_down[expert], d_out[a:b], active[a:b])
        d_hidden = swiglu_backward(d_active, hidden)
        if d_hidden is None:
            d_hidden = _swiglu_backward(d_active, hidden)
        d_rows = torch.empty_like(rows)
        for expert, a, b in ctx.bounds:
            mm(d_hidden[a:b], gate_up[expert], d_rows[a:b])
            if d_gate_up is not None:
                add_mm(d_gate_up[expert], d_hidden[a:b], rows[a:b])
        d_x = d_rows.index_select(0, inverse).view(-1, top_k, rows.shape[1]).sum(1)
        return d_x, d_weights, None, None, d_gate_up, d_down


def _swiglu_backward(d_active: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    width = d_active.shape[1]
    gate, up = hidden[:, :width], hidden[:, width:]
    out = torch.empty_like(hidden)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    torch.mul(d_active, silu, out=out[:, width:])
    # silu'(g) = σ(g) + silu(g)·(1 − σ(g))
    slope = torch.addcmul(sigmoid, silu, 1 - sigmoid)
    torch.mul(d_active.mul_(up), slope, out=out[:, :width])
    return out


def sorted_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts forward in transformers' signature: `[N, D]`, `[N, K]` int64, `[N, K]` → `[N, D]`.

    Layers that are not plain SwiGLU on the CPU (biases, transposed weights, own gates, expert parallelism, mixed dtypes)
    go to transformers' `grouped_mm`.
    """
    if not _plain(self, hidden_states):
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    order, bounds = by_expert(top_k_index, self.num_experts)
    weights = top_k_weights.to(hidden_states.dtype)
    return swiglu_experts(hidden_states, weights, order, bounds, self.gate_up_proj, self.down_proj)


def swiglu_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    bounds: list[tuple[int, int, int]],
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """`[N, D]` of `x [N, D]`; see `SortedExperts`, which small experts are quicker without."""
    way = TiledExperts if suits(x, gate_up, down) else SortedExperts
    return way.apply(x, weights, order, bounds, gate_up, down)  # type: ignore[return-value]


def by_expert(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
    """Order that sorts the (token, slot) pairs of `chosen [N, K]` by expert; expert, first and last + 1 of its pairs."""
    order, ends = by_expert_there(chosen, experts)
    return order, bounds_of(ends)


def by_expert_there(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same order, and `[E]` int32 the place behind the last pair of each expert, without a read of the device."""
    ids, order = chosen.reshape(-1).sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(experts, device=ids.device), right=True)
    return order, ends.int()


def bounds_of(ends: torch.Tensor) -> list[tuple[int, int, int]]:
    """The experts that have pairs, first and last + 1 of each one's, by the place behind the last of every expert."""
    edges = itertools.pairwise([0, *ends.tolist()])
    return [(expert, a, b) for expert, (a, b) in enumerate(edges) if a < b]


def _plain(module: Any, x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and module.gate_up_proj.dtype == x.dtype and plain_experts(module)


def plain_experts(module: Any) -> bool:
    """True for SwiGLU experts `[E, 2W, D]` and `[E, D, W]` and nothing else."""
    gate = type(module)._apply_gate
    return (
        module.has_gate
        and module.is_concatenated
        and not (module.has_bias or module.is_transposed)
        and not any(getattr(module, flag, False) for flag in _LATER_FLAGS)
        and gate is _default_apply_gate
        and isinstance(module.act_fn, torch.nn.SiLU | _HF_SILU)
    )


def _silu_type() -> type:
    from transformers.activations import ACT2FN

    return type(ACT2FN["silu"])


_HF_SILU = _silu_type()
ALL_EXPERTS_FUNCTIONS.register(SORTED_EXPERTS, sorted_experts_forward)
