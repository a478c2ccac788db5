"""Every recipe against a float64 reference that shares no line with it: the gradient coefficient of every token.

10,000 random tokens of real distributions, with and without extreme ratios. Two implementations of an objective agree iff
−d loss / d log p / c agrees per token, so that is what is compared, and with it the kept tokens and the weights. Edges and
branches one by one are in test_truth_tables.py; KL and entropy terms in test_gradients.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference as ref
import torch
from reference import Reference
from reference_tokens import Tokens, random_tokens
from test_parallel_invariance import tensors

from rollkeel.errors import BadInput
from rollkeel.objectives import RECIPES
from rollkeel.objectives.objective import Objective

T = 10_000
INF = float("inf")
CLIPS = {"clip_low": 0.1, "clip_high": 0.3}
SIDES = ("both", "high", "low")
# (recipe, options); the reference function of the same name takes the same options.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", CLIPS),
    ("dapo", {}),
    ("dr_grpo", {}),
    ("tis", {}),
    ("tis", {"cap": 1.1}),
    ("mis", {}),
    ("mis", {"cap": 2.0, "level": "sequence"}),
    ("mis", {"cap": 1.2, "level": "geometric"}),
    ("mis", {"cap": 1.5, "level": "sequence", "weight": "sequence"}),
    ("icepop", {}),
    ("icepop", {"low": 0.8, "high": 1.25, **CLIPS}),
    ("kpop", {}),
    ("kpop", {"phi": 2.0, "weight_cap": 1.5}),
    ("kpop", {"mode": "mask_only"}),
    ("kpop", {"mode": "rollout"}),
    ("kpop", {"mode": "rollout", "phi": 0.01, "cap": 1.5}),
    ("gspo", {}),
    ("gspo", CLIPS),
    ("gmpo", {}),
    ("pg_is", {}),
    ("pg_is", {"cap": 2.0}),
    ("pg_tis", {}),
    ("pg_tis", {"preset": "scaling"}),
    ("grpo_clip_higher", {}),
    ("grpo_clip_higher", {"preset": "scaling"}),
    ("minirl", {}),
    ("minirl_tis", {}),
    *(
        (f"dppo_binary_{d}", options)
        for d in ("tv", "kl")
        for options in ({}, {"preset": "scaling"}, {"anchor": "old"}, {"delta": 0.01, "cap": 2.0})
    ),
    *(
        (f"dppo_topk_{d}", options)
        for d in ("tv", "kl")
        for options in ({}, {"anchor": "old"}, {"other": False}, {"delta": 0.02})
    ),
    ("mask_negative", {}),
    ("mask_negative", {"delta": 0.8, "anchor": "old"}),
    ("mask_negative", {"delta": 0.05}),
    *(("relax_clip", {"side": side}) for side in SIDES),
    ("relax_clip", {"alpha": 0.4}),
    ("mis_po", {}),
    ("mis_po", {"trajectory_low": 0.9, "trajectory_high": 1.1}),
    ("fixed_at_final_bound", {}),
    ("ac_mis_po", {}),
    ("m2po", {}),
    ("m2po", {"tau": 1e-4}),
    ("sapo", {}),
    ("sapo", {"tau_positive": 2.0, "tau_negative": 5.0}),
    ("cispo", {}),
    ("cispo", {"low": 0.8, "high": 1.28}),
    ("ipo", {}),
    ("ipo", {"delta": 0.1, "gap_penalty": 1e-3}),
    ("ipo", {"delta": 0.1, "gap_penalty": 0.05, "directional": True}),
    ("opsm", {}),
    ("opsm", {"delta": 0.05, "anchor": "old"}),
    ("luspo", {}),
    ("vespo", {}),
    ("vespo", {"k_positive": 1.0, "lambda_positive": 0.5, "k_negative": 0.5, "lambda_negative": 4.0}),
    ("topr", {}),
    ("topr", {"low": 0.2, "high": 2.0}),
    ("topr", {"level": "token"}),
    ("topr", {"level": "geometric"}),
    ("gpg", {}),
    ("trm", {}),
    ("trm", {"estimator": "k2", "delta": 0.5}),
    ("trm", {"estimator": "binary"}),
    ("trm", {"reduce": "mean", "delta": 0.01}),
]
SCALING = {
    "pg_tis": {"cap": 5.0},
    "grpo_clip_higher": {"cap": 5.0, "clip_high": 0.27},
    "dppo_binary_tv": {"cap": 5.0, "delta": 0.2},
    "dppo_binary_kl": {"cap": 5.0, "delta": 0.05},
}


def expected(name: str, options: dict[str, Any], t: Tokens) -> Reference:
    options = dict(options)
    if options.pop("preset", None) == "scaling":
        options = {**SCALING[name], **options}
    if name == "ac_mis_po":
        return ref.ac_mis_po(t, ref.ac_mis_po_bounds(t, 1)[-1], **options)
    return getattr(ref, {"dr_grpo": "grpo"}.get(name, name))(t, **options)


def measured(objective: Objective, t: Tokens) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Coefficient, keep and weight that the package gives."""
    tokens = tensors(t)
    objective.prepare(tokens)
    tokens.logprobs.requires_grad_()
    out = objective(tokens)
    (gradient,) = torch.autograd.grad(objective.loss(tokens), tokens.logprobs)
    (again,) = torch.autograd.grad(out.loss, tokens.logprobs)
    assert torch.equal(gradient, again)
    return -gradient.numpy() / t.c, out.keep.numpy(), out.weight.numpy()


