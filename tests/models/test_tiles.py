"""The compiled engine multiplies with its own vector code: an element too few, or a lane of a neighbour, is another model.

Against float64 at every rest of rows, columns and width; to the bit where other elements must not matter; nothing written beside.
Tiles of attention are in test_packed_attention.py, whose slow test runs this file with vectors of eight floats.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from test_compiled import model

from rollkeel.config import EngineConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.models import jit, tiles
from rollkeel.models.names import checkpoint_views
from rollkeel.sync.publish import DirectPublisher
from rollkeel.types import Request, SamplingParams

pytestmark = pytest.mark.skipif(not jit.FOUND, reason="needs numba")
WIDTHS = (1, 7, 8, 9, 15, 16, 17, 31, 32, 40, 130)


@pytest.fixture(scope="module")
def dots() -> Any:
    return jit.njit(**jit.OPTIONS)(lambda a, b, out, fresh: tiles.dots(a, b, out, fresh))


@pytest.fixture(scope="module")
def mixed() -> Any:
    def call(weights: Any, values: Any, out: Any, fresh: int) -> None:
        tiles.mix(weights.ctypes.data, values.ctypes.data, len(values), values.shape[1], out.ctypes.data, fresh)

    return jit.njit(**jit.OPTIONS)(call)


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("width", WIDTHS)
def test_products_of_every_shape(dots: Any, width: int) -> None:
    for rows, columns in itertools.product((1, 2, 3, 4, 5, 8, 11), (1, 3, 4, 5, 6, 7, 8, 19)):
        a, b, c = drawn(rows, width), drawn(columns, width), drawn(rows + 2, columns)
        exact = a.astype(float) @ b.T.astype(float)
        for fresh in (0, 1):
            out = c.copy()
            dots(a, b, out[1:-1], fresh)
            wanted = exact + (0 if fresh else c[1:-1])
            np.testing.assert_allclose(out[1:-1], wanted, rtol=2e-6, atol=2e-6 * width**0.5)
            assert np.array_equal(out[[0, -1]], c[[0, -1]])  # nothing beside


@pytest.mark.parametrize("width", WIDTHS)
def test_an_element_has_the_same_bits_alone(dots: Any, width: int) -> None:
    a, b, out = drawn(11, width), drawn(19, width), np.empty((11, 19), np.float32)
    dots(a, b, out, 1)
    for rows, columns in ((1, 19), (4, 8), (7, 6)):
        part = np.empty((rows, columns), np.float32)
        dots(a[:rows], b[:columns], part, 1)
        assert np.array_equal(part, out[:rows, :columns])


def test_what_is_no_number_stays_in_its_elements(dots: Any) -> None:
    a, b, out = drawn(5, 20), drawn(9, 20), np.empty((5, 9), np.float32)
    a[2, 18], b[7, 1] = np.nan, np.inf
    dots(a, b, out, 1)
    assert np.array_equal(np.isfinite(out), np.outer(np.isfinite(a).all(1), np.isfinite(b).all(1)))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 3, 16])
def test_mixtures_of_rows(mixed: Any, width: int, count: int) -> None:
    weights, values, c = drawn(count), drawn(count, width), drawn(width + 2)
    for fresh in (0, 1):
        out = c.copy()
        mixed(weights, values, out[1:-1], fresh)
        exact = weights.astype(float) @ values.astype(float) + (0 if fresh else c[1:-1])
        np.testing.assert_allclose(out[1:-1], exact, atol=1e-6 * count)
        assert np.array_equal(out[[0, -1]], c[[0, -1]])


@pytest.mark.parametrize("name", ["qwen2", "small-qwen3-moe"])
def test_a_request_has_the_same_bits_in_every_batch(name: str) -> None:
    """Though its prefill, its decode steps and its experts' rows are others' too."""
    net, found = model(name), []
    for slots in (1, 5, 12):
        engine = LocalEngine(net.config, EngineConfig(forward="compiled", slots=slots), max_length=64)
        DirectPublisher([engine]).publish(checkpoint_views(net).items(), 1)  # type: ignore[arg-type]
        rng = np.random.default_rng(0)
        requests = [
            Request(
                id=i, prompt_ids=rng.integers(0, 96, 2 + 3 * (i % 4)), sampling=SamplingParams(max_new_tokens=4 + i)
            )
            for i in range(12)
        ]
        engine.submit(requests)
        done = []
        while part := engine.poll(30):
            done += part
        found.append([s.span for s in sorted(done, key=lambda s: s.request_id)])
    for alone, *others in zip(*found, strict=True):
        for other in others:
            assert np.array_equal(alone.token_ids, other.token_ids)
            assert np.array_equal(alone.logprobs, other.logprobs)
