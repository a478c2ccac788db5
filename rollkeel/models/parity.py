"""One arithmetic for the engine that samples and the trainer: each operation once, a token's values a function of its sequence.

No sum's order depends on the batch, on packing, padding, paging or on how much of a sequence is computed at once, so both
sides have the same bits and every importance ratio is 1. Inside an operation values are float32; what it returns is
rounded to the dtype of the weights, but router logits, routing weights and logits of the head. Gradients are those of
ordinary operations at the same inputs. Operations left to PyTorch are those of single elements (+, ·, look-ups, roundings).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from rollkeel.config import LoraConfig
from rollkeel.errors import BadInput
from rollkeel.models import gpu, jit, kernels_parity
from rollkeel.models.experts import bounds_of, by_expert_there, swiglu_experts
from rollkeel.models.forward import FAMILIES, Attend, FastForward, Observe, Zeros, rotation, supports
from rollkeel.models.numerics import product

Route = Callable[[int, torch.Tensor], torch.Tensor]
"""Of a layer's chosen experts `[N, k]`, those to go to."""


MODES = ("fp32", "bf16")


class _Value(torch.autograd.Function):
    """`value` with the gradient of `ordinary`, which is the same but for rounding."""

    @staticmethod
    def forward(ctx: Any, ordinary: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def with_gradient(value: torch.Tensor, ordinary: Callable[[], torch.Tensor]) -> torch.Tensor:
    return _Value.apply(ordinary(), value) if torch.is_grad_enabled() else value  # type: ignore[return-value]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return matmul(x, weight[None], (0, len(x)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        g = grads[0].to(x.dtype)
        return g @ weight, product(g.t(), x) if ctx.needs_input_grad[1] else None


def _there(tensor: torch.Tensor) -> Any:
    """The kernels of a GPU where `tensor` is computed by those, else None."""
    if not gpu.taken(tensor):
        return None
    from rollkeel.models.gpu import parity as kernels  # which needs Triton

    return kernels


def _np(tensor: torch.Tensor) -> np.ndarray:
    """Float32 values; of a lower precision exactly."""
    return tensor.detach().float().contiguous().numpy()


def matmul(x: torch.Tensor, weight: torch.Tensor, starts: Any) -> torch.Tensor:
    """`[M, N]` float32: rows `starts[e]` to `starts[e + 1]` of `x [M, K]` times `weight [E, N, K]` of e."""
    if there := _there(x):
        return there.matmul(x, weight, starts)
    out = torch.empty(len(x), weight.shape[1])
    kernels_parity.matmul(_np(x), _np(weight), torch.as_tensor(starts, dtype=torch.int64).numpy(), out.numpy())
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`[M, N]` in the dtype of `weight [N, K]`."""
    out: torch.Tensor = _Linear.apply(x, weight)  # type: ignore[assignment]
    return (out if bias is None else out + bias).to(weight.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x · weight / rms(x) over the last dimension."""
    width = x.shape[-1]
    if there := _there(x):
        out = there.norm(x, weight, eps)
    else:
        out = torch.empty(x.shape)
        kernels_parity.norm(_np(x).reshape(-1, width), _np(weight), np.float32(eps), out.view(-1, width).numpy())
    return with_gradient(out.to(x.dtype), lambda: F.rms_norm(x, (width,), weight, eps))


def swiglu(wide: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of `[N, 2W]` = [gate | up]."""
    if there := _there(wide):
        out = there.swiglu(wide.detach())
    else:
        out = torch.empty(len(wide), wide.shape[1] // 2)
        kernels_parity.swiglu(_np(wide), out.numpy())
    gate, up = wide.chunk(2, -1)
    return with_gradient(out.to(wide.dtype), lambda: F.silu(gate) * up)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x [N, H, d]` turned by `cos`, `sin` `[N, 1, d/2]`."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def routing(logits: torch.Tensor, k: int, normalise: bool, route: Callable[[torch.Tensor], torch.Tensor] | None) -> Any:
    """The experts `[N, k]` of router logits `[N, E]`, those that `route` makes of them, and these ones' weights `[N, k]`."""
    chosen = torch.zeros(len(logits), k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(len(logits), k, device=logits.device)

    def choose(given: bool, ids: torch.Tensor) -> None:
        if there := _there(logits):
            there.route(logits.detach(), given, normalise, ids, weights)
        else:
            kernels_parity.route(_np(logits), given, normalise, ids.numpy(), weights.numpy())

    choose(False, chosen)
    taken = chosen if route is None else route(chosen)
    if taken is not chosen:
        choose(True, taken)

    def ordinary() -> torch.Tensor:
        p = logits.softmax(-1).gather(1, taken)
        return p / p.sum(-1, keepdim=True) if normalise else p

    return chosen, taken, with_gradient(weights, ordinary)


def experts(
    h: torch.Tensor, taken: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Σ weight · expert(h) in the order of `taken [N, k]`; `up [E, 2W, D]`, `down [E, D, W]`."""
    order, ends = by_expert_there(taken, len(up))
    starts = F.pad(ends, (1, 0))
    k = taken.shape[1]
    with torch.no_grad():
        wide = matmul(h.index_select(0, order // k), up, starts).to(h.dtype)
        rows = matmul(swiglu(wide), down, starts)
        pairs = torch.empty_like(rows).index_copy_(0, order, rows).view(len(h), k, -1)
        out = pairs[:, 0] * weights[:, :1]
        for i in range(1, k):
            out = out + pairs[:, i] * weights[:, i : i + 1]
    return with_gradient(
        out.to(h.dtype), lambda: swiglu_experts(h, weights.to(h.dtype), order, bounds_of(ends), up, down)
    )


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    where: tuple[Any, Any, Any],
    kv_heads: int,
    scale: float,
) -> torch.Tensor:
    """`[N, H · d]` of queries `[N, H, d]`; `where`: blocks of each sequence `[S, B]`, each query's sequence `[N]` and how many
    of its keys it sees `[N]`, all int64; `keys`, `values` `[blocks · KV, size, d]`."""
    if there := _there(q):
        return there.attend(q.detach(), keys.detach(), values.detach(), where, kv_heads, scale).flatten(1)
    out, places = torch.empty(q.shape), map(np.ascontiguousarray, where)
    kernels_parity.attend(_np(q), _np(keys), _np(values), *places, kv_heads, np.float32(scale), out.numpy())
    return out.flatten(1).to(q.dtype)


def log_normaliser(z: torch.Tensor) -> torch.Tensor:
    """`[n, 1]` float64: log Σ exp of each row of `z [n, V]`."""
    if there := _there(z):
        return there.log_normaliser(z.detach())
    out = torch.empty(len(z), 1, dtype=torch.float64)
    kernels_parity.log_normaliser(_np(z), out.view(-1).numpy())
    return out


def logprobs(z: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Float32 log-probs of `ids [n, K]` under softmax of `z [n, V]`, at most 0."""
    return (z.gather(1, ids).double() - log_normaliser(z)).float().clamp_max_(0.0)


def scores(hidden: torch.Tensor, head: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """`[n, V]` float32: what softmax makes the distribution that is sampled from at `temperature` > 0."""
    z = matmul(hidden, head[None], (0, len(hidden)))
    return z if temperature == 1 else z / torch.full((1, 1), temperature, device=z.device)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Of a layer. Matrices in a list are the parts of one product, whose rows lie one behind the other."""

    norm1: torch.Tensor
    qkv: Sequence[torch.Tensor]
    qkv_bias: Sequence[torch.Tensor | None]
    qk_norm: Sequence[torch.Tensor]
    """Of queries, of keys; empty if there is none."""
    out: torch.Tensor
    out_bias: torch.Tensor | None
    norm2: torch.Tensor
    router: torch.Tensor | None
    up: Sequence[torch.Tensor]
    """`[W, D]` parts of gate, then up projection; of experts one `[E, 2W, D]`."""
    down: torch.Tensor
    """`[D, W]`; of experts `[E, D, W]`."""


class Definition:
    """The forward of the Llama family in this arithmetic."""

    def __init__(
        self,
        config: Any,
        embedding: torch.Tensor,
        layers: Sequence[Weights],
        norm: torch.Tensor,
        *,
        again: int = 0,
    ) -> None:
        """`again`: so many layers, from the first one on, keep what goes into them, and the backward runs them once more."""
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self._again = again
        self.width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.heads, self.kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self.eps, self.scale = float(config.rms_norm_eps), self.width**-0.5
        self.top_k = int(getattr(config, "num_experts_per_tok", 0) or 0)
        self.normalise = bool(getattr(config, "norm_topk_prob", False))
        frequency, self._factor = rotation(config, self.width)
        self._frequency = frequency.to(embedding.device)

    def hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        experts: list[torch.Tensor] | None = None,
        see: Observe | None = None,
        route: Route | None = None,
    ) -> torch.Tensor:
        """As `FastForward.hidden`; `experts` receives what the routers choose, and `route` may send tokens elsewhere."""
        tell = see or (lambda *_: None)
        x = self.embedding.index_select(0, ids)
        tell(None, "embedding", x)
        cos, sin = self._angles(positions)
        for index in range(len(self.layers)):
            if index < self._again and torch.is_grad_enabled():
                x, chosen = checkpoint(self._layer, index, x, cos, sin, attend, tell, route, use_reentrant=False)
            else:
                x, chosen = self._layer(index, x, cos, sin, attend, tell, route)
            if experts is not None and chosen is not None:
                experts.append(chosen)
        x = rms_norm(x, self.norm, self.eps)
        tell(None, "final_norm", x)
        return x

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if there := _there(self.embedding):
            return there.angles(positions, self._frequency, self._factor)
        cos, sin = torch.empty(2, len(positions), 1, self.width // 2)
        to = cos[:, 0].numpy(), sin[:, 0].numpy()
        kernels_parity.angles(positions.numpy(), self._frequency.numpy(), self._factor, *to)
        return cos, sin

    def _layer(
        self,
        index: int,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        tell: Observe,
        route: Route | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        w = self.layers[index]

        def seen(name: str, value: torch.Tensor) -> torch.Tensor:
            tell(index, name, value)
            return value

        h = seen("input_norm", rms_norm(x, w.norm1, self.eps))
        parts = [linear(h, a, b) for a, b in zip(w.qkv, w.qkv_bias, strict=True)]
        qkv = torch.cat(parts, -1).view(len(x), -1, self.width)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        q = seen("q_proj", q)
        k = seen("k_proj", k)
        v = seen("v_proj", v)
        if w.qk_norm:
            q = seen("q_norm", rms_norm(q, w.qk_norm[0], self.eps))
            k = seen("k_norm", rms_norm(k, w.qk_norm[1], self.eps))
        q, k = seen("q_rope", rotary(q, cos, sin)), seen("k_rope", rotary(k, cos, sin))
        out = seen("o_proj", linear(seen("attention", attend(index, q, k, v)), w.out, w.out_bias))
        x = seen("attention_residual", x + out)
        h, chosen = seen("post_norm", rms_norm(x, w.norm2, self.eps)), None
        if w.router is None:
            y = linear(swiglu(torch.cat([linear(h, part) for part in w.up], -1)), w.down)
        else:
            logits = seen("router", _Linear.apply(h, w.router))  # type: ignore[arg-type]
            sent = functools.partial(route, index) if route else None
            chosen, taken, weights = routing(logits, self.top_k, self.normalise, sent)
            seen("experts", taken)
            y = experts(h, taken, weights, w.up[0], w.down)
        return seen("mlp_residual", x + seen("mlp", y)), chosen


class ParityForward(FastForward):
    """The engine's forward in this arithmetic, on the weights of a `FastForward`."""

    fixed_order = True

    def __init__(
        self, config: Any, mode: str, device: torch.device, lora: LoraConfig | None = None, zeros: Zeros = torch.zeros
    ) -> None:
        check(config, mode, device, lora is not None and lora.rank > 0)
        super().__init__(config, mode, device, zeros=zeros)
        self.dtype = torch.float32  # of keys and values, which those of lower precision are exact in
        layers = [
            Weights(
                norm1=layer.norm1,
                qkv=[layer.qkv],
                qkv_bias=[layer.qkv_bias],
                qk_norm=() if layer.qk_norm is None else layer.qk_norm.unbind(),
                out=layer.out,
                out_bias=layer.out_bias,
                norm2=layer.norm2,
                router=layer.router,
                up=[layer.up if layer.router is not None else layer.up[0]],
                down=layer.down if layer.router is not None else layer.down[0],
            )
            for layer in self.layers
        ]
        self._definition = Definition(config, self.embedding, layers, self.norm)

    def hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, experts: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """See `FastForward.hidden`."""
        return self._definition.hidden(ids, positions, attend, experts, self.observe)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, V]` float32 logits of `hidden [N, D]`."""
        return scores(hidden, self.head)


def check(config: Any, mode: str, device: torch.device, lora: bool) -> None:
    """Raises `BadInput` for what this arithmetic does not compute."""
    if not supports(config):
        raise BadInput(
            f"run.parity: expected a model of {', '.join(FAMILIES)}, got {config.model_type}; set run.parity=false"
        )
    if mode not in MODES:
        raise BadInput(f"run.parity: expected engine.dtype of {' or '.join(MODES)}, got {mode}")
    if lora:
        raise BadInput("run.parity: adapters have no such arithmetic; set train.lora.rank=0 or run.parity=false")
    if device.type == "cuda" and not gpu.taken(torch.empty(0, device=device)):
        raise BadInput("run.parity: expected Triton for a GPU; pip install rollkeel[gpu], or set run.device=cpu")
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"run.parity: its kernels are for CPUs and CUDA, got {device.type}; set run.parity=false")
    if device.type == "cpu" and not jit.FOUND:
        raise BadInput("run.parity: expected numba on x86-64 Linux; pip install rollkeel[cpu]")
