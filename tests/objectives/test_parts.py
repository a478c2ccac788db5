"""Parts that have no recipe of their own, against a second writing of their formulas in numpy: the gradient of every token.

Covers dual clip, levels, floors and normalisation of weights, the filters by entropy, covariance and probability gap, the likelihood
of good answers. That they combine, and that packing and ranks change nothing, is tested for every registered part elsewhere
(test_every_composition.py, test_parallel_invariance.py).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import reference as ref
import torch
from reference_tokens import Array, Tokens, random_tokens
from test_parallel_invariance import tensors
from test_truth_tables import at, coefficient, one

from rollkeel.errors import BadInput
from rollkeel.objectives import Objective, build, compose
from rollkeel.objectives.objective import ObjectiveOutput
from rollkeel.objectives.thresholds import Top

T = 3000


@pytest.fixture(scope="module")
def t() -> Tokens:
    return random_tokens(T, seed=31)


def measured(objective: Objective, t: Tokens) -> tuple[Array, ObjectiveOutput]:
    """Coefficient of ∇log p (with A in it) per token, and what the objective says."""
    tokens = tensors(t)
    tokens = dataclasses.replace(tokens, logprobs=tokens.logprobs.requires_grad_())
    objective.prepare(tokens)
    out = objective(tokens)
    (gradient,) = torch.autograd.grad(objective.loss(tokens), tokens.logprobs)
    return -gradient.numpy() / t.c, out


def close(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


# ---- dual clip ---------------------------------------------------------------------------------------------------------


def test_dual_clip(t):
    found, out = measured(compose(surrogate={"ppo_clip": {"dual": 1.5}}, anchor="old"), t)
    r = ref.ratio(t.p, t.o)
    far = (t.a < 0) & (r > 1.5)
    assert far.sum() > 20
    close(found, np.where(far, 0.0, ref.clipped(t, 0.2, 0.2)))
    cut = far | ((t.a > 0) & (r > 1.2))
    assert out.metrics["clip/high"] == pytest.approx(cut.mean())


def test_dual_clip_is_verl_s_and_trl_s(t):
    """Ye et al.: max(min(rA, clip(r)A), cA) for A < 0. TRL's δ: min(min(r, δ)A, clip(r)A). One value, one slope."""
    r, a = ref.ratio(t.p, t.o), t.a
    both = np.minimum(r * a, np.clip(r, 0.8, 1.2) * a)
    dual = np.where(a < 0, np.maximum(both, 3.0 * a), both)
    two_sided = np.minimum(np.minimum(r, 3.0) * a, np.clip(r, 0.8, 1.2) * a)
    np.testing.assert_allclose(dual, two_sided)
    _, out = measured(compose(surrogate={"ppo_clip": {"dual": 3.0}}, anchor="old"), t)
    assert out.loss.item() == pytest.approx(-(t.c * dual).sum(), rel=1e-9)


def test_dual_clip_by_hand():
    objective = compose(surrogate={"ppo_clip": {"dual": 3.0}}, anchor="old")
    assert coefficient(objective, one(*at(0.58, 0.2, 0.2), -1.0)) == pytest.approx(-2.9)
    assert coefficient(objective, one(*at(0.62, 0.2, 0.2), -1.0)) == 0.0  # r 3.1
    assert objective(one(*at(0.62, 0.2, 0.2), -1.0)).loss.item() == pytest.approx(3.0)
    with pytest.raises(BadInput, match=r"ppo_clip\.dual: expected a number > 1, got 0\.5"):
        compose(surrogate={"ppo_clip": {"dual": 0.5}})


# ---- levels ------------------------------------------------------------------------------------------------------------


def levelled(t: Tokens, log_ratio: Array, level: str) -> Array:
    """log of the ratio at a level; a segment is what lies between the environment's words, after each third token."""
    place = np.arange(len(t.ids)) - np.searchsorted(t.ids, t.ids)
    segment = 2 * t.ids + (place > 2)
    if level == "segment":
        return ref.spread(log_ratio, segment, np.mean)
    return {"token": lambda: log_ratio}.get(
        level, lambda: ref.spread(log_ratio, t.ids, np.sum if level == "sequence" else np.mean)
    )()


