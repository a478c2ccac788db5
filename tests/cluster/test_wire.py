"""A batch must arrive at the ranks as it was: one wrong number per token would be trained on, silently.

Not covered: what Ray does with the bytes.
"""

from __future__ import annotations

import pickle
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rollkeel.batch.build import TrainingBatch
from rollkeel.cluster import wire
from tests.train.mesh_ranks import LENGTHS, Case, batch


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("part", [False, True])
def test_every_field_of_a_batch_arrives(experts: bool, part: bool) -> None:
    sent = batch(3, Case(replay=experts))
    if part:  # views of a larger batch, which must not bring it along
        sent = sent.parts([[0.5] * 4, [0.25] * (len(LENGTHS) - 4)], "sequence_mean")[1]
    got = wire.batch_in(pickle.loads(pickle.dumps(wire.batch_out(sent))))
    assert [f.name for f in fields(TrainingBatch) if not same(getattr(sent, f.name), getattr(got, f.name))] == []


def test_a_token_takes_few_bytes() -> None:
    sent = batch(3, Case())
    assert wire.size_of(wire.batch_out(sent)) < 16 * len(sent) + 32 * len(LENGTHS)


numbers = st.one_of(
    arrays.arrays(np.int64, arrays.array_shapes(max_dims=2), elements=st.integers(-(2**63), 2**63 - 1)),
    arrays.arrays(np.int64, arrays.array_shapes(max_dims=2), elements=st.integers(0, 3)),
    arrays.arrays(np.float32, arrays.array_shapes(max_dims=2), elements=st.floats(width=32)),
    arrays.arrays(np.bool_, 5),
    arrays.arrays(np.int16, (2, 3)),
)


@given(numbers)
def test_every_bit_arrives(array: np.ndarray) -> None:
    got = wire.unpacked(pickle.loads(pickle.dumps(wire.packed(array))))
    assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert got.flags.writeable


def test_runs_and_constants_take_next_to_nothing() -> None:
    assert wire.size_of(wire.packed(np.arange(10_000))) < 20
    assert wire.size_of(wire.packed(np.full(10_000, 1.5, np.float32))) < 20
