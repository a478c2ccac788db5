"""Compiled decode steps must be the PyTorch decode steps: same log-probs, experts and tokens, at every batch size.

Matters because the two are exchangeable by one config key. Does not cover speed, nor agreement with the trainer beyond that
of the PyTorch path (see the engine tests).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rollkeel.config import EngineConfig
from rollkeel.engines.kv import Layout, PagedCache
from rollkeel.engines.local import LocalEngine
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.models import compiled, jit, kernels
from rollkeel.models.forward import FastForward
from rollkeel.models.names import checkpoint_views
from rollkeel.models.presets import build_preset
from rollkeel.sync.publish import DirectPublisher
from rollkeel.types import Request, SamplingParams, Segment

pytestmark = pytest.mark.skipif(not jit.FOUND, reason="numba is not here")
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
    engine = LocalEngine(
        net.config, EngineConfig(forward=forward, dtype=dtype, slots=7), max_length=64, layout=Layout(block_size=4)
    )  # type: ignore[arg-type]
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


@pytest.mark.parametrize("name", ["llama", "qwen2", "tiny-qwen3-moe"])
@pytest.mark.parametrize("rows", [5, 512])
def test_prefilled_keys_and_values_are_pytorchs(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one sequence is cut into several calls, and behind tokens that an earlier call has stored."""
    monkeypatch.setattr(compiled, "ROWS", rows)
    net, rng, found = model(name), np.random.default_rng(3), []
    tokens = [rng.integers(0, 96, n) for n in (1, 4, 7, 23)]
    for forward in ("fast", "compiled"):
        engine = LocalEngine(net.config, EngineConfig(forward=forward), max_length=64, layout=Layout(block_size=4))  # type: ignore[arg-type]
        DirectPublisher([engine]).publish(checkpoint_views(net).items(), 1)  # type: ignore[arg-type]
        blocks = [[engine._pool.take() for _ in range(7)] for _ in tokens]
        with torch.inference_mode():
            engine._prefill([(b, t[:15], 0) for b, t in zip(blocks, tokens, strict=True)])
            engine._prefill([(blocks[3], tokens[3][15:], 15)])
        found.append(engine._cache.read([(b, len(t), 1) for b, t in zip(blocks, tokens, strict=True)]))
    for a, b in zip(*found, strict=True):
        assert a is not None
        assert b is not None
        assert np.abs(a.keys).max() > 0.1
        np.testing.assert_allclose(a.keys, b.keys, atol=2e-5)
        np.testing.assert_allclose(a.values, b.values, atol=2e-5)


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
        compiled.compiled_decode(forward, PagedCache(4, 16), 64)
    assert not compiled.suits(forward)


def test_exponential_is_exact_to_float32_over_its_range() -> None:
    x = np.linspace(-86, 0, 10_001, dtype=np.float32)
    got = np.array([jit.exp(v) for v in x])
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


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"top_p": 0.8},
        {"top_k": 5, "return_topk": 3},
        {"stop_token_ids": tuple(range(0, 288, 3))},
    ],
)
def test_every_way_of_sampling_gives_pytorchs_tokens(options: dict[str, object]) -> None:
    net = model("tiny-qwen3-moe")
    found = []
    for forward in ("fast", "compiled"):
        engine = LocalEngine(net.config, EngineConfig(forward=forward, slots=3), max_length=64)  # type: ignore[arg-type]
        DirectPublisher([engine]).publish(checkpoint_views(net).items(), 1)  # type: ignore[arg-type]
        prompt = np.array([5, 6, 7])
        # Half of the requests are plain, so that both kinds of step happen in one batch.
        plain = {k: v for k, v in options.items() if k == "stop_token_ids"}
        engine.submit(
            [
                Request(id=i, prompt_ids=prompt, sampling=SamplingParams(max_new_tokens=20, **(plain, options)[i % 2]))  # type: ignore[arg-type]
                for i in range(8)
            ]
        )
        out: list[Segment] = []
        while part := engine.poll(30):
            out += part
        found.append(sorted(out, key=lambda s: s.request_id))
    for a, b in zip(*found, strict=True):
        assert a.status == b.status
        assert np.array_equal(a.span.token_ids, b.span.token_ids)
        assert np.abs(a.span.logprobs - b.span.logprobs).max() < 5e-5
        assert np.abs(a.span.kept_mass - b.span.kept_mass).max() < 1e-5
    if options.get("stop_token_ids"):
        assert any(s.status == "finished" for s in found[0])


def test_is_what_auto_means_where_it_fits() -> None:
    net = model("tiny-qwen3")
    for dtype, expected in (("fp32", True), ("int8", True), ("bf16", False)):
        engine = LocalEngine(net.config, EngineConfig(dtype=dtype), max_length=64)  # type: ignore[arg-type]
        assert (engine._compiled is not None) is expected


def test_diverged_weights_are_an_error_not_a_token() -> None:
    net = model("tiny-qwen3")
    net.model.norm.weight.data[3] = torch.nan
    with pytest.raises(EngineFailure, match="not finite"):
        sample(net, "compiled", "fp32", False)


def test_draws_follow_the_distribution() -> None:
    """A chi-square of 40,000 draws from 256 outcomes, some of probability 0: no outcome is favoured by the blocked search."""
    rng = np.random.default_rng(0)
    p = rng.exponential(size=256).astype(np.float32)
    p[60:70] = 0
    p[-5:] = 0
    draws = 40_000
    counts = np.zeros(256)
    sums = np.zeros(4, np.float32)
    for u in (np.arange(draws) + 0.5) / draws:
        counts[kernels._pick(p, sums, u)[0]] += 1
    assert np.abs(counts - draws * p / p.sum()).max() <= 1.5  # stratified draws: off by rounding only
    assert kernels._pick(p, sums, 1 - 2**-53)[0] == 250


@pytest.mark.slow
def test_a_process_that_compiles_repeats_the_bits_of_one_that_loads(tmp_path: Path) -> None:
    """Without this a resumed run differs from the run before it: what is linked twice may round differently."""
    script = """
import hashlib, sys
sys.path.insert(0, "tests/models")
from test_compiled import model, sample
h = hashlib.sha256()
for segment in sample(model("small-qwen3-moe"), "compiled", "fp32", False)[0]:
    h.update(segment.span.logprobs.tobytes())
print(h.hexdigest())
"""
    root = Path(__file__).parents[2]
    seen = set()
    for folder in ("a", "a", "b", "b"):  # compile, load, compile, load
        env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / folder), "PYTHONPATH": str(root)}
        done = subprocess.run(
            [sys.executable, "-c", script], env=env, cwd=root, capture_output=True, text=True, check=True
        )
        seen.add(done.stdout)
    for folder in "ab":
        assert {p.name.split("-")[0] for p in tmp_path.glob(f"{folder}/*/*.nbc")} >= {"kernels.layers", "kernels.draw"}
    assert len(seen) == 1
