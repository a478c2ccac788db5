"""Credit per rollout, against numbers worked out by hand; equal groups must teach exactly nothing.

Covers every estimator, group metrics and the shuffled control; not how credit is spread over tokens (batch/).
"""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkeel.advantages import EPSILON, ESTIMATORS, OVER_BATCH, compute, group_metrics, shuffle
from rollkeel.config import AdvantageConfig
from rollkeel.errors import BadInput, NonFinite

REWARDS = [1.0, 0.0, 0.0, 1.0, 3.0, 1.0, 1.0]
GROUPS = [4, 4, 4, 4, 9, 9, 7]  # means ½, 2, 1; unbiased stds √(1/3), √2, –
THIRD = math.sqrt(1 / 3)
CENTRED = [0.5, -0.5, -0.5, 0.5, 1.0, -1.0, 0.0]
BATCH_STD = math.sqrt(6.0 / 6)  # mean of rewards 1: squares 0 1 1 0 4 0 0
CENTRED_STD = math.sqrt(3.0 / 6)
EXPECTED = {
    "grpo": [
        *(x / (THIRD + EPSILON) for x in CENTRED[:4]),
        1 / (math.sqrt(2) + EPSILON),
        -1 / (math.sqrt(2) + EPSILON),
        0,
    ],
    "dr_grpo": CENTRED,
    "rloo": [1 - 1 / 3, 0 - 2 / 3, 0 - 2 / 3, 1 - 1 / 3, 3 - 1, 1 - 3, 0],
    "batch_std": [x / (BATCH_STD + EPSILON) for x in CENTRED],
    "reinforce_plus_plus": [x / (CENTRED_STD + EPSILON) for x in CENTRED],
    "maxrl": [1, -1, -1, 1, 0.5, -0.5, 0],
    # Lengths below: group 4 has 1·1 + 2·0 + 3·0 + 2·1 = 3 over 8 tokens, group 9 has 1·3 + 3·1 = 6 over 4.
    "opo": [1 - 3 / 8, -3 / 8, -3 / 8, 1 - 3 / 8, 3 - 1.5, 1 - 1.5, 0],
    "gpg": [x * 7 / 6 for x in CENTRED],
    "grpo_passk": [0, 0, 0, 0, 2 / (math.sqrt(2) + EPSILON), 0, 0],  # two best of group 4 are equal
}
LENGTHS = [1, 2, 3, 2, 1, 3, 4]


def whitened(values: list[float]) -> list[float]:
    """As a framework that spreads rewards over tokens first: 16 numbers, less their mean, over their unbiased std."""
    spread = np.repeat(np.array(values, float), LENGTHS)
    return [(x - spread.mean()) / math.sqrt(spread.var(ddof=1) + 1e-8) for x in values]


EXPECTED["reinforce_plus_plus_tokens"] = whitened(CENTRED)
EXPECTED["reinforce_plus_plus_no_baseline"] = whitened(REWARDS)
PASS = [name for name in ESTIMATORS if name.startswith("pass@")]
BY_GROUP = [name for name in ESTIMATORS if name not in OVER_BATCH]


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in PASS])
def test_by_hand(name):
    np.testing.assert_allclose(compute(name, REWARDS, GROUPS, LENGTHS), EXPECTED[name], rtol=1e-12, atol=1e-15)


