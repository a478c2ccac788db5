"""Norms, rotary embeddings and SwiGLU of the trainer by kernels: a wrong gradient here would train every Llama-family model on a GPU
wrongly, while its log-probs look right.

Against float64 autograd at odd sizes, and whole models against transformers' own modules. Not covered: speed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rollkeel.config import Recompute
from rollkeel.models.gpu import layers
from rollkeel.models.packed import PackedModel
from tests.models.test_fused import NAMES, assert_those_of_transformers, gradients, model

NEAR = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def drawn(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()


def assert_near(
    one: Callable[..., torch.Tensor], exact: Callable[..., torch.Tensor], inputs: list[torch.Tensor], dtype: torch.dtype
) -> None:
    """Values and gradients of all inputs that have one, relative to the largest."""
    out = one(*inputs)
    assert out.dtype == dtype
    weight = torch.sin(torch.arange(out.numel(), device=out.device) * 0.7 + 1).view_as(out)
    doubles = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    wanted = exact(*doubles)
    grads = torch.autograd.grad(out, [t for t in inputs if t.requires_grad], weight.to(dtype))
    theirs = torch.autograd.grad(wanted, [t for t in doubles if t.requires_grad], weight.to(dtype).double())
    for mine, other in zip((out, *grads), (wanted, *theirs), strict=True):
        assert mine.shape == other.shape
        assert mine.isfinite().all()
        assert float((mine.double() - other).detach().abs().max() / other.detach().abs().max()) < NEAR[dtype]


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize(("rows", "width"), [(1, 17), (16, 64), (37, 96), (33, 1500)])
def test_norm(device: str, rows: int, width: int, dtype: torch.dtype) -> None:
    inputs = [drawn(rows, width, device=device, dtype=dtype), drawn(width, device=device, dtype=dtype)]
    assert_near(lambda x, w: layers.norm(x, w, 1e-6), exact_norm, inputs, dtype)


def test_a_row_of_zeros_has_a_finite_gradient(device: str) -> None:
    x = torch.zeros(2, 20, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(layers.norm(x, torch.ones(20, device=device), 1e-6).sum(), x)
    torch.testing.assert_close(dx, torch.full_like(dx, 1e3))


def exact_rotary(
    x: torch.Tensor, weight: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    if len(weight):
        x = exact_norm(x, weight)
    c, s = (t.double().repeat_interleave(heads, 0) for t in (cos, sin))
    a, b = x.chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1)


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 1, 16), (9, 4, 24), (41, 3, 128)])
def test_rotary(device: str, tokens: int, heads: int, width: int, normed: bool, dtype: torch.dtype) -> None:
    angles = (torch.arange(tokens)[:, None] * 0.37 ** torch.arange(width)).to(device)
    cos, sin = (f(angles).to(dtype)[:, : width // 2] for f in (torch.cos, torch.sin))  # rows lie `width` apart
    x = drawn(tokens * heads, width, device=device, dtype=dtype)
    weight = drawn(width, device=device, dtype=dtype) if normed else torch.empty(0, device=device, dtype=dtype)
    assert_near(
        lambda x, w: layers.rotary(x, w if normed else None, 1e-6, heads, cos, sin),
        lambda x, w: exact_rotary(x, w, heads, cos, sin),
        [x, weight],
        dtype,
    )


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2048), (7, 333)])
def test_swiglu(device: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate, up = (drawn(*shape, device=device, dtype=dtype) for _ in range(2))
    gate = (gate.detach() * 8).requires_grad_()
    assert_near(layers.swiglu, lambda g, u: torch.nn.functional.silu(g) * u, [gate, up], dtype)


def test_swiglu_at_the_ends_of_its_range(device: str) -> None:
    gate = torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0], device=device, requires_grad=True)
    out = layers.swiglu(gate, torch.ones_like(gate))
    assert out.tolist() == [0, 0, 0, 90, 200]
    (grad,) = torch.autograd.grad(out.sum(), gate)
    assert grad.tolist() == [0, 0, 0.5, 1, 1]


@pytest.mark.usually("*-tiny-qwen3-moe", "*-qwen2")
@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_and_every_gradient_are_those_of_transformers(device: str, name: str) -> None:
    assert_those_of_transformers(model(name, num_hidden_layers=2).to(device))


@pytest.mark.usually("*-selective")
@pytest.mark.parametrize("mode", ["none", "layer", "selective"])
def test_in_bfloat16_as_near_to_float32_as_transformers(device: str, mode: str) -> None:
    """With what is computed again, too. Triton's interpreter cuts digits where a card rounds, which is twice the error."""
    net = model("tiny-qwen3", num_hidden_layers=2).to(device, torch.bfloat16)
    got, theirs = (
        gradients(net, PackedModel(net, recompute=Recompute(mode))),
        gradients(net, PackedModel(net, fuse=False)),
    )
    want = gradients(net.float(), PackedModel(net, fuse=False))
    for key, value in want.items():
        mine, other = (float((each[key].float() - value).norm()) for each in (got, theirs))
        assert mine < (1.2 if device == "cuda" else 3.0) * other, key
