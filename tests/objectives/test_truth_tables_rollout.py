"""One row per branch of the rollout-anchored, sequence-level and remaining recipes, with numbers to check by hand.

The gradient coefficient is d loss / d log p, divided by −c. u = p/q, r = p/o. PPO-clip, IcePop and KPop are in
test_truth_tables.py; random tokens and the independent reference in test_reference.py.
"""

import dataclasses
import math

import pytest
import torch
from test_truth_tables import at, coefficient, one

from rollkeel.objectives import (
    RECIPES,
    ac_mis_po,
    cispo,
    dapo,
    dppo_binary_kl,
    dppo_binary_tv,
    dppo_topk_kl,
    dppo_topk_tv,
    dr_grpo,
    gmpo,
    gpg,
    grpo_clip_higher,
    gspo,
    ipo,
    luspo,
    m2po,
    mask_negative,
    minirl,
    minirl_tis,
    mis,
    mis_po,
    opsm,
    pg_is,
    pg_tis,
    random_rejection,
    relax_clip,
    sapo,
    tis,
    topr,
    trm,
    vespo,
)
from rollkeel.objectives.objective import Objective
from rollkeel.objectives.registry import find
from rollkeel.objectives.terms import make_terms
from rollkeel.types import TokenBatch


def several(log_ratios, advantages, ids, base: float = -2.0, **fields) -> TokenBatch:
    """Tokens with q = o = e^base and log(p/q) as given, coefficient 1, float64."""

    def f(values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    q = torch.full((len(ids),), base, dtype=torch.float64)
    sequence_ids = torch.tensor(ids)
    given = {"old_logprobs": q, "rollout_logprobs": q, **fields}
    return TokenBatch(
        logprobs=(given["rollout_logprobs"] + f(log_ratios)).requires_grad_(),
        advantages=f(advantages),
        coefficients=torch.ones_like(q),
        sequence_ids=sequence_ids,
        group_ids=torch.zeros_like(sequence_ids),
        **given,
    )


def coefficients(objective: Objective, tokens: TokenBatch) -> list[float]:
    (gradient,) = torch.autograd.grad(objective.loss(tokens), tokens.logprobs)
    return (-gradient).tolist()


# ---- every recipe's gradient coefficient on one token: (recipe, p, o, q, A, coefficient, kept) ------------------------

E = math.e
TABLE = [
    # PPO-clip family: r = p/o, upper clip of DAPO 1.28.
    (dapo(), 0.25, 0.2, 0.2, 1.0, 1.25, True),
    (dapo(), 0.26, 0.2, 0.2, 1.0, 0.0, True),  # r 1.3
    (dapo(), 0.15, 0.2, 0.2, -1.0, 0.0, True),  # r 0.75
    (dr_grpo(), 0.25, 0.2, 0.2, 1.0, 0.0, True),  # r 1.25 beyond 1.2
    (dr_grpo(), 0.25, 0.2, 0.2, -1.0, -1.25, True),
    # TIS: weight min(ρ, 2).
    (tis(), 0.2, 0.2, 0.16, 1.0, 1.25, True),
    (tis(), 0.2, 0.2, 0.05, 1.0, 2.0, True),  # ρ 4
    (tis(), 0.3, 0.2, 0.05, 1.0, 0.0, True),  # r 1.5, clipped
    # MIS: ρ ≤ 2 keeps, weight ρ; no lower bound.
    (mis(), 0.2, 0.2, 0.125, 1.0, 1.6, True),
    (mis(), 0.2, 0.2, 0.08, 1.0, 0.0, False),  # ρ 2.5
    (mis(), 0.01, 0.01, 0.5, -1.0, -0.02, True),
    # Importance sampling alone.
    (pg_is(), 0.8, 0.5, 0.1, 1.0, 8.0, True),
    (pg_is(), 0.1, 0.5, 0.8, -2.0, -0.25, True),
    (pg_is(cap=3.0), 0.8, 0.5, 0.1, -1.0, -3.0, True),
    (pg_tis(), 0.8, 0.5, 0.1, 1.0, 3.0, True),
    (pg_tis(), 0.2, 0.5, 0.1, 1.0, 2.0, True),
    (pg_tis(preset="scaling"), 0.8, 0.5, 0.1, 1.0, 5.0, True),
    # Clip-Higher as a mask of u, [0.8, 1.28].
    (grpo_clip_higher(), 0.25, 0.9, 0.2, 1.0, 1.25, True),
    (grpo_clip_higher(), 0.26, 0.9, 0.2, 1.0, 0.0, False),  # u 1.3
    (grpo_clip_higher(), 0.26, 0.9, 0.2, -1.0, -1.3, True),
    (grpo_clip_higher(), 0.1, 0.9, 0.2, -1.0, 0.0, False),  # u 0.5
    (grpo_clip_higher(), 0.1, 0.9, 0.2, 1.0, 0.5, True),
    (grpo_clip_higher(), 0.26, 0.9, 0.2, 0.0, 0.0, True),  # A = 0 is no clip
    (grpo_clip_higher(preset="scaling"), 0.255, 0.9, 0.2, 1.0, 0.0, False),  # u 1.275 > 1.27
    # MiniRL: the ratio is u, the clip judges r.
    (minirl(), 0.25, 0.2, 0.05, 1.0, 5.0, True),  # r 1.25, u 5
    (minirl(), 0.26, 0.2, 0.26, 1.0, 0.0, False),  # r 1.3, u 1
    (minirl(), 0.1, 0.2, 0.05, -1.0, 0.0, False),  # r 0.5, u 2
    (minirl(), 0.1, 0.2, 0.05, 1.0, 2.0, True),
    (minirl_tis(), 0.25, 0.2, 0.05, 1.0, 3.0, True),
    (minirl_tis(), 0.26, 0.2, 0.05, 1.0, 0.0, False),
    # DPPO-TV: |p − q| > 0.15 and moving away.
    (dppo_binary_tv(), 0.3, 0.9, 0.2, 1.0, 1.5, True),  # gap 0.1
    (dppo_binary_tv(), 0.4, 0.9, 0.2, 1.0, 0.0, False),  # gap 0.2, up with A > 0
    (dppo_binary_tv(), 0.4, 0.9, 0.2, -1.0, -2.0, True),  # brought back
    (dppo_binary_tv(), 0.4, 0.9, 0.8, -1.0, 0.0, False),  # gap 0.4, down with A < 0
    (dppo_binary_tv(), 0.4, 0.9, 0.8, 1.0, 0.5, True),
    (dppo_binary_tv(), 0.4, 0.9, 0.2, 0.0, 0.0, True),
    (dppo_binary_tv(), 0.01, 0.9, 0.0001, 1.0, 100.0, True),  # the ratio is 100 and the policy hardly moved
    (dppo_binary_tv(preset="scaling"), 0.39, 0.9, 0.2, 1.0, 1.95, True),  # gap 0.19 ≤ 0.2
    (dppo_binary_tv(preset="scaling"), 0.01, 0.9, 0.0001, 1.0, 5.0, True),  # C = 5
    (dppo_binary_tv(anchor="old"), 0.4, 0.2, 0.4, 1.0, 0.0, False),  # p − o = 0.2, though p = q
    (dppo_binary_tv(anchor="old"), 0.4, 0.4, 0.1, 1.0, 4.0, True),  # p = o, though u = 4
    # DPPO-KL: D_B(q‖p) > 0.05. D_B(.3‖.2) = 0.0282, D_B(.5‖.9) = 0.5108, D_B(.8‖.99) = 0.4287, D_B(1e-2‖1e-4) = 0.0362.
    (dppo_binary_kl(), 0.2, 0.9, 0.3, -1.0, -2 / 3, True),
    (dppo_binary_kl(), 0.9, 0.1, 0.5, 1.0, 0.0, False),
    (dppo_binary_kl(), 0.9, 0.1, 0.5, -1.0, -1.8, True),
    (dppo_binary_kl(), 0.99, 0.1, 0.8, 1.0, 0.0, False),
    (dppo_binary_kl(), 1e-4, 0.1, 1e-2, -1.0, -0.01, True),
    (dppo_binary_kl(anchor="old"), 0.9, 0.5, 0.9, 1.0, 0.0, False),
    # The smallest mask: A < 0 and q − p ≥ 0.5.
    (mask_negative(), 0.2, 0.9, 0.9, -1.0, 0.0, False),
    (mask_negative(), 0.2, 0.9, 0.9, 1.0, 2 / 9, True),
    (mask_negative(), 0.5, 0.9, 0.9, -1.0, -5 / 9, True),
    (mask_negative(delta=0.8), 0.2, 0.9, 0.9, -1.0, -2 / 9, True),
    (mask_negative(anchor="old"), 0.2, 0.9, 0.2, -1.0, 0.0, False),
    (mask_negative(anchor="old"), 0.2, 0.2, 0.9, -1.0, -2 / 9, True),
    # Relaxed clip: no clip where q < 0.1.
    (relax_clip(), 0.26, 0.9, 0.2, 1.0, 0.0, False),
    (relax_clip(), 0.26, 0.9, 0.05, 1.0, 5.2, True),
    (relax_clip(), 0.01, 0.9, 0.05, -1.0, -0.2, True),
    (relax_clip(side="high"), 0.26, 0.9, 0.05, 1.0, 5.2, True),
    (relax_clip(side="high"), 0.01, 0.9, 0.05, -1.0, 0.0, False),
    (relax_clip(side="low"), 0.26, 0.9, 0.05, 1.0, 0.0, False),
    (relax_clip(side="low"), 0.01, 0.9, 0.05, -1.0, -0.2, True),
    (relax_clip(alpha=0.0), 0.26, 0.9, 0.05, 1.0, 0.0, False),
    # MIS-PO: token band [0.5, 2], trajectory of one token [0.996, 1.001].
    (mis_po(), 0.2001, 0.9, 0.2, 1.0, 1.0005, True),
    (mis_po(), 0.21, 0.9, 0.2, 1.0, 0.0, False),
    (mis_po(trajectory_high=3.0), 0.3, 0.9, 0.2, 1.0, 1.5, True),
    (mis_po(trajectory_high=3.0), 0.5, 0.9, 0.2, 1.0, 0.0, False),  # u 2.5
    (mis_po(trajectory_low=0.1), 0.08, 0.9, 0.2, -1.0, 0.0, False),  # u 0.4
    (RECIPES["fixed_at_final_bound"](), 0.20003, 0.9, 0.2, 1.0, 1.00015, True),
    (RECIPES["fixed_at_final_bound"](), 0.2001, 0.9, 0.2, 1.0, 0.0, False),
    (ac_mis_po(), 0.2019, 0.9, 0.2, 1.0, 1.0095, True),  # before any batch b = ln 1.01
    (ac_mis_po(), 0.2021, 0.9, 0.2, 1.0, 0.0, False),
    # CISPO: clip(r, 0, 5), and a clipped token learns on.
    (cispo(), 0.3, 0.2, 0.9, 1.0, 1.5, True),
    (cispo(), 0.9, 0.1, 0.9, 1.0, 5.0, True),
    (cispo(low=0.8, high=1.28), 0.1, 0.2, 0.9, -1.0, -0.8, True),
    # SAPO: 4σ(1−σ)·r with σ = σ(τ(r−1)).
    (topr(), 0.8, 0.2, 0.2, 1.0, 1.0, True),  # good answers learn with weight 1, wherever p is
    (topr(), 0.8, 0.2, 0.2, -1.0, -1.0, True),  # u 4 counts 1
    (topr(), 0.1, 0.2, 0.2, -1.0, -0.5, True),
    (topr(low=0.75), 0.1, 0.2, 0.2, -1.0, -0.75, True),
    (gpg(), 0.8, 0.2, 0.1, -3.0, -3.0, True),
    (vespo(), 0.2, 0.1, 0.2, 1.0, 1.0, True),  # W 1
    (vespo(), 0.4, 0.1, 0.2, 1.0, 4 * math.exp(-3), True),  # W 2: 2²·e^(3·(1−2))
    (vespo(), 0.4, 0.1, 0.2, -1.0, -8 * math.exp(-2), True),  # 2³·e^(2·(1−2))
    (luspo(), 0.2004, 0.2, 0.9, 1.0, 1.002, True),
    (luspo(), 0.2006, 0.2, 0.9, 1.0, 0.0, True),  # s 1.003 > 1.0025
    (luspo(), 0.1995, 0.2, 0.9, -1.0, 0.0, True),  # s 0.9975 < 0.998
    (sapo(), 0.2, 0.2, 0.9, 1.0, 1.0, True),
    (sapo(), 0.4, 0.2, 0.9, 1.0, 2 * 4 * E / (1 + E) ** 2, True),  # τ(r−1) = 1
    (sapo(tau_negative=2.0), 0.3, 0.2, 0.9, -1.0, -1.5 * 4 * E / (1 + E) ** 2, True),  # 2·0.5
    # IPO: both sides, whatever the sign of A; with the penalty: −2τ·log u beside u·A.
    (ipo(gap_penalty=0.0), 0.6, 0.9, 0.2, 1.0, 0.0, False),
    (ipo(gap_penalty=0.0), 0.6, 0.9, 0.2, -1.0, 0.0, False),
    (ipo(gap_penalty=0.0), 0.4, 0.9, 0.2, -1.0, -2.0, True),
    (ipo(gap_penalty=0.0, directional=True), 0.6, 0.9, 0.2, -1.0, -3.0, True),
    (ipo(gap_penalty=0.5), 0.4, 0.9, 0.2, 1.0, 2.0 - math.log(2), True),
    (ipo(gap_penalty=0.5), 0.6, 0.9, 0.2, 1.0, -math.log(3), False),  # dropped tokens are pulled back too
    # OPSM: mean log q/p > 1e-4 and A < 0.
    (opsm(clip_low=0.9), 0.1, 0.9, 0.2, -1.0, 0.0, False),
    (opsm(clip_low=0.9), 0.1, 0.9, 0.2, 1.0, 0.5, True),
    (opsm(delta=1.0, clip_low=0.9), 0.1, 0.9, 0.2, -1.0, -0.5, True),  # log 2 ≤ 1
    (opsm(clip_low=0.9), 0.2, 0.9, 0.2, -1.0, -1.0, True),
    (opsm(), 0.25, 0.9, 0.2, 1.0, 0.0, True),  # u 1.25, PPO-clip
    (opsm(anchor="old"), 0.2, 0.2, 0.9, -1.0, -1.0, True),
    # TRM: k3 = u − 1 − log u; u = 2: 0.307, u = 1.2: 0.0177.
    (trm(), 0.24, 0.9, 0.2, 1.0, 1.2, True),
    (trm(), 0.4, 0.9, 0.2, 1.0, 0.0, False),
    (trm(delta=0.31), 0.4, 0.9, 0.2, 1.0, 2.0, True),
    (trm(delta=0.25, estimator="k2"), 0.4, 0.9, 0.2, 1.0, 2.0, True),  # (log 2)²/2 = 0.2402
    (trm(delta=0.1, estimator="binary"), 0.4, 0.9, 0.2, 1.0, 2.0, True),  # D_B(.2‖.4) = 0.0915
    (trm(delta=0.09, estimator="binary"), 0.4, 0.9, 0.2, 1.0, 0.0, False),
]


@pytest.mark.parametrize(
    ("objective", "p", "o", "q", "advantage", "expected", "kept"),
    TABLE,
    ids=[f"{row[0].name}-{i}" for i, row in enumerate(TABLE)],
)
def test_one_token(objective, p, o, q, advantage, expected, kept):
    tokens = one(*at(p, o, q), advantage)
    assert coefficient(objective, tokens) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert objective(tokens).keep.item() is kept


def test_every_recipe_has_a_row():
    elsewhere = {"grpo", "icepop", "kpop"}  # test_truth_tables.py
    below = {"gspo", "gmpo", "dppo_topk_tv", "dppo_topk_kl", "m2po", "random_rejection"}
    assert {row[0].name for row in TABLE} | elsewhere | below == set(RECIPES)


# ---- edges -----------------------------------------------------------------------------------------------------------


def test_mask_negative_drops_at_equality_and_the_divergences_keep():
    """p = ¼ and q = ¾ are exact as differences of exp(log x) only by luck, so the edge is made of the measured gap."""
    tokens = one(*at(0.25, 0.75, 0.75), -1.0)
    gap = (tokens.rollout_logprobs.exp() - tokens.logprobs.exp()).item()
    assert mask_negative(delta=gap)(tokens).keep.item() is False
    assert mask_negative(delta=math.nextafter(gap, 1.0))(tokens).keep.item() is True
    from rollkeel.objectives.divergences import binary_kl, binary_tv

    tv = binary_tv(tokens.logprobs.detach(), tokens.rollout_logprobs).item()
    assert dppo_binary_tv(delta=tv)(tokens).keep.item() is True
    assert dppo_binary_tv(delta=math.nextafter(tv, 0.0))(tokens).keep.item() is False
    kl = binary_kl(tokens.rollout_logprobs, tokens.logprobs.detach()).item()
    assert dppo_binary_kl(delta=kl)(tokens).keep.item() is True
    assert dppo_binary_kl(delta=math.nextafter(kl, 0.0))(tokens).keep.item() is False


def test_band_edges_are_inside():
    unit = one(*at(0.3, 0.3, 0.3), 1.0)
    for low, high in [(1.0, 2.0), (0.5, 1.0), (1.0, 1.0)]:
        assert mis_po(low=low, high=high, trajectory_low=low, trajectory_high=high)(unit).keep.item() is True
    assert mis(cap=1.0)(unit).keep.item() is True
    assert grpo_clip_higher(clip_low=0.0, clip_high=0.0)(unit).keep.item() is True


# ---- rules of whole sequences ----------------------------------------------------------------------------------------


def test_mis_levels():
    """ρ of tokens 4 and ½ in one sequence: product 2, geometric mean √2. A second sequence has ρ = 1."""
    o = torch.tensor([0.8, 0.1, 0.5], dtype=torch.float64).log()
    q = torch.tensor([0.2, 0.2, 0.5], dtype=torch.float64).log()
    tokens = several([0.0, 0.0, 0.0], [1.0] * 3, [0, 0, 1], old_logprobs=o, rollout_logprobs=q)
    assert mis(cap=3.0)(tokens).keep.tolist() == [False, True, True]
    assert mis(cap=2.0001, level="sequence")(tokens).keep.tolist() == [True, True, True]
    assert mis(cap=1.9, level="sequence")(tokens).keep.tolist() == [False, False, True]
    assert mis(cap=1.42, level="geometric")(tokens).keep.tolist() == [True, True, True]
    assert mis(cap=1.41, level="geometric")(tokens).keep.tolist() == [False, False, True]
    assert mis(level="geometric").describe()["cap"] == 1.001
    assert mis(level="sequence", cap=9.0)(tokens).weight.tolist() == pytest.approx([4.0, 0.5, 1.0])
    assert mis(level="sequence", cap=9.0, weight="sequence")(tokens).weight.tolist() == pytest.approx([2.0, 2.0, 1.0])


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "expected"),
    [
        ([0.001, -0.0004], 1.0, math.exp(0.0003)),  # s inside 1 + 4e-4
        ([0.001, 0.0], 1.0, 0.0),  # s = exp(5e-4)
        ([0.001, 0.0], -1.0, -math.exp(0.0005)),
        ([-0.001, 0.0], -1.0, 0.0),  # s = exp(−5e-4) < 1 − 3e-4
        ([-0.001, 0.0], 1.0, math.exp(-0.0005)),
        ([-0.0004, 0.0], -1.0, -math.exp(-0.0002)),
    ],
)
def test_gspo(log_ratios, advantage, expected):
    tokens = several([*log_ratios, 0.0], [advantage, advantage, 1.0], [0, 0, 1])
    assert coefficients(gspo(), tokens) == pytest.approx([expected, expected, 1.0], rel=1e-9, abs=1e-12)
    cut = 2 / 3 if expected == 0 else 0.0
    metrics = gspo()(tokens).metrics
    assert metrics["clip/high"] + metrics["clip/low"] == pytest.approx(cut)


