"""Heads, widths and vocabulary cut over ranks: each computes with its part, and what the ranks' parts come to is added up.

    hidden ──▶ enter ──▶ q k v of its heads ──▶ attention ──▶ its columns of o ──▶ leave ──▶ hidden
    hidden ──▶ enter ──▶ gate, up of its width, of the MLP or of each expert ──▶ its columns of down ──▶ leave ──▶ hidden
               ids ────▶ its rows of the embedding, 0 for others ─────────────────────────────▶ leave ──▶ hidden

`enter` passes values on and adds up gradients, `leave` adds up values and passes gradients on. What stands outside of them (norms,
routers, residuals) is computed by every rank alike, and so are its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_utils import PreTrainedModel

from rollkeel.errors import BadInput
from rollkeel.models.experts import plain_experts
from rollkeel.models.forward import FAMILIES, supports
from rollkeel.models.routers import expert_layers
from rollkeel.train.mesh import Mesh
from rollkeel.train.parts import cuts
from rollkeel.train.vocabulary import Vocabulary

Ids = torch.Tensor


def check_tensor(model: PreTrainedModel, mesh: Mesh) -> None:
    """Raises `BadInput` for a model that cannot be cut over the tensor ranks of `mesh`."""
    if why := next(_obstacles(model, mesh), ""):
        raise BadInput(f"train.mesh: tensor={mesh.tensor}, but {type(model).__name__} {why}; set another tensor, or 1")


def _obstacles(model: PreTrainedModel, mesh: Mesh) -> Iterator[str]:
    config = model.config.get_text_config()
    if not supports(config) or not all(map(plain_experts, expert_layers(model))):
        yield f"is not of the layers that can be cut ({', '.join(FAMILIES)}, without sliding windows and biases of MLPs)"
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (count := getattr(config, key)) % mesh.tensor:
            yield f"has {key}={count}, which it does not divide"
    for name, p in model.named_parameters():
        for over, dim, blocks in cuts(mesh, name, p.shape):
            if over == "tensor" and p.shape[dim] // blocks % mesh.tensor:
                yield f"has {name} of width {p.shape[dim] // blocks}, which it does not divide"


def cut_layers(model: Any, mesh: Mesh) -> Vocabulary | None:
    """Let this rank, which has its part of all that is cut, compute with the others. Returns which rows of the head it has, if not all."""
    group, backbone = mesh.group("tensor"), getattr(model, model.base_model_prefix)
    for layer in backbone.layers:
        layer.self_attn.register_forward_pre_hook(_entering(group), with_kwargs=True)
        layer.self_attn.o_proj.forward = _leaving(layer.self_attn.o_proj, group)
        if experts := expert_layers(layer.mlp):
            experts[0].forward = _experts(experts[0].forward, group)
        else:
            layer.mlp.register_forward_pre_hook(_entering(group), with_kwargs=True)
            layer.mlp.down_proj.forward = _leaving(layer.mlp.down_proj, group)
    embedding = model.get_input_embeddings()
    if len(embedding.weight) < embedding.num_embeddings:
        embedding.forward = _lookup(embedding, mesh)
    rows, of = len(model.get_output_embeddings().weight), model.get_output_embeddings().out_features
    return Vocabulary(mesh.place["tensor"] * rows, rows, group) if rows < of else None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        import torch.distributed as dist

        total = grads[0].clone(memory_format=torch.contiguous_format)  # others may look at the gradient too
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        import torch.distributed as dist

        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None


def enter(x: torch.Tensor, group: Any) -> torch.Tensor:
    """`x`, the same on all ranks; its gradient is the sum of theirs."""
    return _Enter.apply(x, group)  # type: ignore[return-value]


def leave(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of all ranks' `x`, in its memory; each gets the gradient of the sum."""
    return _Leave.apply(x, group)  # type: ignore[return-value]


def _entering(group: Any) -> Callable[..., tuple[Any, Any]]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        _ = module
        if args:
            return (enter(args[0], group), *args[1:]), options
        return args, {**options, "hidden_states": enter(options["hidden_states"], group)}

    return hook


def _leaving(linear: torch.nn.Linear, group: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        out = leave(F.linear(x, linear.weight), group)
        return out if linear.bias is None else out + linear.bias

    return forward


def _experts(own: Callable[..., torch.Tensor], group: Any) -> Callable[..., torch.Tensor]:
    def forward(hidden_states: torch.Tensor, top_k_index: Ids, top_k_weights: torch.Tensor) -> torch.Tensor:
        return leave(own(enter(hidden_states, group), top_k_index, enter(top_k_weights, group)), group)

    return forward


def _lookup(embedding: torch.nn.Embedding, mesh: Mesh) -> Callable[[Ids], torch.Tensor]:
    rows = len(embedding.weight)
    first, padding = mesh.place["tensor"] * rows, embedding.padding_idx
    pad = padding - first if padding is not None and first <= padding < first + rows else None

    def forward(ids: Ids) -> torch.Tensor:
        here = ids - first
        others = (here < 0) | (here >= rows)
        found = F.embedding(here.masked_fill(others, 0), embedding.weight, pad)
        return leave(found.masked_fill(others.unsqueeze(-1), 0.0), mesh.group("tensor"))

    return forward
