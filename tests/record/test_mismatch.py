"""The numbers by which a run is judged healthy: each against a plain numpy definition, and in cases whose truth is known.

Does not cover alarms or the doctor, which only read these numbers.
"""

import json
import math

import numpy as np
import pytest
import torch

from rollkeel.errors import BadInput
from rollkeel.record.mismatch import mismatch_metrics
from rollkeel.types import TokenBatch


def batch(o, q, *, p=None, advantages=None, versions=None, sequence_ids=None, **more) -> TokenBatch:
    """A batch from probabilities."""
    n = len(o)

    def f(x) -> torch.Tensor:
        return torch.tensor(np.asarray(x), dtype=torch.float32)

    ids = torch.zeros(n, dtype=torch.int64) if sequence_ids is None else torch.tensor(sequence_ids)
    return TokenBatch(
        logprobs=f(np.log(o if p is None else p)),
        old_logprobs=f(np.log(o)),
        rollout_logprobs=f(np.log(q)),
        advantages=f(np.ones(n) if advantages is None else advantages),
        coefficients=f(np.full(n, 1 / max(n, 1))),
        sequence_ids=ids,
        group_ids=torch.zeros(n, dtype=torch.int64),
        versions=None if versions is None else torch.tensor(versions),
        **more,
    )


def random_pair(n: int = 5000) -> tuple[np.ndarray, np.ndarray]:
    g = np.random.default_rng(0)
    log_q = -g.exponential(1.0, n)
    return np.exp(np.minimum(log_q + g.normal(0, 0.1, n), -1e-6)), np.exp(log_q)


def test_sequences_against_numpy_definitions():
    """Perplexities, their gap, χ² of whole sequences and the JS divergence, sequence by sequence."""
    o, q = random_pair(60)
    ids = np.repeat(np.arange(12) * 100, [3, 1, 9, 5, 2, 4, 6, 8, 7, 5, 4, 6])
    m = mismatch_metrics(batch(o, q, sequence_ids=ids), trainer_version=0)
    means = [(np.log(o[ids == i]).mean(), np.log(q[ids == i]).mean(), (ids == i).sum()) for i in np.unique(ids)]
    lo, lq, size = np.array(means).T
    rho = o / q
    expected = {
        "perplexity": np.exp(-lo).mean(),
        "rollout_perplexity": np.exp(-lq).mean(),
        "log_perplexity_gap": (lq - lo).mean(),
        "log_perplexity_gap_abs": np.abs(lq - lo).mean(),
        "log_perplexity_gap_abs_max": np.abs(lq - lo).max(),
        "perplexity_ratio": np.exp(lq - lo).mean(),
        "chi2_sequence": np.mean(np.exp(size * (lo - lq)) ** 2) - 1,
        "js": (0.5 * (rho * np.log(rho) - (1 + rho) * np.log((1 + rho) / 2))).mean(),
    }
    for name, value in expected.items():
        assert m[f"mismatch/{name}"] == pytest.approx(value, rel=2e-5), name


def test_js_is_unbiased_and_nothing_for_equal_policies():
    """Over a whole vocabulary weighted by q it is the divergence itself."""
    g = np.random.default_rng(3)
    o, q = g.dirichlet(np.ones(5)), np.full(5, 0.2)  # each token once stands for a draw from q
    middle = (o + q) / 2
    true = 0.5 * (o * np.log(o / middle)).sum() + 0.5 * (q * np.log(q / middle)).sum()
    assert mismatch_metrics(batch(o, q), trainer_version=0)["mismatch/js"] == pytest.approx(true, rel=1e-5)
    same = mismatch_metrics(batch(q, q), trainer_version=0)
    assert (same["mismatch/js"], same["mismatch/chi2_sequence"], same["mismatch/perplexity_ratio"]) == (0.0, 0.0, 1.0)


