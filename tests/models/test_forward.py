"""What samples must compute the model that trains, whatever the architecture: one wrong mask or scale and every ratio is noise.

Tiny random models of many families, served by the engine (prefill, decode, paged cache, padded batches) and compared with
transformers' own forward of each sequence alone. What cannot be served must say so in one line. Not covered: pretrained
weights, bf16, CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rollkeel.config import EngineConfig
from rollkeel.engines.kv import Layout
from rollkeel.engines.local import LocalEngine
from rollkeel.errors import BadInput
from rollkeel.models.forward import FastForward, supports
from rollkeel.models.forward_transformers import TransformersForward
from rollkeel.models.names import checkpoint_views
from rollkeel.sync.publish import full_update
from rollkeel.types import Request, SamplingParams

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}
HEAD = {**SMALL, "head_dim": 32}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROPE = {"rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}

CASES: dict[str, tuple[Callable[[], Any], bool]] = {
    "llama": (lambda: LlamaConfig(**SMALL), True),
    "llama-bias": (lambda: LlamaConfig(**HEAD, attention_bias=True), True),
    "llama-mlp-bias": (lambda: LlamaConfig(**SMALL, mlp_bias=True), False),
    "llama-gelu": (lambda: LlamaConfig(**SMALL, hidden_act="gelu"), False),
    "llama-tied": (lambda: LlamaConfig(**SMALL, tie_word_embeddings=True), True),
    "llama-rope-llama3": (
        lambda: LlamaConfig(
            **SMALL, rope_parameters={"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE}
        ),
        True,
    ),
    "llama-rope-linear": (lambda: LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", **ROPE}), True),
    "llama-rope-dynamic": (lambda: LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", **ROPE}), False),
    "mistral": (lambda: MistralConfig(**HEAD, sliding_window=None), True),
    "mistral-window": (lambda: MistralConfig(**HEAD, sliding_window=7), False),
    "qwen2": (lambda: Qwen2Config(**SMALL), True),
    "qwen2-window": (
        lambda: Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=1),
        False,
    ),
    "qwen3": (lambda: Qwen3Config(**HEAD), True),
    "qwen3-yarn": (lambda: Qwen3Config(**HEAD, rope_parameters={"rope_type": "yarn", **ROPE}), True),
    "qwen3-moe": (lambda: Qwen3MoeConfig(**HEAD, **EXPERTS, norm_topk_prob=True), True),
    "qwen3-moe-raw": (
        lambda: Qwen3MoeConfig(**HEAD, **{**EXPERTS, "num_experts_per_tok": 1}, norm_topk_prob=False),
        True,
    ),
    "qwen3-moe-mixed": (lambda: Qwen3MoeConfig(**HEAD, **EXPERTS, mlp_only_layers=[0]), True),
    "mixtral": (
        lambda: MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
        False,
    ),
    "olmoe": (lambda: OlmoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2), False),
    "deepseek-v3": (
        lambda: DeepseekV3Config(
            **{**SMALL, "num_key_value_heads": 4},
            moe_intermediate_size=32,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=32,
            q_lora_rank=48,
            qk_rope_head_dim=16,
            qk_nope_head_dim=32,
            v_head_dim=24,
        ),
        False,
    ),
    "gpt-oss": (
        lambda: GptOssConfig(
            **{k: v for k, v in HEAD.items() if k != "pad_token_id"},
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        ),
        False,
    ),
    "gpt2": (lambda: GPT2Config(vocab_size=96, n_positions=256, n_embd=64, n_layer=2, n_head=2), False),
}


def build(make: Callable[[], Any]) -> Any:
    config = make()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            # Biases and sinks start at zero, norms at one: there a forgotten one would go unnoticed.
            if p.dim() == 1 or "bias" in name:
                p += 0.3 * torch.randn(p.shape, generator=generator)
    return model


def serve(model: Any, *, block_size: int = 16, **config: Any) -> LocalEngine:
    engine = LocalEngine(model.config, EngineConfig(**config), max_length=80, layout=Layout(block_size))
    engine.update_weights(full_update(checkpoint_views(model).items(), 0))
    return engine


@torch.no_grad()
def check_against_transformers(model: Any, engine: LocalEngine, tolerance: float = 1e-4) -> None:
    rng = np.random.default_rng(0)
    params = SamplingParams(max_new_tokens=20)
    prompts = [rng.integers(1, 96, n) for n in (1, 5, 30, 30, 17, 41)]
    prompts[3] = prompts[2]
    engine.submit([Request(id=i, prompt_ids=p, sampling=params) for i, p in enumerate(prompts)])
    done = {}
    while segments := engine.poll(60.0):
        done |= {s.request_id: s.span for s in segments}
    assert sorted(done) == list(range(6))
    for i, prompt in enumerate(prompts):
        ids = torch.from_numpy(np.concatenate([prompt, done[i].token_ids]))[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        want = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
        np.testing.assert_allclose(done[i].logprobs, want, atol=tolerance, rtol=0)
        assert want.std() > 0.05, "a model that is uniform everywhere proves nothing"


@pytest.mark.parametrize("case", CASES)
def test_the_engine_computes_what_transformers_computes(case: str) -> None:
    make, fast = CASES[case]
    model = build(make)
    assert supports(model.config) is fast
    engine = serve(model)
    assert isinstance(engine._forward, FastForward) is fast
    check_against_transformers(model, engine)


@pytest.mark.parametrize("case", [c for c, (_, fast) in CASES.items() if fast])
def test_the_fallback_computes_the_fast_families_too(case: str) -> None:
    model = build(CASES[case][0])
    check_against_transformers(model, serve(model, forward="transformers", block_size=7, slots=3))


REFUSED: dict[str, Callable[[], Any]] = {
    "gemma2 soft caps": lambda: Gemma2Config(**HEAD),
    "cohere scales logits": lambda: CohereConfig(**{k: v for k, v in SMALL.items() if k != "head_dim"}),
    "bloom alibi": lambda: BloomConfig(vocab_size=96, hidden_size=64, n_layer=2, n_head=4),
    "mamba": lambda: MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, state_size=8),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_says_so_in_one_line(case: str) -> None:
    config = REFUSED[case]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()

    def attempt() -> None:
        engine = serve(model)
        engine.submit([Request(id=0, prompt_ids=np.arange(1, 9), sampling=SamplingParams(max_new_tokens=2))])
        engine.poll(10.0)

    with pytest.raises(BadInput) as refused:
        attempt()
    assert "\n" not in str(refused.value)
    assert "engine" in str(refused.value)


def test_asking_for_the_fast_forward_where_there_is_none_is_refused() -> None:
    with pytest.raises(BadInput, match=r"engine\.forward.*olmoe"):
        LocalEngine(CASES["olmoe"][0](), EngineConfig(forward="fast"), max_length=32)


def test_building_an_engine_leaves_config_and_random_state_alone() -> None:
    model = build(CASES["gpt-oss"][0])
    before, state = model.config._attn_implementation, torch.get_rng_state()
    serve(model)
    assert model.config._attn_implementation == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("forward", ["fast", "transformers"])
@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4", "bf16", "fp16"])
def test_numeric_modes_run_in_both_forwards(forward: str, dtype: str) -> None:
    model = build(CASES["qwen3-moe"][0])
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_against_transformers(model, serve(model, forward=forward, dtype=dtype))
    check_against_transformers(model, serve(model, forward=forward, dtype=dtype), tolerance=8.0)


@pytest.mark.parametrize("forward", [FastForward, TransformersForward])
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_logits_of_low_precision_are_not_rounded(forward: Any, mode: str) -> None:
    """In `mode` they would be off by up to half their last place: 0.03 of a logit of 10."""
    made = forward(build(CASES["qwen3-moe"][0]).config, mode, torch.device("cpu"))
    g = torch.Generator().manual_seed(0)
    head = made.destinations["lm_head.weight"]
    head.copy_(torch.randn(head.shape, generator=g))
    hidden = torch.randn(9, head.shape[1], generator=g).to(made.dtype)
    got = made.logits(hidden)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), hidden.double() @ head.double().t(), rtol=1e-5, atol=1e-4)
