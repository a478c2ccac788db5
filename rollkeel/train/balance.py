"""Who runs which micro-batch, so that all are done at about the same time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from rollkeel.batch.packing import MicroBatch
from rollkeel.models.routers import expert_layers


def pair_cost(model: torch.nn.Module) -> float:
    """Work of one query with one key in all layers, beside that of one token in all matrix products, of a whole `model`.

    2 · layers · heads · head width multiplications against one for each weight that a token meets: of experts, those that it goes to.
    0 for a model whose config does not tell them.
    """
    told: Any = model
    config, layers = told.config.get_text_config(), expert_layers(model)
    heads = getattr(config, "num_attention_heads", 0)
    width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(1, heads)
    experts = {id(p) for layer in layers for p in layer.parameters()}
    per_token = getattr(config, "num_experts_per_tok", 1)
    met = per_token / getattr(layers[0], "num_experts", per_token) if layers else 1.0
    embedding, head = (
        getattr(module(), "weight", None) for module in (told.get_input_embeddings, told.get_output_embeddings)
    )
    skipped = None if embedding is head else embedding  # rows are looked up there, not multiplied
    matrices = (p for p in model.parameters() if p.dim() > 1 and p is not skipped)
    weights = sum(p.numel() * (met if id(p) in experts else 1.0) for p in matrices)
    return 2.0 * getattr(config, "num_hidden_layers", 0) * heads * width / max(1.0, weights)


def cost(micro: MicroBatch, pair: float) -> float:
    """Work of a pass, in tokens through the matrix products; `pair`: see `pair_cost`."""
    cu = micro.cu_seqlens.tolist()
    lengths = [b - a for a, b in itertools.pairwise(cu)]
    parents = [-1] * len(lengths) if micro.parents is None else micro.parents.tolist()
    pairs = sum(n * (n + 1) // 2 + n * (lengths[p] if p >= 0 else 0) for n, p in zip(lengths, parents, strict=True))
    return micro.input_ids.numel() + pair * pairs


def shares(micros: Sequence[MicroBatch], count: int, pair: float = 0.0) -> list[list[MicroBatch]]:
    """Micro-batches for each of `count` processes: the most costly first to the least loaded, ties to the first."""
    return [[micros[i] for i in own] for own in dealt([cost(micro, pair) for micro in micros], count)]


def dealt(costs: Sequence[float], count: int) -> list[list[int]]:
    """The same by numbers, of whatever has these costs."""
    out: list[list[int]] = [[] for _ in range(count)]
    load = [0.0] * count
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = load.index(min(load))
        out[least].append(i)
        load[least] += costs[i]
    return out
