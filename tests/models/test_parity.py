"""An importance ratio is exactly 1 only if every operation gives a row the same bits alone and among others.

Operations against float64 and against themselves on other batches, gradients against those of the ordinary path. Not covered:
CUDA (`gpu/test_gpu_parity.py`); whole engines and runs (`engines/test_engine_parity.py`, `test_parity_runs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rollkeel.batch.packing import pack
from rollkeel.config import Recompute
from rollkeel.models import parity
from rollkeel.models.presets import PRESETS, build_preset
from rollkeel.train.logprobs import PolicyForward

DTYPES = (torch.float32, torch.bfloat16)
Operation = Callable[[torch.Tensor], torch.Tensor]


def drawn(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: torch.device | str = "cpu"
) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def routed(x: torch.Tensor) -> torch.Tensor:
    _, taken, weights = parity.routing(x.float(), 3, True, None)
    return torch.cat((taken.float(), weights), -1)


def like(x: torch.Tensor, *shape: int, seed: int = 1) -> torch.Tensor:
    return drawn(*shape, dtype=x.dtype, seed=seed, device=x.device)


def mixture(x: torch.Tensor) -> torch.Tensor:
    _, taken, weights = parity.routing(x[:, :5].float(), 2, False, None)
    return parity.experts(x, taken, weights, like(x, 5, 14, 37), like(x, 5, 37, 7, seed=2))


OPERATIONS: dict[str, Operation] = {
    "norm": lambda x: parity.rms_norm(x, like(x, 37), 1e-6),
    "linear": lambda x: parity.linear(x, like(x, 71, 37), like(x, 71, seed=2)),
    "swiglu": lambda x: parity.swiglu(x[:, :36].contiguous()),
    "routing": routed,
    "experts": mixture,
    "logprobs": lambda x: parity.logprobs(x.float(), torch.arange(37, device=x.device).expand(len(x), -1)),
}


@torch.no_grad()
def assert_alone_as_in_a_batch(name: str, x: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    """Rows of `x [N, 37]`, N > 7; what the operation makes of all."""
    x[7] = x[3]  # a tie between rows changes nothing for either
    whole = OPERATIONS[name](x)
    for rows in slices:
        assert torch.equal(OPERATIONS[name](x[rows].clone()), whole[rows])
    return whole


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_alone_is_the_row_in_a_batch(name: str, dtype: torch.dtype) -> None:
    slices = slice(0, 1), slice(52, 53), slice(5, 8), slice(11, 40)
    assert_alone_as_in_a_batch(name, drawn(53, 37, dtype=dtype), slices)


@torch.no_grad()
def assert_products_are_right(x: torch.Tensor, weight: torch.Tensor, starts: tuple[int, ...]) -> None:
    """Row 30 is one of the last expert."""
    right = torch.cat([x[a:b].double() @ w.double().t() for a, b, w in zip(starts, starts[1:], weight, strict=False)])
    found = parity.matmul(x, weight, starts)
    assert float((found - right).abs().max()) < 1e-4
    assert torch.equal(parity.matmul(x[30:31], weight[2:], (0, 1))[0], found[30])


def test_products_are_right_and_longer_than_a_tile() -> None:
    assert_products_are_right(drawn(70, 300), drawn(3, 65, 300, seed=1), (0, 20, 20, 70))


@torch.no_grad()
def assert_one_function_of_a_sequence(
    length: int, pages: Sequence[int], dtype: torch.dtype, near: float, device: str = "cpu"
) -> None:
    """Packed, in pages of 16 tokens, a few queries at a time, and beside another sequence."""
    heads, kv_heads, width, size = 4, 2, 10, 16
    q, k, v = (drawn(length, n, width, dtype=dtype, seed=i, device=device) for i, n in enumerate((heads, kv_heads, kv_heads)))  # fmt: skip
    seen, one = np.arange(1, length + 1), np.zeros(length, np.int64)
    keys, values = (t.flatten(0, 1)[:, None] for t in (k, v))
    packed = parity.attention(q, keys, values, (np.arange(length)[None], one, seen), kv_heads, 0.3)
    held = [torch.full(((max(pages) + 1) * kv_heads, size, width), 7.0, device=device) for _ in range(2)]
    for store, new in zip(held, (k, v), strict=True):
        for t in range(length):
            for h in range(kv_heads):
                store[pages[t // size] * kv_heads + h, t % size] = new[t, h].float()
    for a, b in ((0, length), (length - 1, length), (5, 21)):
        where = (np.array([pages]), one[a:b], seen[a:b])
        assert torch.equal(parity.attention(q[a:b], held[0], held[1], where, kv_heads, 0.3), packed[a:b])
    many = np.stack([np.arange(length), np.arange(length)[::-1]])
    beside = parity.attention(q, keys, values, (many, one, seen), kv_heads, 0.3)
    assert torch.equal(beside, packed)
    query, key, value = (t.double().transpose(0, 1)[None] for t in (q, k, v))
    right = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)[0]
    assert float((packed.double() - right.transpose(0, 1).flatten(1)).abs().max()) < near


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_attention_is_one_function_of_a_sequence(dtype: torch.dtype, near: float) -> None:
    assert_one_function_of_a_sequence(37, (4, 0, 2), dtype, near)


def assert_ties_go_to_the_lower_expert(device: str = "cpu") -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0] * 5], device=device)
    chosen, _, weights = parity.routing(logits, 2, True, None)
    assert chosen.tolist() == [[1, 2], [0, 1]]
    assert torch.equal(weights, torch.full_like(weights, 0.5))
    _, _, replayed = parity.routing(logits, 2, False, lambda ids: ids * 0 + torch.tensor([4, 1], device=device))
    torch.testing.assert_close(replayed, logits.softmax(-1)[:, [4, 1]])


def test_ties_go_to_the_lower_expert() -> None:
    assert_ties_go_to_the_lower_expert()


def assert_what_is_not_finite_shows(device: str = "cpu") -> None:
    z = drawn(3, 9, device=device)
    z[1, 4], z[2, 0] = torch.nan, torch.inf
    found = parity.logprobs(z, torch.zeros(3, 1, dtype=torch.int64, device=device))[:, 0]
    assert found.isfinite().tolist() == [True, False, False]


def test_what_is_not_finite_shows() -> None:
    assert_what_is_not_finite_shows()


def passed(model: Any, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of packed sequences and gradients of a sum over them and their entropies."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(8, 264, n) for n in (20, 31, 9, 14)]
    starts = np.cumsum([0, *(len(s) - 3 for s in sequences)])[:-1].tolist()
    micro = pack(range(4), sequences, [3] * 4, starts, torch.device("cpu"))
    model.zero_grad()
    scores = PolicyForward(model, **options).score(micro, temperature=0.7)
    weight = torch.linspace(-1, 1, len(scores.logprobs))
    ((scores.logprobs * weight).sum() + scores.entropy.mean()).backward()
    return scores.logprobs.detach(), {n: p.grad.float().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_are_those_of_the_ordinary_path(preset: str) -> None:
    model = build_preset(preset, 1)[0].eval()
    (ordinary, expected), (logprobs, got) = passed(model), passed(model, parity=True)
    assert torch.allclose(ordinary, logprobs, atol=1e-5)
    assert {n for n, g in got.items() if (g - expected[n]).norm() > 1e-5 * expected[n].norm()} == set()
    for layers in (1, None):
        again, recomputed = passed(model, parity=True, recompute=Recompute("layer", layers))
        assert torch.equal(again, logprobs)
        assert all(torch.equal(recomputed[n], g) for n, g in got.items())


def test_gradients_in_bfloat16() -> None:
    model: Any = build_preset("tiny-qwen3", 1)[0].eval()
    model.to(torch.bfloat16)
    expected, got = passed(model)[1], passed(model, parity=True)[1]
    assert {n for n, g in got.items() if (g - expected[n]).norm() > 0.05 * expected[n].norm()} == set()
