"""A frozen or measured router must be the router: a wrong name trains what should stand still, a missed layer hides flips.

Names of the families' parameters, and the experts that real (tiny) models of each family choose, against their routers' own
output. Not covered: remote code models outside transformers' experts interface, which have no routing metric.
"""

from __future__ import annotations

import pickle
import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    JetMoeConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rollkeel import models
from rollkeel.errors import BadInput
from rollkeel.models.experts import sorted_experts_forward
from rollkeel.models.packed import PackedModel
from rollkeel.models.routers import expert_layers, is_router, record_experts, unreached_experts

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}
SMALL: dict[str, Any] = {"intermediate_size": 32, "moe_intermediate_size": 16}
CONFIGS = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**COMMON, **SMALL, num_experts=6),
    "qwen2_moe": lambda: Qwen2MoeConfig(**COMMON, **SMALL, shared_expert_intermediate_size=16, num_experts=6),
    "olmoe": lambda: OlmoeConfig(**COMMON, intermediate_size=16, num_experts=6),
    "gpt_oss": lambda: GptOssConfig(**COMMON, intermediate_size=16, num_local_experts=6),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{k: v for k, v in COMMON.items() if k != "head_dim"},
        **SMALL,
        n_routed_experts=6,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
}
JETMOE = {k: v for k, v in COMMON.items() if k not in ("num_attention_heads", "head_dim")}
MOE_LAYERS = {"deepseek_v3": 2}


def build(config: PretrainedConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("name", "router"),
    [
        ("model.layers.0.mlp.gate.weight", True),
        ("model.layers.0.mlp.gate", True),
        ("model.layers.3.mlp.router.weight", True),
        ("model.layers.3.mlp.router.bias", True),
        ("model.layers.3.block_sparse_moe.router.layer.weight", True),
        ("model.layers.3.mlp.gate.e_score_correction_bias", True),
        ("model.layers.3.mlp.moe_statics.e_score_correction_bias", True),
        ("model.layers.3.feed_forward.expert_bias", True),
        ("model.layers.0.mlp.gate_proj.weight", False),
        ("model.layers.0.mlp.experts.gate_up_proj", False),
        ("model.layers.0.mlp.experts.3.gate_proj.weight", False),
        ("model.layers.0.self_attn.gate.weight", False),
        ("model.layers.0.linear_attn.gate.weight", False),
        # It scales an expert that every token goes to; it chooses none.
        ("model.layers.0.mlp.shared_expert_gate.weight", False),
    ],
)
def test_router_names(name: str, router: bool) -> None:
    assert is_router(name) is router


@pytest.mark.parametrize("family", CONFIGS)
def test_routers_of_real_models_are_found_by_name(family: str) -> None:
    """Every parameter with one row per expert, and nothing else, is a router's."""
    model = build(CONFIGS[family]())
    named = {n for n, p in model.named_parameters() if is_router(n)}
    assert named == {n for n, p in model.named_parameters() if p.shape[0] == 6 and ".experts." not in n}
    assert len(named) == MOE_LAYERS.get(family, 3) * (2 if family == "gpt_oss" else 1)


@pytest.mark.parametrize("family", CONFIGS)
def test_recorded_experts_are_the_routers_choice(family: str) -> None:
    model = build(CONFIGS[family]())
    packed = PackedModel(model)  # type: ignore[arg-type]
    assert packed.num_moe_layers == len(expert_layers(model)) == MOE_LAYERS.get(family, 3)
    ids = torch.randint(1, 64, (13,))
    positions = torch.cat([torch.arange(8), torch.arange(5)])
    experts: list[torch.Tensor] = []
    with torch.no_grad():
        with_experts = packed(ids, positions, [0, 8, 13], experts)
        assert torch.equal(with_experts, packed(ids, positions, [0, 8, 13]))
    assert [list(e.shape) for e in experts] == [[13, 2]] * packed.num_moe_layers
    # The same tokens, one sequence at a time, straight from the routers.
    chosen: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith((".gate", ".router")):
            module.register_forward_hook(lambda _m, _a, out: chosen.append(out[2]))
    for part in (slice(0, 8), slice(8, 13)):
        chosen.clear()
        with torch.no_grad():
            model(input_ids=ids[None, part])
        for mine, theirs in zip(experts, chosen, strict=True):
            assert torch.equal(mine[part].sort(-1).values, theirs.sort(-1).values)


def test_nothing_is_left_on_the_model() -> None:
    """Trainers copy and pickle their models."""
    model = build(CONFIGS["qwen3_moe"]())
    layers = expert_layers(model)
    with record_experts(layers):
        assert all(layer._forward_pre_hooks for layer in layers)
    assert not any(layer._forward_pre_hooks for layer in layers)
    with pytest.raises(IndexError), record_experts(layers), torch.no_grad():
        model(input_ids=torch.tensor([[10**6]]))
    assert not any(layer._forward_pre_hooks for layer in layers)
    pickle.dumps(model)


def test_a_dense_model_has_no_experts() -> None:
    model = build(Qwen3Config(**{k: v for k, v in COMMON.items() if "experts" not in k}, intermediate_size=32))
    experts: list[torch.Tensor] = []
    with torch.no_grad():
        PackedModel(model)(torch.arange(1, 5), torch.arange(4), [0, 4], experts)  # type: ignore[arg-type]
    assert experts == []
    assert not [n for n, _ in model.named_parameters() if is_router(n)]
    assert unreached_experts(model) == ""


def test_experts_out_of_reach_are_named_and_cannot_be_replayed() -> None:
    model = build(JetMoeConfig(**JETMOE, kv_channels=16, intermediate_size=32, num_local_experts=4))
    assert expert_layers(model) == ()
    assert unreached_experts(model) == "model.layers.0.mlp.router.layer.weight"
    with pytest.raises(BadInput, match=r"no routed experts that replay could reach; set rollout.routing=record"):
        PackedModel(model).replayable()  # type: ignore[arg-type]


def test_experts_of_the_oldest_transformers_are_found_and_computed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two marks of an expert layer are younger than the oldest version that is declared."""
    model = build(CONFIGS["qwen3_moe"]())
    layer, x = expert_layers(model)[0], torch.randn(5, 32)
    chosen, weights = torch.tensor([[0, 1], [2, 3], [4, 5], [0, 5], [1, 2]]), torch.rand(5, 2)
    expected = sorted_experts_forward(layer, x, chosen, weights)
    for mark in ("_is_expert_parallel", "has_post_expert_norm"):
        for module in expert_layers(model):
            module.__dict__.pop(mark, None)
    assert len(expert_layers(model)) == 3
    assert torch.equal(sorted_experts_forward(layer, x, chosen, weights), expected)


def test_a_transformers_that_is_too_old_is_named() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (declared,) = (word for word in project["dependencies"] if word.startswith("transformers"))
    for version in (metadata.version("transformers"), re.findall(r">=([\d.]+)", declared)[0]):
        models.check_transformers(version)
    for version in ("5.15.1", "4.57.6", "6.0.0.dev0"):
        with pytest.raises(BadInput, match=re.escape(f"transformers {version} is installed, expected {declared}; pip")):
            models.check_transformers(version)