LEVELS = ("token", "segment", "geometric", "sequence")


@pytest.mark.parametrize("level", LEVELS)
def test_bands_and_weights_at_every_level(t, level):
    band = {"ratio_band": {"low": 0.9, "high": 1.2, "level": level}}
    weight = {"mismatch": {"floor": 0.95, "cap": 1.1, "level": level}}
    found, out = measured(compose(masks=[band], weight=weight), t)
    rho = np.exp(levelled(t, t.o - t.q, level))
    keep, w = (rho >= 0.9) & (rho <= 1.2), np.clip(rho, 0.95, 1.1)
    assert 0.1 < keep.mean() < 0.97
    close(found, np.where(keep, w * ref.clipped(t, 0.2, 0.2), 0.0))
    assert (out.keep.numpy() == keep).all()


def test_levels_are_four_things(t):
    found = [levelled(t, t.o - t.q, level) for level in LEVELS]
    assert all(np.abs(a - b).max() > 1e-3 for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize(("level", "by"), [("token", "token"), ("sequence", "sequence"), ("geometric", "sequence")])
def test_normalised_weights_average_one(t, level, by):
    """After the cap, as verl does; over tokens, or over sequences where each has one."""
    _, out = measured(compose(weight={"mismatch": {"cap": 2.0, "level": level, "normalise": True}}), t)
    w = np.minimum(np.exp(np.clip(levelled(t, t.o - t.q, level), -20, 20)), 2.0)
    first = np.searchsorted(t.ids, np.unique(t.ids))
    mean = w.mean() if by == "token" else w[first].mean()
    close(out.weight.numpy(), w / mean)
    assert abs(mean - 1) > 1e-3


def test_weights_are_refused():
    with pytest.raises(BadInput, match=r"mismatch: expected floor ≤ cap, got floor=2\.0 and cap=1\.0"):
        compose(weight={"mismatch": {"floor": 2.0, "cap": 1.0}})
    objective = compose(weight={"mismatch": {"level": "segment"}})
    tokens = dataclasses.replace(one(-1.0, -1.0, -1.0, 1.0), token_index=None)
    with pytest.raises(BadInput, match="a batch with token_index, got None"):
        objective.loss(tokens)


# ---- filters -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reduce", "how"), [("mean", np.mean), ("max", np.max), ("sum", np.sum)])
def test_sequence_filters_by_probability_gap(t, reduce, how):
    """ROLL's and others' filter: the mean of |o − q| over a sequence, at most δ."""
    mask = {"sequence_kl": {"estimator": "tv", "reduce": reduce, "delta": 0.05}}
    found, _ = measured(compose(masks=[mask]), t)
    keep = ref.spread(np.abs(np.exp(t.o) - np.exp(t.q)), t.ids, how) <= 0.05
    assert 0.02 < keep.mean() < 0.98
    close(found, np.where(keep, ref.clipped(t, 0.2, 0.2), 0.0))


def test_the_most_uncertain_fifth_learns(t):
    objective = compose(masks=["top_entropy"], anchor="old")
    assert {"prepare"} <= objective.needs
    assert "entropy" not in objective.needs  # it is read, not differentiated
    found, out = measured(objective, t)
    entropy = tensors(t).entropy.numpy()
    keep = np.zeros(T, bool)
    keep[np.argsort(entropy)[-round(0.2 * T) :]] = True
    close(found, np.where(keep, ref.clipped(t, 0.2, 0.2), 0.0))
    assert out.metrics["mask/top_entropy/kept"] == pytest.approx(0.2)
    with pytest.raises(BadInput, match="a batch with entropy, got None"):
        objective.loss(dataclasses.replace(tensors(t), entropy=None))


def covariance(t: Tokens) -> Array:
    return (t.a - t.a.mean()) * (t.p - t.p.mean())


def test_clip_cov(t):
    options = {"share": 0.01, "low": 0.5, "high": 3.0}
    objective = build("composed", {"masks": [{"clip_cov": options}], "anchor": "old"})
    found, out = measured(objective, t)
    dropped = ~out.keep.numpy()
    cov, cut = covariance(t), ref.beyond(t.a, ref.ratio(t.p, t.o), 0.8, 1.2)
    judged = (cov > 0.5) & (cov < 3.0) & ~cut
    assert dropped.sum() == int(0.01 * T) < judged.sum()
    assert judged[dropped].all()
    close(found, np.where(dropped, 0.0, ref.clipped(t, 0.2, 0.2)))
    _, again = measured(objective, t)  # another batch, another draw
    assert not again.keep.equal(out.keep)
    state = objective.state_dict()
    fresh = build("composed", {"masks": [{"clip_cov": options}], "anchor": "old"})
    fresh.load_state_dict(state)
    assert measured(fresh, t)[1].keep.equal(measured(objective, t)[1].keep)
    few = compose(masks=[{"clip_cov": {**options, "low": 1e9, "high": 2e9}}])
    assert measured(few, t)[1].keep.all()  # nobody to choose from
    rare = compose(masks=[{"clip_cov": {**options, "share": 1e-9}}])
    assert (~measured(rare, t)[1].keep).sum() == 1  # at least one


def test_kl_cov(t):
    found, _ = measured(compose(surrogate={"kl_cov": {"share": 0.01, "coefficient": 0.3}}, anchor="old"), t)
    chosen = np.zeros(T, bool)
    chosen[np.argsort(covariance(t))[-int(0.01 * T) :]] = True
    close(found, ref.ratio(t.p, t.o) * t.a - np.where(chosen, 0.3 * np.sign(t.p - t.o), 0.0))


@pytest.mark.parametrize(
    ("values", "dropped"), [([3, 3, 1, 0], 2), ([2, 2, 2], 3), ([4, 3, 3, 0], 1), ([-math.inf, -math.inf, 1, 1], 2)]
)
def test_the_largest_values_are_dropped_where_they_are_equal_too(values, dropped):
    """First tokens of one prompt often agree to the bit, and a bound between equal values drops none."""
    found = torch.tensor(values, dtype=torch.float32)
    assert int((found > Top(1e-3).solve(found)).sum()) == dropped


# ---- likelihood of good answers ----------------------------------------------------------------------------------------


def test_positive_examples_are_made_likelier(t):
    """−μ·log p over tokens with A > 0, whose coefficients are scaled to those of the whole batch; masks do not matter."""
    plain = {"masks": [{"ratio_band": {"low": 0.9, "high": 1.1}}]}
    without, _ = measured(compose(**plain), t)
    found, out = measured(compose(**plain, positive_nll=0.1), t)
    good = t.a > 0
    scale = t.c.sum() / t.c[good].sum()
    close(found - without, np.where(good, 0.1 * scale, 0.0))
    assert out.metrics["loss/positive_nll"] == pytest.approx(-0.1 * scale * (t.c * t.p)[good].sum())
    bad = dataclasses.replace(t, a=-np.abs(t.a))
    assert measured(compose(positive_nll=0.1), bad)[1].metrics["loss/positive_nll"] == 0.0


def test_luspo_is_the_slope_of_its_loss():
    """(1/N) Σ |y|·min(s·A, clip(s)·A), by central differences; coefficients of `sequence_sum`."""
    t = random_tokens(120, seed=5)
    t = dataclasses.replace(t, c=np.full(120, 1 / len(np.unique(t.ids))))

    def loss(p: Array) -> float:
        total = 0.0
        for i in np.unique(t.ids):
            mine = t.ids == i
            s, a = np.exp((p - t.o)[mine].mean()), t.a[mine][0]
            total -= mine.sum() * min(s * a, np.clip(s, 1 - 2e-3, 1 + 2.5e-3) * a)
        return total / len(np.unique(t.ids))

    found, _ = measured(build("luspo"), t)
    for i in range(120):
        step = np.zeros(120)
        step[i] = 1e-7
        slope = (loss(t.p + step) - loss(t.p - step)) / 2e-7
        assert -slope / t.c[i] == pytest.approx(found[i], rel=1e-5, abs=1e-5)
