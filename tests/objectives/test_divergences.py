"""The binary KL decides which tokens KPop learns from, so it must be right to the last digits near p = 0 and p = 1.

Covers values, limits, float32 rounding and symmetries; not the mask built on it (test_truth_tables.py).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkeel.objectives.divergences import FLOOR, at_floor, binary_kl, log1mexp, symmetric_binary_kl

GOLDEN = [
    (0.2, 0.3, 0.025732092478, 0.0281675575953),
    (0.9, 0.5, 0.368064207168, 0.510825623766),
    (0.99, 0.8, 0.181004960571, 0.428671882342),
    (1e-4, 1e-2, 0.00948881880148, 0.0362008743152),
]
ACCEPTED = [(0.9, 0.743134, 0.983436), (0.5, 0.287121, 0.712879), (0.1, 0.0165644, 0.256866)]
probabilities = st.floats(1e-9, 1 - 1e-9)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def log(p: float) -> torch.Tensor:
    return f64(math.log(p))


@pytest.mark.parametrize(("p", "q", "forward", "backward"), GOLDEN)
def test_golden_values(p, q, forward, backward):
    assert abs(binary_kl(log(p), log(q)).item() - forward) < 1e-9
    assert abs(binary_kl(log(q), log(p)).item() - backward) < 1e-9
    assert abs(symmetric_binary_kl(log(p), log(q)).item() - max(forward, backward)) < 1e-9


@pytest.mark.parametrize(("q", "low", "high"), ACCEPTED)
def test_kpop_interval_at_one_tenth(q, low, high):
    """Six printed digits: a relative step of 1e-5 inside is kept, the same step outside is dropped."""
    inside = f64(low * (1 + 1e-5), high * (1 - 1e-5)).log()
    beyond = f64(low * (1 - 1e-5), high * (1 + 1e-5)).log()
    reference = f64(q, q).log()
    assert (symmetric_binary_kl(inside, reference) <= 0.1).all()
    assert (symmetric_binary_kl(beyond, reference) > 0.1).all()


def test_log1mexp_at_both_ends():
    x = f64(-1e-12, -1e-3, -math.log(2), -1.0, -40.0)
    # Series for the ends: log(1 − e^x) = log(−x) + x/2 + …, and −e^x for very negative x.
    expected = [
        math.log(1e-12),
        math.log(-math.expm1(-1e-3)),
        math.log(0.5),
        math.log(1 - math.exp(-1)),
        -math.exp(-40),
    ]
    assert torch.allclose(log1mexp(x), f64(*expected), rtol=1e-12, atol=0)
    assert log1mexp(f64(0.0)).item() == -math.inf


def test_float64_keeps_infinity_and_never_nan():
    lp, lq = f64(0.0, 0.0, -0.5, -1e-17), f64(0.0, -0.5, 0.0, 0.0)
    assert binary_kl(lp, lq).tolist() == [0.0, 0.5, math.inf, math.inf]
    assert symmetric_binary_kl(lp, lq).tolist() == [0.0, math.inf, math.inf, math.inf]
    assert not at_floor(lp).any()


def test_positive_rounding_counts_as_certainty():
    assert binary_kl(f64(1e-9), f64(-0.5)).item() == 0.5
    assert at_floor(torch.tensor([1e-7, 0.0, -1.2e-7])).tolist() == [True, True, False]


def test_float32_zero_is_floored_not_infinite():
    """p rounds to 1 in one engine and to 1 − 1.2e-7 in the other: the same token, and D is of that size."""
    lp, lq = torch.tensor([0.0, 0.0, -1.1920929e-07]), torch.tensor([-1.1920929e-07, 0.0, 0.0])
    found = symmetric_binary_kl(lp, lq)
    assert torch.isfinite(found).all()
    assert (found < 1e-6).all()
    # Against a token the other engine doubts, the floor is where the value comes from: (1−q)·log((1−q)/2⁻²⁴) + q·log q.
    doubt = symmetric_binary_kl(torch.tensor([0.0]), torch.tensor([math.log(0.5)])).item()
    assert doubt == pytest.approx(0.5 * math.log(0.5 / FLOOR) + 0.5 * math.log(0.5), rel=1e-6)


def test_half_precision_is_widened():
    found = symmetric_binary_kl(torch.tensor([0.0], dtype=torch.bfloat16), torch.tensor([-0.5], dtype=torch.bfloat16))
    assert found.dtype == torch.float32
    assert torch.isfinite(found).all()


@settings(deadline=None, max_examples=300)
@given(probabilities, probabilities)
def test_matches_the_definition(p, q):
    direct = p * math.log(p / q) + (1 - p) * (math.log1p(-p) - math.log1p(-q))
    assert binary_kl(log(p), log(q)).item() == pytest.approx(max(direct, 0.0), rel=1e-6, abs=1e-14)


@settings(deadline=None, max_examples=300)
@given(probabilities, probabilities)
def test_symmetries(p, q):
    found = symmetric_binary_kl(log(p), log(q)).item()
    assert found == symmetric_binary_kl(log(q), log(p)).item()
    mirrored = symmetric_binary_kl(f64(math.log1p(-p)), f64(math.log1p(-q))).item()
    assert found == pytest.approx(mirrored, rel=1e-6, abs=1e-13)
    assert found >= 0


@settings(deadline=None, max_examples=300)
@given(st.floats(1e-4, 1 - 1e-4), st.floats(1e-4, 1 - 1e-4))
def test_the_direction_from_the_middle_is_larger(p, q):
    """D_B(p‖q) ≥ D_B(q‖p) iff |p−½| ≤ |q−½|; ties and near-ties are left to rounding."""
    if abs(abs(p - 0.5) - abs(q - 0.5)) < 1e-3 or abs(p - q) < 1e-2:
        return
    forward, backward = binary_kl(log(p), log(q)).item(), binary_kl(log(q), log(p)).item()
    assert (forward >= backward) == (abs(p - 0.5) <= abs(q - 0.5))


@settings(deadline=None, max_examples=200)
@given(st.floats(0.01, 0.99), st.floats(-1e-4, 1e-4))
def test_small_gaps_are_standard_deviations(q, gap):
    if abs(gap) < 1e-6:
        return
    expected = gap * gap / (2 * q * (1 - q))
    assert symmetric_binary_kl(log(q + gap), log(q)).item() == pytest.approx(expected, rel=0.03)
