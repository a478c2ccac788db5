"""One row per branch of every recipe, with numbers a reader can check by hand: is the token kept, with which gradient?

The gradient coefficient is d loss / d log p, divided by −c: what multiplies ∇log p. Random tokens are in test_gradients.py.
"""

import math

import pytest
import torch

from rollkeel.errors import BadInput
from rollkeel.objectives import grpo, icepop, kpop
from rollkeel.objectives.objective import Objective
from rollkeel.objectives.surrogates import ratio
from rollkeel.objectives.terms import ROLLOUT
from rollkeel.objectives.weights import mismatch
from rollkeel.types import TokenBatch

E20 = math.exp(20.0)


def one(p: float, o: float, q: float, advantage: float) -> TokenBatch:
    """One token with these log-probs and coefficient 1, in float64."""

    def f(value: float) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.float64)

    zero = torch.zeros(1, dtype=torch.int64)
    return TokenBatch(
        logprobs=f(p).requires_grad_(),
        old_logprobs=f(o),
        rollout_logprobs=f(q),
        advantages=f(advantage),
        coefficients=f(1.0),
        sequence_ids=zero,
        group_ids=zero,
    )


def coefficient(objective, tokens: TokenBatch) -> float:
    (gradient,) = torch.autograd.grad(objective.loss(tokens), tokens.logprobs)
    return -gradient.item()


def at(*probabilities: float) -> tuple[float, ...]:
    return tuple(math.log(x) for x in probabilities)


# p, o, A → coefficient of ∇log p, clip/high, clip/low. r = p/o; the clip is [0.8, 1.2].
CLIP_TABLE = [
    (0.55, 0.5, 2.0, 1.1 * 2, 0, 0),  # inside, A > 0
    (0.55, 0.5, -2.0, 1.1 * -2, 0, 0),  # inside, A < 0
    (0.7, 0.5, 1.0, 0.0, 1, 0),  # r 1.4, already pushed up enough
    (0.7, 0.5, -1.0, -1.4, 0, 0),  # r 1.4, A < 0: pushed back, full ratio
    (0.3, 0.5, 1.0, 0.6, 0, 0),  # r 0.6, A > 0: pushed back
    (0.3, 0.5, -1.0, 0.0, 0, 1),  # r 0.6, already pushed down enough
    (0.7, 0.5, 0.0, 0.0, 0, 0),  # A = 0 is not a clip
]


@pytest.mark.parametrize(("p", "o", "advantage", "expected", "high", "low"), CLIP_TABLE)
def test_grpo(p, o, advantage, expected, high, low):
    tokens = one(*at(p, o, o), advantage)
    assert coefficient(grpo(), tokens) == pytest.approx(expected, abs=1e-12)
    out = grpo()(tokens)
    assert (out.metrics["clip/high"], out.metrics["clip/low"]) == (high, low)
    clipped = 1.2 if high else 0.8 if low else p / o
    assert out.loss.item() == pytest.approx(-clipped * advantage, abs=1e-12)


def test_clip_edges_are_inside():
    """r exactly on the edge still learns: 0.5 and 1.5 are exact in binary, and so is log 1 = 0."""
    tokens = one(0.0, 0.0, 0.0, 1.0)
    assert coefficient(grpo(clip_low=0.0, clip_high=0.0), tokens) == 1.0
    assert coefficient(grpo(clip_low=0.0, clip_high=0.0), one(0.0, 0.0, 0.0, -1.0)) == -1.0


# o, q, A → kept, coefficient with p = o (r = 1). ρ = o/q against [0.5, 5].
ICEPOP_TABLE = [
    (0.2, 0.1, 1.0, True, 2.0),
    (0.2, 0.1, -1.0, True, -2.0),
    (0.6, 0.1, 1.0, False, 0.0),  # ρ 6
    (0.6, 0.1, -1.0, False, 0.0),
    (0.1, 0.25, 1.0, False, 0.0),  # ρ 0.4
    (0.1, 0.25, -1.0, False, 0.0),
    (0.15, 0.25, 1.0, True, 0.6),
    (0.6, 0.1, 0.0, False, 0.0),  # the band is not directional: A = 0 is judged as any other
]


@pytest.mark.parametrize(("o", "q", "advantage", "kept", "expected"), ICEPOP_TABLE)
def test_icepop(o, q, advantage, kept, expected):
    tokens = one(*at(o, o, q), advantage)
    out = icepop()(tokens)
    assert out.keep.item() is kept
    assert out.weight.item() == pytest.approx(o / q)
    assert coefficient(icepop(), tokens) == pytest.approx(expected, abs=1e-12)
    assert out.metrics["mask/icepop/dropped"] == float(not kept)


def test_icepop_band_edges_are_inside():
    tokens = one(-1.0, -1.0, -1.0, 1.0)  # ρ = 1 exactly
    for low, high in [(1.0, 5.0), (0.5, 1.0), (1.0, 1.0)]:
        assert icepop(low=low, high=high)(tokens).keep.item() is True
    assert icepop(low=1.0 + 1e-12, high=5.0)(tokens).keep.item() is False


def test_icepop_clips_the_policy_ratio_beside_the_band():
    """ρ = 2 is kept and weighs 2; r = p/o = 1.5 with A > 0 is cut, r = 1.1 counts 2·1.1."""
    assert coefficient(icepop(), one(*at(0.3, 0.2, 0.1), 1.0)) == 0.0
    assert coefficient(icepop(), one(*at(0.22, 0.2, 0.1), 1.0)) == pytest.approx(2.2)


