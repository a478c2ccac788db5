"""What is recorded about a draw must be the truth about the distribution it came from; ratios are built on it.

Truth tables by hand, empirical frequencies over many draws, and the edges of the uniform number. Not covered: speed, CUDA.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkeel.engines.sampling import Sampled, SamplingRows, sample

P = [0.5, 0.25, 0.15, 0.08, 0.02]
ALMOST_ONE = 1 - 2**-53


def rows_of(
    count: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> SamplingRows:
    return SamplingRows(
        temperature=torch.full((count,), temperature),
        top_p=torch.full((count,), top_p),
        top_k=torch.full((count,), top_k),
        min_p=torch.full((count,), min_p),
        truncated=temperature == 0 or top_p < 1 or top_k > 0 or min_p > 0,
        tempered=temperature != 1,
    )


def draw(probs: list[float], uniform: list[float], **params: Any) -> Sampled:
    logits = torch.tensor(probs).log().expand(len(uniform), -1).clone()
    return sample(logits, rows_of(len(uniform), **params), torch.tensor(uniform, dtype=torch.float64))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.3}, [0]),  # the token that crosses the mass is kept
        ({"top_p": 0.6}, [0, 1]),
        ({"top_p": 0.76}, [0, 1, 2]),
        ({"top_p": 0.97}, [0, 1, 2, 3]),
        ({"top_p": 1e-6}, [0]),
        ({"min_p": 0.29}, [0, 1, 2]),  # 0.15 / 0.5 = 0.3
        ({"min_p": 0.31}, [0, 1]),
        ({"min_p": 0.999}, [0]),
        ({"top_k": 2, "top_p": 0.6}, [0]),  # of the 0.75 that top-k leaves, the first has 0.67
        ({"top_k": 2, "top_p": 0.7}, [0, 1]),
        ({"top_k": 4, "top_p": 0.95, "min_p": 0.2}, [0, 1, 2]),
    ],
)
def test_truncation_keeps_the_set_renormalises_and_reports_the_mass(params: dict[str, Any], kept: list[int]) -> None:
    order = [3, 0, 4, 1, 2]  # the vocabulary is not sorted by probability
    probs = [0.0] * 5
    for rank, token in enumerate(order):
        probs[token] = P[rank]
    mass = sum(P[r] for r in kept)
    grid = [i / 400 for i in range(400)] + [ALMOST_ONE]
    out = draw(probs, grid, **params)
    assert set(out.ids.tolist()) == {order[r] for r in kept}
    distribution = out.scores.log_softmax(-1)[0].exp()
    for rank, token in enumerate(order):
        expected = P[rank] / mass if rank in kept else 0.0
        assert distribution[token].item() == pytest.approx(expected, abs=1e-6)
    want = torch.tensor([math.log(probs[i] / mass) for i in out.ids.tolist()])
    torch.testing.assert_close(out.logprobs, want, atol=1e-6, rtol=0)
    torch.testing.assert_close(out.kept_mass, torch.full((len(grid),), mass), atol=1e-6, rtol=0)


def test_temperature_divides_logits_before_anything_is_cut() -> None:
    squared = [p * p for p in P]  # temperature 1/2
    total = sum(squared)
    out = draw(P, [0.0, 0.999], temperature=0.5)
    assert out.logprobs[0].item() == pytest.approx(math.log(squared[0] / total), abs=1e-6)
    # Untempered, top-p 0.7 keeps two tokens; tempered, the first alone has 0.735.
    out = draw(P, [ALMOST_ONE], temperature=0.5, top_p=0.7)
    assert out.ids.tolist() == [0]
    assert out.kept_mass.item() == pytest.approx(squared[0] / total, abs=1e-6)


@pytest.mark.parametrize("u", [0.0, 0.3, ALMOST_ONE])
def test_greedy_is_a_kept_set_of_one(u: float) -> None:
    out = draw([0.2, 0.5, 0.3], [u], temperature=0.0)
    assert out.ids.tolist() == [1]
    assert out.logprobs.item() == pytest.approx(0.0, abs=2e-7)
    assert out.logprobs.item() <= 0.0
    assert out.kept_mass.item() == pytest.approx(0.5, abs=1e-6)
    tie = draw([0.25, 0.25, 0.25, 0.25], [u], temperature=0.0)
    assert tie.ids.tolist() == [0]
    assert tie.kept_mass.item() == pytest.approx(0.25, abs=1e-6)


def test_untruncated_rows_are_unchanged_by_truncated_neighbours() -> None:
    """The same request must draw the same bits whether or not its batch needs the slow path."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * 3
    u = torch.linspace(0.01, 0.97, 6, dtype=torch.float64)
    plain = sample(logits.clone(), rows_of(6), u)
    mixed = SamplingRows(
        temperature=torch.tensor([1.0, 0.0, 1.0, 0.7, 1.0, 1.0]),
        top_p=torch.tensor([1.0, 1.0, 0.5, 1.0, 1.0, 1.0]),
        top_k=torch.tensor([0, 0, 0, 0, 3, 0]),
        min_p=torch.zeros(6),
        truncated=True,
        tempered=True,
    )
    beside = sample(logits.clone(), mixed, u)
    for row in (0, 5):
        assert beside.ids[row] == plain.ids[row]
        assert beside.logprobs[row].item() == pytest.approx(plain.logprobs[row].item(), abs=1e-6)
        assert beside.kept_mass[row] == 1.0