def compare(name: str, objective: Objective, t: Tokens, want: Reference) -> None:
    coefficient, keep, weight = measured(objective, t)
    np.testing.assert_array_equal(keep, want.keep)
    np.testing.assert_allclose(coefficient, want.coefficient, rtol=1e-6, atol=1e-12)
    if name in ("tis", "mis", "icepop", "kpop"):
        np.testing.assert_allclose(weight[keep], np.broadcast_to(want.weight, keep.shape)[keep], rtol=1e-6)


def name_of(case: Any) -> str:
    name, options = case
    return name + "".join(f"-{k}={v}" for k, v in options.items())


@pytest.fixture(scope="module")
def batches() -> dict[tuple[bool, bool], Tokens]:
    return {(e, b): random_tokens(T, seed=21, extreme=e, by_token=b) for e in (False, True) for b in (False, True)}


@pytest.mark.parametrize("extreme", [False, True], ids=["ordinary", "extreme"])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_gradient_keep_and_weight(case, extreme, batches):
    name, options = case
    t = batches[extreme, True]
    want = expected(name, options, t)
    compare(name, RECIPES[name](**options), t, want)
    live = np.count_nonzero(want.coefficient)
    assert 0.005 * T < live < T + (name == "ipo")  # tokens learn; A = 0 does not, but for a penalty of its own
    if not want.keep.all():
        assert np.count_nonzero(~want.keep) >= 1


def literal_loss(name: str, t: Tokens, p: np.ndarray) -> float:
    """−Σ c·S with S as the papers print it, for surrogates whose derivative the reference gives in closed form."""
    r, total = np.exp(p - t.o), 0.0
    if name == "grpo":
        return float(-(t.c * np.minimum(r * t.a, np.clip(r, 0.8, 1.2) * t.a)).sum())
    if name == "sapo":
        tau = np.where(t.a > 0, 1.0, 1.05)
        return float(-(t.c * 4 / tau / (1 + np.exp(-tau * (r - 1))) * t.a).sum())
    for s in np.unique(t.ids):
        mine = t.ids == s
        a, x = t.a[mine][0], r[mine]
        if name == "gspo":
            ratio = np.exp(np.mean(np.log(x)))
            value = min(ratio * a, np.clip(ratio, 1 - 3e-4, 1 + 4e-4) * a)
        else:
            clipped = np.minimum(x * a, np.clip(x, np.exp(-0.4), np.exp(0.4)) * a)
            value = np.sign(a) * np.prod(np.abs(clipped)) ** (1 / len(x)) if a else 0.0
        total -= t.c[mine].sum() * value
    return total


@pytest.mark.parametrize("name", ["grpo", "sapo", "gspo", "gmpo"])
def test_the_reference_is_the_slope_of_the_papers_loss(name):
    """Central differences of the printed objective, away from its kinks."""
    t = random_tokens(150, seed=4)
    want = getattr(ref, name)(t).coefficient
    for i in range(150):
        step = np.zeros(150)
        step[i] = 1e-7
        slope = (literal_loss(name, t, t.p + step) - literal_loss(name, t, t.p - step)) / 2e-7
        assert -slope / t.c[i] == pytest.approx(want[i], rel=1e-5, abs=1e-5)


