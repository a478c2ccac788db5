"""The binary KL decides which tokens KPop learns from, so it must be right to the last digits near p = 0 and p = 1.

Covers values, limits, float32 rounding and symmetries of the binary and top-K divergences; not the masks built on them
(test_truth_tables.py).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkeel.objectives.divergences import (
    FLOOR,
    at_floor,
    binary_kl,
    binary_tv,
    log1mexp,
    symmetric_binary_kl,
    topk_kl,
    topk_tv,
)

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


@pytest.mark.parametrize(("p", "q", "forward", "backward"), GOLDEN)
def test_golden_values_in_float32(p, q, forward, backward):
    """The divergence is that of the log-probs as float32 holds them, so those are what the value is compared for."""
    lp, lq = (torch.tensor([math.log(x)], dtype=torch.float32) for x in (p, q))
    for a, b, value in [(lp, lq, forward), (lq, lp, backward)]:
        exact = binary_kl(a.double(), b.double()).item()
        assert binary_kl(a, b).item() == pytest.approx(exact, rel=1e-6)
        assert exact == pytest.approx(value, rel=1e-6)


ONE = 1 - FLOOR
"""What a float32 log-prob of 0 counts as."""
# log p, log q, then D(p‖q) and D(q‖p) in float64, and in float32 where 1 − p of certainty is floored at 2⁻²⁴.
# From 60-digit decimals.
EXTREMES = [
    (math.log(1e-30), math.log(0.5), 0.6931471805599453, 33.84562921435074, None, None),
    (math.log(1e-30), math.log1p(-1e-8), 18.420680743952367, 69.07755190483904, None, None),
    (math.log(0.5), math.log1p(-1e-8), 8.517193196416237, 0.6931469863531379, None, None),
    (0.0, math.log(0.5), 0.6931471805599453, math.inf, 0.693146129400307, 7.624619015961722),
    (0.0, math.log1p(-1e-8), 1.0000000050000001e-08, math.inf, 5.679849333494078e-08, 3.1753161900564286e-08),
    (0.0, math.log(1e-30), 69.07755278982137, math.inf, 69.07754762131874, 16.635532333438686),
    (math.log(0.9), 0.0, math.inf, 0.1053605156578263, 1.3384703135966023, 0.10535959546297834),
    (0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("lp", "lq", "forward", "backward", "forward32", "backward32"), EXTREMES)
def test_extremes(lp, lq, forward, backward, forward32, backward32):
    a, b = f64(lp), f64(lq)
    assert binary_kl(a, b).item() == pytest.approx(forward, rel=1e-9, abs=1e-16)
    assert binary_kl(b, a).item() == pytest.approx(backward, rel=1e-9, abs=1e-16)
    a, b = a.float(), b.float()
    assert binary_kl(a, b).item() == pytest.approx(forward if forward32 is None else forward32, rel=1e-6, abs=1e-14)
    assert binary_kl(b, a).item() == pytest.approx(backward if backward32 is None else backward32, rel=1e-6, abs=1e-14)
    assert symmetric_binary_kl(a, b).item() == max(binary_kl(a, b).item(), binary_kl(b, a).item())


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


def test_binary_tv():
    p, q = [0.3, 1e-4, 1.0, 1e-30, 0.5, 0.99], [0.2, 1e-2, 0.25, 1.0, 0.5, 0.8]
    expected = [0.1, 0.0099, 0.75, 1.0, 0.0, 0.19]
    assert binary_tv(f64(*p).log(), f64(*q).log()).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-16)
    found = binary_tv(f64(*p).log().float(), f64(*q).log().float())
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-12)
    # The gap of two nearly equal probabilities keeps its digits: p·(1 − e^−gap), no difference of rounded numbers.
    near = torch.tensor([-1.0, -1.0 - 1e-6]).float()
    exact = -math.exp(near[0].double().item()) * math.expm1(near.double().diff().item())
    assert binary_tv(near[:1], near[1:]).item() == pytest.approx(exact, rel=1e-6)


# Four tokens; q = (.4, .3, .2, .1) and p = (.1, .4, .3, .2), K = 2: the ids are 0 and 1.
P, Q = f64(0.1, 0.4, 0.3, 0.2), f64(0.4, 0.3, 0.2, 0.1)


def top(sampled: int) -> tuple[torch.Tensor, ...]:
    lp, lq = P.log(), Q.log()
    return lp[None, sampled], lq[None, sampled], lp[None, :2], lq[None, :2], torch.tensor([sampled < 2])


def kl(*pairs: tuple[float, float]) -> float:
    """Σ q·log(q/p) over (q, p)."""
    return sum(q * math.log(q / p) for q, p in pairs)


TOPK = [
    # sampled token, TV with and without "other", KL with and without
    (0, 0.5 * (0.3 + 0.1 + 0.2), 0.5 * 0.4, kl((0.4, 0.1), (0.3, 0.4), (0.3, 0.5)), kl((0.4, 0.1), (0.3, 0.4))),
    (
        2,
        0.5 * (0.3 + 0.1 + 0.1 + 0.1),
        0.5 * 0.5,
        kl((0.4, 0.1), (0.3, 0.4), (0.2, 0.3), (0.1, 0.2)),
        kl((0.4, 0.1), (0.3, 0.4), (0.2, 0.3)),
    ),
]


@pytest.mark.parametrize(("sampled", "tv", "tv_listed", "divergence", "divergence_listed"), TOPK)
def test_topk_by_hand(sampled, tv, tv_listed, divergence, divergence_listed):
    arguments = top(sampled)
    assert topk_tv(*arguments).item() == pytest.approx(tv, rel=1e-12)
    assert topk_tv(*arguments, other=False).item() == pytest.approx(tv_listed, rel=1e-12)
    assert topk_kl(*arguments).item() == pytest.approx(divergence, rel=1e-12)
    assert topk_kl(*arguments, other=False).item() == pytest.approx(max(divergence_listed, 0.0), rel=1e-12)


def test_eq_15_as_printed_can_fall_below_the_binary_tv():
    """Without the bin of all others only half of the sampled token's own change counts."""
    lp, lq = f64(0.1).log(), f64(0.4).log()
    alone = (lp, lq, lp[:, None], lq[:, None], torch.tensor([True]))
    assert topk_tv(*alone, other=False).item() == pytest.approx(0.15)
    assert binary_tv(lp, lq).item() == pytest.approx(0.3)
    assert topk_tv(*alone).item() == pytest.approx(0.3)


