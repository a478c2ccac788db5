"""Norms, rotary embeddings and SwiGLU of the packed training forward as single passes, forward and backward: by numba on a CPU in
float32, by Triton on a GPU.

Autograd runs each as a dozen passes over memory, which costs a tenth of a step on a CPU and half of one on a GPU. `fused(model)`
lends a Llama-family model these for the time of a forward; elsewhere it lends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from rollkeel.models import gpu, jit, kernels_training
from rollkeel.models.forward import supports
from rollkeel.models.jit import array as _np
from rollkeel.models.products import linear_of, quick

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Queries `[N, H, d]`, keys and values `[N, KV, d]`, scale → `[N, H * d]`."""
Lent = tuple[Any, Callable[..., Any]]
"""A module and the forward that it is lent."""


class _Norm(torch.autograd.Function):
    """`x [N, D]` → x · weight / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        out, scales = torch.empty_like(x), x.new_empty(len(x))
        kernels_training.norm_forward(_np(x), _np(weight), np.float32(eps), _np(out), _np(scales))
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        kernels_training.norm_backward(*map(_np, (grads[0].contiguous(), x, weight, scales, dx, dweight)))
        return dx, dweight, None


class _Rotary(torch.autograd.Function):
    """`x [N · heads, d]` → head norm (if `weight` is not empty), then rotary embedding by `cos`, `sin` `[N, d/2]`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, heads: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        x = x.contiguous()
        out, scales = torch.empty_like(x), x.new_empty(len(x) if len(weight) else 0)
        kernels_training.rotary_forward(
            _np(x), _np(weight), np.float32(eps), heads, _np(cos), _np(sin), _np(out), _np(scales)
        )
        ctx.save_for_backward(x, weight, scales, cos, sin)
        ctx.heads = heads
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scales, cos, sin = ctx.saved_tensors
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        g = _np(grads[0].contiguous())
        kernels_training.rotary_backward(
            g, _np(x), _np(weight), _np(scales), ctx.heads, _np(cos), _np(sin), _np(dx), _np(dweight)
        )
        return dx, dweight if len(weight) else None, None, None, None, None


def swiglu_backward(d_active: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
    """Gradient of silu(gate) · up by `hidden [N, 2W]` = [gate | up]; None where it cannot be one pass."""
    if not _fits(hidden) or not d_active.is_contiguous() or not hidden.is_contiguous():
        return None
    out = torch.empty_like(hidden)
    kernels_training.swiglu_backward(_np(d_active), _np(hidden), _np(out))
    return out


def _fits(tensor: torch.Tensor) -> bool:
    return jit.FOUND and tensor.device.type == "cpu" and tensor.dtype == torch.float32


def fusable(model: Any, backbone: Any) -> bool:
    """True if `fused` may lend this model its passes: a Llama-family model in float32 on a CPU with numba, or where kernels are taken."""
    held = list(model.parameters())
    if not supports(model.config.get_text_config()) or not (all(map(_fits, held)) or all(map(gpu.taken, held))):
        return False
    norms = [
        backbone.norm,
        *(n for layer in backbone.layers for n in (layer.input_layernorm, layer.post_attention_layernorm)),
    ]
    return all(type(n).__name__.endswith("RMSNorm") for n in norms)  # nobody has put something else there


def fused(backbone: Any, attend: Attend) -> AbstractContextManager[None]:
    """Inside, `backbone`'s norms and attention run as single passes around `attend`; afterwards it is as it was."""
    kernels = gpu.taken(backbone.norm.weight)
    parts: list[Lent] = [(backbone.norm, _norm_of(backbone.norm, kernels))]
    for layer in backbone.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            parts.append((norm, _norm_of(norm, kernels)))
        parts.append((layer.self_attn, _attention_of(layer.self_attn, attend, kernels)))
        if kernels and hasattr(layer.mlp, "gate_proj"):
            parts.append((layer.mlp, _mlp_of(layer.mlp)))
        parts += [(m, linear_of(m)) for m in layer.modules() if quick(m)]
    return lent(parts)


@contextmanager
def lent(parts: Sequence[Lent]) -> Iterator[None]:
    """Inside, each of these modules runs the forward beside it."""
    try:
        for module, forward in parts:
            module.forward = forward
        yield
    finally:
        for module, _ in parts:
            module.__dict__.pop("forward", None)


def _norm_of(module: Any, kernels: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    norm = _kernels().norm if kernels else _Norm.apply

    def forward(x: torch.Tensor) -> torch.Tensor:
        return norm(x.reshape(-1, x.shape[-1]), module.weight, module.variance_epsilon).view(x.shape)  # type: ignore[union-attr]

    return forward


def _mlp_of(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    swiglu = _kernels().swiglu
    return lambda x: module.down_proj(swiglu(module.gate_proj(x), module.up_proj(x)))


def _attention_of(module: Any, attend: Attend, kernels: bool) -> Callable[..., tuple[torch.Tensor, None]]:
    width = module.head_dim
    rotary = _kernels().rotary if kernels else _Rotary.apply

    def project(
        x: torch.Tensor, linear: torch.nn.Module, norm: Any, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        rows = linear(x)
        heads = rows.shape[1] // width
        none = None if kernels else x.new_empty(0)
        weight, eps = (norm.weight, norm.variance_epsilon) if norm is not None else (none, 0.0)
        return rotary(rows.view(-1, width), weight, eps, heads, cos, sin).view(-1, heads, width)  # type: ignore[union-attr]

    def forward(hidden_states: torch.Tensor, position_embeddings: Any, **_: Any) -> tuple[torch.Tensor, None]:
        x = hidden_states[0]
        cos, sin = (t[0, :, : width // 2] for t in position_embeddings)
        if not kernels:
            cos, sin = cos.contiguous(), sin.contiguous()
        q = project(x, module.q_proj, getattr(module, "q_norm", None), cos, sin)
        k = project(x, module.k_proj, getattr(module, "k_norm", None), cos, sin)
        v = module.v_proj(x).view(len(x), -1, width)
        return module.o_proj(attend(q, k, v, module.scaling))[None], None

    return forward


def _kernels() -> Any:
    from rollkeel.models.gpu import layers  # which needs Triton

    return layers
