"""Routers of mixture-of-experts models: which parameters they are, and which experts they chose in a forward pass."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_ROUTER = re.compile(
    r"(?:^|(?<!attn)(?<!attention)\.)(?:gate|router)(?:\.|$)|(?:^|\.)(?:e_score_correction|expert)_bias$"
)
_CHOICE_NAMES = ("top_k_index", "router_indices")


def is_router(name: str) -> bool:
    """True for parameters, buffers and modules that decide which experts a token goes to, by checkpoint or module name.

    `…mlp.gate.weight`, `…router.bias`, `…e_score_correction_bias`, but not `gate_proj` or an attention gate, and not
    `shared_expert_gate`: it scales the output of an expert that every token goes to and chooses nothing.
    """
    return _ROUTER.search(name) is not None


def expert_layers(model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """The routed experts of each mixture-of-experts layer, in layer order; empty for a dense model.

    Found by transformers' experts interface, which every family there shares whatever its router looks like
    (Qwen3-MoE, OLMoE, DeepSeek-V3, GPT-OSS, …): the experts are handed the router's choice.
    """
    return tuple(m for m in model.modules() if hasattr(m, "_is_expert_parallel") and hasattr(m, "has_gate"))


@contextmanager
def record_experts(layers: Sequence[torch.nn.Module]) -> Iterator[list[torch.Tensor]]:
    """Collects the expert ids `[N, k]` that each of `expert_layers` is called with, in the order of the calls.

    The hooks live as long as the context: a model that carries none can be copied and sent to other processes.
    """
    chosen: list[torch.Tensor] = []

    def see(module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        _ = module
        given = args[1] if len(args) > 1 else next(options[n] for n in _CHOICE_NAMES if n in options)
        chosen.append(given.detach())

    handles = [layer.register_forward_pre_hook(see, with_kwargs=True) for layer in layers]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()
