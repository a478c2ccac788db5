"""Decoder layers through torch.compile: one kernel where their modules launch ten, whatever the lengths are.

Attention stays outside: what it works on changes with every batch. So do routed experts, which are told where to send tokens.
"""

from __future__ import annotations

import torch
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rollkeel.errors import BadInput
from rollkeel.models.fused import Lent
from rollkeel.models.routers import expert_layers

BACKEND = "inductor"


def outside(attention: str) -> str:
    """Registers the attention implementation `attention` as one that compiled code calls; the name of that."""
    name = f"{attention}_outside"
    ALL_ATTENTION_FUNCTIONS.register(name, torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[attention]))
    return name


def compiled_layers(backbone: torch.nn.Module) -> list[Lent]:
    """Compiled forwards of the decoder layers, of a mixture those of what stands around its experts. Nothing is compiled yet.

    Raises `BadInput` for a model without decoder layers.
    """
    layers = [m for m in backbone.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise BadInput(f"train.compile: model {type(backbone).__name__} has no decoder layers; set train.compile=false")
    parts: list[torch.nn.Module] = []
    for layer in layers:
        routed = set(expert_layers(layer))
        parts += [m for m in layer.children() if not routed & set(m.modules())] if routed else [layer]
    return [(m, torch.compile(m.forward, dynamic=True, backend=BACKEND)) for m in parts]
