"""Between the products of a layer: a value rounded elsewhere, a key in the slot of somebody else or a wrong partner of a rotation
shows in no error, only in log-probs that are not the trainer's.

The interpreter cuts bfloat16 off instead of rounding it, so float16 stands for it there. Not covered: speed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from rollkeel.engines.decode import InCache
from rollkeel.engines.kv import PagedCache
from rollkeel.engines.prefill import prefill_step
from rollkeel.models import gpu
from rollkeel.models.forward import FastForward
from rollkeel.models.gpu.decode import add_norm, gated, rotate

EPS = 1e-6
LOW = {"cpu": torch.float16, "cuda": torch.bfloat16}
SHAPES = [(3, 1, 24), (16, 8, 128), (4, 2, 64)]
"""Heads, heads of keys, width: no power of two anywhere, what models have, and a program that ends with the queries."""


def drawn(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def apart(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many elements differ by more than the order of a float32 sum explains."""
    assert one.dtype == other.dtype
    assert other.isfinite().all()
    difference, largest = (one.float() - other.float()).abs(), float(other.abs().max())
    return int((~(difference <= 1e-6 * largest)).sum())


def check(one: torch.Tensor, other: torch.Tensor) -> None:
    """Equal, but for the last place of an element here and there where numbers are short."""
    near = max(1e-6, 2 * torch.finfo(one.dtype).eps) * float(other.abs().max())
    torch.testing.assert_close(one, other, rtol=0, atol=near)
    assert apart(one, other) <= (0 if one.dtype == torch.float32 else 2 + 0.002 * one.numel())


def check_misplaced(one: torch.Tensor, other: torch.Tensor) -> None:
    """`other` leaves a rounding out; that `check` would see."""
    assert one.dtype == torch.float32 or apart(one, other) > max(2, 0.02 * one.numel())


def normed(x: torch.Tensor, weight: torch.Tensor, between: Any) -> torch.Tensor:
    """RMS norm in float32; `between` is what becomes of it before the weight."""
    x = x.float()
    return between(x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()) * weight.float()


