"""Perturbations and bias monitors reproduce the stability study's experiments, so they must be what its equations say.

Covers values, independence of the noise from packing, and what the monitors report; whether a perturbed run really destabilises is
not covered.
"""

import dataclasses
import math

import pytest
import torch
from test_truth_tables import at, coefficient, one
from test_truth_tables_rollout import coefficients, several

from rollkeel.errors import BadInput
from rollkeel.objectives import build, dppo_binary_tv, grpo, gspo, icepop, kpop, pg_is
from rollkeel.objectives.draws import normal, uniform
from rollkeel.types import TokenBatch


def distorted(delta: float, **options: float) -> list:
    return [{"distort_low_probability": {"delta": delta, **options}}]


@pytest.mark.parametrize("delta", [3.0, 2.0, 1.2, 0.0])
def test_distortion_multiplies_tokens_under_the_threshold(delta):
    """o = 0.09 is rare, 0.1 itself and 0.5 are not (eq. 18 is strict)."""
    edge = one(math.log(0.1), math.log(0.1), -1.0, 1.0)
    for o, factor in ((0.09, delta), (0.5, 1.0)):
        tokens = one(*at(o, o, 0.3), -1.0)
        assert coefficient(gspo(perturb=distorted(delta)), tokens) == pytest.approx(-factor)
    assert coefficient(grpo(perturb=distorted(delta)), edge) == pytest.approx(1.0)
    wider = grpo(perturb=distorted(delta, threshold=0.6))
    assert coefficient(wider, one(*at(0.5, 0.5, 0.5), 1.0)) == pytest.approx(delta)


def test_distortion_acts_inside_a_sequence_token_by_token():
    old = torch.tensor([0.05, 0.5], dtype=torch.float64).log()
    tokens = several([0.0, 0.0], [1.0, 1.0], [0, 0], old_logprobs=old, rollout_logprobs=old)
    assert coefficients(gspo(perturb=distorted(3.0)), tokens) == pytest.approx([3.0, 1.0])


def test_a_distortion_needs_the_old_policy():
    assert "old_logprobs" not in pg_is().needs
    assert "old_logprobs" in pg_is(perturb=distorted(2.0)).needs


def test_perturbations_multiply():
    both = grpo(perturb=[*distorted(2.0), {"distort_low_probability": {"delta": 5.0, "threshold": 0.2}}])
    assert coefficient(both, one(*at(0.05, 0.05, 0.05), 1.0)) == pytest.approx(10.0)
    assert coefficient(both, one(*at(0.15, 0.15, 0.15), 1.0)) == pytest.approx(5.0)


NOISE = [{"weight_noise": {"sigma": 0.2}}]


def many(count: int = 20_000) -> TokenBatch:
    ids = [i // 10 for i in range(count)]
    tokens = several([0.0] * count, [1.0] * count, ids)
    return dataclasses.replace(tokens, rollout_ids=tokens.sequence_ids + 5000)


def test_noise_has_mean_one_and_the_given_deviation():
    objective, tokens = grpo(perturb=NOISE), many()
    objective.prepare(tokens)
    found = torch.tensor(coefficients(objective, tokens), dtype=torch.float64)
    n = len(found)
    assert found.mean().item() == pytest.approx(1.0, abs=5 * 0.2 / n**0.5)
    assert found.std().item() == pytest.approx(0.2, rel=5 / (2 * n) ** 0.5)
    # Neighbours in a sequence and equal positions of neighbouring sequences are independent.
    by_sequence = found.view(-1, 10) - 1
    for a, b in ((by_sequence[:, 0], by_sequence[:, 1]), (by_sequence[1:, 0], by_sequence[:-1, 0])):
        assert abs((a * b).mean().item()) < 5 * 0.04 / len(a) ** 0.5


def test_noise_belongs_to_the_token_and_changes_with_the_batch():
    objective, tokens = grpo(perturb=NOISE), many(200)
    objective.prepare(tokens)
    first = coefficients(objective, tokens)
    assert coefficients(objective, tokens) == first
    order = torch.cat([torch.arange(i * 10, i * 10 + 10) for i in torch.randperm(20).tolist()])
    shuffled = TokenBatch(**{k: None if v is None else v[order] for k, v in vars(tokens).items()})
    assert coefficients(objective, shuffled) == [first[i] for i in order.tolist()]
    piece = TokenBatch(**{k: None if v is None else v[50:60] for k, v in vars(tokens).items()})
    assert coefficients(objective, piece) == first[50:60]
    objective.prepare(tokens)
    assert coefficients(objective, tokens) != first
    other = grpo(perturb=[{"weight_noise": {"sigma": 0.2, "seed": 1}}])
    other.prepare(tokens)
    assert coefficients(other, tokens) != first


def test_draws_fill_the_unit_interval():
    u = uniform(123, torch.arange(100_000))
    assert u.min() >= 0
    assert u.max() < 1
    assert len(u.unique()) == len(u)
    counts = torch.histc(u, 20, 0, 1)
    assert ((counts - 5000).square() / 5000).sum() < 50  # χ² with 19 degrees of freedom: 1 in 10,000
    z = normal(7, torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64))
    assert z.isfinite().all()
    assert (z.abs() < 1.96).double().mean().item() == pytest.approx(0.95, abs=0.005)


