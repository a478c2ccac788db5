"""Inference forward of the Llama family on flat tokens: Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE.

Tokens of many sequences lie in one `[N, D]` tensor; where each attends is the business of the `attend` callback, so the
same code prefills and decodes. Projections are fused and weights are updated in place (addresses never change).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from rollkeel.config import LoraConfig
from rollkeel.models import gpu
from rollkeel.models.lora import Part, add_by_expert, add_low_rank, beside
from rollkeel.models.numerics import activation_rounder, compute_dtype, logits_of

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Gate = Callable[[torch.Tensor], torch.Tensor]
Zeros = Callable[..., torch.Tensor]
"""As `torch.zeros`: sizes, dtype and device."""
Observe = Callable[[int | None, str, torch.Tensor], None]
"""Told layer (None outside of the layers), name and `[N, ...]` value of an operation. It must copy what it keeps."""


@runtime_checkable
class Paged(Protocol):
    """An `Attend` whose keys and values lie where a kernel can write them."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...

    def places(self, layer: int, kv_heads: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values `[num_blocks * kv_heads, block_size, width]`, and block * block_size + offset of each token `[N]`."""
        ...

    def look_up(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attention of `q [N, H, d]` once keys and values are written."""
        ...


FUSED = ("qkv", "out", "up", "down")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


def supports(config: Any) -> bool:
    """True if `FastForward` computes this Hugging Face config exactly."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in FAMILIES
        and not getattr(config, "sliding_window", None)
        and getattr(config, "hidden_act", "silu") == "silu"
        and not getattr(config, "mlp_bias", False)
        and rope.get("rope_type", "default") in ("default", "linear", "llama3", "yarn")
        and float(rope.get("partial_rotary_factor", 1.0)) == 1.0
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    )


def said_forward(asked: str, config: Any, fast: bool, compiled: bool, lora: bool = False) -> str:
    """Which forward computes, with the reason, for people."""
    if asked != "auto":
        return f"{asked} (engine.forward={asked})"
    if compiled:
        return "compiled (the fast forward with compiled decode steps: float32 on a CPU, numba found)"
    if fast and lora:
        return "fast (decode steps with adapters, train.lora, are not compiled)"
    if fast:
        return "fast (compiled decode steps are for float32 on a CPU, with numba)"
    family = "an option of it" if config.model_type in FAMILIES else f"model type {config.model_type}"
    return f"transformers, several times slower ({family} is not among what the fast forward computes)"


def rotation(config: Any, head_dim: int) -> tuple[torch.Tensor, float]:
    """`[d/2]` angles per position of the rotary embedding, and what scales its sines."""
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return inverse, float(factor)


def _gated(wide: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up `[N, W]` of `wide [N, 2 W]`, the gates first."""
    gate, up = wide.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _kernels() -> Any:
    from rollkeel.models.gpu import decode

    return decode


class _Layer:
    """Fused weights of one decoder layer and the checkpoint names they are filled from."""

    def __init__(self, config: Any, index: int, new: Callable[..., torch.Tensor], head_dim: int) -> None:
        d = config.hidden_size
        heads = config.num_attention_heads
        kv = config.num_key_value_heads
        q_rows, kv_rows = heads * head_dim, kv * head_dim
        prefix, attn = f"model.layers.{index}", f"model.layers.{index}.self_attn"
        self.norm1, self.norm2 = new(d), new(d)
        self.qkv = new(q_rows + 2 * kv_rows, d)
        self.out = new(d, q_rows)
        parts = {
            "q_proj": (0, q_rows),
            "k_proj": (q_rows, q_rows + kv_rows),
            "v_proj": (q_rows + kv_rows, q_rows + 2 * kv_rows),
        }
        self.names = {
            f"{prefix}.input_layernorm.weight": self.norm1,
            f"{prefix}.post_attention_layernorm.weight": self.norm2,
            f"{attn}.o_proj.weight": self.out,
        }
        for name, (a, b) in parts.items():
            self.names[f"{attn}.{name}.weight"] = self.qkv[a:b]
        self.qkv_bias = None
        if config.model_type == "qwen2" or getattr(config, "attention_bias", False):
            self.qkv_bias = new(q_rows + 2 * kv_rows)
            for name, (a, b) in parts.items():
                self.names[f"{attn}.{name}.bias"] = self.qkv_bias[a:b]
        self.out_bias = None
        if config.model_type != "qwen2" and getattr(config, "attention_bias", False):
            self.out_bias = self.names[f"{attn}.o_proj.bias"] = new(d)
        self.qk_norm = None
        if config.model_type in ("qwen3", "qwen3_moe"):
            self.qk_norm = new(2, head_dim)
            self.names[f"{attn}.q_norm.weight"], self.names[f"{attn}.k_norm.weight"] = self.qk_norm
        self._mlp(config, index, new, f"{prefix}.mlp")

    def _mlp(self, config: Any, index: int, new: Callable[..., torch.Tensor], prefix: str) -> None:
        d = config.hidden_size
        moe = (
            config.model_type == "qwen3_moe"
            and index not in (config.mlp_only_layers or [])
            and config.num_experts > 0
            and (index + 1) % config.decoder_sparse_step == 0
        )
        self.router = None
        experts = config.num_experts if moe else 1
        width = config.moe_intermediate_size if moe else config.intermediate_size
        self.up = new(experts, 2 * width, d)
        self.down = new(experts, d, width)
        if moe:
            self.router = self.names[f"{prefix}.gate.weight"] = new(experts, d)
        for e in range(experts):
            stem = f"{prefix}.experts.{e}" if moe else prefix
            self.names[f"{stem}.gate_proj.weight"] = self.up[e, :width]
            self.names[f"{stem}.up_proj.weight"] = self.up[e, width:]
            self.names[f"{stem}.down_proj.weight"] = self.down[e]
        self.experts = f"{prefix}.experts" if moe else ""
        self.lora: dict[str, list[Part]] = {key: [] for key in FUSED}
        # Slicing a tensor costs a microsecond; at decode sizes that is as much as the arithmetic.
        self.up_t = [w.t() for w in self.up]
        self.down_t = [w.t() for w in self.down]
        self.out_t = self.out.t()


class FastForward:
    """Runs the model described by a Hugging Face config; weights are undefined until every name was written."""

    fixed_order = False
    """True in the arithmetic of `run.parity`."""

    def __init__(
        self, config: Any, mode: str, device: torch.device, lora: LoraConfig | None = None, zeros: Zeros = torch.zeros
    ) -> None:
        self.dtype = compute_dtype(mode)
        self.device = device
        self._round = activation_rounder(mode)
        self.exact_activations = self._round is None
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.heads, self.kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self.num_layers = int(config.num_hidden_layers)
        self.vocab_size = int(config.vocab_size)
        self.eps = float(config.rms_norm_eps)
        self.scale = self.head_dim**-0.5
        self.top_k = int(getattr(config, "num_experts_per_tok", 0) or 0)
        self.norm_topk = bool(getattr(config, "norm_topk_prob", False))
        self.observe: Observe | None = None
        """While set, told the value after every operation; what is computed stays the same to the bit, but for the last places of kernels
        on a GPU, which run while nobody looks."""

        new = functools.partial(zeros, dtype=self.dtype, device=device)
        self.embedding, self.norm = new(self.vocab_size, config.hidden_size), new(config.hidden_size)
        self.layers = [_Layer(config, i, new, self.head_dim) for i in range(self.num_layers)]
        # Views of the very memory that is computed with, by checkpoint name: nothing is derived, so a proof can look at it.
        self.destinations = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        for layer in self.layers:
            self.destinations |= layer.names
        self.adapters: dict[str, torch.Tensor] = {}
        """The same of what stands beside the weights, by PEFT's name."""
        self.lora_scale = 0.0
        if lora is not None and lora.rank:
            self.lora_scale = lora.alpha / lora.rank
            exact = functools.partial(torch.zeros, device=device)
            for layer in self.layers:
                fused = {key: getattr(layer, key) for key in FUSED}
                layer.lora, held = beside(fused, layer.names, layer.experts, lora, exact)
                self.adapters |= held
        self.head = self.embedding
        if not config.tie_word_embeddings:
            self.head = self.destinations["lm_head.weight"] = new(self.vocab_size, config.hidden_size)
        self._norm_of_head = torch.tensor([0] * self.heads + [1] * self.kv_heads, device=device)
        """Row of a layer's `qk_norm` for each head."""
        self._expert_ids = torch.arange(int(getattr(config, "num_experts", 0) or 0), device=device)
        self.num_moe_layers = sum(layer.router is not None for layer in self.layers)
        inverse, self.rope_factor = rotation(config, self.head_dim)
        self.inverse_frequency = inverse.to(device)

    def hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, experts: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Final-norm hidden states `[N, D]` of tokens `ids [N]` at `positions [N]`.

        `experts`, when given, receives one `[N, top_k]` tensor of expert ids per MoE layer.
        """
        see = self.observe
        x = self.embedding.index_select(0, ids)
        exact = see is None and self._round is None
        paged = attend if exact and isinstance(attend, Paged) and gpu.taken(x) else None
        if see:
            see(None, "embedding", x)
        angle = positions[:, None].float() * self.inverse_frequency
        cos, sin = angle.cos() * self.rope_factor, angle.sin() * self.rope_factor
        cos = torch.cat((cos, cos), -1).to(self.dtype)[:, None]
        # rotate_half as a roll: the sign lives in the sine.
        sin = torch.cat((-sin, sin), -1).to(self.dtype)[:, None]
        h = F.rms_norm(x, (x.shape[-1],), self.layers[0].norm1, self.eps)
        following = [*(layer.norm1 for layer in self.layers[1:]), self.norm]
        for index, (layer, norm) in enumerate(zip(self.layers, following, strict=True)):
            qkv = self._project(h, layer, index)
            if paged is None:
                out = attend(index, *self._rotated(qkv, layer, index, cos, sin))
            else:
                out = self._rotate_into(paged, qkv, layer, index, cos, sin)
            x = self._add_attention(x, out, layer, index)
            h = F.rms_norm(x, (x.shape[-1],), layer.norm2, self.eps)
            if see:
                see(index, "attention_residual", x)
                see(index, "post_norm", h)
            gate = _gated if paged is None else _kernels().gated
            y = self._mlp(h, layer, gate) if layer.router is None else self._experts(h, layer, index, gate, experts)
            if paged is None:
                x = x + y
                h = F.rms_norm(x, (x.shape[-1],), norm, self.eps)
            else:
                x, h = _kernels().add_norm(x, y, norm, self.eps)
            if see:
                see(index, "mlp", y)
                see(index, "mlp_residual", x)
        if see:
            see(None, "final_norm", h)
        return h

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, V]` float32 logits of `hidden [N, D]`."""
        return logits_of(hidden, self.head)

    def _project(self, h: torch.Tensor, layer: _Layer, index: int) -> torch.Tensor:
        if self.observe:
            self.observe(index, "input_norm", h)
        if self._round:
            h = self._round(h)
        return self._beside(F.linear(h, layer.qkv, layer.qkv_bias), h, layer, "qkv").view(len(h), -1, self.head_dim)

    def _rotate_into(
        self, paged: Paged, qkv: torch.Tensor, layer: _Layer, index: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """`_rotated` and its attention, with keys and values written by the kernel that rotates."""
        keys, values, slots = paged.places(index, self.kv_heads, self.head_dim)
        q = _kernels().rotate(qkv, layer.qk_norm, cos, sin, slots, keys, values, self.heads, self.eps)
        return paged.look_up(index, q)

    def _rotated(
        self, qkv: torch.Tensor, layer: _Layer, index: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        see = self.observe
        qk = qkv[:, : self.heads + self.kv_heads]
        if see:
            see(index, "q_proj", qkv[:, : self.heads])
            see(index, "k_proj", qkv[:, self.heads : self.heads + self.kv_heads])
            see(index, "v_proj", qkv[:, self.heads + self.kv_heads :])
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (self.head_dim,), None, self.eps) * layer.qk_norm.index_select(0, self._norm_of_head)
            if see:
                see(index, "q_norm", qk[:, : self.heads])
                see(index, "k_norm", qk[:, self.heads :])
        qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)
        if see:
            see(index, "q_rope", qk[:, : self.heads])
            see(index, "k_rope", qk[:, self.heads :])
        return qk[:, : self.heads], qk[:, self.heads :], qkv[:, self.heads + self.kv_heads :]

    def _add_attention(self, x: torch.Tensor, out: torch.Tensor, layer: _Layer, index: int) -> torch.Tensor:
        see = self.observe
        if see:
            see(index, "attention", out)
        if self._round:
            out = self._round(out)
        if see:  # a product of its own: the real one adds the residual on the way
            see(index, "o_proj", self._beside(F.linear(out, layer.out, layer.out_bias), out, layer, "out"))
        if layer.out_bias is not None:
            y = x + F.linear(out, layer.out, layer.out_bias)
        else:
            y = torch.addmm(x, out, layer.out_t)
        return self._beside(y, out, layer, "out")

    def _beside(self, y: torch.Tensor, x: torch.Tensor, layer: _Layer, weight: str) -> torch.Tensor:
        return add_low_rank(y, x, layer.lora[weight], self.lora_scale)

    def _mlp(self, h: torch.Tensor, layer: _Layer, gate: Gate) -> torch.Tensor:
        if self._round:
            h = self._round(h)
        a = gate(self._beside(h @ layer.up_t[0], h, layer, "up"))
        if self._round:
            a = self._round(a)
        return self._beside(a @ layer.down_t[0], a, layer, "down")

    def _experts(
        self, h: torch.Tensor, layer: _Layer, index: int, gate: Gate, experts: list[torch.Tensor] | None
    ) -> torch.Tensor:
        assert layer.router is not None
        logits = F.linear(h, layer.router)
        weights, chosen = torch.topk(logits.float().softmax(-1), self.top_k, dim=-1)
        if self.observe:
            self.observe(index, "router", logits)
            self.observe(index, "experts", chosen)
        if self.norm_topk:
            weights = weights / weights.sum(-1, keepdim=True)
        if experts is not None:
            experts.append(chosen)
        if self._round:
            h = self._round(h)
        by_expert, order = chosen.flatten().sort(stable=True)
        x = h.index_select(0, order // self.top_k if self.top_k > 1 else order)
        y = self._by_expert(x, by_expert, layer, gate)
        y = torch.empty_like(y).index_copy_(0, order, y).view(len(h), self.top_k, -1)
        return torch.bmm(weights.to(y.dtype)[:, None], y)[:, 0]

    def _by_expert(self, x: torch.Tensor, by_expert: torch.Tensor, layer: _Layer, gate: Gate) -> torch.Tensor:
        """What each row's expert makes of it; `by_expert [rows]` ascends."""
        if x.device.type != "cpu":  # how many rows an expert has stays on the device
            ends = torch.searchsorted(by_expert, self._expert_ids, right=True).int()
            wide = F.grouped_mm(x, layer.up.transpose(1, 2), offs=ends)
            add_by_expert(wide, x, layer.lora["up"], self.lora_scale, ends)
            a = gate(wide)
            a = self._round(a) if self._round else a
            y = F.grouped_mm(a, layer.down.transpose(1, 2), offs=ends)
            add_by_expert(y, a, layer.lora["down"], self.lora_scale, ends)
            return y
        counts = torch.bincount(by_expert, minlength=len(layer.up_t)).tolist()
        wide, y = x.new_empty(len(x), layer.up.shape[1]), torch.empty_like(x)
        for rows, out, weight in zip(x.split(counts), wide.split(counts), layer.up_t, strict=True):
            torch.mm(rows, weight, out=out)
        add_by_expert(wide, x, layer.lora["up"], self.lora_scale, counts)
        a = gate(wide)
        if self._round:
            a = self._round(a)
        for rows, out, weight in zip(a.split(counts), y.split(counts), layer.down_t, strict=True):
            torch.mm(rows, weight, out=out)
        add_by_expert(y, a, layer.lora["down"], self.lora_scale, counts)
        return y
