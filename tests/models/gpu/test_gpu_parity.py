"""Under `run.parity` an importance ratio is exactly 1 only if every kernel gives a row the same bits alone and among others.

Operations against float64 and against themselves on other batches; an engine and the packed trainer to the bit; gradients. In
bfloat16 the interpreter cuts where a card rounds. Not covered: whole runs (`test_cuda.py`), speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rollkeel.batch.packing import pack
from rollkeel.config import EngineConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.models import parity
from rollkeel.models.names import checkpoint_views
from rollkeel.models.presets import build_preset
from rollkeel.sync.publish import DirectPublisher
from rollkeel.train.logprobs import PolicyForward
from rollkeel.types import Request, SamplingParams

DTYPES = (torch.float32, torch.bfloat16)
Operation = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def one_order(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by a BLAS, whose order depends on the rows of a tile. A card's does not."""
    if device != "cpu":
        return
    from triton.runtime import interpreter

    def dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None] * b.data[k]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def drawn(*shape: int, like: torch.Tensor | None = None, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(device) if like is None else made.to(like.device, like.dtype)


def routed(x: torch.Tensor) -> torch.Tensor:
    _, taken, weights = parity.routing(x.float(), 3, True, None)
    return torch.cat((taken.float(), weights), -1)


def mixture(x: torch.Tensor) -> torch.Tensor:
    up, down = drawn(5, 14, 37, like=x, seed=1), drawn(5, 37, 7, like=x, seed=2)
    _, taken, weights = parity.routing(x[:, :5].float(), 2, False, None)
    return parity.experts(x, taken, weights, up, down)


OPERATIONS: dict[str, Operation] = {
    "norm": lambda x: parity.rms_norm(x, drawn(37, like=x, seed=1), 1e-6),
    "linear": lambda x: parity.linear(x, drawn(71, 37, like=x, seed=1), drawn(71, like=x, seed=2)),
    "swiglu": lambda x: parity.swiglu(x[:, :36].contiguous()),
    "routing": routed,
    "experts": mixture,
    "logprobs": lambda x: parity.logprobs(x.float(), torch.arange(37, device=x.device).expand(len(x), -1)),
}
EXACT: dict[str, Operation] = {
    "norm": lambda x: F.rms_norm(x, (37,), drawn(37, like=x, seed=1), 1e-6),
    "linear": lambda x: F.linear(x, drawn(71, 37, like=x, seed=1), drawn(71, like=x, seed=2)),
    "swiglu": lambda x: F.silu(x[:, :18]) * x[:, 18:36],
    "logprobs": lambda x: x.log_softmax(-1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
@torch.no_grad()
def test_a_row_alone_is_the_row_in_a_batch(device: str, name: str, dtype: torch.dtype) -> None:
    x = drawn(70, 37, device=device).to(dtype)
    x[7] = x[3]  # a tie between rows changes nothing for either
    whole = OPERATIONS[name](x)
    for rows in (slice(0, 1), slice(69, 70), slice(5, 8), slice(11, 68)):
        assert torch.equal(OPERATIONS[name](x[rows].clone()), whole[rows])
    if name in EXACT:
        near: Any = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.06}
        torch.testing.assert_close(whole.float(), EXACT[name](x.float()), **near)


@torch.no_grad()
def test_products_of_experts_are_right(device: str) -> None:
    x, weight = drawn(150, 300, device=device), drawn(3, 65, 300, device=device, seed=1)
    starts = (0, 20, 20, 150)
    right = torch.cat([x[a:b].double() @ w.double().t() for a, b, w in zip(starts, starts[1:], weight, strict=False)])
    found = parity.matmul(x, weight, starts)
    assert float((found - right).abs().max()) < 1e-4
    assert torch.equal(parity.matmul(x[30:31], weight[2:], (0, 1))[0], found[30])


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_attention_is_one_function_of_a_sequence(device: str, dtype: torch.dtype) -> None:
    """Packed, in pages, and a few queries at a time; longer than one step of the kernel."""
    length, heads, kv_heads, width, size = 70, 4, 2, 10, 16
    q, k, v = (drawn(length, n, width, device=device, seed=i).to(dtype) for i, n in enumerate((heads, kv_heads, kv_heads)))  # fmt: skip
    seen, one = np.arange(1, length + 1), np.zeros(length, np.int64)
    keys, values = (t.flatten(0, 1)[:, None] for t in (k, v))
    packed = parity.attention(q, keys, values, (np.arange(length)[None], one, seen), kv_heads, 0.3)
    pages = np.array([[4, 0, 2, 5, 6]])
    held = [torch.full((7 * kv_heads, size, width), 7.0, device=device) for _ in range(2)]
    for store, new in zip(held, (k, v), strict=True):
        for t in range(length):
            for h in range(kv_heads):
                store[pages[0, t // size] * kv_heads + h, t % size] = new[t, h].float()
    for a, b in ((0, length), (69, 70), (60, 68)):
        where = (pages, one[a:b], seen[a:b])
        assert torch.equal(parity.attention(q[a:b], held[0], held[1], where, kv_heads, 0.3), packed[a:b])
    query, key, value = (t.double().transpose(0, 1)[None] for t in (q, k, v))
    right = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)[0]
    assert float((packed.double() - right.transpose(0, 1).flatten(1)).abs().max()) < (1e-6 if dtype == torch.float32 else 3e-2)  # fmt: skip


def test_ties_go_to_the_lower_expert(device: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0] * 5], device=device)
    chosen, _, weights = parity.routing(logits, 2, True, None)
    assert chosen.tolist() == [[1, 2], [0, 1]]
    assert torch.equal(weights, torch.full_like(weights, 0.5))
    _, _, replayed = parity.routing(logits, 2, False, lambda ids: ids * 0 + torch.tensor([4, 1], device=device))
    torch.testing.assert_close(replayed, logits.softmax(-1)[:, [4, 1]])


def test_what_is_not_finite_shows(device: str) -> None:
    z = drawn(3, 9, device=device)
    z[1, 4], z[2, 0] = torch.nan, torch.inf
    found = parity.logprobs(z, torch.zeros(3, 1, dtype=torch.int64, device=device))[:, 0]
    assert found.isfinite().tolist() == [True, False, False]


def scored(model: Any, sequences: list[np.ndarray], prompts: list[int], **options: Any) -> Any:
    starts = np.cumsum([0, *(len(s) - p for s, p in zip(sequences, prompts, strict=True))])[:-1].tolist()
    micro = pack(range(len(sequences)), sequences, prompts, starts, next(model.parameters()).device)
    return PolicyForward(model, **options).score(micro)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("preset", ["tiny-qwen3-tied", "tiny-qwen3-moe"])
def test_engine_and_trainer_have_the_same_bits(device: str, preset: str, dtype: torch.dtype) -> None:
    about = {"initializer_range": 0.2, "hidden_size": 32, "num_hidden_layers": 2}
    model: Any = build_preset(preset, 1, about)[0].eval()
    model.to(device, dtype)
    config = EngineConfig(slots=4, forward="parity", dtype="fp32" if dtype == torch.float32 else "bf16")
    engine = LocalEngine(model.config, config, device=device, max_length=64)
    DirectPublisher([engine]).publish(checkpoint_views(model).items(), 0)
    rng = np.random.default_rng(0)
    asked = [Request(id=i, prompt_ids=rng.integers(8, 264, 4 + 5 * i), sampling=SamplingParams(max_new_tokens=7, seed=i)) for i in range(6)]  # fmt: skip
    engine.submit(asked)
    spans = dict[int, Any]()
    while engine.busy:
        spans |= {segment.request_id: segment.span for segment in engine.poll(60)}
    sequences = [np.concatenate([r.prompt_ids, spans[r.id].token_ids]) for r in asked]
    prompts = [len(r.prompt_ids) for r in asked]
    with torch.no_grad():
        said = scored(model, sequences, prompts, parity=True).logprobs.cpu().numpy()
    assert np.array_equal(said, np.concatenate([spans[r.id].logprobs for r in asked]))
    assert len(np.unique(said)) > 20


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-qwen3-moe"])
def test_gradients_are_those_of_the_ordinary_path(device: str, preset: str) -> None:
    model: Any = build_preset(preset, 1, {"hidden_size": 32, "num_hidden_layers": 2})[0].eval().to(device)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(8, 264, n) for n in (20, 31, 9, 14)]
    got = []
    for options in ({}, {"parity": True}, {"parity": True, "checkpointing": "layer"}):
        model.zero_grad()
        scores = scored(model, sequences, [3] * 4, **options)
        weight = torch.linspace(-1, 1, len(scores.logprobs), device=device)
        ((scores.logprobs * weight).sum() + scores.entropy.mean()).backward()
        got.append({n: p.grad.clone() for n, p in model.named_parameters()} | {"": scores.logprobs.detach()})
    for name, value in got[0].items():
        assert (got[1][name] - value).norm() < 2e-5 * value.norm(), name
        assert torch.equal(got[2][name], got[1][name]) or device == "cuda"
