"""Denominators decide what a gradient means; this checks them by hand and that nothing else divides.

Not covered: what objectives do with them (tests/objectives, tests/train).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollkeel.batch.coefficients import coefficients
from rollkeel.errors import BadInput


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("token_mean", [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("sequence_mean", [1 / 2, 1 / 6, 1 / 6, 1 / 6]),
        ("sequence_sum", [1 / 2, 1 / 2, 1 / 2, 1 / 2]),
        ("token_sum", [1.0] * 4),
        ("prompt_mean", [1 / 4] * 4),
        ("constant_length(10)", [1 / 20, 1 / 20, 1 / 20, 1 / 20]),
    ],
)
def test_truth_table_for_one_and_three_tokens(aggregate: str, expected: list[float]) -> None:
    assert coefficients(aggregate, [1, 3]).tolist() == pytest.approx(expected, rel=1e-6)


def test_prompt_mean_gives_every_prompt_the_same() -> None:
    """Groups 7 (1 + 3 tokens) and 2 (2 tokens): each carries a half, by tokens inside."""
    c = coefficients("prompt_mean", [1, 2, 3], [7, 2, 7])
    assert c.tolist() == pytest.approx([1 / 8, 1 / 4, 1 / 4, 1 / 8, 1 / 8, 1 / 8])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_means_sum_to_one(lengths: list[int]) -> None:
    for aggregate in ("token_mean", "sequence_mean", "prompt_mean"):
        c = coefficients(aggregate, lengths)
        assert c.dtype == torch.float32
        assert len(c) == sum(lengths)
        assert c.sum().item() == pytest.approx(1.0, rel=1e-5)
    assert coefficients("sequence_sum", lengths).sum().item() == pytest.approx(sum(lengths) / len(lengths), rel=1e-5)


@pytest.mark.parametrize("aggregate", ["mean", "constant_length", "constant_length(0)", "constant_length(-3)", ""])
def test_unknown_aggregates_are_refused(aggregate: str) -> None:
    with pytest.raises(BadInput, match="expected one of token_mean"):
        coefficients(aggregate, [1, 2])


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_empty_sequences_are_refused(lengths: list[int]) -> None:
    with pytest.raises(BadInput, match="at least one response token"):
        coefficients("token_mean", lengths)
