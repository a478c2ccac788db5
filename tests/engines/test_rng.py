"""A request must draw the same numbers whatever runs beside it, or no rollout could be repeated, resumed or moved.

Golden values, uniformity, and independence of neighbours. Not covered: statistical test batteries.
"""

from __future__ import annotations

import torch

from rollkeel.engines.rng import request_keys, uniforms

MASK = 2**64 - 1
GOLDEN = [0.5225540511444501, 0.2864190728595838, 0.9392669682704436, 0.13143070512329402]


def splitmix(x: int) -> int:
    """SplitMix64's finaliser on Python integers, written from its definition (Steele, Lea, Flood 2014)."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def scalar(seed: int, rollout: int, position: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = splitmix(splitmix(seed + golden) ^ ((rollout * 0xD1342543DE82EF95 + 1) & MASK))
    return (splitmix(key + (position + 1) * golden) >> 11) * 2.0**-53


def table(seeds: list[int], ids: list[int], positions: list[int]) -> torch.Tensor:
    return uniforms(request_keys(torch.tensor(seeds), torch.tensor(ids)), torch.tensor(positions))


def test_tensor_arithmetic_is_the_unsigned_arithmetic_it_stands_for() -> None:
    seeds = [0, 1, 7, 2**40, 2**62, 3]
    ids = [0, 0, 12345, 2**33, 5, 2**45]
    positions = [0, 1, 63, 4095, 2**20, 2]
    assert table(seeds, ids, positions).tolist() == [scalar(*x) for x in zip(seeds, ids, positions, strict=True)]


def test_golden_values() -> None:
    """A changed generator makes every recorded run unrepeatable; this must then be changed on purpose."""
    found = table([0, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0]).tolist()
    assert found == GOLDEN


def test_draws_do_not_depend_on_the_batch() -> None:
    whole = table([5] * 64, list(range(64)), [9] * 64)
    for i in (0, 17, 63):
        assert table([5], [i], [9]).item() == whole[i].item()


def test_uniform_in_every_direction() -> None:
    """Along ids, positions and seeds: mean, variance, 64-bin chi-square and lag-1 correlation of 50,000 numbers."""
    n = 50_000
    line, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    keys = {"ids": (zero, line, zero), "positions": (zero, zero, line), "seeds": (line, zero, zero)}
    for name, (seeds, ids, positions) in keys.items():
        u = uniforms(request_keys(seeds, ids), positions)
        assert u.dtype == torch.float64
        assert u.min() >= 0
        assert u.max() < 1
        assert abs(u.mean().item() - 0.5) < 5 * (1 / 12 / n) ** 0.5, name
        assert abs(u.var().item() - 1 / 12) < 0.002, name
        counts = torch.bincount((u * 64).long(), minlength=64).double()
        chi2 = ((counts - n / 64) ** 2 / (n / 64)).sum().item()
        assert chi2 < 63 + 5 * (2 * 63) ** 0.5, name
        lag = torch.corrcoef(torch.stack((u[:-1], u[1:])))[0, 1].item()
        assert abs(lag) < 5 / n**0.5, name


def test_no_two_places_of_a_run_share_a_number() -> None:
    ids, positions = torch.arange(2000).repeat_interleave(64), torch.arange(64).repeat(2000)
    u = uniforms(request_keys(torch.zeros_like(ids), ids), positions)
    assert u.unique().numel() == u.numel()