def test_against_numpy_definitions():
    o, q = random_pair()
    m = mismatch_metrics(batch(o, q), trainer_version=0)
    rho, lr = o / q, np.log(o / q)
    expected = {
        "ratio_mean": rho.mean(),
        "ratio_std": rho.std(),
        "ratio_max": rho.max(),
        "prob_abs_diff": np.abs(o - q).mean(),
        "prob_abs_diff_max": np.abs(o - q).max(),
        "logprob_abs_diff": np.abs(lr).mean(),
        "pearson": np.corrcoef(o, q)[0, 1],
        "kl": -lr.mean(),
        "kl_k3": (rho - 1 - lr).mean(),
        "inverse_ratio_mean": (1 / rho).mean(),
        "second_moment": (rho**2).mean(),
        "ess": rho.sum() ** 2 / (len(rho) * (rho**2).sum()),
        "tokens": 5000,
        "non_finite": 0,
        "clamped_log_ratios": 0,
        "source": 1,
    }
    assert {k: m[f"mismatch/{k}"] for k in expected} == pytest.approx(expected, rel=1e-5)
    assert not any("/_" in key for key in m)
    for axis, x in (("o", o), ("q", q)):
        for k in range(10):
            inside = (x >= k / 10) & (x < (k + 1) / 10)
            name = f"mismatch/by_probability/{axis}_{k / 10:.1f}"
            assert m[f"{name}/share"] == pytest.approx(inside.mean(), abs=1e-3)
            assert m[f"{name}/mean"] == pytest.approx(rho[inside].mean(), abs=2e-3)
            assert m[f"{name}/std"] == pytest.approx(rho[inside].std(), abs=2e-3)


def test_effective_sample_size_of_a_weight_and_kl_to_the_reference():
    o, q = random_pair()
    w = np.minimum(o / q, 1.05)
    ref = np.exp(np.minimum(np.log(o) + np.random.default_rng(3).normal(0, 0.2, len(o)), -1e-6))
    tokens = batch(o, q, versions=[0, 1] * 2500, ref_logprobs=torch.tensor(np.log(ref), dtype=torch.float32))
    m = mismatch_metrics(tokens, 0, weight=torch.tensor(w, dtype=torch.float32))
    assert m["mismatch/ess"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()), rel=1e-6)
    half = w[::2]
    assert m["mismatch/equal_version/ess"] == pytest.approx(half.sum() ** 2 / (len(half) * (half**2).sum()), rel=1e-6)
    assert m["policy/kl_base"] == pytest.approx((ref / o - 1 - np.log(ref / o)).mean(), rel=1e-4)
    # Everything else is that of a batch without weight and reference.
    plain = mismatch_metrics(batch(o, q, versions=[0, 1] * 2500), 0)
    apart = {"mismatch/ess", "mismatch/equal_version/ess", "policy/kl_base"}
    assert set(m) - set(plain) == {"policy/kl_base"}
    assert {k: m[k] for k in m if k not in apart} == pytest.approx({k: plain[k] for k in plain if k not in apart})
    with pytest.raises(BadInput, match="expected weight of shape"):
        mismatch_metrics(tokens, 0, weight=torch.ones(3))


def test_an_objective_without_any_weight_left_has_no_sample_size():
    m = mismatch_metrics(batch([0.5, 0.4], [0.5, 0.5]), 0, weight=torch.zeros(2))
    assert "mismatch/ess" not in m


def test_without_a_recomputed_o_the_first_pass_stands_in():
    o, q = random_pair()
    with_old = mismatch_metrics(batch(o, q), 0)
    tokens = batch(o, q)
    fields = {n: getattr(tokens, n) for n in tokens.__dataclass_fields__ if n != "old_logprobs"}
    without = mismatch_metrics(TokenBatch(**fields), 0)
    assert without.pop("mismatch/source") == 0
    assert with_old.pop("mismatch/source") == 1
    assert without == with_old


def test_identical_engines_and_constant_inputs_are_clean():
    for value in (0.5, 1.0):
        m = mismatch_metrics(batch([value] * 8, [value] * 8, versions=[3] * 8), 3)
        assert "mismatch/pearson" not in m  # a constant has no correlation
        assert m["mismatch/ratio_std"] == m["mismatch/kl_k3"] == m["mismatch/prob_abs_diff_max"] == 0
        assert m["mismatch/ratio_mean"] == m["mismatch/ess"] == m["mismatch/inverse_ratio_mean"] == 1
        json.dumps(m, allow_nan=False)


def test_small_gaps_are_not_lost_in_rounding():
    """An fp32 engine is off by about 1e-6: the std of ρ must come out as that, not as 0 or 1e-4."""
    n = 4096
    g = np.random.default_rng(1)
    tokens = batch(np.full(n, 0.5), np.full(n, 0.5))
    q = torch.tensor(g.normal(0, 1e-6, n)) + tokens.rollout_logprobs.double()
    fields = {k: getattr(tokens, k) for k in tokens.__dataclass_fields__} | {"rollout_logprobs": q}
    m = mismatch_metrics(TokenBatch(**fields), 0)
    assert m["mismatch/ratio_std"] == pytest.approx(1e-6, rel=0.05)
    assert m["mismatch/kl_k3"] == pytest.approx(0.5e-12, rel=0.1)


