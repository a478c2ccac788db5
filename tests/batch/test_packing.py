"""Packing must neither lose, split nor shift a token: an off-by-one here trains every token on its neighbour's log-prob.

Not covered: attention over packed rows (tests/models/test_packed.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollkeel.batch import packing
from rollkeel.batch.packing import Family, families, pack, plan
from rollkeel.errors import BadInput


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 80), st.booleans())
def test_a_plan_is_a_partition_within_the_budget(lengths: list[int], budget: int, padded: bool) -> None:
    batches = plan(lengths, budget, padded=padded)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert sum(lengths[i] for i in batch) <= budget or len(batch) == 1
        assert [lengths[i] for i in batch] == sorted(lengths[i] for i in batch)
    assert batches == plan(lengths, budget, padded=padded)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(60, 200))
def test_a_plan_needs_at_most_twice_the_fewest_batches(lengths: list[int], budget: int) -> None:
    assert len(plan(lengths, budget)) <= 2 * -(-sum(lengths) // budget)


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(60, 200))
def test_no_two_batches_fit_into_one(lengths: list[int], budget: int) -> None:
    sizes = sorted(sum(lengths[i] for i in batch) for batch in plan(lengths, budget))
    assert len(sizes) < 2 or sizes[0] + sizes[1] > budget


def test_best_fit_fills_passes() -> None:
    assert plan([20, 24, 30, 40], 64) == [[0, 2], [1, 3]]  # and not [20, 24], [30], [40]
    assert plan([7, 5, 3, 4, 2], 10) == [[4], [3, 1], [2, 0]]
    assert plan([5, 1, 100, 5, 2], 10) == [[1, 4], [0, 3], [2]]


def test_padded_passes_hold_similar_lengths() -> None:
    assert plan([20, 24, 30, 40], 64, padded=True) == [[0, 1], [2], [3]]
    assert plan([5, 1, 100, 5, 2], 10, padded=True) == [[1, 4, 0], [3], [2]]


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


def test_a_shared_prompt_by_hand() -> None:
    """10 11 12|13 14 and 10 11 12|15 share 10 11; the last prompt token stays with each, as it predicts 13 and 15."""
    sequences = [np.array([10, 11, 12, 13, 14]), np.array([10, 11, 12, 15]), np.array([20, 21])]
    micro = pack([2, Family((0, 1), 2, 7)], sequences, [3, 3, 1], [0, 2, 3])
    assert micro.sequences == (2, 0, 1)
    assert micro.input_ids.tolist() == [20, 21, 10, 11, 12, 13, 14, 12, 15]
    assert micro.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 4, 2, 3]
    assert micro.cu_seqlens.tolist() == [0, 2, 4, 7, 9]
    assert micro.parents is not None
    assert micro.parents.tolist() == [-1, -1, 1, 1]
    assert micro.predict_index.tolist() == [0, 4, 5, 7]
    assert micro.targets.tolist() == [21, 13, 14, 15]
    assert micro.indices.tolist() == [3, 0, 1, 2]


def test_families_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SHARED_LEAST", 2)
    one, two = [1, 2, 3], [1, 2, 4]
    sequences = [np.array(s) for s in ([*one, 5, 6], [*two, 5], [*one, 7], [*one, 8, 9, 9, 9], [1, 2])]
    lengths = [3, 3, 3, 3, 1]
    assert families(sequences, lengths, 99) == [
        Family((4,), 0, 2),
        Family((1,), 0, 4),
        Family((2, 0, 3), 2, 2 + 2 + 3 + 5),
    ]
    # 2 shared + 2 + 3 fill a budget of 8; the third would need 5 more.
    assert families(sequences, lengths, 8)[2:] == [Family((2, 0), 2, 7), Family((3,), 0, 7)]
    alone = families(sequences, lengths, 99, share=False)
    assert [f.members for f in alone] == [(4,), (1,), (2,), (0,), (3,)]
    monkeypatch.setattr(packing, "SHARED_LEAST", 3)
    assert families(sequences, lengths, 99) == alone  # two tokens before the last one are too few


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=14), st.integers(1, 60))
def test_families_lose_no_token_and_keep_the_budget(sizes: list[tuple[int, int]], budget: int) -> None:
    prompts = [
        np.arange(100 * p, 100 * p + packing.SHARED_LEAST + p) for p in range(4)
    ]  # the first is one token too short
    sequences = [np.concatenate([prompts[p], 1000 + 50 * i + np.arange(r)]) for i, (p, r) in enumerate(sizes)]
    lengths = [len(prompts[p]) for p, _ in sizes]
    starts = np.concatenate([[0], np.cumsum([r for _, r in sizes])]).tolist()
    made = families(sequences, lengths, budget)
    assert sorted(i for f in made for i in f.members) == list(range(len(sizes)))
    predicted = {}
    for members in plan([f.tokens for f in made], budget):
        micro = pack([made[i] for i in members], sequences, lengths, starts)
        assert len(micro.input_ids) == sum(made[i].tokens for i in members)
        assert len(micro.input_ids) <= budget or len(micro.sequences) == 1
        predicted |= dict(zip(micro.indices.tolist(), micro.targets.tolist(), strict=True))
        rows = np.split(micro.input_ids.numpy(), micro.cu_seqlens[1:-1].tolist())
        parents = micro.parents.tolist() if micro.parents is not None else [-1] * len(rows)
        whole = [np.concatenate([rows[p], row]) if p >= 0 else row for row, p in zip(rows, parents, strict=True)]
        own = [row.tolist() for i, row in enumerate(whole) if i not in parents]
        assert own == [sequences[i].tolist() for i in micro.sequences]
    assert [predicted[i] for i in range(starts[-1])] == np.concatenate(
        [s[n:] for s, n in zip(sequences, lengths, strict=True)]
    ).tolist()


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
