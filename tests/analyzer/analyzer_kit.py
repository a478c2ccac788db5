"""Models, tokens and faults for the analyzer's tests: one thing broken in one layer of one side, and where it must be found."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from rollkeel.analyzer.capture import Tokens
from rollkeel.analyzer.compare import Analysis, compare
from rollkeel.analyzer.reference import Reference
from rollkeel.analyzer.sides import EngineSide, TrainerSide, engine_forward
from rollkeel.models import forward as forward_module
from rollkeel.models.names import checkpoint_views
from rollkeel.models.presets import build_preset

LAYERS = 4
KINDS = ("scale", "rope", "norm", "swap")


def model_of(preset: str, seed: int = 0, layers: int = LAYERS) -> Any:
    """A preset whose norms are no longer all ones, so that a missing one shows."""
    model = build_preset(preset, seed, {"num_hidden_layers": layers})[0].eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data *= 1 + 0.3 * torch.rand(weight.shape, generator=generator)
    return model


def tokens_of(seed: int = 0, sequences: int = 5, longest: int = 40) -> Tokens:
    """Random tokens in sequences of different lengths."""
    rng = np.random.default_rng(seed)
    ids = tuple(rng.integers(8, 264, int(n)) for n in rng.integers(20, longest, sequences))
    return Tokens(ids, tuple(int(p) for p in rng.integers(1, 12, sequences)))


def reference_of(model: Any) -> Reference:
    return Reference(model.config, dict(checkpoint_views(model)))


def analyzed(trainer: Any, engine: Any, mode: str, reference: Reference, tokens: Tokens) -> Analysis:
    """Trainer model against engine forward."""
    b = EngineSide(engine, trainer.config, mode)
    return compare(TrainerSide(trainer).capture(tokens), b.capture(tokens), reference)


@dataclass
class Fault:
    """Something broken while the context is open, and the places where naming it is right."""

    layer: int
    operations: tuple[str, ...]
    held: Callable[[], Any] = nullcontext


@dataclass
class Trial:
    """A seeded fault in one side."""

    kind: str
    side: str
    mode: str
    fault: Fault
    analysis: Analysis

    @property
    def named(self) -> bool:
        """Whether layer, operation and side are the right ones."""
        key, index = self.analysis.first, ("trainer", "engine").index(self.side)
        right = key is not None and key[0] == self.fault.layer and key[1] in self.fault.operations
        return right and self.analysis.side == index and not self.analysis.healthy


def trial(seed: int, mode: str) -> Trial:
    """One random fault: kind, side, layer and size by `seed`."""
    rng = np.random.default_rng([seed, 77])
    kind, side = KINDS[seed % 4], ("engine", "trainer")[seed // 4 % 2]
    preset = "tiny-qwen3-moe" if kind == "swap" or rng.random() < 0.5 else "tiny-qwen3"
    model = model_of(preset, seed)
    reference = reference_of(model)
    trainer = copy.deepcopy(model)
    engine = engine_forward(model.config, checkpoint_views(model).items(), mode)
    if side == "engine":
        fault = break_engine(engine, model.config, kind, rng)
    else:
        fault = break_trainer(trainer, kind, rng)
    with fault.held():
        return Trial(kind, side, mode, fault, analyzed(trainer, engine, mode, reference, tokens_of(seed)))


def _pick(rng: np.random.Generator, names: list[str]) -> str:
    return names[int(rng.integers(len(names)))]


def _factor(rng: np.random.Generator) -> float:
    return 1 + float(rng.choice([-1, 1]) * rng.uniform(0.03, 0.08))


def break_engine(engine: Any, config: Any, kind: str, rng: np.random.Generator) -> Fault:
    at = int(rng.integers(LAYERS))
    layer = engine.layers[at]
    if kind == "scale":
        name = _pick(rng, ["q_proj", "k_proj", "v_proj", "o_proj", "mlp"])
        target = layer.down if name == "mlp" else layer.names[f"model.layers.{at}.self_attn.{name}.weight"]
        target *= _factor(rng)
        return Fault(at, (name,))
    if kind == "rope":
        steps = torch.arange(0, engine.head_dim, 2) / engine.head_dim
        engine.inverse_frequency = 1.0 / (config.rope_parameters["rope_theta"] * float(rng.uniform(1.5, 10))) ** steps
        return Fault(0, ("q_rope", "k_rope"))
    if kind == "swap":
        a, b = rng.choice(len(layer.up), 2, replace=False).tolist()
        for weight in (layer.up, layer.down):
            weight[[a, b]] = weight[[b, a]].clone()
        return Fault(at, ("mlp",))
    name = _pick(rng, ["input_norm", "post_norm", "q_norm"])
    if name == "q_norm":
        layer.qk_norm = None
        return Fault(at, ("q_norm",))
    weight = layer.norm1 if name == "input_norm" else layer.norm2
    return Fault(at, (name,), lambda: _without_norm(weight))


def break_trainer(model: Any, kind: str, rng: np.random.Generator) -> Fault:
    at = int(rng.integers(LAYERS))
    layer = model.model.layers[at]
    if kind == "scale":
        name = _pick(rng, ["q_proj", "k_proj", "v_proj", "o_proj", "mlp"])
        if name == "mlp":
            experts = getattr(layer.mlp, "experts", None)
            weight = layer.mlp.down_proj.weight if experts is None else experts.down_proj
        else:
            weight = getattr(layer.self_attn, name).weight
        weight.data *= _factor(rng)
        return Fault(at, (name,))
    if kind == "rope":
        base = float(rng.uniform(1.5, 10))
        layer.self_attn.register_forward_pre_hook(lambda m, a, k: (a, _turned(k, base)), with_kwargs=True)
        return Fault(at, ("q_rope", "k_rope"))
    if kind == "swap":
        experts = layer.mlp.experts
        a, b = rng.choice(experts.num_experts, 2, replace=False).tolist()
        for weight in (experts.gate_up_proj, experts.down_proj):
            weight.data[[a, b]] = weight.data[[b, a]].clone()
        return Fault(at, ("mlp",))
    name = _pick(rng, ["input_norm", "post_norm"])
    setattr(layer, {"input_norm": "input_layernorm"}.get(name, "post_attention_layernorm"), torch.nn.Identity())
    return Fault(at, (name,))


def _turned(options: dict[str, Any], base: float) -> dict[str, Any]:
    """Rotary embeddings of another base: angles of dimension i divided by base ** (i / d)."""
    cos, sin = options["position_embeddings"]
    half = cos.shape[-1] // 2
    slower = base ** -(torch.arange(half) / half)
    positions = torch.arange(cos.shape[1]).float()
    found = positions[:, None] * slower.repeat(2)
    return {**options, "position_embeddings": (found.cos()[None].to(cos.dtype), found.sin()[None].to(sin.dtype))}


@contextmanager
def _without_norm(weight: torch.Tensor) -> Iterator[None]:
    class Functional:
        def __getattr__(self, name: str) -> Any:
            return getattr(F, name)

        @staticmethod
        def rms_norm(
            x: torch.Tensor, shape: Any, w: torch.Tensor | None = None, eps: float | None = None
        ) -> torch.Tensor:
            return x.clone() if w is weight else F.rms_norm(x, shape, w, eps)

    original = forward_module.F
    forward_module.F = Functional()  # type: ignore[assignment]
    try:
        yield
    finally:
        forward_module.F = original
