"""Single-pass norms, rotary embeddings and SwiGLU must be the model's own, forward and backward.

A wrong gradient here would train every Llama-family model on a CPU wrongly, while its log-probs look right. Does not cover
attention itself (see test_packed.py) nor speed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rollkeel.models import experts, fused, jit
from rollkeel.models.packed import PackedModel
from rollkeel.models.presets import build_preset

pytestmark = pytest.mark.skipif(not jit.FOUND, reason="numba or torch's BLAS is not here")
LENGTHS = [7, 3, 12]
NAMES = ("tiny-qwen3-moe", "tiny-qwen3", "llama", "qwen2")
SMALL: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def model(name: str, **overrides: Any) -> Any:
    """`overrides`: of a preset."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "llama":
            net: Any = LlamaForCausalLM(LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2))
        elif name == "qwen2":
            net = Qwen2ForCausalLM(Qwen2Config(**SMALL, num_attention_heads=2, num_key_value_heads=2))
        else:
            net = build_preset(name, 0, overrides)[0]
        for p in net.parameters():  # norms of weight 1 and biases of 0 would hide mistakes
            if p.dim() == 1:
                p.data += 0.3 * torch.randn_like(p)
    return net.eval()


def gradients(net: Any, packed: PackedModel) -> dict[str, torch.Tensor]:
    device = next(net.parameters()).device
    ids = (torch.arange(sum(LENGTHS)) * 7 % 96).to(device)
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).to(device)
    hidden = packed(ids, positions, torch.tensor([0, *LENGTHS]).cumsum(0))
    net.zero_grad()
    hidden.mul(torch.sin(torch.arange(hidden.numel(), device=device) * 0.37).view_as(hidden)).sum().backward()
    return {"hidden": hidden.detach()} | {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}


def assert_those_of_transformers(net: Any) -> None:
    """Hidden states and the gradient of every parameter."""
    packed = PackedModel(net)
    assert packed._fused
    got = gradients(net, packed)
    packed._fused = False
    want = gradients(net, packed)
    assert got.keys() == want.keys()
    for key, value in want.items():
        scale = value.abs().max().clamp_min(1e-3)
        assert ((got[key] - value).abs().max() / scale).item() < 2e-5, key


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_and_every_gradient_are_those_of_transformers(name: str) -> None:
    assert_those_of_transformers(model(name))


def test_the_model_is_given_back() -> None:
    net = model("tiny-qwen3-moe")
    packed = PackedModel(net)
    gradients(net, packed)
    assert all("forward" not in m.__dict__ for m in net.modules())


@pytest.mark.parametrize("change", ["bf16", "no numba"])
def test_other_models_get_nothing(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model("tiny-qwen3")
    if change == "bf16":
        net = net.bfloat16()
    else:
        monkeypatch.setattr(jit, "FOUND", False)
    assert not PackedModel(net)._fused


def test_swiglu_gradient_against_float64_over_its_range() -> None:
    gate = torch.linspace(-200, 200, 4001, dtype=torch.float64)
    hidden = torch.stack([gate, torch.cos(gate)], 1).requires_grad_()
    out = torch.nn.functional.silu(hidden[:, :1]) * hidden[:, 1:]
    g = torch.sin(gate)[:, None]
    out.backward(g)
    assert hidden.grad is not None
    single = fused.swiglu_backward(g.float(), hidden.detach().float())
    passes = experts._swiglu_backward(g.float(), hidden.detach().float())
    assert single is not None
    for got in (single, passes):
        assert torch.allclose(got.double(), hidden.grad, rtol=2e-6, atol=2e-6)
