"""Experts dealt over ranks: each holds some of every layer, and tokens travel to them and back.

    rank 0: its tokens ──┐  by expert   ┌─▶ experts 0 … E/2    of both ranks' tokens ──┐            ┌─▶ rank 0's tokens,
    rank 1: its tokens ──┴─ all to all ─┴─▶ experts E/2 … E    of both ranks' tokens ──┴─ all to all ┴─▶ weighted and added there

Routers stay whole on every rank, so that recorded and replayed choices are what they are in one process. An expert's gradient is the sum
over the tokens of all ranks of its group as soon as a backward is through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rollkeel.errors import BadInput
from rollkeel.models.experts import by_expert, plain_experts, swiglu_experts
from rollkeel.models.routers import expert_layers
from rollkeel.train.mesh import Mesh
from rollkeel.train.parts import cuts


def check_experts(model: torch.nn.Module, mesh: Mesh) -> None:
    """Raises `BadInput` for a model whose experts cannot be dealt over the ranks of `mesh`."""
    layers = expert_layers(model)
    inside = {id(p) for layer in layers for p in layer.parameters()}
    counts = {int(getattr(layer, "num_experts", 0)) for layer in layers}
    why = ""
    if not layers:
        why = "has no experts"
    elif uneven := [count for count in counts if count % mesh.expert]:
        why = f"has {uneven[0]} experts, which it does not divide"
    elif not all(map(plain_experts, layers)):
        why = "has experts that are no plain SwiGLU"
    elif any(not cuts(mesh, name, p.shape) for name, p in model.named_parameters() if id(p) in inside):
        why = "has experts with other parameters than experts.gate_up_proj and experts.down_proj"
    if why:
        raise BadInput(f"train.mesh: expert={mesh.expert}, but {type(model).__name__} {why}; set another expert, or 1")


def send_to_experts(model: torch.nn.Module, mesh: Mesh) -> None:
    """Let this rank, which has its rows of all stacks of experts, send tokens to the others."""
    layers: Sequence[Any] = expert_layers(model) if mesh.expert > 1 else ()
    for layer in layers:
        layer.forward = _forward_of(layer, mesh)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], came: list[int], group: Any) -> torch.Tensor:
        ctx.about = came, sent, group
        return _exchanged(rows, sent, came, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchanged(grads[0], *ctx.about), None, None, None


def exchange(rows: torch.Tensor, sent: list[int], came: list[int], group: Any) -> torch.Tensor:
    """Rows `[sum(sent), D]`, so many for each rank of `group` → those that came `[sum(came), D]`; with their gradients. Collective."""
    return _Exchange.apply(rows, sent, came, group)  # type: ignore[return-value]


def _exchanged(rows: torch.Tensor, sent: list[int], came: list[int], group: Any) -> torch.Tensor:
    import torch.distributed as dist

    out = rows.new_empty(sum(came), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), came, sent, group=group)
    return out


def _forward_of(layer: Any, mesh: Mesh) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """`[N, D]`, `[N, K]` int64 among all experts, `[N, K]` → `[N, D]`."""
    group, ranks = mesh.group("expert"), mesh.expert

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        top_k = top_k_index.shape[1]
        each = layer.num_experts // ranks
        order, _ = by_expert(top_k_index, layer.num_experts)
        counts = torch.bincount(top_k_index.reshape(-1), minlength=layer.num_experts)
        arriving = _exchanged(counts, [each] * ranks, [each] * ranks, group).view(ranks, each)
        sent, came = counts.view(ranks, each).sum(1).tolist(), arriving.sum(1).tolist()
        rows = exchange(hidden_states.index_select(0, order // top_k), sent, came, group)
        ids = torch.arange(each, device=counts.device).repeat(ranks).repeat_interleave(arriving.reshape(-1))
        mine, bounds = by_expert(ids, each)
        ones = hidden_states.new_ones(len(ids), 1)
        out = swiglu_experts(rows, ones, mine, bounds, layer.gate_up_proj, layer.down_proj)
        back = exchange(out, came, sent, group)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        pairs = back.index_select(0, inverse).view(-1, top_k, hidden_states.shape[1])
        return (pairs * top_k_weights.to(pairs.dtype).unsqueeze(2)).sum(1)

    return forward
