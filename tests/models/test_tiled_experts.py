"""Experts are half of what the trainer computes on a CPU: a tile that is cut wrongly, or a pair sent to another expert, trains on silently.

Against float64 of every token alone, values and gradients; to the bit where neighbours and memory must not matter. Not covered:
processors without AVX-512 but for the slow test, and wider experts, which take a product each (test_packed.py).
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rollkeel.models import jit, tiled_experts
from rollkeel.models.experts import by_expert
from rollkeel.models.tiled_experts import TiledExperts, suits
from tests.models.narrow import passes
from tests.models.test_packed_attention import poisoned

pytestmark = pytest.mark.skipif(not jit.FOUND, reason="needs numba")
Tensors = tuple[torch.Tensor, ...]


def drawn(tokens: int, top_k: int, experts: int, size: int, width: int, idle: int = 0) -> tuple[Tensors, torch.Tensor]:
    """x, weights, gate_up, down and the gradient of what comes out; and the experts of each token, none of the first `idle`."""
    made = torch.Generator().manual_seed(tokens + size)
    shapes = (tokens, size), (tokens, top_k), (experts, 2 * width, size), (experts, size, width), (tokens, size)
    x, weights, gate_up, down, g = (torch.randn(*shape, generator=made) for shape in shapes)
    ways = [torch.randperm(experts - idle, generator=made)[:top_k] + idle for _ in range(tokens)]
    return (x, weights, gate_up / size**0.5, down / width**0.5, g), torch.stack(ways)


def expected(tensors: Tensors, chosen: torch.Tensor) -> Tensors:
    """Result and gradients in float64, one pair after the other."""
    x, weights, gate_up, down = (t.double().requires_grad_() for t in tensors[:4])
    rows = []
    for n, ways in enumerate(chosen.tolist()):
        row = torch.zeros(x.shape[1], dtype=torch.float64)
        for slot, expert in enumerate(ways):
            gate, up = (gate_up[expert] @ x[n]).chunk(2)
            row = row + weights[n, slot] * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    out = torch.stack(rows)
    return out.detach(), *torch.autograd.grad(out, (x, weights, gate_up, down), tensors[4].double())


def found(tensors: Tensors, chosen: torch.Tensor) -> Tensors:
    given = [t.clone().requires_grad_() for t in tensors[:4]]
    order, bounds = by_expert(chosen, len(given[2]))
    assert suits(given[0], *given[2:])
    out: torch.Tensor = TiledExperts.apply(*given[:2], order, bounds, *given[2:])  # type: ignore[assignment]
    return out.detach(), *torch.autograd.grad(out, given, tensors[4])


def same(ours: Tensors, theirs: Tensors) -> bool:
    return len(ours) == len(theirs) == 5 and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(("size", "width"), [(32, 32), (64, 96), (128, 64)])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "idle"), [(1, 1, 1, 0), (9, 2, 4, 1), (70, 3, 5, 2), (200, 2, 3, 0)]
)
def test_values_and_gradients(tokens: int, top_k: int, experts: int, idle: int, size: int, width: int) -> None:
    tensors, chosen = drawn(tokens, top_k, experts, size, width, idle)
    with poisoned():
        ours = found(tensors, chosen)
    for one, other in zip(ours, expected(tensors, chosen), strict=True):
        assert torch.allclose(one.double(), other, rtol=0, atol=3e-6 * float(other.abs().max()))
    assert not ours[3][:idle].any()


def test_a_token_alone_has_the_bits_that_it_has_among_others() -> None:
    tensors, chosen = drawn(150, 2, 4, 64, 32)
    together = found(tensors, chosen)
    for n in (0, 63, 64, 149):
        x, weights, gate_up, down, g = tensors
        alone = found((x[n : n + 1], weights[n : n + 1], gate_up, down, g[n : n + 1]), chosen[n : n + 1])
        for one, all_of in zip(alone[:3], together, strict=False):
            assert torch.equal(one[0], all_of[n])


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_compute_the_same(threads: int) -> None:
    tensors, chosen = drawn(150, 2, 5, 64, 32)
    one, before = found(tensors, chosen), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        many = found(tensors, chosen)
        assert same(many, found(tensors, chosen))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(one, many, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-6 * float(b.abs().max()))
    assert all(map(torch.equal, one[2:], many[2:]))  # of a pair and of an expert, which no two threads share


def test_experts_that_do_not_learn_pass_the_gradient_on() -> None:
    tensors, chosen = drawn(40, 2, 4, 64, 32)
    x, weights = (t.clone().requires_grad_() for t in tensors[:2])
    order, bounds = by_expert(chosen, 4)
    out: torch.Tensor = TiledExperts.apply(x, weights, order, bounds, *tensors[2:4])  # type: ignore[assignment]
    for got, want in zip(torch.autograd.grad(out, (x, weights), tensors[4]), found(tensors, chosen)[1:3], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("threads", [1, 3])
def test_one_after_the_other_they_have_the_same_bits(threads: int) -> None:
    """As experts with adapters compute, which add to what comes between."""
    tensors, chosen = drawn(90, 3, 5, 64, 32)
    order, bounds = by_expert(chosen, 5)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        whole = found(tensors, chosen)
        x, weights, gate_up, down, g = tensors
        given = x.index_select(0, order // 3), weights.clone().requires_grad_()
        wide = tiled_experts.grouped(given[0], bounds, gate_up).requires_grad_()
        active: torch.Tensor = tiled_experts.Gate.apply(wide)  # type: ignore[assignment]
        rows = tiled_experts.grouped(active.detach(), bounds, down).requires_grad_()
        out: torch.Tensor = tiled_experts.Combined.apply(rows, given[1], order, bounds)  # type: ignore[assignment]
        d_rows, d_weights = torch.autograd.grad(out, (rows, given[1]), g)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, whole[0])
    assert torch.allclose(d_weights, whole[2], rtol=0, atol=1e-5)
    for expert, a, b in bounds:
        down_grad = d_rows[a:b].T @ active[a:b]
        assert torch.allclose(down_grad, whole[4][expert], rtol=0, atol=1e-4 * float(down_grad.abs().max()))
        (d_wide,) = torch.autograd.grad(active, wide, d_rows @ down[expert], retain_graph=True)
        gradient = d_wide[a:b].T @ given[0][a:b]
        assert torch.allclose(gradient, whole[3][expert], rtol=0, atol=1e-4 * float(gradient.abs().max()))


def test_no_tokens() -> None:
    """As a rank has it whose experts nobody chose."""
    _, _, gate_up, down, _ = drawn(1, 1, 4, 64, 32)[0]
    x, weights = torch.empty(0, 64, requires_grad=True), torch.empty(0, 1)
    gate_up.requires_grad_()
    out: torch.Tensor = TiledExperts.apply(x, weights, torch.empty(0, dtype=torch.int64), [], gate_up, down)  # type: ignore[assignment]
    d_x, d_gate_up = torch.autograd.grad(out.sum(), (x, gate_up))
    assert out.shape == d_x.shape == (0, 64)
    assert not d_gate_up.any()


def test_gates_over_their_range() -> None:
    """Gates from −200 to 200: what is far from 0 must neither overflow nor lose its slope."""
    gate = torch.linspace(-200, 200, 801)
    x = torch.zeros(801, 32)
    x[:, 0], x[:, 1] = gate, torch.cos(gate)
    gate_up, down = torch.zeros(1, 64, 32), torch.zeros(1, 32, 32)
    gate_up[0, 0, 0] = gate_up[0, 32, 1] = down[0, 5, 0] = 1
    g = torch.zeros(801, 32)
    g[:, 5] = torch.sin(gate)
    tensors, chosen = (x, torch.ones(801, 1), gate_up, down, g), torch.zeros(801, 1, dtype=torch.int64)
    for one, other in zip(found(tensors, chosen)[:3], expected(tensors, chosen), strict=False):
        assert torch.allclose(one.double(), other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_shows_where_it_is_and_nowhere_else(value: float) -> None:
    tensors, chosen = drawn(100, 2, 4, 64, 32)
    tensors[0][20, 3] = value
    out = found(tensors, chosen)[0]
    assert not torch.isfinite(out[20]).all()
    assert torch.isfinite(out[torch.arange(100) != 20]).all()


def test_other_experts_are_left_to_torch() -> None:
    x, _, gate_up, down, _ = drawn(3, 1, 2, 64, 32)[0]
    assert suits(x, gate_up, down)
    assert not suits(x.double(), gate_up.double(), down.double())
    assert not suits(x, gate_up, down[:, :, :20])
    assert not suits(x, gate_up.transpose(1, 2).contiguous().transpose(1, 2), down)
    assert not tiled_experts.fits(1024, 512)


@pytest.mark.slow
def test_smaller_vectors_compute_the_same(tmp_path: Path) -> None:
    passes(tmp_path, "-k", "not peak_memory", __file__, Path(__file__).parents[1] / "train" / "test_logprobs.py")
