"""The sizes of a model that decide what it takes of memory, from its config alone: no weight is loaded or drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollkeel.config import LoraConfig
from rollkeel.errors import BadInput, nearest

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


def _qwen3(width: int, layers: int, heads: int, kv_heads: int, mlp: int, tied: bool, **more: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe" if more else "qwen3",
        "vocab_size": 151936,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": mlp,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40960,
        **more,
    }


PUBLIC = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 8, 3072, True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 8, 6144, True),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 8, 9728, True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 8, 12288, False),
    "Qwen/Qwen3-14B": _qwen3(5120, 40, 40, 8, 17408, False),
    "Qwen/Qwen3-32B": _qwen3(5120, 64, 64, 8, 25600, False),
    "Qwen/Qwen3-30B-A3B": _qwen3(
        2048, 48, 32, 4, 6144, False, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768
    ),
}
PUBLIC |= {  # there is no base of 32B
    f"{name}-Base": {**fields, "max_position_embeddings": 32768} for name, fields in PUBLIC.items() if "32B" not in name
}
"""What the `config.json` of well-known models says, for planning where nothing was downloaded."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a causal language model with attention in every layer."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    """Width of a head."""
    mlp: int
    """Width inside an MLP, of one expert in a mixture."""
    experts: int
    chosen: int
    """Experts per token."""
    tied: bool
    head_norms: bool
    biases: bool
    """Of query, key and value."""
    context: int

    @property
    def queries(self) -> int:
        return self.heads * self.head

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the projections of a layer by the end of their names, routers and experts apart."""
        attention = {
            "q_proj": (self.width, self.queries),
            "k_proj": (self.width, self.keys),
            "v_proj": (self.width, self.keys),
            "o_proj": (self.queries, self.width),
        }
        if self.experts:
            return attention
        wide = (self.width, self.mlp)
        return {**attention, "gate_proj": wide, "up_proj": wide, "down_proj": (self.mlp, self.width)}

    def adapters(self, lora: LoraConfig) -> int:
        """Parameters of the adapters that `lora` puts beside the weights."""
        sizes = [sum(size) for name, size in self.linear.items() if not lora.targets or name in lora.targets]
        if lora.experts:  # gate and up are one weight there
            sizes.append(self.experts * (2 * self.width + 3 * self.mlp))
        return lora.rank * self.layers * sum(sizes)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """Parameters: the name of the first of those that are alike, its shape, and how many there are."""
        for name, (inputs, outputs) in self.linear.items():
            at = f"model.layers.0.{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}"
            yield f"{at}.weight", (outputs, inputs), self.layers
            if self.biases and name[0] in "qkv":
                yield f"{at}.bias", (outputs,), self.layers
        if self.experts:
            experts = "model.layers.0.mlp.experts"
            yield f"{experts}.gate_up_proj", (self.experts, 2 * self.mlp, self.width), self.layers
            yield f"{experts}.down_proj", (self.experts, self.width, self.mlp), self.layers
            yield "model.layers.0.mlp.gate.weight", (self.experts, self.width), self.layers
        yield "model.layers.0.input_layernorm.weight", (self.width,), 2 * self.layers + 1
        if self.head_norms:
            yield "model.layers.0.self_attn.q_norm.weight", (self.head,), 2 * self.layers
        yield "model.embed_tokens.weight", (self.vocab, self.width), 1
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.width), 1

    @property
    def parameters(self) -> int:
        return sum(times * math.prod(shape) for _, shape, times in self.tensors())


def shape_of(path: str, overrides: Mapping[str, Any]) -> Shape:
    """Sizes of `model.path` with `model.overrides`: a preset, a folder with a config.json, a name that was downloaded, or one in `PUBLIC`.

    Raises `BadInput` for another name, and for an architecture whose sizes are not known here.
    """
    if path.startswith("preset:"):
        from rollkeel.models.presets import PRESETS

        name = path.removeprefix("preset:")
        if name not in PRESETS:
            raise BadInput(f"model.path {path!r}: no such preset{nearest(name, list(PRESETS))}")
        make, _, fields = PRESETS[name]
        return shape_from(make(**{**fields, **overrides}).to_dict(), path)
    file = Path(path).expanduser() / "config.json"
    file = file if file.is_file() else _downloaded(path)
    if file is not None:
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            raise BadInput(f"model.path {path!r}: its config.json is no JSON") from None
    elif path in PUBLIC:
        fields = PUBLIC[path]
    else:
        raise BadInput(
            f"model.path {path!r}: no folder with config.json and no architecture that is known here{nearest(path, list(PUBLIC))}"
        )
    return shape_from({**fields, **overrides} if isinstance(fields, dict) else {}, path)


def _downloaded(name: str) -> Path | None:
    """The config.json of a model of the hub that lies in its cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def shape_from(fields: Mapping[str, Any], path: str) -> Shape:
    """Sizes from the fields of the `config.json` of `path`, see `shape_of`."""
    family = fields.get("model_type")
    if family not in FAMILIES:
        raise BadInput(f"model.path {path!r}: sizes of {family!r} are not known here, expected {', '.join(FAMILIES)}")
    try:
        heads = int(fields["num_attention_heads"])
        experts = int(fields.get("num_experts") or fields.get("num_local_experts") or 0)
        return Shape(
            vocab=int(fields["vocab_size"]),
            width=int(fields["hidden_size"]),
            layers=int(fields["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(fields.get("num_key_value_heads") or heads),
            head=int(fields.get("head_dim") or fields["hidden_size"] // heads),
            mlp=int(fields["moe_intermediate_size" if experts else "intermediate_size"]),
            experts=experts,
            chosen=int(fields["num_experts_per_tok"]) if experts else 0,
            tied=bool(fields.get("tie_word_embeddings")),
            head_norms=family.startswith("qwen3"),
            biases=family == "qwen2",
            context=int(fields.get("max_position_embeddings") or 2**20),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadInput(f"model.path {path!r}: its config lacks a size, or it is no number ({error})") from None