def test_pass_at_2_by_hand():
    """Four answers, two right: of six pairs one fails, P = 5/6. With a wrong one, one of its three partners is wrong."""
    sigma = math.sqrt(5 / 36)
    right, wrong = (1 / 6) / sigma, (1 / 6 - 1 / 3) / sigma
    found = compute("pass@2", [1, 0, 0, 1, 0, 0, 1, 0, 0], [4, 4, 4, 4, 5, 5, 5, 6, 6])
    # Group 5: P = 2/3; a wrong answer with the other wrong one fails half the time.
    odd = math.sqrt(2 / 9)
    expected = [right, wrong, wrong, right, (1 / 3 - 1 / 2) / odd, (1 / 3 - 1 / 2) / odd, (1 / 3) / odd, 0, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert compute("pass@4", [1, 0], [0, 0]).tolist() == [0.0, 0.0]  # fewer answers than are drawn
    assert compute("pass@2", [1, 1, 1, 0], [0] * 4).tolist() == [0.0] * 4  # every pair passes: nothing to learn
    with pytest.raises(BadInput, match=r"pass@2: expected rewards of 0 or 1, got 0\.5"):
        compute("pass@2", [0.5, 0.0], [0, 0])


@pytest.mark.parametrize("k", [2, 4])
def test_pass_at_k_is_the_mean_over_every_draw(k):
    """By definition: every k of n answers, each draw paid 1 if one is right; an answer's credit is its draws' mean, centred."""
    for wrong in range(k, 7):
        rewards = np.array([0.0] * wrong + [1.0] * (8 - wrong))
        draws = np.array(list(itertools.combinations(range(8), k)))
        paid = rewards[draws].max(1)
        spread = paid.std()
        means = np.array([(paid[(draws == i).any(1)].mean() - paid.mean()) / spread for i in range(8)])
        np.testing.assert_allclose(compute(f"pass@{k}", rewards, [3] * 8), means, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=30), st.randoms()
)
def test_order_group_names_and_equal_groups(name, rows, random):
    rewards, groups, sizes = (np.array(x) for x in zip(*rows, strict=True))
    rewards = rewards if name not in PASS else (rewards > 5).astype(float)
    found = compute(name, rewards, groups, sizes)
    assert np.isfinite(found).all()
    order = list(range(len(rows)))
    random.shuffle(order)
    again = compute(name, rewards[order], 100 - groups[order], sizes[order])
    np.testing.assert_allclose(again, found[order], rtol=1e-6, atol=1e-9)
    for g in set(groups) if name not in OVER_BATCH else ():
        if len(set(rewards[groups == g])) == 1:
            assert (found[groups == g] == 0).all()


@pytest.mark.parametrize("name", [name for name in BY_GROUP if name not in PASS])
def test_equal_rewards_that_do_not_sum_exactly_give_zero(name):
    """0.1 · 3 / 3 ≠ 0.1 in floating point: the residue must not be divided by a tiny std."""
    assert compute(name, [0.1, 0.1, 0.1, 1.0, 0.0], [0, 0, 0, 1, 1])[:3].tolist() == [0.0, 0.0, 0.0]


def test_names_of_the_config_are_the_estimators():
    names = AdvantageConfig.model_json_schema()["properties"]["name"]["anyOf"]
    assert {value for option in names for value in option.get("enum", ())} == set(ESTIMATORS)


def test_all_wrong_batch_is_zero_under_every_estimator():
    for name in ESTIMATORS:
        assert compute(name, [0.0] * 4, [0, 0, 1, 1]).tolist() == [0.0] * 4


def test_torch_input_and_empty_batch():
    found = compute("grpo", torch.tensor(REWARDS), torch.tensor(GROUPS))
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, EXPECTED["grpo"])
    assert compute("grpo", [], []).shape == (0,)
    assert group_metrics([], []) == {"groups/count": 0.0, "groups/zero_variance": 0.0}


def test_metrics():
    found = group_metrics([1.0, 0.0, 0.5, 0.5, 2.0], [3, 3, 1, 1, 8])
    assert found["groups/count"] == 3
    assert found["groups/zero_variance"] == 2  # group 1, and group 8 with its single member
    assert found["reward/mean"] == pytest.approx(0.8)
    assert found["reward/std"] == pytest.approx(math.sqrt((0.04 + 0.64 + 0.09 + 0.09 + 1.44) / 4))


def test_shuffle_is_a_permutation_keyed_by_seed_and_step():
    values = np.arange(64.0)
    first = shuffle(values, seed=1, step=5)
    assert sorted(first) == sorted(values)
    assert not np.array_equal(first, values)
    assert np.array_equal(first, shuffle(values, seed=1, step=5))
    assert not np.array_equal(first, shuffle(values, seed=1, step=6))
    assert not np.array_equal(first, shuffle(values, seed=2, step=5))


def test_shuffle_severs_credit_from_rollouts():
    values = np.where(np.arange(512) % 2, 1.0, -1.0)
    correlations = [np.corrcoef(values, shuffle(values, seed=0, step=s))[0, 1] for s in range(50)]
    assert abs(np.mean(correlations)) < 0.02  # se 0.0063


def test_refusals():
    with pytest.raises(BadInput, match="did you mean dr_grpo"):
        compute("drgrpo", [1.0], [0])
    with pytest.raises(BadInput, match="one group id per reward"):
        compute("grpo", [1.0, 2.0], [0])
    with pytest.raises(NonFinite, match="rollout 1 of the batch"):
        compute("grpo", [1.0, math.nan], [0, 0])
    with pytest.raises(BadInput, match=r"a length ≥ 1 per reward, got shape \[1\]"):
        compute("opo", [1.0, 2.0], [0, 0], [3])
    with pytest.raises(BadInput, match="rewards ≥ 0"):
        compute("maxrl", [1.0, -1.0], [0, 0])
