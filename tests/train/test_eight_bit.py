"""Moments of one byte must move as those of four do: a second moment that cannot decay, or becomes 0, ruins a run without any error.

Hand-computed codes, long runs of one parameter, whole optimizers beside float32 ones, and resumption. Not covered: CUDA's random
numbers, which are others; whether a large model learns as well.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from test_trainer import make_batch, policy, update, weights

from rollkeel.config import TrainConfig
from rollkeel.train.eight_bit import BLOCK, pack, unpack
from rollkeel.train.optimizer import Schedule, Stepper
from rollkeel.train.state import load_state, save_state
from rollkeel.train.trainer import LocalTrainer


def stored(values: torch.Tensor, kind: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = torch.zeros(len(values), dtype=kind), torch.zeros(-(-len(values) // BLOCK))
    pack(values, codes, scales, seed)
    return codes, scales


def test_codes() -> None:
    values = torch.tensor([2.0, -2.0, 1.0, -1.0, 0.5, 0.0])
    codes, scales = stored(values, torch.int8)
    assert scales.tolist() == [2.0]
    assert codes.tolist() == [127, -127, 119, -119, 111, 0]
    codes, scales = stored(values.abs(), torch.uint8)
    assert codes.tolist() == [255, 255, 247, 247, 239, 0]
    torch.testing.assert_close(unpack(codes, scales), values.abs())


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8])
def test_values_are_right_on_average(kind: torch.dtype) -> None:
    values = torch.tensor([1.0, 0.3, 0.01, 1e-4, 0.0])
    drawn = torch.stack([unpack(*stored(values, kind, seed)) for seed in range(4000)])
    assert (drawn[:, 0] == 1).all()
    assert (drawn[:, 4] == 0).all()
    assert len(drawn[:, 1].unique()) == 2
    torch.testing.assert_close(drawn.mean(0), values, rtol=0.005, atol=0)


def test_tiny_first_moments_may_be_0_and_second_ones_never() -> None:
    values = torch.tensor([1.0, 1e-30])
    assert unpack(*stored(values, torch.int8))[1] == 0
    assert unpack(*stored(values, torch.uint8))[1] > 0


def test_blocks_have_their_own_scales_and_the_last_may_be_short() -> None:
    values = torch.cat([torch.full((BLOCK,), 1e-6), torch.full((3,), 1e3)])
    for kind in (torch.int8, torch.uint8):
        codes, scales = stored(values, kind)
        torch.testing.assert_close(unpack(codes, scales), values)
    codes, scales = stored(torch.zeros(5), torch.uint8)
    assert unpack(codes, scales).tolist() == [0.0] * 5


@pytest.mark.parametrize("steps", [700, 2000])
def test_second_moments_decay_as_they_should(steps: int) -> None:
    """One large value keeps the scale; rounded to the nearest, the others would stand still."""
    values = torch.full((BLOCK,), 0.2)
    values[0] = 1.0
    codes, scales = stored(values, torch.uint8)
    for step in range(steps):
        values = unpack(codes, scales) * 0.999
        values[0] = 1.0
        pack(values, codes, scales, step)
    expected = 0.2 * 0.999**steps
    assert unpack(codes, scales)[1:].mean().item() == pytest.approx(expected, rel=0.1)


def steppers(dtype: torch.dtype) -> list[tuple[Stepper, torch.nn.Parameter]]:
    out = []
    for eight in (False, True):
        p = torch.nn.Parameter((torch.randn(60, 40, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype))
        schedule = Schedule(lr=1e-4, warmup_steps=0, kind="constant", total=300)
        out.append((Stepper([("w", p)], schedule, eight_bit=eight, clip_norm=1e9), p))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_nearly_those_of_float32(dtype: torch.dtype) -> None:
    """Gradients of sizes that span four decades inside a block."""
    (full, p), (small, q) = steppers(dtype)
    begun = p.detach().float().clone()
    g = torch.Generator().manual_seed(1)
    size = 10 ** (-4 * torch.rand(p.shape, generator=g))
    mean = torch.randn(p.shape, generator=g) * size
    for _ in range(300):
        grad = mean + size * torch.randn(p.shape, generator=g)
        for stepper, weight in ((full, p), (small, q)):
            weight.grad = grad.clone()
            stepper.step()
    way, ours = p.detach().float() - begun, q.detach().float() - begun
    assert torch.nn.functional.cosine_similarity(way.flatten(), ours.flatten(), dim=0) > 0.97
    assert ours.norm().item() == pytest.approx(way.norm().item(), rel=0.1)
    assert ours.abs().max() < 1.5 * way.abs().max()


def made(moments: str) -> LocalTrainer:
    config = TrainConfig.model_validate({"moments": moments, "lr": 1e-3, "warmup_steps": 0, "kl_coefficient": 0.0})
    return LocalTrainer(policy(), config, temperature=1.0, total_updates=9)


def held(trainer: LocalTrainer) -> float:
    """Bytes of moments per parameter."""
    state = trainer._stepper.state_dict()["moments"].values()
    sizes = sum(t.numel() * t.element_size() for s in state for k, t in s.items() if k != "step")
    return sizes / sum(p.numel() for p in trainer.model.parameters())


def test_bytes() -> None:
    for moments, expected in (("float32", 8.0), ("int8", 2 + 8 / BLOCK)):
        trainer = made(moments)
        update(trainer, make_batch(4))
        assert held(trainer) == pytest.approx(expected, rel=0.01)


def test_a_run_that_is_resumed_is_the_same_run(tmp_path: Path) -> None:
    whole, first = made("int8"), made("int8")
    batch = make_batch(4)
    for trainer in (whole, first):
        update(trainer, batch)
    save_state(tmp_path / "state", first.state_dict())
    second = made("int8")
    second.load_state_dict(load_state(tmp_path / "state"))
    for trainer in (whole, second):
        update(trainer, batch)
    assert all(map(torch.equal, weights(whole).values(), weights(second).values()))


@pytest.mark.parametrize(("before", "after"), [("float32", "int8"), ("int8", "float32")])
def test_a_run_goes_on_with_other_moments(before: str, after: str, tmp_path: Path) -> None:
    first, second = made(before), made(after)
    batch = make_batch(4)
    for _ in range(3):
        update(first, batch)
    save_state(tmp_path / "state", first.state_dict())
    second.load_state_dict(load_state(tmp_path / "state"))
    for trainer in (first, second):
        update(trainer, batch)
    one, other = (torch.cat([w.flatten() for w in weights(t).values()]) for t in (first, second))
    assert not math.isclose(held(first), held(second))
    assert (one - other).abs().max() < 2e-3  # an update is 1e-3
    assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.999