def test_gspo_is_the_gradient_of_the_sequence_ratio():
    """With one advantage per sequence the token form has the gradient of s·A differentiated through its mean."""
    tokens = several([0.0002, 0.0003, -0.0001], [2.0] * 3, [0, 0, 0])
    s = (tokens.logprobs - tokens.rollout_logprobs).mean().exp()
    (direct,) = torch.autograd.grad(3 * s * 2.0, tokens.logprobs)
    assert coefficients(gspo(), tokens) == pytest.approx(direct.tolist(), rel=1e-9)


def test_gmpo():
    """log r = (0.6, 0.2): with A > 0 the first is held at 0.4, so the geometric mean is e^0.3; with A < 0 it is e^0.4."""
    up = several([0.6, 0.2], [1.0, 1.0], [0, 0])
    assert coefficients(gmpo(), up) == pytest.approx([0.0, math.exp(0.3)], rel=1e-9)
    assert gmpo()(up).metrics["clip/high"] == 0.5
    down = several([0.6, 0.2], [-1.0, -1.0], [0, 0])
    assert coefficients(gmpo(), down) == pytest.approx([-math.exp(0.4)] * 2, rel=1e-9)
    low = several([-0.6, 0.2], [-1.0, -1.0], [0, 0])
    assert coefficients(gmpo(), low) == pytest.approx([0.0, -math.exp(-0.1)], rel=1e-9)
    assert gmpo()(low).metrics["clip/low"] == 0.5


