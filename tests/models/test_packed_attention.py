"""Attention is half of what a policy is: a mask that is off by one, or a neighbour's key, trains on garbage without any error.

Against float64 of each sequence alone, values and gradients; to the bit where batch, threads and memory must not matter. Tiles of
processors without AVX-512 are tested on one that has it. Not covered: torch's attention, which takes over elsewhere (test_packed.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from rollkeel.models import jit, packed_attention, tiles
from rollkeel.models.layout import Layout
from rollkeel.models.packed_attention import attend
from tests.models.narrow import passes

pytestmark = pytest.mark.skipif(not jit.FOUND, reason="needs numba")
Tensors = tuple[torch.Tensor, ...]
CPU = torch.device("cpu")


def drawn(tokens: int, heads: int, kv_heads: int, width: int, scale: float = 1.0) -> Tensors:
    """q, k, v and the gradient of what comes out."""
    made = torch.Generator().manual_seed(tokens + width)
    counts = (heads, kv_heads, kv_heads, heads)
    q, k, v, g = (torch.randn(tokens, n, width, generator=made) * scale for n in counts)
    return q, k, v, g.flatten(1)


def expected(tensors: Tensors, spans: torch.Tensor) -> Tensors:
    """Result and gradients in float64, one sequence after the other."""
    q, k, v = (x.double().requires_grad_() for x in tensors[:3])
    group, parts = q.shape[1] // k.shape[1], []
    for first, end, prefix, prefix_end in spans.tolist():
        keys, values = (torch.cat([x[prefix:prefix_end], x[first:end]]).repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[first:end], keys) / math.sqrt(q.shape[-1])
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(prefix_end - prefix)
        parts.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values))
    out = torch.cat(parts).flatten(1)
    out.backward(tensors[3].double())
    return out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)


def found(tensors: Tensors, spans: torch.Tensor) -> Tensors:
    q, k, v = (x.detach().clone().requires_grad_() for x in tensors[:3])
    out = attend(q, k, v, spans)
    out.backward(tensors[3])
    return out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)


def same(ours: Tensors, theirs: Tensors) -> bool:
    return len(ours) == len(theirs) == 4 and all(map(torch.equal, ours, theirs))


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody has written is not a number."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("width", [16, 20, 32, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(
    ("lengths", "parents"),
    [
        ([1], None),
        ([31, 1, 32, 33, 65], None),
        ([13, 5, 33, 1, 70, 9], [-1, 0, -1, 2, 2, -1]),
        ([40, 7, 96], [-1, 0, 0]),
    ],
)
def test_values_and_gradients(
    lengths: Sequence[int], parents: Sequence[int] | None, heads: int, kv_heads: int, width: int
) -> None:
    spans = Layout.build(lengths, CPU, parents).spans
    tensors = drawn(sum(lengths), heads, kv_heads, width)
    with poisoned():
        ours = found(tensors, spans)
    for one, other in zip(ours, expected(tensors, spans), strict=True):
        assert torch.allclose(one.double(), other, rtol=0, atol=2e-6 * float(other.abs().max()))


def test_sharp_scores_keep_their_largest() -> None:
    """Scores in the hundreds, whose exponentials are no float32 unless the largest is taken off first; hidden keys have larger ones."""
    spans = Layout.build([70, 40], CPU).spans
    q, k, v, g = drawn(110, 2, 2, 32, 12.0)
    k[60:70] *= 40
    ours = found((q, k, v, g), spans)
    assert all(torch.isfinite(x).all() for x in ours)
    reference = expected((q, k, v, g), spans)
    assert torch.allclose(ours[0].double(), reference[0], rtol=0, atol=1e-3 * float(reference[0].abs().max()))


def test_a_sequence_alone_has_the_bits_that_it_has_among_others() -> None:
    lengths, parents = [37, 64, 5, 100, 1], [-1, 0, -1, 2, 2]
    spans = Layout.build(lengths, CPU, parents).spans
    tensors = drawn(sum(lengths), 4, 2, 32)
    together = attend(*tensors[:3], spans)
    starts = list(itertools.accumulate(lengths, initial=0))
    for part, parent in enumerate(parents):
        own = list(range(starts[part], starts[part + 1]))
        before = list(range(starts[parent], starts[parent + 1])) if parent >= 0 else []
        q, k, v = (x[before + own] for x in tensors[:3])
        some = [len(before), len(own)] if before else [len(own)]
        alone = attend(q, k, v, Layout.build(some, CPU, [-1, 0][: len(some)]).spans)
        assert torch.equal(alone[len(before) :], together[own])


def test_a_prompt_is_read_the_same_shared_or_not() -> None:
    """Queries behind a prefix have the bits of a sequence that is prompt and answer in one; its gradient is their sum."""
    q, k, v, g = drawn(60, 4, 2, 32)
    out, dq, dk, _ = found((q, k, v, g), Layout.build([20, 40], CPU, [-1, 0]).spans)
    whole = found((q, k, v, g), Layout.build([60], CPU).spans)
    assert torch.equal(out, whole[0])
    assert torch.allclose(dq, whole[1], atol=1e-6)
    assert torch.allclose(dk, whole[2], atol=1e-6)


def test_threads_and_strides_change_no_bit() -> None:
    lengths = [37, 64, 5]
    spans = Layout.build(lengths, CPU, [-1, 0, -1]).spans
    q, k, v, g = drawn(sum(lengths), 8, 4, 32)
    one = found((q, k, v, g), spans)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert same(found((q, k, v, g), spans), one)
    finally:
        torch.set_num_threads(before)
    laid = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    assert not laid[0].is_contiguous()
    assert same(found((*laid, g), spans), one)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_shows_where_it_is_seen_and_nowhere_else(value: float) -> None:
    spans = Layout.build([50, 50], CPU).spans
    for place in range(3):
        tensors = [x.clone() for x in drawn(100, 2, 1, 32)]
        tensors[place][20, 0, 0] = value
        out = attend(*tensors[:3], spans)
        assert not torch.isfinite(out[20]).all()
        assert torch.isfinite(out[50:]).all()
    tensors = [x.clone() for x in drawn(100, 2, 1, 32)]
    tensors[1][20] = value
    assert not torch.isfinite(attend(*tensors[:3], spans)[21:50]).all(1).any()


def test_what_it_does_not_compute_is_left_to_torch() -> None:
    q, k, v, _ = drawn(4, 2, 2, 16)
    assert packed_attention.suits(q, k, v)
    assert not packed_attention.suits(q.double(), k.double(), v.double())
    assert not packed_attention.suits(q, k, v[..., :8])
    assert not packed_attention.suits(*(x.to("meta") for x in (q, k, v)))


@pytest.mark.parametrize("seed", range(5))
def test_tiles_multiply(seed: int) -> None:
    """Odd numbers of steps, transposed factors, sums that go on."""
    draw = np.random.default_rng(seed)
    rows, steps = tiles.ROWS * int(draw.integers(1, 6)), int(draw.integers(1, 70))
    columns = tiles.COLUMNS * int(draw.integers(1, 4))
    a, b = (draw.standard_normal(shape, dtype=np.float32) for shape in ((rows, steps), (steps, columns)))
    c = draw.standard_normal((rows, columns), dtype=np.float32)
    product = jit.njit(lambda *all_of: tiles.product(*all_of))
    for factor, strides in ((a, (steps, 1)), (np.ascontiguousarray(a.T), (1, rows))):
        out = np.full_like(c, np.nan)
        product(factor, *strides, b, out, rows, steps, 1)
        exact = a.astype(np.float64) @ b
        np.testing.assert_allclose(out, exact, atol=1e-5 * steps**0.5)
        out = c.copy()
        product(factor, *strides, b, out, rows, steps, 0)
        np.testing.assert_allclose(out, c + exact, atol=1e-5 * steps**0.5)


def test_a_changed_helper_is_compiled_anew() -> None:
    """Numba looks at the file of a kernel alone: code that it takes from other files would stay as it was."""
    index = packed_attention.kernels_attention.attend._cache._cache_file
    assert jit._STATE in index._source_stamp
    assert {"jit.py", "tiles.py", "vectors.py"} <= set(jit.HELPERS)


@pytest.mark.slow
def test_smaller_vectors_compute_the_same(tmp_path: Path) -> None:
    passes(tmp_path, __file__, Path(__file__).with_name("test_tiles.py"))
