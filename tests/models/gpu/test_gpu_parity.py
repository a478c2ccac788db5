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
from rollkeel.config import EngineConfig, Recompute
from rollkeel.engines.local import LocalEngine
from rollkeel.models.names import checkpoint_views
from rollkeel.models.presets import build_preset
from rollkeel.sync.publish import DirectPublisher
from rollkeel.train.logprobs import PolicyForward
from rollkeel.types import Request, SamplingParams
from tests.models.test_parity import (
    DTYPES,
    OPERATIONS,
    assert_alone_as_in_a_batch,
    assert_one_function_of_a_sequence,
    assert_products_are_right,
    assert_ties_go_to_the_lower_expert,
    assert_what_is_not_finite_shows,
    drawn,
    like,
)


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


EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norm": lambda x: F.rms_norm(x, (37,), like(x, 37), 1e-6),
    "linear": lambda x: F.linear(x, like(x, 71, 37), like(x, 71, seed=2)),
    "swiglu": lambda x: F.silu(x[:, :18]) * x[:, 18:36],
    "logprobs": lambda x: x.log_softmax(-1),
}


@pytest.mark.usually(
    "*-norm-dtype0", "*-linear-dtype1", "*-swiglu-dtype1", "*-routing-dtype0", "*-experts-dtype1", "*-logprobs-dtype0"
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_alone_is_the_row_in_a_batch(device: str, name: str, dtype: torch.dtype) -> None:
    x = drawn(70, 37, dtype=dtype, device=device)
    whole = assert_alone_as_in_a_batch(name, x, (slice(0, 1), slice(69, 70), slice(5, 8), slice(11, 68)))
    if name in EXACT:
        near: Any = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.06}
        torch.testing.assert_close(whole.float(), EXACT[name](x.float()), **near)


def test_products_of_experts_are_right(device: str) -> None:
    x, weight = drawn(150, 300, device=device), drawn(3, 65, 300, device=device, seed=1)
    assert_products_are_right(x, weight, (0, 20, 20, 150))


@pytest.mark.usually("*-dtype1-0.03")
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
def test_attention_is_one_function_of_a_sequence(device: str, dtype: torch.dtype, near: float) -> None:
    """Longer than one step of the kernel."""
    assert_one_function_of_a_sequence(70, (4, 0, 2, 5, 6), dtype, near, device)


def test_ties_go_to_the_lower_expert(device: str) -> None:
    assert_ties_go_to_the_lower_expert(device)


def test_what_is_not_finite_shows(device: str) -> None:
    assert_what_is_not_finite_shows(device)


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
    model: Any = build_preset(preset, 1, {"hidden_size": 32, "num_hidden_layers": 2})[0].eval()
    model.to(device)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(8, 264, n) for n in (20, 31, 9, 14)]
    got = []
    for options in ({}, {"parity": True}, {"parity": True, "recompute": Recompute("layer")}):
        model.zero_grad()
        scores = scored(model, sequences, [3] * 4, **options)
        weight = torch.linspace(-1, 1, len(scores.logprobs), device=device)
        ((scores.logprobs * weight).sum() + scores.entropy.mean()).backward()
        got.append({n: p.grad.clone() for n, p in model.named_parameters()} | {"": scores.logprobs.detach()})
    for name, value in got[0].items():
        assert (got[1][name] - value).norm() < 2e-5 * value.norm(), name
        assert torch.equal(got[2][name], got[1][name]) or device == "cuda"
