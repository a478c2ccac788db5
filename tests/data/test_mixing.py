"""Stated proportions are a promise to the row: rounding must neither lose rows nor give a domain more than it has.

Not covered: that the choice within a domain is representative (it is by a hash of the content).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollkeel.data.mixing import apportion, copies, plan
from rollkeel.errors import BadInput

SHARES = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 100).map(lambda n: n / 7), min_size=1)


def test_largest_remainder_by_hand() -> None:
    paper = {"math": 0.46, "stem": 0.26, "code": 0.20, "other": 0.08}
    assert apportion(100, paper) == {"math": 46, "stem": 26, "code": 20, "other": 8}
    assert apportion(7, paper) == {"math": 3, "stem": 2, "code": 1, "other": 1}  # 3.22, 1.82, 1.4, 0.56
    assert apportion(2, {"a": 1, "b": 1, "c": 1}) == {"a": 1, "b": 1, "c": 0}


@given(st.integers(0, 10_000), SHARES)
def test_apportioning_loses_nothing_and_keeps_the_quota(total: int, shares: dict[str, float]) -> None:
    counts = apportion(total, shares)
    assert sum(counts.values()) == total
    whole = sum(shares.values())
    assert all(abs(counts[name] - total * share / whole) < 1 + 1e-6 for name, share in shares.items())


@settings(deadline=None)
@example({"a": 1 / 7, "b": 6 / 7, "c": 11 / 7}, 212)  # the largest is far above the first total that does not fit
@given(SHARES, st.integers(0, 2**32))
def test_the_largest_mixture_is_the_largest(shares: dict[str, float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    available = {name: int(rng.integers(1, 60)) for name in shares}
    found = plan(available, shares, None, False)
    assert all(found.counts[name] <= available[name] for name in shares)
    total, most = sum(found.counts.values()), sum(available.values())
    for larger in range(total + 1, most + 1):
        assert any(n > available[name] for name, n in apportion(larger, shares).items())
    assert found.limiting


def test_rows_and_repeats() -> None:
    available, shares = {"a": 10, "b": 3}, {"a": 0.5, "b": 0.5}
    assert plan(available, shares, None, False).counts == {"a": 4, "b": 3}  # 3.5 each, and the tie is the first one's
    assert plan(available, shares, 4, False).limiting == ()
    assert plan(available, shares, 16, True).counts == {"a": 8, "b": 8}
    assert plan(available, shares, 16, True).limiting == ("b",)
    with pytest.raises(BadInput, match="domain 'b' has 3 of the 8 rows it takes"):
        plan(available, shares, 16, False)
    with pytest.raises(BadInput, match="no row of domain 'c' is left; domains with rows: 'a', 'b'"):
        plan(available, {"c": 1.0}, None, False)


def test_copies_are_the_same_rows_again_for_the_same_seed() -> None:
    domains, keys = np.array([0, 1, 0, 0, 1]), np.arange(5, dtype=np.uint64)
    taken = copies(domains, keys, {0: 2, 1: 5}, 0)
    assert taken[domains == 0].sum() == 2
    assert sorted(taken[domains == 1].tolist()) == [2, 3]
    assert (copies(domains, keys, {0: 2, 1: 5}, 0) == taken).all()
    assert len({tuple(copies(domains, keys, {0: 1, 1: 0}, seed).tolist()) for seed in range(20)}) == 3
    moved = copies(domains[::-1].copy(), keys[::-1].copy(), {0: 2, 1: 5}, 0)  # a matter of content, not of place
    assert (moved[::-1] == taken).all()
