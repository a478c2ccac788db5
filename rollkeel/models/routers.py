"""Routers of mixture-of-experts models: which parameters they are, which experts they chose, and how to choose for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rollkeel.errors import BadInput

_ROUTER = re.compile(
    r"(?:^|(?<!attn)(?<!attention)\.)(?:gate|router)(?:\.|$)|(?:^|\.)(?:e_score_correction|expert)_bias$"
)
_ROUTED = re.compile(r"\.(?:experts|router)\.")
_CHOICE_NAMES = ("top_k_index", "router_indices")
_WEIGHT_NAMES = ("top_k_weights", "routing_weights")
_TOPK = (torch.topk, torch.Tensor.topk)


def is_router(name: str) -> bool:
    """True for parameters, buffers and modules that decide which experts a token goes to, by checkpoint or module name.

    `…mlp.gate.weight`, `…router.bias`, `…e_score_correction_bias`, but not `gate_proj` or an attention gate, and not
    `shared_expert_gate`: it scales the output of an expert that every token goes to and chooses nothing.
    """
    return _ROUTER.search(name) is not None


def is_frozen(name: str, what: str) -> bool:
    """True for a parameter that `train.freeze_router` = `what` leaves as it is."""
    return what != "off" and is_router(name) and (what == "router" or name.endswith("bias"))


def expert_layers(model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """The routed experts of each mixture-of-experts layer, in layer order; empty for a dense model.

    Found by transformers' experts interface, which every family there shares whatever its router looks like
    (Qwen3-MoE, OLMoE, DeepSeek-V3, GPT-OSS, …): the experts are handed the router's choice.
    """
    return tuple(m for m in model.modules() if hasattr(m, "is_transposed") and hasattr(m, "has_gate"))


def unreached_experts(model: torch.nn.Module) -> str:
    """Name of a parameter of routed experts in a model where `expert_layers` finds none; empty if there is none."""
    if expert_layers(model):
        return ""
    return next((name for name, _ in model.named_parameters() if _ROUTED.search(name)), "")


@contextmanager
def record_experts(layers: Sequence[torch.nn.Module]) -> Iterator[list[torch.Tensor]]:
    """Collects the expert ids `[N, k]` that each of `expert_layers` is called with, in the order of the calls.

    The hooks live as long as the context: a model that carries none can be copied and sent to other processes.
    """
    chosen: list[torch.Tensor] = []

    def see(module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        _ = module
        chosen.append(_argument(1, _CHOICE_NAMES, args, options).detach())

    handles = [layer.register_forward_pre_hook(see, with_kwargs=True) for layer in layers]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def _argument(at: int, names: Sequence[str], args: tuple[Any, ...], options: Mapping[str, Any]) -> torch.Tensor:
    return args[at] if len(args) > at else next(options[n] for n in names if n in options)


@dataclass(frozen=True)
class RoutingShape:
    """How a mixture-of-experts model routes a token."""

    layers: int
    """Layers with routed experts."""
    k: int
    """Experts per token and layer."""
    experts: int
    """Experts of a layer."""

    def check(self, experts: torch.Tensor | None) -> None:
        """Raises `BadInput` unless `experts` is `[T, layers, k]` with distinct ids in [0, experts) per token and layer."""
        if experts is None:
            raise BadInput(
                "routing replay: expected the experts the engine chose for every token, the rollouts carry none; sample with"
                " return_experts"
            )
        if experts.dim() != 3 or experts.shape[1:] != (self.layers, self.k):
            raise BadInput(
                f"routing replay: expected experts [T, {self.layers} layers, {self.k} per token] of the model, got"
                f" {list(experts.shape)}; engine and trainer must serve the same architecture"
            )
        ordered = experts.sort(-1).values
        low, high = (int(v) for v in torch.aminmax(experts)) if experts.numel() else (0, 0)
        if low < 0 or high >= self.experts or bool((ordered[..., 1:] == ordered[..., :-1]).any()):
            raise BadInput(
                f"routing replay: expected {self.k} different experts in [0, {self.experts}) per token and layer, got ids"
                f" {low} to {high}{'' if low < 0 or high >= self.experts else ' with repetitions'}; the engine's records are broken"
            )


@contextmanager
def replay_experts(
    layers: Sequence[torch.nn.Module], chosen: torch.Tensor, where: torch.Tensor
) -> Iterator[list[torch.Tensor]]:
    """Sends some tokens of a forward pass to given experts, with the weights that the model's router gives these experts.

    Args: `layers`: `expert_layers` of the model; `chosen [t, layers, k]` distinct expert ids; `where [t]` int64, the rows of
    the flattened pass that take them. The other rows keep the router's choice. Yields a list that receives, per layer, the
    `[N, k]` experts which the router would have chosen itself.

    The router's top-k selection is answered with the replayed ids and the scores at them, so whatever the model does before
    and after it (softmax or sigmoid, bias, renormalisation, scale) stays the model's own, and so does the gradient.
    Raises `BadInput` for a model whose weights do not come from such a selection, or come from scores in which the
    selection of groups has erased experts.
    """
    replay = _Replay(layers, chosen)
    replay.where = where
    handles = [layer.register_forward_pre_hook(replay.arrive, with_kwargs=True) for layer in layers]
    try:
        with replay:
            yield replay.own
    finally:
        for handle in handles:
            handle.remove()
    if len(replay.own) != len(layers):
        raise BadInput(f"routing replay: expected a pass through {len(layers)} expert layers, saw {len(replay.own)}")


class _Replay(TorchFunctionMode):
    """Answers top-k selections among a layer's experts; the layer must then be called with just that answer."""

    where: torch.Tensor

    def __init__(self, layers: Sequence[torch.nn.Module], chosen: torch.Tensor) -> None:
        super().__init__()
        self.layers = layers
        self.chosen = chosen
        self.k = chosen.shape[2]
        self.own: list[torch.Tensor] = []
        self._forget()

    def _forget(self) -> None:
        self._answer: torch.Tensor | None = None
        self._wanted: torch.Tensor | None = None
        self._selections = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _TOPK or len(self.own) == len(self.layers):
            return out
        self._selections += 1
        scores = args[0] if args else kwargs["input"]
        experts = getattr(self.layers[len(self.own)], "num_experts", None)
        if scores.shape[-1] != experts or out.indices.shape != (*scores.shape[:-1], self.k):
            return out
        wanted = out.indices.reshape(-1, self.k)
        ids = wanted.index_copy(0, self.where, self.chosen[:, len(self.own)].to(wanted.dtype)).view_as(out.indices)
        self._wanted, self._answer = wanted, ids
        values = scores.gather(-1, ids)
        if self._selections > 1:
            # An earlier selection (of groups) may have erased scores here. A router that weighs by others never sees this.
            values = torch.full_like(values, torch.nan)
        return torch.return_types.topk((values, ids))

    def arrive(self, module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Pre-hook of a layer's experts."""
        ids = _argument(1, _CHOICE_NAMES, args, options)
        weights = _argument(2, _WEIGHT_NAMES, args, options)
        at, answer = len(self.own), self._answer
        if at == len(self.layers) or module is not self.layers[at] or answer is None or self._wanted is None:
            raise _unsupported(module, "its experts are not chosen by one top-k over their scores")
        if ids.data_ptr() != answer.data_ptr() and not torch.equal(ids.reshape(-1), answer.reshape(-1)):
            raise _unsupported(module, "the chosen experts are changed after their top-k")
        if weights.shape[-1] != self.k:
            raise _unsupported(module, f"its experts take {weights.shape[-1]} weights per token, not {self.k}")
        if self._selections > 1 and not bool(torch.isfinite(weights).all()):
            raise _unsupported(module, "its routing weights come from scores that a choice of groups has masked")
        self.own.append(self._wanted)
        self._forget()


def _unsupported(module: torch.nn.Module, why: str) -> BadInput:
    return BadInput(f"routing replay: {type(module).__name__}: {why}; set rollout.routing=record for this model")