def test_trajectory_filters_see_the_geometric_mean():
    """Sequence 0: log u = (0.5, −0.5), mean 0, kept though both tokens move; sequence 1: mean 0.0015."""
    tokens = several([0.5, -0.5, 0.001, 0.002], [1.0] * 4, [0, 0, 1, 1])
    out = mis_po()(tokens)
    assert out.keep.tolist() == [True, True, False, False]
    assert out.metrics["mask/trajectory/dropped"] == 0.5
    assert out.metrics["mask/token/dropped"] == 0.0
    assert out.metrics["mask/trajectory/dropped_high"] == 0.5
    assert out.metrics["mask/trajectory/dropped_low"] == 0.0
    assert ac_mis_po(bound_low=0.0014, bound_high=0.0014)(tokens).keep.tolist() == [True, True, False, False]
    assert ac_mis_po(bound_low=0.0016, bound_high=0.0016)(tokens).keep.tolist() == [True] * 4


def test_m2po_drops_the_largest_until_the_mean_fits():
    """(log u)² of tokens moving away: .01, .04, .09; means .01, .025, .0467. The others never count, however large."""
    ratios, advantages = [0.1, 0.2, -0.3, 2.0, -2.0, 0.9], [1.0, 1.0, -1.0, -1.0, 1.0, 0.0]
    tokens = several(ratios, advantages, [0] * 6)
    assert m2po()(tokens).keep.tolist() == [True, True, False, True, True, True]
    assert m2po(tau=0.0467)(tokens).keep.all()
    assert m2po(tau=0.025 - 1e-9)(tokens).keep.tolist() == [True, False, False, True, True, True]
    assert m2po(tau=0.009)(tokens).keep.tolist() == [False, False, False, True, True, True]
    objective = m2po()
    objective.prepare(tokens)
    assert objective(tokens).metrics["mask/m2po/cutoff"] == pytest.approx((0.04 + 0.09) / 2)
    assert objective(tokens).metrics["mask/m2po/tau"] == 0.04
    # Equal values go together: two of .09 cannot be told apart.
    tie = several([0.1, 0.3, 0.3], [1.0] * 3, [0] * 3)
    assert m2po(tau=0.05)(tie).keep.tolist() == [True, False, False]


