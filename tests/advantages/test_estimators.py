"""Credit per rollout, against numbers worked out by hand; equal groups must teach exactly nothing.

Covers every estimator, group metrics and the shuffled control; not how credit is spread over tokens (batch/).
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkeel.advantages import EPSILON, ESTIMATORS, compute, group_metrics, shuffle
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
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_by_hand(name):
    np.testing.assert_allclose(compute(name, REWARDS, GROUPS), EXPECTED[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 4)), min_size=1, max_size=30), st.randoms())
def test_order_group_names_and_equal_groups(name, rows, random):
    rewards, groups = np.array([r for r, _ in rows]), np.array([g for _, g in rows])
    found = compute(name, rewards, groups)
    assert np.isfinite(found).all()
    order = list(range(len(rows)))
    random.shuffle(order)
    np.testing.assert_allclose(compute(name, rewards[order], 100 - groups[order]), found[order], rtol=1e-6, atol=1e-9)
    for g in set(groups):
        if len(set(rewards[groups == g])) == 1:
            assert (found[groups == g] == 0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_rewards_that_do_not_sum_exactly_give_zero(name):
    """0.1 · 3 / 3 ≠ 0.1 in floating point: the residue must not be divided by a tiny std."""
    assert compute(name, [0.1, 0.1, 0.1, 1.0, 0.0], [0, 0, 0, 1, 1])[:3].tolist() == [0.0, 0.0, 0.0]


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
    with pytest.raises(BadInput, match="rewards ≥ 0"):
        compute("maxrl", [1.0, -1.0], [0, 0])
