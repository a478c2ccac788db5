"""From `engine.forward` to what computes hidden states, what it attends over, and what draws tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rollkeel.config import EngineConfig, LoraConfig
from rollkeel.engines.kv import PagedCache
from rollkeel.engines.sampling import Sampler, sample
from rollkeel.errors import BadInput
from rollkeel.models.forward import FastForward, Zeros, supports


class Pieces(NamedTuple):
    """What belongs together in an engine."""

    forward: Any
    cache: type[PagedCache] = PagedCache
    draw: Sampler = sample


def open_forward(
    text: Any, config: EngineConfig, device: torch.device, lora: LoraConfig | None, zeros: Zeros = torch.zeros
) -> Pieces:
    """The pieces for the architecture `text`. Raises `BadInput` where `engine.forward` does not compute it."""
    if config.forward == "transformers" or (config.forward == "auto" and not supports(text)):
        # Imported here: it brings in most of transformers, which a worker of a known family starts without.
        from rollkeel.models.forward_transformers import TransformersForward

        return Pieces(TransformersForward(text, config.dtype, device, lora))
    if not supports(text):
        raise BadInput(f"engine.forward: expected a family the fast forward computes, got {text.model_type}; use auto")
    if config.forward == "parity":
        from rollkeel.engines.parity import ParityCache, draw
        from rollkeel.models.parity import ParityForward

        return Pieces(ParityForward(text, config.dtype, device, lora, zeros), ParityCache, draw)
    return Pieces(FastForward(text, config.dtype, device, lora, zeros))