def test_opsm_and_trm_judge_the_sequence():
    """Sequence 0: log u = (−0.3, 0.1), mean −0.1; sequence 1: (0.2, 0.2)."""
    tokens = several([-0.3, 0.1, 0.2, 0.2], [-1.0] * 4, [0, 0, 1, 1])
    assert opsm(delta=0.05)(tokens).keep.tolist() == [False, False, True, True]
    assert opsm(delta=0.1001)(tokens).keep.all()
    # k3: (.0408, .0052), mean .023; sequence 1: .0214 each.
    assert trm(delta=0.03)(tokens).keep.tolist() == [False, False, True, True]
    assert trm(delta=0.022, reduce="mean")(tokens).keep.tolist() == [False, False, True, True]
    assert trm(delta=0.0231, reduce="mean")(tokens).keep.all()


def test_random_rejection_rejects_an_exact_number_of_trajectories():
    ids = [i for i in range(10) for _ in range(3)]
    tokens = several([0.1] * 30, [1.0] * 30, ids)
    objective, seen = random_rejection(acceptance=0.3), set()
    for _ in range(20):
        objective.prepare(tokens)
        keep = objective(tokens).keep.view(10, 3)
        assert (keep.all(1) == keep.any(1)).all()
        assert keep.all(1).sum() == 3
        seen.add(tuple(keep[:, 0].tolist()))
    assert len(seen) > 10  # another choice for every batch
    assert not random_rejection(acceptance=0.0)(tokens).keep.any()
    assert random_rejection(acceptance=1.0)(tokens).keep.all()


