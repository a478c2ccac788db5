"""Each operation once more, by its definition, from the inputs that a side itself recorded.

Errors propagate: behind the first wrong operation everything differs. So an operation is judged by its own inputs, in
float64, with the checkpoint's weights rounded as the side's numeric mode rounds them. What its dtype explains is measured:
the same operation, by the same definition, in the side's own arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rollkeel.analyzer.capture import OPERATIONS, Capture, Key
from rollkeel.models.numerics import activation_rounder, compute_dtype, is_quantised, logits_of, weight_rounder

FLOOR = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
"""Relative error that other orders of summation and other roundings on the way explain, whatever was measured."""
LOGPROB_FLOOR = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1.25e-4}
"""The same for log-probs, nats."""
CHUNK = 512
"""Tokens whose logits exist together."""


@dataclass(frozen=True, kw_only=True)
class Local:
    """An operation of a side, judged by its own inputs."""

    key: Key
    error: float
    """Root mean square over tokens of ‖got − right‖ / ‖right‖; of log-probs in nats; of `experts` the fraction of tokens that
    were not sent to the best. Infinite if the side has no such operation, or gives what is not finite."""
    expected: float
    """What the dtype explains of it."""
    worst: float
    """Largest error of a token, in units of `expected`."""
    token: int
    """That token's place among the capture's."""

    @property
    def ratio(self) -> float:
        """How many times as large as explained."""
        return self.error / self.expected if self.expected else float("inf") if self.error else 0.0


class Definition:
    """The operations of a Llama-family model (`models.forward.supports`) from values to values."""

    def __init__(self, config: Any, weights: Mapping[str, torch.Tensor], mode: str, dtype: torch.dtype) -> None:
        """`weights` by checkpoint name; `mode`: how they are rounded; `dtype`: of the arithmetic."""
        self.config = config
        self.mode = mode
        self.dtype = dtype
        self._weights, self._round_weight = weights, weight_rounder(mode)
        self.round_input: Callable[[torch.Tensor], torch.Tensor] | None = activation_rounder(mode)
        heads = config.num_attention_heads
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        self.eps = float(config.rms_norm_eps)

    def weight(self, name: str) -> torch.Tensor | None:
        """A weight as the mode holds it, in the dtype of the arithmetic; None if the checkpoint has none of this name."""
        found = self._weights.get(name)
        if found is None:
            return None
        found = found.detach()
        if self._round_weight is not None and is_quantised(name, found):
            found = self._round_weight(found)
        return found.to(compute_dtype(self.mode)).to(self.dtype)

    def operations(self, layer: int) -> list[str]:
        """What a layer does, in order."""
        without = set()
        if f"model.layers.{layer}.self_attn.q_norm.weight" not in self._weights:
            without |= {"q_norm", "k_norm"}
        if f"model.layers.{layer}.mlp.gate.weight" not in self._weights:
            without |= {"router", "experts"}
        return [name for name in OPERATIONS if name not in without]

    def compute(self, key: Key, capture: Capture) -> torch.Tensor:
        """`[T, width]` of one operation from what `capture` recorded before it. Raises `KeyError` if that is missing."""
        layer, name = key
        if name == "embedding":
            return self._need("model.embed_tokens.weight")[capture.tokens.ids]
        if layer is None:
            return self._norm(self._recorded(capture, last_residual(capture)), "model.norm.weight")
        return getattr(self, f"_{name}")(layer, lambda other: self._recorded(capture, (layer, other)), capture)

    def logprobs(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """`[N]` float64 log-probs of `targets [N]` at final states `hidden [N, D]`."""
        head = self.weight("lm_head.weight")
        head = self._need("model.embed_tokens.weight") if head is None else head
        parts = []
        for states, wanted in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
            product = F.linear if self.dtype == torch.float64 else logits_of
            logits = product(states.to(self.dtype), head)
            parts.append(logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0].double())
        return torch.cat(parts)

    def _recorded(self, capture: Capture, key: Key) -> torch.Tensor:
        return capture.values[key].to(self.dtype)

    def _need(self, name: str) -> torch.Tensor:
        found = self.weight(name)
        if found is None:
            raise KeyError(name)
        return found

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._need(name), self.eps)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if self.round_input is not None:
            x = self.round_input(x)
        return F.linear(x, self._need(f"{name}.weight"), self.weight(f"{name}.bias"))

    def _input_norm(self, layer: int, get: _Get, capture: Capture) -> torch.Tensor:
        before = (layer - 1, "mlp_residual") if layer else (None, "embedding")
        return self._norm(self._recorded(capture, before), f"model.layers.{layer}.input_layernorm.weight")

    def _project(self, layer: int, get: _Get, part: str) -> torch.Tensor:
        return self._linear(get("input_norm"), f"model.layers.{layer}.self_attn.{part}")

    def _q_proj(self, layer: int, get: _Get, capture: Capture) -> torch.Tensor:
        return self._project(layer, get, "q_proj")

    def _k_proj(self, layer: int, get: _Get, capture: Capture) -> torch.Tensor:
        return self._project(layer, get, "k_proj")

    def _v_proj(self, layer: int, get: _Get, capture: Capture) -> torch.Tensor:
        return self._project(layer, get, "v_proj")

    def _head_norm(self, layer: int, get: _Get, part: str) -> torch.Tensor:
        x = get(f"{part}_proj").unflatten(-1, (-1, self.head_dim))
        return self._norm(x, f"model.layers.{layer}.self_attn.{part}_norm.weight").flatten(1)

    def _q_norm(self, layer: int, get: _Get, capture: Capture) -> torch.Tensor:
        return self._head_norm(layer, get, "q")

    def _k_norm(self, layer: int, get: _Get, capture: Capture) -> torch.Tensor:
        return self._head_norm(layer, get, "k")

    def _rope(self, layer: int, get: _Get, capture: Capture, part: str) -> torch.Tensor:
        before = f"{part}_norm" if f"{part}_norm" in self.operations(layer) else f"{part}_proj"
        x = get(before).unflatten(-1, (-1, self.head_dim))
        cos, sin = self._rotation(capture.tokens.positions)
        left, right = x.chunk(2, -1)
        return (x * cos + torch.cat((-right, left), -1) * sin).flatten(1)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[T, 1, d]` each. Angles are float64 or float32, never less: so it is done everywhere."""
        rope, wide = self.config.rope_parameters, torch.float64 if self.dtype == torch.float64 else torch.float32
        kind, factor = rope.get("rope_type", "default"), 1.0
        if kind == "default":
            steps = torch.arange(0, self.head_dim, 2, dtype=wide) / self.head_dim
            inverse = 1.0 / rope["rope_theta"] ** steps
        else:
            inverse, factor = ROPE_INIT_FUNCTIONS[kind](self.config, torch.device("cpu"))
        angle = positions[:, None].to(wide) * inverse.to(wide)
        angle = torch.cat((angle, angle), -1)[:, None]
        return (angle.cos() * factor).to(self.dtype), (angle.sin() * factor).to(self.dtype)

    def _q_rope(self, layer: int, get: _Get, capture: Capture) -> torch.Tensor:
        return self._rope(layer, get, capture, "q")

    def _k_rope(self, layer: int, get: _Get, capture: Capture) -> torch.Tensor:
        return self._rope(layer, get, capture, "k")

    def _attention(self, layer: int, get: _Get, capture: Capture) -> torch.Tensor:
        names, lengths = ("q_rope", "k_rope", "v_proj"), [len(s) for s in capture.tokens.sequences]
        q, k, v = (get(name).unflatten(-1, (-1, self.head_dim)).split(lengths) for name in names)
        parts = []
        for one in zip(q, k, v, strict=True):
            query, key, value = (x.transpose(0, 1)[None] for x in one)
            grouped = query.shape[1] != key.shape[1]
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
            parts.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(parts)

    def _o_proj(self, layer: int, get: _Get, capture: Capture) -> torch.Tensor:
        return self._linear(get("attention"), f"model.layers.{layer}.self_attn.o_proj")

    def _attention_residual(self, layer: int, get: _Get, capture: Capture) -> torch.Tensor:
        before = (layer - 1, "mlp_residual") if layer else (None, "embedding")
        return self._recorded(capture, before) + get("o_proj")

    def _post_norm(self, layer: int, get: _Get, capture: Capture) -> torch.Tensor:
        return self._norm(get("attention_residual"), f"model.layers.{layer}.post_attention_layernorm.weight")

    def _router(self, layer: int, get: _Get, capture: Capture) -> torch.Tensor:
        return F.linear(get("post_norm"), self._need(f"model.layers.{layer}.mlp.gate.weight"))

    def _mlp(self, layer: int, get: _Get, capture: Capture) -> torch.Tensor:
        h, stem = get("post_norm"), f"model.layers.{layer}.mlp"
        if "router" not in self.operations(layer):
            return self._swiglu(h, stem)
        chosen, scores = capture.values[layer, "experts"].long(), get("router")
        wide = scores if self.dtype == torch.float64 else scores.float()
        weights = wide.softmax(-1).gather(1, chosen)
        if getattr(self.config, "norm_topk_prob", False):
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(h)
        for expert in chosen.unique().tolist():
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            part = self._swiglu(h[rows], f"{stem}.experts.{expert}")
            out.index_add_(0, rows, part * weights[rows, slots, None].to(part.dtype))
        return out

    def _swiglu(self, h: torch.Tensor, stem: str) -> torch.Tensor:
        inner = F.silu(self._linear(h, f"{stem}.gate_proj")) * self._linear(h, f"{stem}.up_proj")
        return self._linear(inner, f"{stem}.down_proj")

    def _mlp_residual(self, layer: int, get: _Get, capture: Capture) -> torch.Tensor:
        return get("attention_residual") + get("mlp")


