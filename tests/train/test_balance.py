"""Micro-batches are dealt by what they cost, not by their tokens.

Matters because ranks wait for the slowest: attention over one long sequence takes longer than over many short ones of as many tokens. Does not
cover seconds, which depend on the machine.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollkeel.batch.packing import Family, MicroBatch, pack, plan
from rollkeel.models.presets import build_preset
from rollkeel.train.balance import cost, pair_cost, shares


def rows(lengths: list[int], most: int) -> list[MicroBatch]:
    sequences, starts = [np.zeros(n, np.int64) for n in lengths], np.cumsum([0, *lengths]).tolist()
    return [pack(members, sequences, [1] * len(lengths), starts) for members in plan(lengths, most)]


def spread(dealt: list[list[MicroBatch]], pair: float) -> float:
    """How much longer the slowest takes than all would on average."""
    loads = [sum(cost(micro, pair) for micro in share) for share in dealt]
    return max(loads) / (sum(loads) / len(loads)) - 1


def test_cost_counts_tokens_and_what_they_look_at() -> None:
    lone = rows([3, 2], 5)[0]
    assert cost(lone, 0.0) == 5
    assert cost(lone, 10.0) == 5 + 10 * (3 + 6)
    sequences = [np.arange(6), np.array([0, 1, 2, 3, 9])]
    shared = pack([Family((0, 1), 3, 8)], sequences, [4, 4], [0, 2])
    assert shared.cu_seqlens.tolist() == [0, 3, 6, 8]
    assert cost(shared, 1.0) == 8 + (6 + (6 + 3 * 3) + (3 + 2 * 3))


def test_pairs_are_counted_in_tokens_through_all_matrices() -> None:
    dense, mixture = build_preset("tiny-qwen3")[0], build_preset("tiny-qwen3-moe")[0]
    attention, head = 64 * 128 + 2 * 64 * 64 + 128 * 64, 288 * 64
    assert pair_cost(dense) == pytest.approx(2 * 2 * 4 * 32 / (2 * (attention + 3 * 64 * 192) + head))
    met = 2 * 3 * 64 * 32 + 8 * 64  # two of eight experts, and the router
    assert pair_cost(mixture) == pytest.approx(2 * 2 * 4 * 32 / (2 * (attention + met) + head))
    assert pair_cost(build_preset("tiny-qwen3-tied")[0]) == pair_cost(dense)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_long_tails_are_spread_better_than_by_tokens(workers: int) -> None:
    pair, before, after = 1 / 3000, [], []
    for seed in range(10):
        lengths = np.random.default_rng(seed).lognormal(6, 1, 256).clip(16, 8192).astype(int).tolist()
        micros = rows(lengths, 8192)
        before.append(spread(shares(micros, workers), pair))
        after.append(spread(shares(micros, workers, pair), pair))
    assert np.mean(after) < 0.6 * np.mean(before)
    assert np.max(after) < np.max(before)


def test_nothing_is_lost_or_doubled() -> None:
    micros = rows([5, 900, 7, 30, 30, 400, 2], 900)
    dealt = shares(micros, 3, 0.01)
    assert sorted(i for share in dealt for m in share for i in m.sequences) == list(range(7))
    assert shares(micros, 3, 0.01)[0][0] is dealt[0][0]
    assert torch.equal(dealt[0][0].input_ids, next(m for m in micros if 1 in m.sequences).input_ids)