@pytest.mark.parametrize(
    ("like", "kept"),
    [
        ("mis_po", 8),  # two of ten trajectories are outside the band
        ({"name": "mis_po", "trajectory_high": 9.0}, 10),
        ({"name": "dppo_binary_tv", "delta": 0.001}, 8),  # a token rule: 4 of 20 tokens move away by more
    ],
)
def test_random_rejection_takes_another_rules_acceptance(like, kept):
    ratios = [0.5, 0.5] * 2 + [0.0, 0.0] * 8
    tokens = several(ratios, [1.0] * 20, [i // 2 for i in range(20)])
    objective = random_rejection(like=like)
    assert "prepare" in objective.needs
    objective.prepare(tokens)
    assert objective(tokens).keep.view(10, 2).all(1).sum() == kept
    assert random_rejection(like=like)(tokens).keep.view(10, 2).all(1).sum() == kept  # without a preparation


# ---- top-K ------------------------------------------------------------------------------------------------------------


def with_topk(advantage: float, sampled: int, p: list[float], q: list[float], o: list[float]) -> TokenBatch:
    """One token of a four-token vocabulary; the ids are the two likeliest under q, which are 0 and 1."""

    def f(x) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.float64).log()

    tokens = one(f(p)[sampled].item(), f(o)[sampled].item(), f(q)[sampled].item(), advantage)
    listed = {"topk_logprobs": f(p)[None, :2], "rollout_topk_logprobs": f(q)[None, :2]}

    return dataclasses.replace(
        tokens,
        token_ids=torch.tensor([sampled]),
        topk_ids=torch.tensor([[0, 1]]),
        old_topk_logprobs=f(o)[None, :2],
        **listed,
    )


NOW, SAMPLER, OLD = [0.1, 0.4, 0.3, 0.2], [0.4, 0.3, 0.2, 0.1], [0.15, 0.4, 0.3, 0.15]


@pytest.mark.parametrize(
    ("sampled", "advantage", "tv", "kl"),
    [
        (0, -1.0, 0.3, 0.4 * math.log(4) + 0.3 * math.log(0.75) + 0.3 * math.log(0.6)),
        (2, 1.0, 0.3, 0.4 * math.log(4) + 0.3 * math.log(0.75) + 0.2 * math.log(2 / 3) + 0.1 * math.log(0.5)),
    ],
)
def test_dppo_topk(sampled, advantage, tv, kl):
    tokens = with_topk(advantage, sampled, NOW, SAMPLER, OLD)
    u = NOW[sampled] / SAMPLER[sampled]
    for recipe, value in ((dppo_topk_tv, tv), (dppo_topk_kl, kl)):
        assert coefficient(recipe(delta=value + 1e-9), tokens) == pytest.approx(u * advantage)
        assert coefficient(recipe(delta=value - 1e-9), tokens) == 0.0
        back = with_topk(-advantage, sampled, NOW, SAMPLER, OLD)
        assert coefficient(recipe(delta=0.0), back) == pytest.approx(-u * advantage)  # never against the way back


def test_dppo_topk_against_the_old_policy():
    """TV(o, p) = ½(.05 + 0 + .05) = 0.05 at token 0; the ratio stays p/q."""
    tokens = with_topk(-1.0, 0, NOW, SAMPLER, OLD)
    old = dppo_topk_tv(anchor="old", delta=0.051)
    assert old.needs >= {"old_logprobs", "old_topk_logprobs", "topk_logprobs"}
    assert coefficient(old, tokens) == pytest.approx(-0.25)
    assert coefficient(dppo_topk_tv(anchor="old", delta=0.049), tokens) == 0.0


def test_topk_reads_the_first_k_ids_and_caps_at_five():
    """K = 1 at token 0 is the binary divergence: ½(.3 + .3) = 0.3; u = 10 is capped at C = 5."""
    tokens = with_topk(-1.0, 0, NOW, SAMPLER, OLD)
    assert coefficient(dppo_topk_tv(k=1, delta=0.2999), tokens) == 0.0
    assert coefficient(dppo_topk_tv(k=1, delta=0.3001), tokens) == pytest.approx(-0.25)
    rare = with_topk(-1.0, 3, [0.3, 0.3, 0.2, 0.2], [0.5, 0.28, 0.2, 0.02], OLD)
    assert coefficient(dppo_topk_tv(), rare) == pytest.approx(-5.0)


def test_relaxing_nothing_is_the_plain_clip_with_either_preset():
    """ε of the scaling experiments is 0.27 above, for the relaxed clip too."""
    for preset, top in (("stability", 0.28), ("scaling", 0.27)):
        for objective in (relax_clip(alpha=0.0, preset=preset), grpo_clip_higher(preset=preset)):
            assert [rule.threshold.value for rule in objective.masks[0].rules] == [top, 0.2]


@pytest.mark.parametrize("kind", ["topk_tv", "topk_kl"])
def test_the_sampled_token_is_known_by_its_id_and_guessed_without(kind):
    """Two tokens as likely as each other under both policies: only the id says that the sampled one is not among the K."""
    p, q = [0.3, 0.3, 0.2, 0.2], [0.35, 0.35, 0.2, 0.1]
    objective = RECIPES[f"dppo_{kind}"](delta=0.0)
    tokens = dataclasses.replace(with_topk(-1.0, 0, p, q, q), topk_ids=torch.tensor([[1, 2]]))
    rolled = {
        "topk_logprobs": torch.tensor([[p[1], p[2]]], dtype=torch.float64).log(),
        "rollout_topk_logprobs": torch.tensor([[q[1], q[2]]], dtype=torch.float64).log(),
    }
    tokens = dataclasses.replace(tokens, **rolled)
    (rule,) = objective.masks[0].rules
    known, guessed = (
        rule.values(make_terms(t, objective.anchor)).item()
        for t in (tokens, dataclasses.replace(tokens, token_ids=None))
    )
    bins = [(0.3, 0.35), (0.3, 0.35), (0.2, 0.2), (0.2, 0.1)]
    merged = [(0.3, 0.35), (0.2, 0.2), (0.5, 0.45)]
    for got, table in ((known, bins), (guessed, merged)):
        tv = 0.5 * sum(abs(a - b) for a, b in table)
        kl = sum(b * math.log(b / a) for a, b in table)
        assert got == pytest.approx(tv if kind == "topk_tv" else kl, rel=1e-9)


def test_a_product_over_a_sequence_is_clamped_and_counted_as_a_whole():
    """Two tokens of log ρ = 15 are inside ±20 and their product, the weight of both, is not."""
    tokens = several([0.0, 0.0], [1.0, 1.0], [0, 0])
    tokens = dataclasses.replace(tokens, old_logprobs=tokens.rollout_logprobs + 15.0, logprobs=tokens.logprobs + 15.0)
    tokens = dataclasses.replace(
        tokens,
        **{name: getattr(tokens, name) - 20.0 for name in ("logprobs", "old_logprobs", "rollout_logprobs")},
    )
    out = mis(cap=1e9, weight="sequence")(tokens)
    assert out.weight.tolist() == pytest.approx([math.exp(20.0)] * 2)
    assert out.metrics["objective/clamped_log_ratios"] == 2
    assert mis(cap=1e9)(tokens).metrics["objective/clamped_log_ratios"] == 0


# log u of the tokens of four sequences: 15 and 15 (sum 30), −15 and −15 (sum −30), 21, 21; their A: −, +, −, +.
CLAMPED = [
    ("gpg", {}, 0),  # takes no ratio
    ("pg_is", {}, 2),  # u of each token: the two of 21
    ("topr", {}, 3),  # products where A < 0: both tokens of 30, and 21; where A > 0 the ratio is not used
    ("topr", {"level": "token"}, 1),  # 21 where A < 0
    ("topr", {"level": "geometric"}, 1),  # means 15 and 21 where A < 0
    ("vespo", {}, 6),  # every product: 2 + 2 + 1 + 1
    ("gspo", {}, 2),  # means 15, −15, 21, 21
    ("gmpo", {}, 1),  # the last 21 is held at 0.4 before the mean: its A is positive
    ("grpo", {"kl_coefficient": 0.1}, 8),  # r at the two of 21; log p/ref is twice log u: 30, −30 and 42, at all six
    ("grpo", {"kl_coefficient": 0.1, "kl_estimator": "rk3"}, 8),  # the ratio before k3 is r again
    # u at the two of 21, and the products of the other two sequences; of one token the product is its u.
    ("composed", {"anchor": "rollout", "masks": [{"ratio_band": {"level": "sequence"}}]}, 6),
]


@pytest.mark.parametrize(("name", "options", "count"), CLAMPED)
def test_clamps_are_counted_at_every_token_that_they_change(name: str, options: dict, count: int) -> None:
    ids, signs = [0, 0, 1, 1, 2, 3], [-1.0, -1.0, 1.0, 1.0, -1.0, 1.0]
    tokens = several([15.0, 15.0, -15.0, -15.0, 21.0, 21.0], signs, ids, base=-50.0)
    tokens = dataclasses.replace(tokens, ref_logprobs=2 * tokens.rollout_logprobs - tokens.logprobs.detach())
    assert find(name)(**options)(tokens).metrics["objective/clamped_log_ratios"] == count
