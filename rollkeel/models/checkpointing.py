"""Activation checkpointing: a decoder layer keeps what goes into it, and the backward runs the layer again.

Transformers' own flag works in train mode only, which would switch dropout on. The second run repeats the bits of the first; in
a mixture it is sent to the experts of the first, so that a tie or a rounding cannot draw others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from rollkeel.config import Recompute
from rollkeel.errors import BadInput
from rollkeel.models import packed_attention
from rollkeel.models.routers import expert_layers

_ROUTES = frozenset({"aten::topk"})
_ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
        packed_attention.NAME,
    }
)
"""Both matrix products of attention in one operation: its work grows with the square of a length, its result does not."""
Again = Callable[[torch.nn.Module], AbstractContextManager[None]]
"""What the second run of a layer needs around it."""


class Layer(NamedTuple):
    """A decoder layer."""

    module: torch.nn.Module
    kept: frozenset[str]
    """Operations whose results are kept for the second run."""


def decoder_layers(backbone: torch.nn.Module, recompute: Recompute) -> list[Layer]:
    """Those of the layers that transformers would checkpoint which `recompute` is for. Raises `BadInput` if there are none."""
    if (mode := recompute.mode) == "none":
        return []
    layers = [m for m in backbone.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise BadInput(
            f"train.checkpointing={mode}: model {type(backbone).__name__} has no layers for it; set train.checkpointing=none"
        )
    kept = _ATTENTION if mode == "selective" else frozenset[str]()
    return [Layer(m, kept | _ROUTES if expert_layers(m) else kept) for m in layers[: recompute.of(len(layers))]]


@contextmanager
def checkpointed(layers: Sequence[Layer], again: Again) -> Iterator[None]:
    """Inside, a forward with gradient keeps little of what happens in `layers`."""
    lent = layers if torch.is_grad_enabled() else ()
    try:
        for layer in lent:
            layer.module.forward = _forward(layer, layer.module.forward, again)
        yield
    finally:
        for layer in lent:
            layer.module.__dict__.pop("forward", None)


def _forward(layer: Layer, own: Callable[..., Any], again: Again) -> Callable[..., Any]:
    def forward(*args: Any, **options: Any) -> Any:
        results = _Results(layer.kept)

        def run(*args: Any, **options: Any) -> Any:
            if results.complete:
                with again(layer.module), results if layer.kept else nullcontext():
                    return own(*args, **options)
            with results if layer.kept else nullcontext():
                out = own(*args, **options)
            results.complete = True
            return out

        return checkpoint(run, *args, use_reentrant=False, **options)

    return forward


class _Results(TorchDispatchMode):
    """Keeps the results of some operations in the first run, and answers with them in every later one."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self.names = names
        self.kept = list[Any]()
        self.answered = 0
        self.complete = False

    def __enter__(self) -> Any:
        self.answered = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if name not in self.names:
            return func(*args, **(kwargs or {}))
        # Routers divide the scores of their choice in place, so those are copied on both ways.
        take = torch.Tensor.clone if name in _ROUTES else torch.Tensor.detach
        if not self.complete:
            out = func(*args, **(kwargs or {}))
            self.kept.append(tree_map_only(torch.Tensor, take, out))
            return out
        self.answered += 1
        return tree_map_only(torch.Tensor, take, self.kept[self.answered - 1])