_Get = Callable[[str], torch.Tensor]


class Reference:
    """Judges captures by the definitions and one checkpoint's weights."""

    def __init__(self, config: Any, weights: Mapping[str, torch.Tensor]) -> None:
        """`config`: of the text model; `weights` by checkpoint name, as published (unrounded)."""
        self.config = config
        self.weights = {name: tensor.detach().cpu() for name, tensor in weights.items()}

    @torch.no_grad()
    def judge(self, capture: Capture) -> Iterator[Local]:
        """Every operation of `capture` that can be judged, in the order of computing."""
        working = compute_dtype(capture.mode)
        exact = Definition(self.config, self.weights, capture.mode, torch.float64)
        noisy = Definition(self.config, self.weights, capture.mode, working)
        unrounded = None
        if exact.round_input is not None:
            unrounded = Definition(self.config, self.weights, capture.mode, torch.float64)
            unrounded.round_input = None
        keys: list[Key] = [(None, "embedding")]
        keys += [(layer, name) for layer in complete_layers(capture) for name in exact.operations(layer)]
        for key in [*keys, (None, "final_norm")]:
            if key[1] == "experts":
                yield _judge_choice(key, capture)
            elif (found := _judge(key, capture, exact, noisy, unrounded)) is not None:
                yield found
        if (None, "final_norm") in capture.values:
            yield _judge_logprobs(capture, exact, noisy)


