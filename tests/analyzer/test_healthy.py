"""An analyzer that cries wolf is switched off: honest sides of every dtype and family must be called healthy.

Trainer against engine in every numeric mode, prefill against decode, a trainer in bfloat16, every family that rollkeel's own
forward computes, and architectures that are judged module by module. A fault that only a compiled path has must be told too.
Not covered: CUDA kernels, pretrained weights with their huge activations.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from analyzer_kit import analyzed, model_of, reference_of, tokens_of
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from rollkeel.analyzer.capture import Tokens
from rollkeel.analyzer.compare import compare
from rollkeel.analyzer.module_reference import ModuleReference
from rollkeel.analyzer.reference import wrong_choice
from rollkeel.analyzer.sides import EngineSide, TrainerSide, engine_forward
from rollkeel.config import ModelConfig
from rollkeel.models.loading import load_policy
from rollkeel.models.names import checkpoint_views
from rollkeel.models.numerics import MODES

SMALL: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}


def engine_of(model: Any, mode: str) -> Any:
    return engine_forward(model.config, checkpoint_views(model).items(), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("preset", ["tiny-qwen3-moe", "tiny-qwen3-tied"])
def test_every_mode_is_healthy(preset: str, mode: str) -> None:
    model = model_of(preset, seed=3, layers=2)
    found = analyzed(model, engine_of(model, mode), mode, reference_of(model), tokens_of(3))
    assert found.healthy, found.verdict
    assert found.verdict.startswith("Healthy")
    # What nobody judges cannot be healthy: all operations of both sides were.
    moe = "moe" in preset
    assert len(found.rows) == 2 * (16 if moe else 14) + 3
    assert all(None not in row.sides for row in found.rows)
    assert max(row.ratio for row in found.rows) < 2, "half of the threshold is the margin that was measured"
    assert (found.flips is not None) == moe
    if found.flips is not None:
        assert found.flips.explained == found.flips.count


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_prefill_and_decode_are_one_model(mode: str) -> None:
    model, tokens = model_of("tiny-qwen3-moe", layers=2), tokens_of()
    forward = engine_of(model, mode)
    a = EngineSide(forward, model.config, mode, prefill=True).capture(tokens)
    b = EngineSide(forward, model.config, mode).capture(tokens)
    found = compare(a, b, reference_of(model))
    assert found.healthy, found.verdict
    assert found.gap.rms < (1e-5 if mode == "fp32" else 0.1)
    assert [p.side for p in found.paths] == ([1] if b.path_logprobs is not None else [])


def test_a_trainer_in_bfloat16_keeps_its_rotary_frequencies() -> None:
    policy = load_policy(ModelConfig(path="preset:tiny-qwen3", dtype="bfloat16"))
    model, tokens = policy.model.eval(), tokens_of()
    found = analyzed(model, engine_of(model, "bf16"), "bf16", reference_of(model), tokens)
    assert found.names == ("trainer bf16", "engine bf16")
    assert found.healthy, found.verdict
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.bfloat16()
    found = analyzed(model, engine_of(model, "bf16"), "bf16", reference_of(model), _long(tokens))
    assert found.first in ((0, "q_rope"), (0, "k_rope")), found.verdict


def _long(tokens: Tokens) -> Tokens:
    """One sequence with far positions."""
    ids = torch.cat([torch.from_numpy(s) for s in tokens.sequences] * 2).numpy()
    return Tokens((ids,), (4,))


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, attention_bias=True, rope_parameters=YARN),
        MistralConfig(**SMALL, sliding_window=None),
        Qwen2Config(**SMALL),
        Qwen3MoeConfig(**SMALL, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,  # type: ignore[call-arg]
                       norm_topk_prob=False, mlp_only_layers=[0]),
    ],
    ids=["llama-yarn-bias", "mistral", "qwen2", "qwen3-moe-mixed"],
)  # fmt: skip
def test_every_family_is_judged_by_operation(config: Any) -> None:
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    found = analyzed(model, engine_of(model, "bf16"), "bf16", reference_of(model), tokens_of(1))
    assert found.healthy, found.verdict
    assert {"q_rope", "attention", "mlp"} <= {row.key[1] for row in found.rows}


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["olmoe", "gemma2"])
def test_other_architectures_are_judged_by_module(family: str, mode: str) -> None:
    torch.manual_seed(1)
    if family == "olmoe":
        config: Any = OlmoeConfig(**SMALL, eos_token_id=1, num_experts=4, num_experts_per_tok=2)
    else:  # soft caps: the trainer runs it padded, the embedded engine refuses it
        config = Gemma2Config(**SMALL, head_dim=32)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    tokens, judge = tokens_of(1), ModuleReference(model)
    a = TrainerSide(model).capture(tokens)
    b = a if family == "gemma2" else EngineSide(engine_of(model, mode), config, mode).capture(tokens)
    found = compare(a, b, judge)
    assert found.healthy, found.verdict
    assert {row.key for row in found.rows} >= {(1, "self_attention"), (1, "feed_forward"), (1, "layer")}
    broken = TrainerSide(_scaled(model))
    found = compare(broken.capture(tokens), b, judge)
    assert (found.first, found.side) == ((1, "self_attention"), 0), found.verdict


def _scaled(model: Any) -> Any:
    broken = copy.deepcopy(model)
    broken.model.layers[1].self_attn.v_proj.weight.data *= 1.3
    return broken


def test_a_fault_of_the_compiled_path_alone_is_told() -> None:
    model, tokens = model_of("tiny-qwen3", layers=2), tokens_of()
    a = TrainerSide(model).capture(tokens)
    side = EngineSide(engine_of(model, "fp32"), model.config, "fp32")
    b = side.capture(tokens)
    if b.path_logprobs is None:
        pytest.skip("no compiled path on this machine")
    found = compare(a, replace(b, path_logprobs=b.path_logprobs * 1.01), reference_of(model))
    assert found.first == (None, "served_path")
    assert found.side == 1
    assert "compiled or fused path of engine fp32" in found.verdict


def test_choices_of_experts() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 1.0, 1.0], [3.0, 2.0, 1.0]])
    chosen = torch.tensor([[1, 0], [0, 2], [2, 1], [0, 0]])
    assert wrong_choice(chosen, logits).tolist() == [False, True, False, True]
