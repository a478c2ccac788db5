"""A wrong optimizer step trains something, and nobody sees what: the kernel's masters against float64 and against torch.

Not covered: speed; that the compiled kernel fuses the products that torch's does, which tests/test_cuda.py compares on a card.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rollkeel.models import gpu
from rollkeel.models.gpu import adamw as kernels
from rollkeel.train.adamw import AdamW, master, put_back

SHAPES = ((33, 17), (3, 100), (7,), (1,), (0, 4), (16, 4, 4))
BETAS, DECAY = (0.9, 0.95), 0.1


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 64)


def drawn(device: str, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[torch.nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter((torch.randn(shape, generator=g) * 0.02).to(device, torch.bfloat16)) for shape in shapes]


def gradients(parameters: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=g).to(p.device) for p in parameters]


def masters_of(made: AdamW) -> list[torch.Tensor]:
    return [master(p.detach().view(-1), made.state_of(p)["rest"].view(-1)) for p in made.parameters]


def ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.view(torch.int32).long() - b.view(torch.int32).long()).abs()


def stepped(made: AdamW, times: int, lr: float, first: int = 0) -> AdamW:
    for seed in range(first, first + times):
        for p, grad in zip(made.parameters, gradients(made.parameters, seed), strict=True):
            p.grad = grad
        made.step(lr)
    return made


@pytest.mark.parametrize("lr", [1e-6, 1e-2])
def test_steps_are_those_of_float64(device: str, lr: float) -> None:
    made = AdamW(drawn(device), betas=BETAS, weight_decay=DECAY)
    exact = [[p.detach().double(), torch.zeros_like(p).double(), torch.zeros_like(p).double()] for p in made.parameters]
    beta1, beta2 = BETAS
    for t in range(1, 6):
        stepped(made, 1, lr, t)
        for held, g in zip(exact, gradients(made.parameters, t), strict=True):
            w, m, v = held
            w = w * (1 - lr * DECAY * (w.dim() > 1))
            m, v = beta1 * m + (1 - beta1) * g.double(), beta2 * v + (1 - beta2) * g.double() ** 2
            held[:] = w - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + 1e-8), m, v
    for p, values, (w, m, v) in zip(made.parameters, masters_of(made), exact, strict=True):
        state = made.state_of(p)
        assert state["step"].tolist() == 5
        torch.testing.assert_close(values.double(), w.flatten(), rtol=1e-6, atol=5e-6 * lr)
        torch.testing.assert_close(state["exp_avg"].double(), m, rtol=0, atol=1e-6)
        torch.testing.assert_close(state["exp_avg_sq"].double(), v, rtol=1e-5, atol=0)


def test_masters_are_torchs_but_for_the_last_place(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = stepped(AdamW(drawn(device), betas=BETAS, weight_decay=DECAY), 1, 1e-6)
    monkeypatch.setenv(gpu.SWITCH, "0")
    plain = stepped(AdamW(drawn(device), betas=BETAS, weight_decay=DECAY), 1, 1e-6)
    start = torch.cat([p.detach().flatten().float() for p in drawn(device)])
    a, b = torch.cat(masters_of(mine)), torch.cat(masters_of(plain))
    assert (a != start).float().mean() > 0.99
    assert ulps(a, b).max() <= 1


def test_a_rest_is_that_of_put_back(device: str) -> None:
    """Whatever the lower half of a master, ties among them; a weight is the nearest bfloat16."""
    g = torch.Generator().manual_seed(3)
    patterns = torch.randint(-(2**31), 2**31, (500,), generator=g)
    patterns[:9] = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F818001, 0, 0x00008000, 1, 0x7F7F7FFF, 0x8000])
    values = patterns.to(torch.int32).view(torch.float32)
    values = values[values.isfinite()].to(device)
    p = torch.nn.Parameter(torch.zeros(len(values), dtype=torch.bfloat16, device=device))
    made = AdamW([p], betas=BETAS, weight_decay=0.0)
    rest = made.state_of(p)["rest"]
    put_back(values, p.data, rest)
    before = p.detach().clone(), rest.clone()
    p.grad = torch.zeros(len(values), device=device)
    made.step(1e-3)
    assert torch.equal(p.detach().view(torch.int16), before[0].view(torch.int16))
    assert torch.equal(rest, before[1])
    p.grad = torch.randn(len(values), generator=g).to(device)
    made.step(1e-3)
    after = master(p.detach(), rest)
    weight, low = torch.empty_like(p.data), torch.empty_like(rest)
    put_back(after, weight, low)
    assert torch.equal(weight.view(torch.int16), p.detach().view(torch.int16))
    assert torch.equal(low, rest)
    assert not torch.equal(low, before[1])


def test_memory_that_begins_anywhere(device: str) -> None:
    """Parts of larger memory and transposed gradients; the elements beside a part stay."""
    made = AdamW(drawn(device, [(64, 10), (200,)]), betas=BETAS, weight_decay=DECAY)
    room = torch.full((842,), 3.0, dtype=torch.bfloat16, device=device)
    cut = [torch.nn.Parameter(room[1:641].view(64, 10)), torch.nn.Parameter(room[641:841])]
    for p, q in zip(cut, made.parameters, strict=True):
        p.data.copy_(q.detach())
    other = AdamW(cut, betas=BETAS, weight_decay=DECAY)
    for seed in range(2):
        for p, q, grad in zip(cut, made.parameters, gradients(cut, seed), strict=True):
            p.grad, q.grad = grad.t().contiguous().t() if grad.dim() > 1 else grad[:], grad
        made.step(1e-3)
        other.step(1e-3)
    for a, b in zip(masters_of(made), masters_of(other), strict=True):
        assert torch.equal(a, b)
    assert room[[0, -1]].tolist() == [3.0, 3.0]


def test_every_parameter_has_steps_of_its_own_and_one_launch_has_all(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()
    real = kernels.update
    monkeypatch.setattr(kernels, "update", lambda t, s, **k: calls.append(len(t)) or real(t, s, **k))
    shapes = [(5, 30), (7, 9), (130,)]
    both = AdamW(drawn(device, shapes), betas=BETAS, weight_decay=DECAY)
    apart = AdamW(drawn(device, shapes), betas=BETAS, weight_decay=DECAY)
    for seed in range(3):
        for made, chosen in ((both, range(3)), *((apart, [n]) for n in range(3))):
            for n, grad in enumerate(gradients(made.parameters, seed)):
                made.parameters[n].grad = grad if n in chosen and not (n == 1 and seed == 1) else None
            made.step(1e-3)
    assert calls[:2] == [2, 1]
    for a, b in zip(masters_of(both), masters_of(apart), strict=True):
        assert torch.equal(a, b)
    assert [float(both.state_of(p)["step"]) for p in both.parameters] == [3, 2, 3]


def test_the_block_that_runs_by_default(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    for block in (64, 1024):
        monkeypatch.setattr(kernels, "BLOCK", block)
        made.append(masters_of(stepped(AdamW(drawn(device, [(3, 1500)]), betas=BETAS, weight_decay=DECAY), 1, 1e-3))[0])
    assert torch.equal(*made)


def test_moments_of_eight_bits_and_other_dtypes_take_the_other_way(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "update", lambda *a, **b: pytest.fail("the kernel was taken"))
    stepped(AdamW(drawn(device, [(32, 32)]), betas=BETAS, weight_decay=DECAY, eight_bit=True), 1, 1e-3)
    low = [torch.nn.Parameter(torch.randn(32, 32, device=device).to(kind)) for kind in (torch.float16, torch.float32)]
    stepped(AdamW(low, betas=BETAS, weight_decay=DECAY), 1, 1e-3)
