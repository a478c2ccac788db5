"""The papers' theorems, exactly, on policies small enough to list every answer they can give.

All sequences of length ≤ 4 over ≤ 4 tokens, with and without a stop token, for 1,000 random pairs of policies: the identity
and the bounds of the DPPO paper (Theorem 3.1, Theorem 3.2, Appendix B.3, Appendix C) and eqs. 10, 30 and 46 of the stability
study, with the package's divergences and its bias metric inside. Sampling noise is not covered: every expectation is a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rollkeel.objectives import grpo
from rollkeel.objectives.divergences import binary_kl, binary_tv, topk_kl, topk_tv
from rollkeel.types import TokenBatch

LAYOUTS = [(v, n, stop) for v in (2, 3, 4) for n in (1, 2, 3, 4) for stop in (False, True)]
PAIRS = 42  # per layout: 24 · 42 = 1,008


@dataclass(frozen=True)
class Pair:
    """Policies μ and π as trees. `[k]` indexes depth, arrays are `[pairs, V^k, V]`; leaves are `[pairs, V^n]`.

    With a stop token (the last one), every state behind it is absorbing: both policies repeat it with probability 1, so its
    ratio is 1 and its divergence 0, and sums over t ≤ n are sums over t ≤ |y|.
    """

    mu: list[np.ndarray]
    pi: list[np.ndarray]
    live: list[np.ndarray]
    """bool `[V^k]`: states that are not behind a stop."""
    reward: np.ndarray

    @property
    def depth(self) -> int:
        return len(self.mu)

    def ratios(self) -> np.ndarray:
        """π/μ at step t of each leaf, `[n, pairs, leaves]`; 1 where neither can get."""
        with np.errstate(invalid="ignore"):  # −∞ − −∞ where neither can get
            gaps = [np.where(m > -np.inf, p - m, 0.0) for m, p in zip(self.mu, self.pi, strict=True)]
        return np.stack([self._at_leaves(np.exp(gap)) for gap in gaps])

    def leaf_probability(self, which: list[np.ndarray]) -> np.ndarray:
        return np.exp(sum(self._at_leaves(level) for level in which))

    def state_probability(self, which: list[np.ndarray]) -> list[np.ndarray]:
        """Probability to be in each state, `[pairs, V^k]` per depth."""
        reach = [np.ones((len(self.reward), 1))]
        for level in which[:-1]:
            reach.append((reach[-1][:, :, None] * np.exp(level)).reshape(len(self.reward), -1))
        return reach

    def _at_leaves(self, level: np.ndarray) -> np.ndarray:
        flat = level.reshape(level.shape[0], -1)
        return np.repeat(flat, self.reward.shape[1] // flat.shape[1], axis=1)


def log_softmax(x: np.ndarray) -> np.ndarray:
    return torch.tensor(x).log_softmax(-1).numpy()


def make(vocabulary: int, depth: int, stop: bool, seed: int) -> Pair:
    """Pairs from nearly equal (noise 0.001) to unrelated and nearly deterministic (logits ±8)."""
    g = np.random.default_rng([seed, vocabulary, depth, stop])
    scale = np.exp(g.uniform(np.log(0.3), np.log(4), (PAIRS, 1, 1)))
    noise = np.exp(g.uniform(np.log(1e-3), np.log(4), (PAIRS, 1, 1)))
    mu, pi, live = [], [], [np.ones(1, bool)]
    for k in range(depth):
        logits = scale * g.normal(size=(PAIRS, vocabulary**k, vocabulary))
        levels = [log_softmax(logits), log_softmax(logits + noise * g.normal(size=logits.shape))]
        if stop:
            absorbed = np.full(vocabulary, -np.inf)
            absorbed[-1] = 0.0
            levels = [np.where(live[k][:, None], level, absorbed) for level in levels]
        mu.append(levels[0])
        pi.append(levels[1])
        goes_on = np.arange(vocabulary) < vocabulary - stop
        live.append((live[k][:, None] & goes_on).reshape(-1))
    pair = Pair(mu, pi, live[:-1], np.zeros((PAIRS, vocabulary**depth)))
    reachable = pair.leaf_probability(mu) > 0
    signs = np.where(g.random((PAIRS, 1)) < 0.5, g.integers(0, 2, reachable.shape), g.normal(size=reachable.shape))
    reward = np.where(reachable, signs, 0.0)
    reward[:, 0] += ~reward.any(1)
    return Pair(mu, pi, live[:-1], reward)


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    return [make(*layout, seed=7) for layout in LAYOUTS]


def improvement(pair: Pair) -> np.ndarray:
    return ((pair.leaf_probability(pair.pi) - pair.leaf_probability(pair.mu)) * pair.reward).sum(1)


def surrogate(pair: Pair) -> np.ndarray:
    """L'_μ(π), eq. 5."""
    return (pair.leaf_probability(pair.mu) * pair.reward * (pair.ratios() - 1).sum(0)).sum(1)


