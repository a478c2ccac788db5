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
from rollkeel.train.logprobs import PolicyForward
from rollkeel.train.mesh import Mesh, spread
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
    }
    if mesh.size > 1:
        for name in (name for name, there in asked.items() if there):
            raise BadInput(f"{name}: cannot be on {mesh.size} ranks yet; set its default or train.mesh to 1")


def pieces_of(model: Any, mesh: Mesh) -> Pieces:
    """What a sharded model's checkpoint tensors are, asked while it is whole; empty for one that stays so."""
    names = {id(p): n for n, p in model.named_parameters()}
    pieces = checkpoint_pieces(model) if mesh.shard > 1 else ()
    return [(name, names[id(owner)], piece) for name, owner, piece in pieces]


def shard(forward: PolicyForward, mesh: Mesh, tree: Tree | None) -> None:
    """Leave this rank its part of the model that `forward` runs."""
    if mesh.shard > 1:
        model = forward.packed.model
        layers = [layer.module for layer in decoder_layers(model, "layer")]
        reduce = tree and reduce_scatter(tree)
        forward.score = spread(model, layers, forward.score, mesh, reduce)  # type: ignore[method-assign]


def gathered(model: torch.nn.Module, pieces: Pieces) -> Iterator[tuple[str, torch.Tensor]]:
    """(Checkpoint name, tensor) of a sharded model: one parameter whole at a time, on every rank."""
    live, held, whole = dict(model.named_parameters()), "", torch.empty(0)
    for name, owner, piece in pieces:
        if owner != held:
            held, whole = owner, live[owner].detach().full_tensor()  # type: ignore[attr-defined]
        yield name, piece_of(whole, piece)
