"""Compiled decode steps must be the PyTorch decode steps: same log-probs, experts and tokens, at every batch size.

Matters because the two are exchangeable by one config key. Does not cover speed, nor agreement with the trainer beyond that
of the PyTorch path (see the engine tests), nor the same bits in two processes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rollkeel.config import EngineConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.errors import BadInput
from rollkeel.models import compiled
from rollkeel.models.forward import FastForward
from rollkeel.models.names import checkpoint_views
from rollkeel.models.presets import build_preset
from rollkeel.sync.publish import DirectPublisher
from rollkeel.types import Request, SamplingParams, Segment

pytestmark = pytest.mark.skipif(not compiled.FOUND, reason="numba or torch's BLAS is not here")
SMALL = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "initializer_range": 0.2}


def model(name: str) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "llama":
            return LlamaForCausalLM(LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=1, head_dim=16))
        if name == "qwen2":  # biased projections
            net = Qwen2ForCausalLM(Qwen2Config(**SMALL, num_attention_heads=2, num_key_value_heads=2))
            for layer in net.model.layers:
                for p in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                    torch.nn.init.normal_(p.bias)
            return net
    overrides = {"initializer_range": 0.15} | ({"norm_topk_prob": False} if name == "tiny-qwen3-moe" else {})
    return build_preset(name, overrides=overrides)[0]


def sample(net: torch.nn.Module, forward: str, dtype: str, experts: bool) -> tuple[list[Segment], LocalEngine]:
    engine = LocalEngine(net.config, EngineConfig(forward=forward, dtype=dtype, slots=7, block_size=4), max_length=64)  # type: ignore[arg-type]
    DirectPublisher([engine]).publish(checkpoint_views(net).items(), 1)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    requests = [
        Request(
            id=i,
            prompt_ids=rng.integers(0, 96, 1 + i % 9),
            sampling=SamplingParams(max_new_tokens=3 + 2 * i, return_experts=experts),
        )
        for i in range(12)
    ]
    engine.submit(requests)
    out: list[Segment] = []
    while part := engine.poll(30):
        out += part
    return sorted(out, key=lambda s: s.request_id), engine


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "tiny-qwen3", "tiny-qwen3-moe", "small-qwen3-moe"])
def test_same_tokens_log_probs_and_experts_as_pytorch(name: str, dtype: str) -> None:
    net = model(name)
    moe = "moe" in name
    fast, with_torch = sample(net, "fast", dtype, moe)
    auto, with_numba = sample(net, "compiled", dtype, moe)
    assert with_torch._compiled is None
    assert with_numba._compiled is not None
    for a, b in zip(fast, auto, strict=True):
        assert np.array_equal(a.span.token_ids, b.span.token_ids)
        assert np.abs(a.span.logprobs - b.span.logprobs).max() < 5e-5
        if moe:
            assert a.span.experts is not None
            assert np.array_equal(a.span.experts, b.span.experts)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_modes_with_other_arithmetic_are_refused(dtype: str) -> None:
    forward = FastForward(model("tiny-qwen3-moe").config, dtype, torch.device("cpu"))
    with pytest.raises(BadInput, match=r"engine\.forward=compiled"):
        compiled.compiled_decode(forward)


def test_exponential_is_exact_to_float32_over_its_range() -> None:
    x = np.linspace(-86, 0, 10_001, dtype=np.float32)
    got = x.copy()
    compiled._exp_in_place(got, got.view(np.int32), 0, len(got), np.float32(0))
    want = np.exp(x.astype(np.float64))
    assert np.max(np.abs(got - want) / want) < 3e-7


def test_silu_survives_large_inputs() -> None:
    net = model("tiny-qwen3")
    for layer in net.model.layers:
        layer.mlp.gate_proj.weight.data *= 300  # pre-activations far beyond ±80
    fast, _ = sample(net, "fast", "fp32", False)
    auto, _ = sample(net, "compiled", "fp32", False)
    assert all(np.array_equal(a.span.token_ids, b.span.token_ids) for a, b in zip(fast, auto, strict=True))
    assert all(np.isfinite(s.span.logprobs).all() for s in auto)
