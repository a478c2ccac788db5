"""The trainer's packed forward in the arithmetic of `parity.py`, in place of `packed.PackedModel`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.modeling_utils import PreTrainedModel

from rollkeel.config import Recompute
from rollkeel.errors import BadInput
from rollkeel.models.adapters import parameters
from rollkeel.models.forward import Attend, Observe
from rollkeel.models.layout import Layout
from rollkeel.models.numerics import mode_of
from rollkeel.models.packed import attend_whole
from rollkeel.models.parity import Definition, Weights, attention, check, with_gradient
from rollkeel.models.routers import RoutingShape


class ParityModel:
    """Hidden states of a Llama-family model over packed sequences, as `PackedModel` gives them."""

    varlen, padded = True, ""

    def __init__(self, model: PreTrainedModel, *, recompute: Recompute = Recompute()) -> None:
        """Raises `BadInput` for a model or a `recompute` without this arithmetic."""
        self.model = model
        config = model.config.get_text_config()
        parameter = next(model.parameters())
        check(config, mode_of(parameter.dtype), parameter.device, bool(parameters(model)))
        if recompute.mode == "selective":
            raise BadInput("run.parity: expected train.checkpointing=none or layer, got selective")
        backbone: Any = getattr(model, model.base_model_prefix)
        layers = [_weights(layer) for layer in backbone.layers]
        self.num_moe_layers = sum(layer.router is not None for layer in layers)
        self._experts = int(getattr(config, "num_experts", 0) or 0)
        again = recompute.of(len(layers))
        self._definition = Definition(config, backbone.embed_tokens.weight, layers, backbone.norm.weight, again=again)

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cu_seqlens: torch.Tensor | Sequence[int],
        experts: list[torch.Tensor] | None = None,
        replay: tuple[torch.Tensor, torch.Tensor] | None = None,
        parents: torch.Tensor | None = None,
        see: Observe | None = None,
    ) -> torch.Tensor:
        """See `PackedModel`; `see` is told every operation."""
        cu = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else list(cu_seqlens)
        continued = [-1] * (len(cu) - 1) if parents is None else parents.tolist()
        attend = self._attend(cu, continued, input_ids.device)
        layers = [i for i, layer in enumerate(self._definition.layers) if layer.router is not None]

        def route(layer: int, chosen: torch.Tensor) -> torch.Tensor:
            assert replay is not None
            return chosen.index_copy(0, replay[1], replay[0][:, layers.index(layer)].long())

        return self._definition.hidden(input_ids, position_ids, attend, experts, see, None if replay is None else route)

    def replayable(self) -> RoutingShape:
        """The shape of the experts that `replay` takes. Raises `BadInput` for a dense model."""
        if not self.num_moe_layers:
            raise BadInput("routing replay: the model has no routed experts; set rollout.routing=record")
        return RoutingShape(self.num_moe_layers, self._definition.top_k, self._experts)

    def _attend(self, cu: Sequence[int], parents: Sequence[int], device: torch.device) -> Attend:
        lengths = [b - a for a, b in itertools.pairwise(cu)]
        layout = Layout.build(lengths, device, parents)
        rows = [np.arange(a, b) for a, b in itertools.pairwise(cu)]
        own = [row if p < 0 else np.concatenate((rows[p], row)) for row, p in zip(rows, parents, strict=True)]
        table = np.zeros((len(own), max(map(len, own))), np.int64)
        for at, row in enumerate(own):
            table[at, : len(row)] = row
        sequence = np.repeat(np.arange(len(rows)), lengths)
        seen = np.concatenate([np.arange(len(o) - n, len(o)) + 1 for o, n in zip(own, lengths, strict=True)])
        where: tuple[Any, ...] = (table, sequence, seen)
        if device.type != "cpu":
            where = tuple(torch.from_numpy(each).to(device) for each in where)
        kv_heads, scale = self._definition.kv_heads, self._definition.scale

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = (t.flatten(0, 1)[:, None] for t in (k, v))
            value = attention(q, keys, values, where, kv_heads, scale)
            return with_gradient(value, lambda: attend_whole(q, k, v, layout, scale))

        return attend


def _weights(layer: Any) -> Weights:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    routed = hasattr(mlp, "experts")
    return Weights(
        norm1=layer.input_layernorm.weight,
        qkv=[p.weight for p in projections],
        qkv_bias=[p.bias for p in projections],
        qk_norm=[n.weight for n in norms if n is not None],
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        norm2=layer.post_attention_layernorm.weight,
        router=mlp.gate.weight if routed else None,
        up=[mlp.experts.gate_up_proj] if routed else [mlp.gate_proj.weight, mlp.up_proj.weight],
        down=mlp.experts.down_proj if routed else mlp.down_proj.weight,
    )