def complete_layers(capture: Capture) -> list[int]:
    """Layers with more values than their output."""
    return [layer for layer in capture.layers if {k[1] for k in capture.values if k[0] == layer} != {"mlp_residual"}]


def last_residual(capture: Capture) -> Key:
    """What the final norm gets, if the last layer was recorded."""
    return max(capture.layers, default=0), "mlp_residual"


def _judge(
    key: Key, capture: Capture, exact: Definition, noisy: Definition, unrounded: Definition | None
) -> Local | None:
    """None for an operation whose inputs were not recorded."""
    if key == (None, "final_norm") and last_residual(capture)[0] != exact.config.num_hidden_layers - 1:
        return None
    try:
        right = exact.compute(key, capture)
        emulated = noisy.compute(key, capture).double()
    except KeyError:
        return None
    noise = [emulated - right]
    if unrounded is not None:
        noise.append(unrounded.compute(key, capture) - right)
    return judged(key, capture, right, noise, FLOOR[noisy.dtype])


def judged(key: Key, capture: Capture, right: torch.Tensor, noise: Sequence[torch.Tensor], floor: float) -> Local:
    """What was recorded against what is `right [T, width]`; `noise`: independent errors that the dtype explains.

    Errors are relative to a token's own size, so that a few tokens with huge activations do not hide the others; a token
    far smaller than the median is measured by that, because its error comes from larger terms that cancel.
    """
    got = capture.values.get(key)
    if got is None or got.shape != right.shape:
        return Local(key=key, error=float("inf"), expected=floor, worst=float("inf"), token=0)
    size = right.norm(dim=-1)
    unit = torch.maximum(size, size.median()).clamp_min(1e-30)
    each = (got.double() - right).norm(dim=-1) / unit
    explained = torch.stack([part.norm(dim=-1) / unit for part in noise]).square().sum(0).mean().sqrt()
    return local(key, float(each.square().mean().sqrt()), max(float(explained), floor), each)


