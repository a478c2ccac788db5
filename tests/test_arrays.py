"""Numbers that cross processes must arrive as they were: one wrong bit of a log-prob or an id would be trained on, silently.

Not covered: what carries the bytes.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rollkeel import arrays as packing
from rollkeel.arrays import packed, unpacked

numbers = st.one_of(
    arrays.arrays(np.int64, arrays.array_shapes(max_dims=2), elements=st.integers(-(2**63), 2**63 - 1)),
    arrays.arrays(np.int64, arrays.array_shapes(max_dims=2, max_side=40), elements=st.integers(-1, 3)),
    arrays.arrays(np.int32, 7, elements=st.integers(-(2**31), 2**31 - 1)),
    arrays.arrays(np.float32, arrays.array_shapes(max_dims=2), elements=st.floats(width=32)),
    arrays.arrays(np.float64, 3, elements=st.floats()),
    arrays.arrays(np.bool_, st.integers(0, 20)),
    arrays.arrays(np.int16, (2, 3)),
    arrays.arrays(np.uint8, st.integers(0, 20)),
)


def carried(array: np.ndarray) -> np.ndarray:
    return unpacked(pickle.loads(pickle.dumps(packed(array))))


@given(numbers)
def test_every_bit_arrives(array: np.ndarray) -> None:
    got = carried(array)
    assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert got.flags.writeable


@pytest.mark.parametrize("dtype", [np.int16, np.int64, np.float32])
def test_every_bit_of_many_numbers_arrives(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "FEW", 8)
    for array in (np.arange(-9, 30).astype(dtype), np.array([3, 300, -3, 9] * 9, dtype), np.full(99, 7, dtype)):
        got = carried(array)
        assert (got.dtype, got.tobytes()) == (array.dtype, array.tobytes())


def test_views_of_other_orders_arrive() -> None:
    array = np.arange(24, dtype=np.int16).reshape(4, 6).T[::2]
    assert np.array_equal(carried(array), array)


@pytest.mark.parametrize(
    ("array", "most"),
    [
        (np.arange(10_000), 0),
        (np.full(10_000, 1.5, np.float32), 0),
        (np.repeat(np.arange(100), 100), 200),  # a length and a step for each
        (np.random.default_rng(0).integers(0, 264, 10_000), 10_000 * 9 / 8),  # nine bits tell 264 ids apart
        (np.random.default_rng(0).integers(0, 32, (625, 4, 4)).astype(np.int16), 10_000 * 5 / 8),
        (np.random.default_rng(0).random(10_000) < 0.5, 10_000 / 8),
        (np.random.default_rng(0).normal(size=10_000).astype(np.float32), 40_000),
    ],
)
def test_an_array_takes_its_information_and_few_bytes_more(array: np.ndarray, most: float) -> None:
    assert len(pickle.dumps(packed(array))) < most + 100
