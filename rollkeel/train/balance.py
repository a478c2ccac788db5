"""Who runs which micro-batch, so that all are done at about the same time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from rollkeel.batch.packing import MicroBatch
from rollkeel.models.routers import expert_layers


def pair_cost(model: torch.nn.Module) -> float:
    """Work of one query with one key in all layers, beside that of one token in all matrix products, of a whole `model`.

    2 · layers · heads · head width multiplications against one for each weight that a token meets: of experts, those that it goes to.
    0 for a model whose config does not tell them.
    """
    config = model.config.get_text_config()  # type: ignore[operator,union-attr]
    layers, heads = getattr(config, "num_hidden_layers", 0), getattr(config, "num_attention_heads", 0)
    width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(1, heads)
    experts = {id(p) for layer in expert_layers(model) for p in layer.parameters()}
    met = 1.0
    if experts:
        met = getattr(config, "num_experts_per_tok", 1) / next(int(m.num_experts) for m in expert_layers(model))  # type: ignore[arg-type]
    looked_up = model.get_input_embeddings().weight  # type: ignore[operator]
    tied = looked_up is model.get_output_embeddings().weight  # type: ignore[operator]
    weights = sum(
        p.numel() * (met if id(p) in experts else 1.0)
        for p in model.parameters()
        if p.dim() > 1 and (tied or p is not looked_up)
    )
    return 2.0 * layers * heads * width / weights


def cost(micro: MicroBatch, pair: float) -> float:
    """Work of a pass, in tokens through the matrix products; `pair`: see `pair_cost`."""
    cu = micro.cu_seqlens.tolist()
    lengths = [b - a for a, b in itertools.pairwise(cu)]
    parents = [-1] * len(lengths) if micro.parents is None else micro.parents.tolist()
    pairs = sum(n * (n + 1) // 2 + n * (lengths[p] if p >= 0 else 0) for n, p in zip(lengths, parents, strict=True))
    return micro.input_ids.numel() + pair * pairs


def shares(micros: Sequence[MicroBatch], count: int, pair: float = 0.0) -> list[list[MicroBatch]]:
    """Micro-batches for each of `count` processes: the most costly first to the least loaded, ties to the first."""
    out: list[list[MicroBatch]] = [[] for _ in range(count)]
    load = [0.0] * count
    costs = [cost(micro, pair) for micro in micros]
    for i in sorted(range(len(micros)), key=lambda i: -costs[i]):
        least = load.index(min(load))
        out[least].append(micros[i])
        load[least] += costs[i]
    return out