# o, q → kept at φ = 0.1 (intervals of the mathematics page: q 0.9 → [.743134, .983436], q 0.1 → [.0165644, .256866]).
KPOP_TABLE = [(0.75, 0.9, True), (0.74, 0.9, False), (0.983, 0.9, True), (0.984, 0.9, False)]
KPOP_TABLE += [(0.017, 0.1, True), (0.016, 0.1, False), (0.256, 0.1, True), (0.257, 0.1, False)]


@pytest.mark.parametrize(("o", "q", "kept"), KPOP_TABLE)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_kpop_modes(o, q, kept, advantage):
    """The same test on (o, q) or (p, q); weight ρ, 1, or the ratio u in the surrogate. Here p = 1.1·o."""
    p = min(1.1 * o, 1.0)
    decoupled, mask_only = one(*at(p, o, q), advantage), one(*at(p, o, q), advantage)
    r = p / o
    assert coefficient(kpop(), decoupled) == pytest.approx(advantage * r * o / q if kept else 0.0)
    assert coefficient(kpop(mode="mask_only"), mask_only) == pytest.approx(advantage * r if kept else 0.0)
    rollout = one(*at(o, 0.5, q), advantage)  # p takes o's place; the recomputed o must not matter
    assert coefficient(kpop(mode="rollout"), rollout) == pytest.approx(advantage * o / q if kept else 0.0)
    for mode in ("decoupled", "mask_only"):
        assert kpop(mode=mode)(decoupled).keep.item() is kept


def test_kpop_threshold_is_strict():
    """D = 0 is not above φ, and a divergence equal to φ is kept."""
    from rollkeel.objectives.divergences import symmetric_binary_kl

    tokens = one(*at(0.2, 0.2, 0.3), 1.0)
    assert tokens.old_logprobs is not None
    value = symmetric_binary_kl(tokens.old_logprobs, tokens.rollout_logprobs).item()
    assert kpop(phi=value)(tokens).keep.item() is True
    assert kpop(phi=math.nextafter(value, 0.0))(tokens).keep.item() is False


def test_kpop_caps():
    assert coefficient(kpop(phi=5.0, weight_cap=3.0), one(*at(0.8, 0.8, 0.1), 2.0)) == pytest.approx(6.0)
    assert coefficient(kpop(phi=5.0, weight_cap=3.0), one(*at(0.2, 0.2, 0.1), 2.0)) == pytest.approx(4.0)
    rollout = kpop(phi=5.0, mode="rollout", cap=3.0)
    assert coefficient(rollout, one(*at(0.8, 0.5, 0.1), -2.0)) == pytest.approx(-6.0)
    assert coefficient(rollout, one(*at(0.2, 0.5, 0.1), -2.0)) == pytest.approx(-4.0)
    # The capped surrogate's value is min(u, C)·A, and it still differentiates.
    assert rollout(one(*at(0.8, 0.5, 0.1), -2.0)).loss.item() == pytest.approx(6.0)


def test_clamped_log_ratios_are_counted_and_keep_their_gradient():
    """log r = 30 with A < 0 is not clipped by PPO: the coefficient is e²⁰, not e³⁰ and not a silent 0."""
    tokens = one(-1.0, -31.0, -31.0, -1.0)
    assert coefficient(grpo(), tokens) == pytest.approx(-E20)
    assert grpo()(tokens).metrics["objective/clamped_log_ratios"] == 1
    assert grpo()(one(-1.0, -21.0, -21.0, -1.0)).metrics["objective/clamped_log_ratios"] == 0
    # ρ = e⁻³⁰: dropped, and its clamp counted beside that of r.
    assert kpop()(one(-1.0, -31.0, -1.0, -1.0)).metrics["objective/clamped_log_ratios"] == 2
    # One and the same ratio in mask and surrogate counts once.
    assert kpop(mode="rollout")(one(-31.0, -1.0, -1.0, -1.0)).metrics["objective/clamped_log_ratios"] == 1


def test_float32_certainty_is_floored_and_counted():
    f = torch.tensor
    ids = torch.zeros(3, dtype=torch.int64)
    tokens = TokenBatch(
        logprobs=f([0.0, -1e-7, -0.5]),
        old_logprobs=f([0.0, -1.1920929e-07, -0.5]),
        rollout_logprobs=f([-1.1920929e-07, 0.0, -0.5]),
        advantages=torch.ones(3),
        coefficients=torch.ones(3),
        sequence_ids=ids,
        group_ids=ids,
    )
    out = kpop()(tokens)
    assert out.keep.all()
    assert out.metrics["mask/kpop/floored"] == 2
    wide = one(0.0, 0.0, -1e-7, 1.0)  # float64 resolves 1 − p, so D(q‖o) is infinite there and the token goes
    assert kpop()(wide).keep.item() is False
    assert kpop()(wide).metrics["mask/kpop/floored"] == 0


def test_two_corrections_of_one_gap_are_refused():
    with pytest.raises(BadInput, match="allow_double_correction"):
        kpop(mode="rollout", weight_cap=2.0)
    with pytest.raises(BadInput, match="allow_double_correction"):
        Objective(name="mine", anchor=ROLLOUT, surrogate=ratio(), weight=mismatch())
    allowed = kpop(phi=9.0, mode="rollout", weight_cap=2.0, allow_double_correction=True)
    assert allowed.needs == {"old_logprobs"}
    assert coefficient(allowed, one(*at(0.3, 0.4, 0.1), 1.0)) == pytest.approx(3.0 * 2.0)