def test_edges_of_the_uniform_number_never_select_probability_zero() -> None:
    edges = [0.0, 2**-53, 0.5, 1 - 2**-24, 1 - 2**-30, ALMOST_ONE]
    for zeros_in_front, zeros_behind in ((0, 3), (3, 0), (2, 2)):
        probs = [0.0] * zeros_in_front + [0.7, 0.0, 0.3] + [0.0] * zeros_behind
        out = draw(probs, edges)
        assert all(probs[i] > 0 for i in out.ids.tolist())
        assert torch.isfinite(out.logprobs).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.1, 1.0, 5.0, 30.0]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    min_p=st.sampled_from([0.0, 0.1, 0.9]),
)
def test_any_draw_is_finite_in_the_kept_set_and_consistent(
    seed: int, scale: float, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, 40, generator=generator) * scale
    u = torch.rand(8, generator=generator, dtype=torch.float64)
    u[0], u[1] = 0.0, ALMOST_ONE
    out = sample(logits.clone(), rows_of(8, temperature, top_p, top_k, min_p), u)
    assert torch.isfinite(out.logprobs).all()
    assert (out.logprobs <= 0).all()
    assert ((out.kept_mass > 0) & (out.kept_mass <= 1)).all()
    drawn = out.scores.log_softmax(-1).gather(1, out.ids[:, None])[:, 0]
    # A draw of 0.0 takes the first possible token, however unlikely: a subnormal probability has few digits left.
    normal = drawn > np.log(np.finfo(np.float32).tiny)
    torch.testing.assert_close(out.logprobs[normal], drawn[normal], atol=2e-5, rtol=0)
    torch.testing.assert_close(out.logprobs, drawn, atol=0.5, rtol=0)
    full = (logits / (temperature or 1.0)).log_softmax(-1)
    lifted = out.logprobs + out.kept_mass.log()  # back to the untruncated distribution
    expected = full.gather(1, out.ids[:, None])[:, 0]
    torch.testing.assert_close(lifted[normal], expected[normal], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_empirical_frequencies_are_the_reported_probabilities(params: dict[str, Any]) -> None:
    """Chi-square over 200,000 stratified-free draws against what the log-probs claim; p-value above 1e-4."""
    draws, probs = 200_000, [0.3, 0.01, 0.22, 0.05, 0.17, 0.002, 0.128, 0.12]
    u = torch.rand(draws, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    logits = torch.tensor(probs).log()
    out = sample(logits.expand(draws, -1).clone(), rows_of(draws, **params), u)
    claimed = out.scores[0].log_softmax(-1).exp().double()
    counts = torch.bincount(out.ids, minlength=len(probs)).double()
    live = claimed > 0
    assert counts[~live].sum() == 0
    chi2 = ((counts - draws * claimed)[live] ** 2 / (draws * claimed[live])).sum()
    freedom = int(live.sum()) - 1
    p_value = 1 - torch.special.gammainc(torch.tensor(freedom / 2.0).double(), chi2 / 2).item()
    assert p_value > 1e-4


def test_large_vocabulary_draws_the_token_of_its_interval() -> None:
    """At 100,000 equal tokens, rounding of the running sum must not move a draw by more than a few tokens."""
    size = 100_000
    u = torch.tensor([0.0, 0.25, 0.5, 0.75, ALMOST_ONE], dtype=torch.float64)
    out = sample(torch.zeros(5, size), rows_of(5), u)
    assert (out.ids - (u * size).long().clamp_max(size - 1)).abs().max() <= 2
    torch.testing.assert_close(out.logprobs, torch.full((5,), -math.log(size)), atol=1e-5, rtol=0)


def test_a_broken_row_is_reported_by_its_logprob_not_by_a_crash() -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = torch.nan
    out = sample(logits, rows_of(2), torch.tensor([0.3, 0.3], dtype=torch.float64))
    assert out.logprobs[0].item() == pytest.approx(-math.log(4), abs=1e-6)
    assert not torch.isfinite(out.logprobs[1])