def test_options_keep_their_digits():
    """τ and δ that float32 cannot hold act in float64 as they are."""
    t = random_tokens(300, seed=9)
    taus = {"tau_positive": 1.1, "tau_negative": 1.7}
    coefficient, _, _ = measured(RECIPES["sapo"](**taus), t)
    np.testing.assert_allclose(coefficient, ref.sapo(t, **taus).coefficient, rtol=1e-10, atol=1e-15)
    coefficient, _, _ = measured(RECIPES["grpo"](perturb=[{"distort_low_probability": {"delta": 1.2}}]), t)
    np.testing.assert_allclose(coefficient, ref.grpo(t).coefficient * ref.distortion(t, 1.2), rtol=1e-10, atol=1e-15)


def test_dr_grpo_has_one_length():
    assert RECIPES["dr_grpo"]().aggregate == "constant_length(1024)"
    assert RECIPES["dr_grpo"](aggregate="token_mean").aggregate == "token_mean"
    with pytest.raises(BadInput, match=r"dr_grpo\.length: .*token_mean.*512; set one of the two"):
        RECIPES["dr_grpo"](length=512, aggregate="token_mean")


def test_every_recipe_is_here():
    elsewhere = {"random_rejection"}  # below: which trajectories it rejects is its own choice
    assert {name for name, _ in CASES} | elsewhere == set(RECIPES)


def test_the_cases_drop_what_only_they_drop(batches):
    """Two recipes that always agreed here would be one: no two cases may have the same coefficients."""
    t = batches[True, False]
    seen: dict[bytes, str] = {}
    for name, options in CASES:
        key = np.round(expected(name, options, t).coefficient, 9).tobytes()
        if name in ("dr_grpo",) or options.get("preset") == "scaling":
            continue  # the same mask and surrogate, aggregated otherwise; presets are other numbers of the same
        assert key not in seen, f"{name} {options} equals {seen[key]}"
        seen[key] = f"{name} {options}"


def test_random_rejection_rejects_whole_trajectories(batches):
    t = batches[False, True]
    coefficient, keep, _ = measured(RECIPES["random_rejection"](acceptance=0.3), t)
    np.testing.assert_allclose(coefficient, np.where(keep, ref.ratio(t.p, t.q) * t.a, 0.0), rtol=1e-6, atol=1e-12)
    kept = [keep[t.ids == s] for s in np.unique(t.ids)]
    assert all(k.all() or not k.any() for k in kept)
    assert sum(k.all() for k in kept) == round(0.3 * len(kept))


@pytest.mark.parametrize("delta", [3.0, 2.0, 1.2, 0.0])
@pytest.mark.parametrize("name", ["gspo", "grpo", "icepop"])
def test_distortion_multiplies_rare_tokens(name, delta, batches):
    """Stability study eqs. 17–18: S of tokens with o < 0.1 times δ."""
    t = batches[False, False]
    objective = RECIPES[name](perturb=[{"distort_low_probability": {"delta": delta}}])
    want = expected(name, {}, t)
    coefficient, _, _ = measured(objective, t)
    np.testing.assert_allclose(coefficient, want.coefficient * ref.distortion(t, delta), rtol=1e-6, atol=1e-12)


def test_ac_mis_po_over_several_batches(batches):
    """The controller's bound of every step, from eqs. 5–8 alone."""
    t = batches[False, False]
    objective = RECIPES["ac_mis_po"]()
    for bound in ref.ac_mis_po_bounds(t, 30):
        compare("ac_mis_po", objective, t, ref.ac_mis_po(t, bound))


def test_nominal_distortion_monitor(batches):
    """Σ A·(φ−1) with the nominal δ = 2, for masked, weighted and plain recipes; the other monitors are in test_bias.py."""
    t = batches[False, True]
    for name in ("grpo", "icepop", "kpop", "dppo_binary_tv", "pg_is"):
        objective, tokens = RECIPES[name](), tensors(t)
        objective.prepare(tokens)
        found = objective(tokens).metrics["bias/j"]
        assert found == pytest.approx((t.a * (ref.distortion(t, 2.0) - 1)).sum(), rel=1e-6)