def error_term(pair: Pair) -> np.ndarray:
    """Δ(μ, π), eq. 6."""
    ratios = pair.ratios()
    later = np.concatenate([np.cumprod(ratios[::-1], axis=0)[::-1][1:], np.ones_like(ratios[:1])])
    return (pair.leaf_probability(pair.mu) * pair.reward * ((ratios - 1) * (1 - later)).sum(0)).sum(1)


def tv_by_state(pair: Pair) -> list[np.ndarray]:
    """D_TV(μ‖π) of every state, `[pairs, V^k]`: half the sum of the package's binary TV over all tokens."""
    return [
        np.where(live, 0.5 * binary_tv(torch.tensor(p), torch.tensor(m)).numpy().sum(-1), 0.0)
        for m, p, live in zip(pair.mu, pair.pi, pair.live, strict=True)
    ]


def expected_tv(pair: Pair) -> np.ndarray:
    """E_{y∼μ} Σ_t D_TV of the states on the way, `[pairs]`."""
    reach = pair.state_probability(pair.mu)
    return np.sum([(at * tv).sum(1) for at, tv in zip(reach, tv_by_state(pair), strict=True)], axis=0)


def bounds(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """The quadratic and the linear bound on Δ (Theorem 3.2, eq. 20), `[pairs]` each."""
    tv, horizon = tv_by_state(pair), pair.depth
    largest = np.max([level.max(1) for level in tv], axis=0)
    xi = np.abs(pair.reward).max(1)
    return 2 * xi * horizon * (horizon - 1) * largest**2, 4 * xi * expected_tv(pair)


def test_there_are_a_thousand_pairs_and_probabilities_add_up(pairs):
    assert sum(len(pair.reward) for pair in pairs) >= 1000
    for pair in pairs:
        for which in (pair.mu, pair.pi):
            np.testing.assert_allclose(pair.leaf_probability(which).sum(1), 1.0, rtol=1e-12)


def test_theorem_3_1_performance_difference_identity(pairs):
    errors = []
    for pair in pairs:
        np.testing.assert_allclose(improvement(pair), surrogate(pair) - error_term(pair), rtol=1e-9, atol=1e-12)
        errors.append(np.abs(error_term(pair)))
        if pair.depth == 1:
            assert errors[-1].max() == 0  # one step: the surrogate is exact
    assert (np.concatenate(errors) > 1e-3).sum() > 200  # the identity is not the surrogate alone


def test_theorem_3_2_improvement_bound(pairs):
    above, tightest = 0, 0.0
    for pair in pairs:
        quadratic, _ = bounds(pair)
        gain, first_order = improvement(pair), surrogate(pair)
        assert (gain >= first_order - quadratic - 1e-12).all()
        assert (np.abs(gain - first_order) <= quadratic + 1e-12).all()  # the proof bounds |Δ|
        above += (gain < first_order - 1e-9).sum()
        if pair.depth > 1:
            tightest = max(tightest, (np.abs(gain - first_order) / quadratic).max())
    assert above > 100  # without the penalty the inequality fails
    assert tightest > 0.1  # and a tenth of the penalty would not do


def test_theorem_b_3_composite_bound(pairs):
    linear_wins, quadratic_wins, tightest = 0, 0, 0.0
    for pair in pairs:
        quadratic, linear = bounds(pair)
        gap = np.abs(improvement(pair) - surrogate(pair))
        assert (gap <= linear + 1e-12).all()
        assert (improvement(pair) >= surrogate(pair) - np.minimum(quadratic, linear) - 1e-12).all()
        linear_wins += (linear < quadratic).sum()
        quadratic_wins += (quadratic < linear).sum()
        tightest = max(tightest, (gap / linear).max())
    assert min(linear_wins, quadratic_wins) > 100  # both arms of the minimum are needed
    assert tightest > 0.1


def test_lemma_b_1_sequence_divergence(pairs):
    for pair in pairs:
        whole = 0.5 * np.abs(pair.leaf_probability(pair.mu) - pair.leaf_probability(pair.pi)).sum(1)
        assert (whole <= expected_tv(pair) + 1e-12).all()


def test_tv_is_half_the_expected_ratio_gap_and_obeys_pinsker(pairs):
    """DPPO paper eq. 10, and D_TV² ≤ ½ KL for the package's binary divergences at every token."""
    for pair in pairs:
        for m, p, tv, live in zip(pair.mu, pair.pi, tv_by_state(pair), pair.live, strict=True):
            with np.errstate(invalid="ignore"):
                half = 0.5 * (np.exp(m) * np.abs(np.exp(p - m) - 1)).sum(-1)
            np.testing.assert_allclose(half[:, live], tv[:, live], rtol=1e-9, atol=1e-14)
            lm, lp = torch.tensor(m[:, live]), torch.tensor(p[:, live])
            for a, b in ((lm, lp), (lp, lm)):
                assert (binary_tv(a, b) ** 2 <= 0.5 * binary_kl(a, b) + 1e-12).all()


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_approximations_are_lower_bounds(pairs, k):
    """Appendix C: binary ≤ top-K ≤ full, for every token that could be sampled; with K = V the top-K one is the full one."""
    for pair in pairs:
        m, p, live = (torch.tensor(x[-1]) for x in (pair.mu, pair.pi, pair.live))
        m, p = m[:, live].flatten(0, 1), p[:, live].flatten(0, 1)
        vocabulary = m.shape[1]
        full_tv = 0.5 * (m.exp() - p.exp()).abs().sum(1)
        full_kl = (m.exp() * (m - p)).sum(1)
        ids = m.topk(min(k, vocabulary), dim=1).indices
        for token in range(vocabulary):
            lq, lp = m[:, token], p[:, token]
            arguments = (lp, lq, p.gather(1, ids), m.gather(1, ids), (ids == token).any(1))
            tv, kl = topk_tv(*arguments), topk_kl(*arguments)
            assert (binary_tv(lp, lq) <= tv + 1e-12).all()
            assert (tv <= full_tv + 1e-12).all()
            # The mass of all others is 1 − the listed ones: where p leaves it 1e-9, its logarithm knows 7 digits.
            assert (binary_kl(lq, lp) <= kl + 1e-6).all()
            assert (kl <= full_kl + 1e-6).all()
            if k >= vocabulary:
                torch.testing.assert_close(tv, full_tv, rtol=1e-9, atol=1e-12)
                torch.testing.assert_close(kl, full_kl, rtol=1e-7, atol=1e-10)


def test_eq_46_inverse_ratio_is_at_least_one(pairs):
    """Stability study eq. 46 with q = μ and o = π: E_q[1/ρ] = 1 + χ²(q‖o) ≥ 1, equal only where o = q; E_o[1/ρ] = E_q[ρ] = 1."""
    for pair in pairs:
        for q, o, live in zip(pair.mu, pair.pi, pair.live, strict=True):
            q, o = q[:, live], o[:, live]
            expected = np.exp(2 * q - o).sum(-1)
            chi_squared = ((np.exp(q) - np.exp(o)) ** 2 / np.exp(o)).sum(-1)
            np.testing.assert_allclose(expected, 1 + chi_squared, rtol=1e-9)
            assert (expected >= 1 - 1e-12).all()
            assert (expected[np.abs(q - o).max(-1) > 1e-3] > 1).all()
            np.testing.assert_allclose(np.exp(2 * q - q).sum(-1), 1.0, rtol=1e-12)
            np.testing.assert_allclose((np.exp(q) * np.exp(o - q)).sum(-1), 1.0, rtol=1e-12)
            np.testing.assert_allclose((np.exp(o) * np.exp(q - o)).sum(-1), 1.0, rtol=1e-12)


def test_eq_10_is_what_the_bias_metric_estimates(pairs):
    """ΔJ = E_q[X] − E_o[X], X = r·A: summed over all tokens with c = q, the metric equals it and the covariance of eq. 10."""
    pair = next(p for p, layout in zip(pairs, LAYOUTS, strict=True) if layout == (4, 4, False))
    g = np.random.default_rng(3)
    q, o = (torch.tensor(x[-1]).flatten(0, 1)[:50] for x in (pair.mu, pair.pi))
    p = torch.log_softmax(o + 0.3 * torch.tensor(g.normal(size=o.shape)), dim=-1)
    advantages = torch.tensor(g.normal(size=o.shape))
    x = (p - o).exp() * advantages
    inverse = (q - o).exp()
    weighted = (o.exp() * x * inverse).sum(1)
    covariance = weighted - (o.exp() * x).sum(1) * (o.exp() * inverse).sum(1)
    expected = (q.exp() * x).sum(1) - (o.exp() * x).sum(1)
    torch.testing.assert_close(covariance, expected, rtol=1e-9, atol=1e-12)
    for i in range(len(q)):
        ids = torch.zeros(4, dtype=torch.int64)
        tokens = TokenBatch(
            logprobs=p[i],
            old_logprobs=o[i],
            rollout_logprobs=q[i],
            advantages=advantages[i],
            coefficients=q[i].exp(),
            sequence_ids=ids,
            group_ids=ids,
        )
        assert grpo()(tokens).metrics["bias/delta_j_ratio"] == pytest.approx(expected[i].item(), rel=1e-9, abs=1e-12)
