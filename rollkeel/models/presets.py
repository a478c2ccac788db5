"""Built-in models: architectures initialised from a seed and a byte-level tokenizer, without any download."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.modeling_utils import PreTrainedModel
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from rollkeel.errors import BadInput

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
PAD, BOS, EOS = 0, 1, 2
VOCAB_SIZE = 288  # 8 specials + 256 bytes, padded to a multiple of 32

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's CPU attention starts at 32
    # Short contexts: slow rotations carry no information, and a tiny model learns to look back much sooner without them.
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    # 0.02 is meant for widths in the thousands; at width 64 it starves the residual stream.
    "initializer_range": 0.08,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "output_router_logits": False,
}

PRESETS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "tiny-qwen3-moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**_COMMON, **_MOE, "moe_intermediate_size": 32, "intermediate_size": 128},
    ),
    "tiny-qwen3": (Qwen3Config, Qwen3ForCausalLM, {**_COMMON, "intermediate_size": 192}),
    "tiny-qwen3-tied": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {**_COMMON, "intermediate_size": 192, "tie_word_embeddings": True},
    ),
    "small-qwen3-moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            **_COMMON,
            **_MOE,
            "vocab_size": 2048,
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "moe_intermediate_size": 128,
            "intermediate_size": 256,
        },
    ),
}


def build_preset(
    name: str, seed: int = 0, overrides: Mapping[str, Any] | None = None, context: int | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Model and tokenizer of preset `name`, weights a function of (`name`, `overrides`, `seed`) alone; `context`: see `extend`.

    Raises `BadInput` for an unknown preset or an unknown architecture field.
    """
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean preset:{close[0]}?" if close else f"known: {', '.join(PRESETS)}"
        raise BadInput(f"model preset {name!r}: unknown; {hint}")
    config_type, model_type, fields = PRESETS[name]
    config = config_type(**fields)
    for key in overrides or {}:
        if not hasattr(config, key):
            raise BadInput(f"model.overrides.{key}: {config_type.__name__} has no such field")
    # What the config derives from other fields is derived again.
    derived = {"model_type", "transformers_version"} | {k for k in ("layer_types",) if k not in (overrides or {})}
    try:
        for key, value in (overrides or {}).items():
            setattr(config, key, value)
        config = config_type(**{k: v for k, v in config.to_dict().items() if k not in derived})
        extend(config, context)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = model_type(config)
    except (StrictDataclassError, ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
        raise BadInput(f"model.overrides for preset {name}: {' '.join(str(error).split())[:200]}") from None
    _check_shape(config)
    return model, build_tokenizer()


def extend(config: Any, context: int | None) -> None:
    """Make a Hugging Face config one of `context` positions, by YaRN where that is more than it has. Raises `BadInput`."""
    text = config.get_text_config()
    own = int(getattr(text, "max_position_embeddings", 2**31))
    if context is None or context <= own:
        return
    rope = dict(getattr(text, "rope_parameters", None) or {})
    if "rope_theta" not in rope or rope.get("rope_type", "default") != "default":
        raise BadInput(
            f"model.context: YaRN extends plain rotary embeddings, {config.model_type} has {rope.get('rope_type', 'none')};"
            f" set model.overrides.rope_parameters, or at most {own}"
        )
    yarn = {"rope_type": "yarn", "factor": context / own, "original_max_position_embeddings": own}
    text.rope_parameters, text.max_position_embeddings = {**rope, **yarn}, context


def _check_shape(config: Any) -> None:
    """What transformers would only notice in the middle of a forward pass."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise BadInput(
            f"model.overrides.num_attention_heads: expected a multiple of num_key_value_heads={kv_heads}, got {heads}"
        )
    if config.head_dim % 2:
        raise BadInput(f"model.overrides.head_dim: expected an even rotary dimension, got {config.head_dim}")
    experts, used = getattr(config, "num_experts", 0), getattr(config, "num_experts_per_tok", 0)
    if experts and used > experts:
        raise BadInput(f"model.overrides.num_experts_per_tok: expected at most num_experts={experts}, got {used}")
    tokens = len(SPECIAL_TOKENS) + 256
    if config.vocab_size < tokens:
        raise BadInput(
            f"model.overrides.vocab_size: expected at least the tokenizer's {tokens}, got {config.vocab_size}"
        )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer: 8 specials, then one token per byte, so that any text survives a round trip."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = (
        "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return tokenizer
