"""Looks at transformers' modules while they compute, under the names of `capture`. Nothing they compute changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rollkeel.models.forward import Observe
from rollkeel.models.packed import VARLEN_ATTENTION, varlen_attention

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj")
_PLACES = {
    "self_attention": ("self_attn", "attention", "attn", "self_attention"),
    "feed_forward": ("mlp", "feed_forward", "block_sparse_moe", "moe"),
}
"""What architectures call the two halves of a layer."""


@contextmanager
def operations_watched(model: Any, backbone: Any, see: Observe) -> Iterator[None]:
    """`see` is told every operation of a Llama-family model that runs by `PackedModel(fuse=False)`."""
    with _Hooks(see) as hooks, _attention_watched(see):
        hooks.output(model.get_input_embeddings(), None, "embedding")
        for index, layer in enumerate(backbone.layers):
            hooks.output(layer.input_layernorm, index, "input_norm")
            for name in _PROJECTIONS:
                hooks.output(getattr(layer.self_attn, name, None), index, name)
            hooks.input(layer.post_attention_layernorm, index, "attention_residual", 0, "hidden_states")
            hooks.output(layer.post_attention_layernorm, index, "post_norm")
            if hasattr(layer.mlp, "experts"):
                hooks.output(layer.mlp.gate, index, "router")
                hooks.input(layer.mlp.experts, index, "experts", 1, "top_k_index")
            hooks.output(layer.mlp, index, "mlp")
            hooks.output(layer, index, "mlp_residual")
        hooks.output(backbone.norm, None, "final_norm")
        yield


@contextmanager
def modules_watched(model: Any, backbone: Any, see: Observe) -> Iterator[None]:
    """`see` is told what whole modules of any decoder give: embedding, attention, feed-forward part, layer."""
    with _Hooks(see) as hooks:
        hooks.output(model.get_input_embeddings(), None, "embedding")
        for index, layer in enumerate(decoder_layers(backbone)):
            for name, part in parts_of(layer).items():
                hooks.output(part, index, name)
            hooks.output(layer, index, "layer")
        yield


def decoder_layers(backbone: Any) -> Sequence[Any]:
    """The layers of a decoder, by their number in its config."""
    count = backbone.config.get_text_config().num_hidden_layers
    found = (m for m in backbone.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count)
    return list(next(found, ()))


def parts_of(layer: Any) -> dict[str, torch.nn.Module]:
    """Attention and feed-forward part of a layer, as far as they go by a usual name."""
    out = {}
    for name, places in _PLACES.items():
        module = next((m for place in places if (m := getattr(layer, place, None)) is not None), None)
        if module is not None:
            out[name] = module
    return out


class _Hooks:
    """Hooks that live as long as the context."""

    def __init__(self, see: Observe) -> None:
        self._see, self._handles = see, []

    def __enter__(self) -> _Hooks:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def output(self, module: torch.nn.Module | None, layer: int | None, name: str) -> None:
        """Tell what `module` returns, the first of it if it returns several."""
        if module is None:
            return

        def hook(module: torch.nn.Module, args: Any, out: Any) -> None:
            self._see(layer, name, out[0] if isinstance(out, tuple) else out)

        self._handles.append(module.register_forward_hook(hook))

    def input(self, module: torch.nn.Module, layer: int | None, name: str, at: int, keyword: str) -> None:
        """Tell an argument of `module`."""

        def hook(module: torch.nn.Module, args: Any, options: Any) -> None:
            self._see(layer, name, args[at] if len(args) > at else options[keyword])

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))


@contextmanager
def _attention_watched(see: Observe) -> Iterator[None]:
    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        see(module.layer_idx, "q_rope", query[0].transpose(0, 1))
        see(module.layer_idx, "k_rope", key[0].transpose(0, 1))
        out, weights = varlen_attention(module, query, key, value, mask, **options)
        see(module.layer_idx, "attention", out[0])
        return out, weights

    ALL_ATTENTION_FUNCTIONS.register(VARLEN_ATTENTION, attend)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.register(VARLEN_ATTENTION, varlen_attention)