def _judge_choice(key: Key, capture: Capture) -> Local:
    """Whether the experts chosen are those with the best recorded logits."""
    chosen, logits = capture.values.get(key), capture.values.get((key[0], "router"))
    if chosen is None or logits is None:
        return Local(key=key, error=float("inf"), expected=0.0, worst=float("inf"), token=0)
    wrong = wrong_choice(chosen, logits)
    token = int(wrong.int().argmax()) if len(wrong) else 0
    return Local(key=key, error=float(wrong.double().mean()), expected=0.0, worst=float(wrong.any()), token=token)


def wrong_choice(chosen: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """`[T]` bool: tokens not sent to different experts with the best of `logits [T, experts]`, ties aside."""
    chosen, logits = chosen.long(), logits.double()
    taken = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, chosen, True)
    lowest = logits.gather(1, chosen).amin(1)
    best = logits.masked_fill(taken, -torch.inf).amax(1)
    # Softmax in float32 makes a tie of logits that differ by less than this.
    tie = 1e-6 * (1 + logits.abs().amax(1))
    return (taken.sum(1) != chosen.shape[1]) | (best > lowest + tie)


def _judge_logprobs(capture: Capture, exact: Definition, noisy: Definition) -> Local:
    hidden, places = capture.values[None, "final_norm"], capture.tokens.predicted.nonzero()[:, 0]
    known = capture.logprobs[places].isfinite() | (capture.path_logprobs is None)
    places = places[known]
    states, targets = hidden[places - 1], capture.tokens.ids[places]
    right = exact.logprobs(states, targets)
    noise = (noisy.logprobs(states, targets) - right).square().mean().sqrt()
    expected = max(float(noise), LOGPROB_FLOOR[noisy.dtype])
    each = (capture.logprobs[places].double() - right).abs()
    found = local((None, "logprobs"), float(each.square().mean().sqrt()), expected, each)
    return Local(**{**found.__dict__, "token": int(places[found.token])})


def local(key: Key, error: float, expected: float, each: torch.Tensor) -> Local:
    """`each [T]`: error of every token in the units of `error`."""
    if not bool(each.isfinite().all()):
        token = int((~each.isfinite()).int().argmax())
        return Local(key=key, error=float("inf"), expected=expected, worst=float("inf"), token=token)
    return Local(key=key, error=error, expected=expected, worst=float(each.max()) / expected, token=int(each.argmax()))