@pytest.mark.parametrize("kept", [1.0, 0.9])
def test_expected_ratio_is_the_kept_mass(kept):
    """Sample from q = the most likely tokens of o, renormalised: E_q[ρ] is the mass they have under o."""
    g = np.random.default_rng(2)
    o = np.array([0.5, 0.3, 0.1, 0.06, 0.04])
    support = o[:3] if kept < 1 else o
    q = support / support.sum()
    drawn = g.choice(len(q), 20_000, p=q)
    mass = torch.full((20_000,), float(support.sum()))
    m = mismatch_metrics(batch(o[drawn], q[drawn], kept_mass=mass), 0)
    assert m["mismatch/expected_ratio"] == pytest.approx(kept)
    assert m["mismatch/ratio_mean"] == pytest.approx(kept, rel=1e-5)


def test_equal_version_and_staleness():
    o, q = [0.5, 0.5, 0.4, 0.2], [0.5, 0.5, 0.2, 0.1]
    m = mismatch_metrics(batch(o, q, versions=[7, 7, 4, 6], sequence_ids=[0, 0, 1, 1]), 7)
    assert m["mismatch/ratio_mean"] == pytest.approx(1.5)
    assert m["mismatch/equal_version/ratio_mean"] == pytest.approx(1.0)
    assert m["mismatch/equal_version/ratio_max"] == pytest.approx(1.0)
    assert m["mismatch/equal_version/share"] == 0.5
    assert m["mismatch/equal_version/tokens"] == 2
    assert (m["staleness/mean"], m["staleness/max"]) == (1.0, 3.0)
    assert (m["staleness/span"], m["staleness/span_mean"]) == (2.0, 1.0)


def test_maxima_are_those_of_the_selected_tokens():
    """All ratios below 1: a token that is not selected must not raise the maximum to that of an empty place."""
    m = mismatch_metrics(batch([0.1, 0.2, 0.9], [0.4, 0.4, 0.9], versions=[2, 2, 1]), 2)
    assert m["mismatch/ratio_max"] == pytest.approx(1.0)
    assert m["mismatch/equal_version/ratio_max"] == pytest.approx(0.5)
    assert m["mismatch/equal_version/prob_abs_diff_max"] == pytest.approx(0.3)


def test_no_token_of_the_trainers_version():
    m = mismatch_metrics(batch([0.5], [0.4], versions=[1]), 9)
    assert m["mismatch/equal_version/share"] == 0
    assert m["mismatch/equal_version/tokens"] == 0
    assert not any(k.startswith("mismatch/equal_version/ratio") for k in m)
    assert m["staleness/span"] == 0
    assert not any(k.startswith("staleness") for k in mismatch_metrics(batch([0.5], [0.4]), 9))


def test_policy_and_bad_updates():
    """Only the first token is pushed down while q − p > ½: the second has A > 0, the third a gap of exactly ½ − 0.1."""
    tokens = batch(
        [0.3, 0.3, 0.5, 0.9],
        [0.9, 0.9, 0.9, 0.9],
        p=[0.2, 0.2, 0.5, 0.9],
        advantages=[-1, 1, -1, -1],
        entropy=torch.arange(4.0),
    )
    m = mismatch_metrics(tokens, 0)
    assert m["mask/bad_updates"] == 0.25
    assert m["policy/prob_mean"] == pytest.approx(0.45)
    assert m["policy/entropy"] == 1.5


def test_non_finite_and_huge_gaps_are_counted_not_spread():
    tokens = batch([0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5])
    tokens.rollout_logprobs[0] = math.nan
    assert tokens.old_logprobs is not None
    tokens.old_logprobs[1] = -math.inf
    tokens.rollout_logprobs[2] = -90.0
    m = mismatch_metrics(tokens, 0)
    assert m["mismatch/non_finite"] == 2
    assert m["mismatch/tokens"] == 2
    assert m["mismatch/clamped_log_ratios"] == 1
    assert m["mismatch/ratio_max"] == pytest.approx(math.exp(20))
    json.dumps(m, allow_nan=False)


def test_lengths_empty_batch_and_gradients():
    tokens = batch([0.5, 0.5], [0.5, 0.5])
    fields = {k: getattr(tokens, k) for k in tokens.__dataclass_fields__}
    short = TokenBatch(**fields | {"rollout_logprobs": tokens.rollout_logprobs[:1]})
    with pytest.raises(BadInput, match="rollout_logprobs of shape"):
        mismatch_metrics(short, 0)
    assert mismatch_metrics(batch([], []), 0) == {"mismatch/tokens": 0.0}
    tokens = batch([0.5, 0.4], [0.5, 0.5])
    tokens.logprobs.requires_grad_()
    assert mismatch_metrics(tokens, 0)["policy/prob_mean"] == pytest.approx(0.45)
