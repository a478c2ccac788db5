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
from rollkeel.models.experts import SortedExperts, by_expert, plain_experts
from rollkeel.models.routers import expert_layers
from rollkeel.train.mesh import Mesh, gather_into


def check_experts(model: torch.nn.Module, mesh: Mesh) -> None:
    """Raises `BadInput` for a model whose experts cannot be dealt over the ranks of `mesh`."""
    layers = expert_layers(model)
    counts = {int(getattr(layer, "num_experts", 0)) for layer in layers}
    why = ""
    if not layers:
        why = "has no experts"
    elif uneven := [count for count in counts if count % mesh.expert]:
        why = f"has {uneven[0]} experts, which it does not divide"
    elif not all(map(plain_experts, layers)):
        why = "has experts that are no plain SwiGLU"
    if why:
        raise BadInput(f"train.mesh: expert={mesh.expert}, but {type(model).__name__} {why}; set another expert, or 1")


def expert_parameters(model: torch.nn.Module, mesh: Mesh) -> frozenset[str]:
    """Names of the parameters that are dealt over the ranks of `mesh`."""
    if mesh.expert == 1:
        return frozenset()
    inside = {id(p) for layer in expert_layers(model) for p in layer.parameters()}
    return frozenset(name for name, p in model.named_parameters() if id(p) in inside)


@torch.no_grad()
def deal_experts(model: torch.nn.Module, mesh: Mesh) -> None:
    """Leave this rank its rows of all stacks of experts, and let it send tokens to the others."""
    if mesh.expert == 1:
        return
    layers: Sequence[Any] = expert_layers(model)
    for layer in layers:
        for name, whole in list(layer.named_parameters()):
            part = whole.chunk(mesh.expert)[mesh.place["expert"]].clone()
            setattr(layer, name, torch.nn.Parameter(part, whole.requires_grad))
        layer.forward = _forward_of(layer, mesh)


def all_experts(part: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The stack of all experts, of which `part` lies here."""
    out = part.new_empty(mesh.expert * len(part), *part.shape[1:])
    gather_into(out, part.contiguous(), mesh.group("expert"))
    return out


class _Exchange(torch.autograd.Function):
    """Rows `[sum(sent), D]`, so many for each rank → those that came `[sum(came), D]`, rank by rank; its gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], came: list[int], group: Any) -> torch.Tensor:
        ctx.about = came, sent, group
        return _exchanged(rows, sent, came, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchanged(grads[0], *ctx.about), None, None, None


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
        rows = _Exchange.apply(hidden_states.index_select(0, order // top_k), sent, came, group)
        ids = torch.arange(each, device=counts.device).repeat(ranks).repeat_interleave(arriving.reshape(-1))
        mine, bounds = by_expert(ids, each)
        ones = hidden_states.new_ones(len(ids), 1)
        out = SortedExperts.apply(rows, ones, mine, bounds, layer.gate_up_proj, layer.down_proj)
        back = _Exchange.apply(out, came, sent, group)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        pairs = back.index_select(0, inverse).view(-1, top_k, hidden_states.shape[1])  # type: ignore[union-attr]
        return (pairs * top_k_weights.to(pairs.dtype).unsqueeze(2)).sum(1)

    return forward
