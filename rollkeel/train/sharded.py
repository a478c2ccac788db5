"""The trainer's model when its parts lie on several ranks: brought in for passes, and one parameter at a time for others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rollkeel.config import TrainConfig
from rollkeel.errors import BadInput
from rollkeel.models.checkpointing import decoder_layers
from rollkeel.models.loading import Policy
from rollkeel.models.names import checkpoint_pieces, piece_of
from rollkeel.train.expert_parallel import check_experts, send_to_experts
from rollkeel.train.logprobs import PolicyForward
from rollkeel.train.mesh import Mesh, local, spread
from rollkeel.train.parts import Deal
from rollkeel.train.tree import Tree, reduce_scatter

Pieces = Sequence[tuple[str, str, torch.Tensor]]
"""Checkpoint name, the parameter's, and which piece of it that is."""


def check_ranks(mesh: Mesh, config: TrainConfig, policy: Policy, rounding: str, parity: bool) -> None:
    """Raises `BadInput` for what does not run on several ranks yet."""
    asked = {
        "train.processes": config.processes > 1,
        "train.compile": config.compile,
        "train.lora": policy.lora is not None,
        "run.parity": parity,
        "experiment.rounding": rounding != "none",
        "model.dtype": policy.model.dtype != torch.float32,
        "train.reduce": config.reduce == "tree" and mesh.size > mesh.over("replicate", "shard"),
    }
    if mesh.size > 1:
        for name in (name for name, there in asked.items() if there):
            raise BadInput(f"{name}: cannot be on {mesh.size} ranks yet; set its default or train.mesh to 1")
    if mesh.expert > 1:
        check_experts(policy.model, mesh)
    if mesh.tensor > 1:
        from rollkeel.train.tensor_parallel import check_tensor

        check_tensor(policy.model, mesh)


def pieces_of(model: Any, mesh: Mesh) -> Pieces:
    """What a sharded model's checkpoint tensors are, asked while it is whole; empty for one that stays so."""
    names = {id(p): n for n, p in model.named_parameters()}
    pieces = checkpoint_pieces(model) if mesh.in_step else ()
    return [(name, names[id(owner)], piece) for name, owner, piece in pieces]


def shard(forward: PolicyForward, deal: Deal, tree: Tree | None) -> None:
    """Leave this rank its part of the model that `forward` runs."""
    model, mesh = forward.packed.model, deal.mesh
    if mesh.context > 1:
        from rollkeel.train.context_parallel import Context, check_context

        check_context(model, forward.packed.padded, mesh)
        forward.share(Context(mesh))
    deal.keep(model)
    send_to_experts(model, mesh)
    if mesh.tensor > 1:
        from rollkeel.train.tensor_parallel import cut_layers

        forward.vocabulary = cut_layers(model, mesh)
    if mesh.shard > 1:
        layers = [layer.module for layer in decoder_layers(model, "layer")]
        reduce = tree and reduce_scatter(tree)
        forward.score = spread(model, layers, forward.score, mesh, reduce)  # type: ignore[method-assign]


def gathered(model: torch.nn.Module, pieces: Pieces, deal: Deal) -> Iterator[tuple[str, torch.Tensor]]:
    """(Checkpoint name, tensor) of a sharded model: one parameter whole at a time, on every rank."""
    live, held, whole = dict(model.named_parameters()), "", torch.empty(0)
    for name, owner, piece in pieces:
        if owner != held:
            held, part = owner, live[owner].detach()
            whole = part if local(part) is part else part.full_tensor()  # type: ignore[attr-defined]
            whole = deal.whole(owner, whole)
        yield name, piece_of(whole, piece)
