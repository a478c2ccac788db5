"""LoRA (Hu et al., arXiv:2106.09685) in the fast forward: y = xW + (alpha / rank)(xA)B, A and B beside W and never merged into it.

Adapters are kept in float32 whatever the weights are. They go by PEFT's names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from rollkeel.config import LoraConfig

ADAPTER = ".lora."
"""In the names of a model's parameters: an adapter, and no weight of its own."""
PREFIX = "base_model.model."
STACKS = {"gate_up_proj": ".base_layer", "down_proj": ""}
"""Weights of routed experts, and how deep PEFT nests the wrapper of each."""
ALIGNED = 8
"""Columns of A in multiples of which grouped products are possible in every dtype."""
Part = tuple[slice, torch.Tensor, torch.Tensor]
"""Rows of a fused weight, A `[rank, in]` and B `[rows, rank]` beside them; of a stack of experts A `[E, …]` and B `[E, …]`."""


def low_rank(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """scale · (x Aᵀ) Bᵀ: `x [..., in]`, `a [rank, in]`, `b [out, rank]`."""
    kind = _working(x)
    return F.linear(F.linear(x.to(kind), a.to(kind)), b.to(kind)) * scale


def low_rank_by_expert(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, ends: torch.Tensor
) -> torch.Tensor:
    """The same of rows sorted by expert, on a device: `a [E, rank, in]`, `b [E, out, rank]`, `ends [E]` behind the last row of each."""
    kind, more = _working(x), -a.shape[1] % ALIGNED
    if more:
        a, b = F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))
    inner = F.grouped_mm(x.to(kind), a.to(kind).transpose(1, 2), offs=ends)
    return F.grouped_mm(inner, b.to(kind).transpose(1, 2), offs=ends) * scale


def _working(x: torch.Tensor) -> torch.dtype:
    """What adapters are multiplied in: float32, and on a device what `x` is, summed in float32, for which it has fast products."""
    return torch.float32 if x.device.type == "cpu" else x.dtype


def adapter_names(module: str, stack: str = "") -> tuple[str, str]:
    """PEFT's names of A and B beside a linear layer, or beside a weight of routed experts."""
    stem = f"{PREFIX}{module}{STACKS.get(stack, '')}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def beside(
    fused: Mapping[str, torch.Tensor],
    names: Mapping[str, torch.Tensor],
    experts: str,
    lora: LoraConfig,
    new: Callable[..., torch.Tensor],
) -> tuple[dict[str, list[Part]], dict[str, torch.Tensor]]:
    """Adapters of a layer: for each of its `fused` weights those that add to it, and all by PEFT's name.

    `names`: views into the fused weights by checkpoint name; `experts`: name of the layer's routed experts, if it has any, whose
    weights are fused as `up` and `down`.
    """
    where = {tensor.untyped_storage().data_ptr(): key for key, tensor in fused.items()}
    weights = [
        (name.removesuffix(".weight"), "", view)
        for name, view in names.items()
        if view.dim() == 2 and (not lora.targets or name.split(".")[-2] in lora.targets)
    ]
    if experts:
        stacked = zip(STACKS, (fused["up"], fused["down"]), strict=True)
        weights = [w for w in weights if not w[0].startswith(experts)]
        weights += [(experts, stack, weight) for stack, weight in stacked] if lora.experts else []
    parts: dict[str, list[Part]] = {key: [] for key in fused}
    held: dict[str, torch.Tensor] = {}
    for module, stack, view in weights:
        key = where.get(view.untyped_storage().data_ptr())
        if key is None:
            continue  # a router
        *several, outputs, inputs = view.shape
        first = 0 if stack else int(view.storage_offset()) // inputs
        a, b = new(*several, lora.rank, inputs), new(*several, outputs, lora.rank)
        parts[key].append((slice(first, first + outputs), a, b))
        held |= zip(adapter_names(module, stack), (a, b), strict=True)
    return parts, held


def add_low_rank(y: torch.Tensor, x: torch.Tensor, parts: Sequence[Part], scale: float) -> torch.Tensor:
    """`y [N, out]` with what the adapters `parts` say of `x [N, in]` added, in place."""
    for rows, a, b in parts:
        y[:, rows] += low_rank(x, a, b, scale).to(y.dtype)
    return y


def add_by_expert(
    y: torch.Tensor, x: torch.Tensor, parts: Sequence[Part], scale: float, ends: torch.Tensor | Sequence[int]
) -> None:
    """The same of rows sorted by expert: behind the last row of each on a device, how many of each on a CPU."""
    for _, a, b in parts:
        if isinstance(ends, torch.Tensor):
            y += low_rank_by_expert(x, a, b, scale, ends).to(y.dtype)
            continue
        for expert, (mine, rows) in enumerate(zip(y.split(ends), x.split(ends), strict=True)):
            if len(rows):
                mine += low_rank(rows, a[expert], b[expert], scale).to(y.dtype)
