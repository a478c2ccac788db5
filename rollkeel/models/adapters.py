"""Adapters of a live transformers model: put beside its layers, learnt, taken out by PEFT's names. The model itself is frozen."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from rollkeel.config import LoraConfig
from rollkeel.errors import BadInput
from rollkeel.models import tiled_experts
from rollkeel.models.experts import by_expert, by_expert_there, plain_experts
from rollkeel.models.lora import ADAPTER, STACKS, adapter_names, low_rank, low_rank_by_expert
from rollkeel.models.numerics import stays_precise
from rollkeel.models.products import add_mm, mm
from rollkeel.models.routers import expert_layers

Split = torch.Tensor | list[tuple[int, int, int]]
"""Where the rows of each expert lie: `[E]` int32 ends on a device; expert, first and last + 1 on a CPU."""


def _grouped(rows: torch.Tensor, weight: torch.Tensor, split: Split, tiled: bool = False) -> torch.Tensor:
    if isinstance(split, torch.Tensor):
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=split)
    return _Grouped.apply(rows, weight, split, tiled)  # type: ignore[return-value]


class Adapter(torch.nn.Module):
    """A and B of a weight `[out, in]`, or of each of a stack's; B begins as 0, where the model is its base."""

    def __init__(
        self, weight: torch.Tensor, lora: LoraConfig, generator: torch.Generator, device: torch.device | str | None
    ) -> None:
        super().__init__()
        *stack, outputs, inputs = weight.shape
        device = weight.device if device is None else device
        drawn = torch.rand(*stack, lora.rank, inputs, generator=generator)
        self.A = torch.nn.Parameter(((2 * drawn - 1) * inputs**-0.5).to(device))
        self.B = torch.nn.Parameter(torch.zeros(*stack, outputs, lora.rank, device=device))
        self.scale = lora.alpha / lora.rank

    def forward(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        """As a forward hook of the linear layer `module`."""
        _ = module
        return out + low_rank(args[0], self.A, self.B, self.scale).to(out.dtype)

    def grouped(self, rows: torch.Tensor, weight: torch.Tensor, split: Split, tiled: bool) -> torch.Tensor:
        """Each expert's rows times its own weight, and times its own adapters. `tiled`: the former by `tiled_experts`."""
        if isinstance(split, torch.Tensor):
            beside = low_rank_by_expert(rows, self.A, self.B, self.scale, split)
        else:
            beside = _grouped(_grouped(rows.float(), self.A, split), self.B, split) * self.scale
        return _grouped(rows, weight, split, tiled) + beside.to(rows.dtype)


class _Grouped(torch.autograd.Function):
    """`rows [N, in]` sorted by expert, `weight [E, out, in]` → `[N, out]`."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bounds: list[tuple[int, int, int]], tiled: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.bounds = bounds
        if tiled:
            return tiled_experts.grouped(rows, bounds, weight)
        out = rows.new_empty(len(rows), weight.shape[1])
        for expert, a, b in bounds:
            mm(rows[a:b], weight[expert].t(), out[a:b])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        d_out = grads[0].contiguous()
        d_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for expert, a, b in ctx.bounds:
            if d_rows is not None:
                mm(d_out[a:b], weight[expert], d_rows[a:b])
            if d_weight is not None:
                add_mm(d_weight[expert], d_out[a:b], rows[a:b])
        return d_rows, d_weight, None, None


class _Unsorted(torch.autograd.Function):
    """`rows [N, D]` that lie in `order`, back where they were. The backward of a copy to places would keep the rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        return torch.empty_like(rows).index_copy_(0, order, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order), None


def _experts(self: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """SwiGLU experts with adapters, in the signature of transformers' experts: `[N, D]`, `[N, K]`, `[N, K]` → `[N, D]`."""
    top_k = chosen.shape[-1]
    order, split = (by_expert if hidden.device.type == "cpu" else by_expert_there)(chosen, self.num_experts)
    rows = hidden.index_select(0, order // top_k)
    # As the model without adapters computes, or at zero they would not be it to the bit.
    tiled = tiled_experts.suits(hidden, self.gate_up_proj, self.down_proj)
    wide = self.lora["gate_up_proj"].grouped(rows, self.gate_up_proj, split, tiled)
    gate, up = wide.chunk(2, -1)
    active: Any = tiled_experts.Gate.apply(wide) if tiled else F.silu(gate) * up
    out = self.lora["down_proj"].grouped(active, self.down_proj, split, tiled)
    if tiled:
        return tiled_experts.Combined.apply(out, weights.to(hidden.dtype), order, split)  # type: ignore[return-value]
    back: Any = _Unsorted.apply(out, order)
    pairs = back.view(-1, top_k, hidden.shape[-1])
    return (pairs * weights.to(hidden.dtype).unsqueeze(2)).sum(1)


def attach(model: torch.nn.Module, lora: LoraConfig, seed: int = 0, device: torch.device | str | None = None) -> None:
    """Freeze `model` and put adapters beside the weights that `lora` names, A drawn with `seed`. `device`: of the adapters of a model
    without weights.

    Raises `BadInput` for a target that no layer has, and for experts that are not there or not plain SwiGLU.
    """
    linear = {
        name: module
        for name, module in model.named_modules()
        if ".layers." in name and type(module) is torch.nn.Linear and not stays_precise(name)
    }
    ends = sorted({_end(name) for name in linear})
    for target in lora.targets:
        if target not in ends:
            raise BadInput(
                f"train.lora.targets: {type(model).__name__} has no linear layers {target!r}; it has"
                f" {', '.join(ends) or 'none inside its layers'}"
            )
    experts = expert_layers(model) if lora.experts else ()
    if (lora.experts and not experts) or not all(map(plain_experts, experts)):
        raise BadInput(
            f"train.lora.experts: {type(model).__name__} has no routed SwiGLU experts without biases; set it to false"
        )
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, module in linear.items():
        if not lora.targets or _end(name) in lora.targets:
            adapter = Adapter(module.weight, lora, generator, device)
            module.add_module("lora", adapter)
            module.register_forward_hook(adapter)
    for module in experts:
        stacks = {name: Adapter(getattr(module, name), lora, generator, device) for name in STACKS}
        module.add_module("lora", torch.nn.ModuleDict(stacks))
        # A partial, which can be copied and sent to other processes.
        module.forward = functools.partial(_experts, module)


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The adapters of `model` by parameter name; empty without any."""
    return {name: p for name, p in model.named_parameters() if ADAPTER in name}


def trained_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The part of `model.state_dict()` that training changes: its adapters, or without any all of it."""
    state = {name: value.detach() for name, value in model.state_dict().items()}
    return {name: value for name, value in state.items() if ADAPTER in name} or state


def load_trained(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Take `trained_state` over. Raises `RuntimeError` for the state of another model."""
    if state.keys() != trained_state(model).keys():
        raise RuntimeError("the state of other adapters")
    model.load_state_dict(state, strict=not parameters(model))


def named_adapters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """PEFT's name → live tensor, `[rank, in]` and `[out, rank]`; of experts stacked, `[E, …]`."""
    return {peft_name(name): p.detach() for name, p in parameters(model).items()}


def peft_name(name: str) -> str:
    module, _, rest = name.partition(ADAPTER)
    weight, _, letter = rest.rpartition(".")
    return adapter_names(module, weight)["AB".index(letter)]


def check_base(told: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises `BadInput` unless adapters beside the base `told` belong to a model whose base is `own`; both are empty without."""
    if told.get("checksum") == own.get("checksum"):
        return
    theirs, here = (f"{base.get('path')} with checksum {base.get('checksum')}" for base in (told, own))
    raise BadInput(f"checkpoint: its adapters stand beside {theirs}, the model is {here}; resume with the same base")


@contextmanager
def holding(model: torch.nn.Module, adapters: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, the adapters of `model`, or what lies here of them, are these, by parameter name; those that are not named stay."""
    live = {name: getattr(p, "_local_tensor", p.data) for name, p in parameters(model).items() if name in adapters}
    kept = {name: p.clone() for name, p in live.items()}
    try:
        for name, p in live.items():
            p.copy_(adapters[name])
        yield
    finally:
        for name, p in live.items():
            p.copy_(kept[name])