def test_topk_knows_truncation_and_keeps_the_digits_of_a_small_rest():
    # An id that q cannot sample has log q = −∞ and counts 0·log 0 = 0; its mass under p is still a difference.
    lp, lq = f64(0.5).log(), f64(1.0).log()
    top_p, top_q = f64(math.log(0.5), math.log(0.3))[None], f64(0.0, -math.inf)[None]
    found = topk_kl(lp, lq, top_p, top_q, torch.tensor([True]))
    assert found.item() == pytest.approx(math.log(2), rel=1e-6)
    # p = 1 − 3e-12 at the one listed id, q = 1 − 1e-12: the others' masses are known to all digits.
    lp, lq = f64(-3e-12), f64(-1e-12)
    arguments = (lp, lq, lp[:, None], lq[:, None], torch.tensor([True]))
    expected = 1e-12 * math.log(1 / 3) + 2e-12
    assert topk_kl(*arguments).item() == pytest.approx(expected, rel=1e-3)
    assert topk_tv(*arguments).item() == pytest.approx(2e-12, rel=1e-3)
    # In float32 a rest that is nothing but rounding is no infinity.
    one = torch.zeros(1)
    assert topk_kl(one, one - 0.1, one[:, None], one[:, None] - 0.1, torch.tensor([True])).isfinite().all()


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(-8, 8), min_size=4, max_size=7),
    st.lists(st.floats(-8, 8), min_size=7, max_size=7),
    st.integers(1, 7),
    st.integers(0, 6),
    st.booleans(),
)
def test_binary_below_topk_below_full(a, b, k, sampled, single):
    q = torch.tensor(a, dtype=torch.float64).log_softmax(0)
    p = torch.tensor(b[: len(a)], dtype=torch.float64).log_softmax(0)
    if single:
        q, p = q.float(), p.float()
    slack = 1e-5 if single else 1e-10
    k, sampled = min(k, len(a)), sampled % len(a)
    ids = q.topk(k).indices
    lp, lq = p[None, sampled], q[None, sampled]
    arguments = (lp, lq, p[None, ids], q[None, ids], (ids == sampled).any()[None])
    tv, divergence = topk_tv(*arguments).item(), topk_kl(*arguments).item()
    full_tv = 0.5 * (q.double().exp() - p.double().exp()).abs().sum().item()
    full_kl = (q.double().exp() * (q.double() - p.double())).sum().item()
    assert binary_tv(lp, lq).item() <= tv + slack
    assert tv <= full_tv + slack
    assert binary_kl(lq, lp).item() <= divergence + slack
    assert divergence <= full_kl + slack * 20