def rotation(device: str, dtype: torch.dtype, tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(tokens * width // 2, dtype=torch.float32).view(tokens, 1, -1).to(device)
    sin = angle.sin()
    return torch.cat((angle.cos(),) * 2, -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(("heads", "kv", "width"), SHAPES)
@pytest.mark.parametrize("with_norms", [True, False])
def test_rotation_into_a_cache(device: str, low: bool, heads: int, kv: int, width: int, with_norms: bool) -> None:
    tokens, size, dtype = 5, 4, LOW[device] if low else torch.float32
    qkv = drawn(tokens, heads + 2 * kv, width, device=device, dtype=dtype)
    norms = drawn(2, width, device=device, dtype=dtype, seed=1) if with_norms else None
    cos, sin = rotation(device, dtype, tokens, width)
    slots = torch.tensor([9, 2, 3, 22, 16], device=device)
    keys, values = (torch.full((6 * kv, size, width), float("nan"), device=device, dtype=dtype) for _ in range(2))
    query = rotate(qkv, norms, cos, sin, slots, keys, values, heads, EPS)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).float()

    def wanted(between: Any, product: Any) -> torch.Tensor:
        qk = qkv[:, : heads + kv].float()
        if norms is not None:
            parts = (normed(qk[:, :heads], norms[0], between), normed(qk[:, heads:], norms[1], between))
            qk = rounded(torch.cat(parts, 1))
        other = torch.cat((qk[..., width // 2 :], qk[..., : width // 2]), -1)
        return (product(qk * cos.float()) + other * sin.float()).to(dtype)

    right = wanted(rounded, rounded)
    lines = [(slot // size * kv + head, slot % size) for slot in slots.tolist() for head in range(kv)]
    at = tuple(torch.tensor(part, device=device) for part in zip(*lines, strict=True))
    both = torch.cat((query, keys[at].view(tokens, kv, width)), 1)
    check(both, right)
    assert torch.equal(values[at].view(tokens, kv, width), qkv[:, heads + kv :])
    for store in (keys, values):
        store[at] = float("nan")
        assert store.isnan().all()
    check_misplaced(both, wanted(rounded, lambda x: x))
    if norms is not None:
        check_misplaced(both, wanted(lambda x: x, rounded))


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("width", [1, 100, 1024, 1500])
def test_gate(device: str, low: bool, width: int) -> None:
    dtype = LOW[device] if low else torch.float32
    wide = drawn(3, 2 * width + 8, device=device, dtype=dtype)[:, : 2 * width] * 4
    gate, up = wide.float().chunk(2, -1)
    silu = gate / (1 + (-gate).exp())
    out = gated(wide)
    check(out, F.silu(wide[:, :width]) * wide[:, width:])
    check(out, (silu.to(dtype).float() * up).to(dtype))
    if width > 1:
        check_misplaced(out, (silu * up).to(dtype))


def test_a_gate_that_is_shut_is_zero(device: str) -> None:
    wide = torch.tensor([[-200.0, 200.0, 0.0, 3.0, 2.0, 5.0]], device=device)
    assert gated(wide).tolist() == [[0.0, 400.0, 0.0]]


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("width", [7, 96, 1024, 2560])
def test_sum_and_norm(device: str, low: bool, width: int) -> None:
    dtype = LOW[device] if low else torch.float32
    x, y = (drawn(4, width, device=device, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = drawn(width, device=device, dtype=dtype, seed=2)
    total, out = add_norm(x, y, weight, EPS)
    assert torch.equal(total, x + y)
    check(out, F.rms_norm(x + y, (width,), weight, EPS))
    check_misplaced(out, normed(x.float() + y.float(), weight, lambda n: n).to(dtype))
    check_misplaced(out, normed(x + y, weight, lambda n: n.to(dtype).float()).to(dtype))


def test_rows_do_not_know_of_each_other(device: str) -> None:
    wide = drawn(9, 2048, device=device, dtype=torch.float16)
    x, y = wide.chunk(2, -1)
    assert torch.equal(gated(wide)[4:5], gated(wide[4:5]))
    whole, alone = add_norm(x, y, x[0], EPS), add_norm(x[4:5], y[4:5], x[0], EPS)
    assert all(torch.equal(one[4:5], other) for one, other in zip(whole, alone, strict=True))


SMALL: dict[str, Any] = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 72}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
FAMILIES = {
    "qwen3": lambda: Qwen3Config(**SMALL),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "llama": lambda: LlamaConfig(**SMALL, attention_bias=True),
}


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_computes_with_them(device: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of two lengths, then a token each: hidden states, keys and values of the other path. Observed, it takes that path."""
    forward = FastForward(FAMILIES[family](), "fp32", torch.device(device))
    for seed, weight in enumerate(forward.destinations.values()):
        weight.copy_(drawn(*weight.shape, device=device, dtype=torch.float32, seed=seed) * 0.2)
    called, ended = list[str](), dict[str, list[torch.Tensor]]()
    for kernel in (rotate, gated, add_norm):
        name = f"rollkeel.models.gpu.decode.{kernel.__name__}"
        monkeypatch.setattr(name, lambda *a, _kernel=kernel: called.append(_kernel.__name__) or _kernel(*a))
    for way in ("1", "0", "observed"):
        monkeypatch.setenv(gpu.SWITCH, "0" if way == "0" else "1")
        forward.observe = (lambda *a: None) if way == "observed" else None
        cache, ended[way] = PagedCache(8, 4, torch.float32, device), []
        for lengths in ((0, 5), (0, 3)), ((5, 6), (3, 4)):
            jobs = [(blocks, np.arange(*part), part[0]) for blocks, part in zip(([5, 2], [7]), lengths, strict=True)]
            ids, positions, step = prefill_step(jobs, 4, 0, torch.device(device))
            ended[way].append(forward.hidden(ids, positions, InCache(cache, step, forward.scale)))
        ended[way] += cache.tensors()
        assert called == (["rotate", "gated", "add_norm"] * 4 if way == "1" else [])
        called.clear()
    for one, other, observed in zip(*ended.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(observed, other, rtol=1e-5, atol=1e-5)
