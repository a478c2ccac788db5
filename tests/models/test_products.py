"""Products by oneDNN are the products: a wrong block or a forgotten rest would train something else without an error.

Everything is checked with oneDNN forced on and forced off, whatever this processor is. Not covered: that oneDNN is faster here, which
`benchmarks.peer` shows.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkeel.models import products
from rollkeel.models.packed import PackedModel
from rollkeel.models.presets import build_preset
from rollkeel.models.products import LEAST, ROWS, add_mm, linear_of, mm, quick
from rollkeel.train.logprobs import token_logprobs

BOTH = pytest.mark.parametrize("faster", [True, False], ids=["onednn", "blas"])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what went to oneDNN, which is forced on for products of every size."""
    seen: list[tuple[int, ...]] = []
    own = products._linear

    def counted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append((*x.shape, len(weight)))
        return own(x, weight)

    monkeypatch.setattr(products, "FASTER", True)
    monkeypatch.setattr(products, "LEAST", 1)
    monkeypatch.setattr(products, "_linear", counted)
    return seen


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product(a: torch.Tensor, b: torch.Tensor, _: torch.Tensor | None = None) -> torch.Tensor:
    total = torch.zeros(a.shape[1], b.shape[1])
    add_mm(total, a, b)
    return total


def close(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    exact = a.double() @ b.double()
    bound = 1e-6 * (a.double().abs() @ b.double().abs()) + 1e-12  # rounding grows with the terms, not with their sum
    assert got.dtype == torch.float32
    assert got.shape == exact.shape
    assert bool(((got.double() - exact).abs() <= bound).all())


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.integers(1, 4 * ROWS + 3),
    width=st.integers(2, 70),
    other=st.integers(2, 70),
    across=st.booleans(),
    turned=st.booleans(),
    given_out=st.booleans(),
)
def test_every_arrangement_is_the_product(
    tokens: int, width: int, other: int, across: bool, turned: bool, given_out: bool
) -> None:
    left = drawn(tokens, width)
    a = left.t() if across else left
    inner = a.shape[1]
    b = drawn(other, inner, seed=1).t() if turned else drawn(inner, other, seed=1)
    out = torch.full((a.shape[0], other), float("nan")) if given_out else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "FASTER", True)
        patch.setattr(products, "LEAST", 1)
        got = product(left, b, out) if across else mm(a, b, out)
        assert out is None or across or got is out
        close(got, a, b)
        assert torch.equal(got, product(left, b) if across else mm(a, b))


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(1, 3 * ROWS + 3), width=st.integers(2, 70), other=st.integers(2, 70))
def test_a_product_is_added_to_what_is_there(tokens: int, width: int, other: int) -> None:
    a, b, total = drawn(tokens, width), drawn(tokens, other, seed=1), drawn(width, other, seed=2)
    before = total.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "FASTER", True)
        patch.setattr(products, "LEAST", 1)
        add_mm(total, a, b)
    close(total, torch.cat([a.t(), torch.eye(width)], 1), torch.cat([b, before]))


def test_the_head_holds_no_second_gradient_of_its_weight(calls: list[tuple[int, ...]]) -> None:
    """150,000 rows of 4,096 are 2.5 GB; a chunk's logits are promised to be the largest thing there is."""
    for width, from_onednn in ((ROWS, 1), (2 * ROWS, 0)):
        hidden, weight = drawn(ROWS, width), drawn(40, width).requires_grad_()
        logprobs, _, _ = token_logprobs(hidden, weight, torch.arange(ROWS) % 40)
        calls.clear()
        logprobs.sum().backward()
        assert len(calls) == from_onednn


def test_only_whole_blocks_of_tokens_go_to_onednn(calls: list[tuple[int, ...]]) -> None:
    mm(drawn(2 * ROWS + 5, 16), drawn(16, 8))
    product(drawn(3 * ROWS + 1, 16), drawn(3 * ROWS + 1, 8))
    mm(drawn(ROWS - 1, 16), drawn(16, 8))
    assert calls == [(2 * ROWS, 16, 8), (8, 3 * ROWS, 16)]  # of the second, the smaller factor first


def test_small_products_and_other_dtypes_stay_with_blas(
    calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mm(drawn(ROWS, 16).double(), drawn(16, 8).double())
    mm(drawn(ROWS, 16).bfloat16(), drawn(16, 8).bfloat16())
    monkeypatch.setattr(products, "LEAST", LEAST)
    mm(drawn(ROWS, 128), drawn(128, 128))
    assert not calls
    mm(drawn(2 * ROWS, 128), drawn(128, 128))
    assert len(calls) == 1


@BOTH
def test_a_layer_and_its_gradients_are_the_stock_ones(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "FASTER", faster)
    monkeypatch.setattr(products, "LEAST", 1)
    layer = torch.nn.Linear(24, 40, bias=False)
    x = drawn(2, ROWS + 9, 24).requires_grad_()
    weights = drawn(2, ROWS + 9, 40, seed=2)
    own, stock = (
        (out, *torch.autograd.grad((out * weights).sum(), [x, layer.weight])) for out in (linear_of(layer)(x), layer(x))
    )
    for got, want in zip(own, stock, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_frozen_weight_gets_no_gradient() -> None:
    layer = torch.nn.Linear(24, 40, bias=False).requires_grad_(False)
    x = drawn(ROWS, 24).requires_grad_()
    linear_of(layer)(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand_as(x))


def test_layers_that_somebody_changed_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "FASTER", True)
    plain, biased, own = (torch.nn.Linear(64, 64, bias=bias) for bias in (False, True, False))
    own.forward = lambda x: F.linear(x, own.weight)  # type: ignore[method-assign]
    assert quick(plain)
    assert not quick(biased)
    assert not quick(own)
    assert not quick(torch.nn.Linear(4, 4, bias=False))
    monkeypatch.setattr(products, "FASTER", False)
    assert not quick(plain)


@pytest.mark.parametrize("preset", ["tiny-qwen3-moe", "tiny-qwen3"])
def test_a_model_trains_the_same_with_both(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs and all gradients of a packed pass."""
    monkeypatch.setattr(products, "LEAST", 1)
    results = []
    for faster in (False, True):
        monkeypatch.setattr(products, "FASTER", faster)
        model = build_preset(preset)[0].eval()
        ids = torch.randint(0, 40, (150,), generator=torch.Generator().manual_seed(5))
        positions = torch.cat([torch.arange(70), torch.arange(80)])
        hidden = PackedModel(model)(ids, positions, [0, 70, 150])
        logprobs, entropy, _ = token_logprobs(hidden[:-1], model.lm_head.weight, ids[1:])
        assert entropy is not None
        (logprobs.mean() + 0.1 * entropy.mean()).backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((logprobs.detach(), grads))
    (want, expected), (got, grads) = results
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert expected.keys() == grads.keys()
    for name, grad in grads.items():
        assert float((grad - expected[name]).norm() / expected[name].norm().clamp_min(1e-12)) < 1e-5, name
