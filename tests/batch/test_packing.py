"""Packing must neither lose, split nor shift a token: an off-by-one here trains every token on its neighbour's log-prob.

Not covered: attention over packed rows (tests/models/test_packed.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollkeel.batch.packing import pack, plan
from rollkeel.errors import BadInput


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 80))
def test_a_plan_is_a_partition_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = plan(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert sum(lengths[i] for i in batch) <= budget or len(batch) == 1
    assert batches == plan(lengths, budget)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(60, 200))
def test_a_plan_needs_at_most_twice_the_fewest_batches(lengths: list[int], budget: int) -> None:
    assert len(plan(lengths, budget)) <= 2 * -(-sum(lengths) // budget)


def test_similar_lengths_share_a_batch_and_a_long_sequence_is_alone() -> None:
    assert plan([5, 1, 100, 5, 2], 10) == [[1, 4, 0], [3], [2]]


@pytest.mark.parametrize(("lengths", "budget"), [([3], 0), ([0, 2], 4)])
def test_impossible_plans_are_refused(lengths: list[int], budget: int) -> None:
    with pytest.raises(BadInput, match="packing"):
        plan(lengths, budget)


def test_pack_by_hand() -> None:
    """Two sequences, prompt|response: 10 11|12 13 and 20|21; packed in reverse order."""
    micro = pack([1, 0], [np.array([10, 11, 12, 13]), np.array([20, 21])], [2, 1], [0, 2])
    assert micro.sequences == (1, 0)
    assert micro.input_ids.tolist() == [20, 21, 10, 11, 12, 13]
    assert micro.position_ids.tolist() == [0, 1, 0, 1, 2, 3]
    assert micro.cu_seqlens.tolist() == [0, 2, 6]
    assert micro.predict_index.tolist() == [0, 3, 4]
    assert micro.targets.tolist() == [21, 12, 13]
    assert micro.indices.tolist() == [2, 0, 1]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12), st.integers(1, 40))
def test_every_response_token_is_predicted_once_from_the_token_before_it(
    sizes: list[tuple[int, int]], budget: int
) -> None:
    sequences, start = [], 0
    for p, r in sizes:
        sequences.append(np.arange(start, start + p + r))  # all ids distinct, so places can be read off the ids
        start += p + r
    starts = np.concatenate([[0], np.cumsum([r for _, r in sizes])])
    seen = {}
    for members in plan([p + r for p, r in sizes], budget):
        micro = pack(members, sequences, [p for p, _ in sizes], starts.tolist())
        assert (micro.input_ids[micro.predict_index] + 1).tolist() == micro.targets.tolist()
        for index, target in zip(micro.indices.tolist(), micro.targets.tolist(), strict=True):
            assert index not in seen
            seen[index] = target
    flat = np.concatenate([s[p:] for s, (p, _) in zip(sequences, sizes, strict=True)])
    assert [seen[i] for i in range(len(flat))] == flat.tolist()