@pytest.mark.parametrize(
    ("perturb", "message"),
    [
        ([{"distort_low_probabilty": {}}], "did you mean distort_low_probability"),
        ([{"weight_noise": {"sigm": 1}}], r"weight_noise\.sigm.*did you mean sigma"),
        ([{"weight_noise": {"sigma": -1}}], "≥ 0"),
        ({"weight_noise": {"sigma": 1}}, "expected a list"),
        ("weight_noise", "expected a list"),
        ([{"weight_noise": 3}], "mapping of options"),
    ],
)
def test_wrong_perturbations_are_refused(perturb, message):
    with pytest.raises(BadInput, match=message):
        build("gspo", {"perturb": perturb})


def test_perturbations_are_shown():
    shown = build("gspo", {"perturb": distorted(3.0)}).describe()
    assert shown["perturb"] == [{"distort_low_probability": {"delta": 3.0, "threshold": 0.1}}]


# ---- monitors ----------------------------------------------------------------------------------------------------------


KEYS = ("delta_j", "delta_j_ratio", "delta_j_weight", "delta_j_clip", "delta_j_mask", "j")


def monitors(objective, tokens: TokenBatch) -> list[float]:
    return [objective(tokens).metrics.get(f"bias/{key}", 0.0) for key in KEYS]


def test_monitors_by_hand():
    """p .22, o .2, q .1: r = 1.1, ρ = 2, u = 2.2. A = −2, c = 1; o is not rare."""
    tokens = one(*at(0.22, 0.2, 0.1), -2.0)
    push, u = 1.1 * -2.0, 2.2 * -2.0
    assert monitors(grpo(), tokens) == pytest.approx([push - u, push - u, 0.0, 0.0, 0.0, 0.0])
    assert monitors(icepop(), tokens) == pytest.approx([0.0, push - u, u - push, 0.0, 0.0, 0.0])
    assert monitors(icepop(high=1.5), tokens) == pytest.approx([-u, push - u, u - push, 0.0, -u, 0.0])  # dropped
    assert monitors(kpop(mode="mask_only", phi=9.0), tokens) == pytest.approx([push - u, push - u, 0.0, 0.0, 0.0, 0.0])
    up = one(*at(0.3, 0.2, 0.1), 1.0)  # r 1.5 is cut
    assert monitors(icepop(), up) == pytest.approx([-3.0, -1.5, 1.5, -3.0, 0.0, 0.0])
    assert grpo()(up).metrics["bias/delta_clip"] == pytest.approx(-1.5)
    held = one(*at(0.3, 0.2, 0.1), -1.0)  # outside the band, and PPO lets it come back
    assert grpo()(held).metrics["bias/delta_clip"] == pytest.approx(1.5)
    assert monitors(pg_is(cap=2.0), up) == pytest.approx([-1.0, 0.0, 0.0, -1.0, 0.0, 0.0])
    rare = one(*at(0.05, 0.05, 0.05), -2.0)
    assert monitors(grpo(), rare) == pytest.approx([0.0] * 5 + [-2.0])  # nominal δ = 2
    distortion = grpo(perturb=distorted(3.0))
    assert monitors(distortion, rare) == pytest.approx([-4.0] + [0.0] * 4 + [-4.0])  # the applied one
    assert distortion(rare).metrics["bias/delta_j_perturb"] == pytest.approx(-4.0)
    assert monitors(grpo(perturb=distorted(0.0, threshold=0.01)), rare) == pytest.approx([0.0] * 6)


def test_monitors_without_an_old_policy():
    """What is judged on p/q alone needs no o; p = .3 is not rare, and 0.05 is."""
    tokens = dataclasses.replace(one(*at(0.3, 0.2, 0.1), -2.0), old_logprobs=None)
    assert monitors(pg_is(), tokens) == pytest.approx([0.0] * 6)
    assert monitors(dppo_binary_tv(), tokens) == pytest.approx([0.0] * 6)  # brought back, so kept
    away = dataclasses.replace(one(*at(0.3, 0.2, 0.1), 2.0), old_logprobs=None)
    assert monitors(dppo_binary_tv(), away) == pytest.approx([-6.0, 0.0, 0.0, 0.0, -6.0, 0.0])
    rare = dataclasses.replace(one(*at(0.05, 0.2, 0.1), -2.0), old_logprobs=None)
    assert monitors(pg_is(), rare)[-1] == pytest.approx(-2.0)
