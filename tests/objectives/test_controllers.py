"""A threshold that follows a drop rate decides what a run learns from, so each of its steps must be one a reader can redo.

Covers AC-MIS-PO's equations by hand, drop rates for the thresholds of every kind of mask and clip, state and metrics. The long
stream with a changing spread is in test_ac_mis_po_stream.py, ranks in test_parallel_invariance.py.
"""

import json
import math

import pytest
import torch
from test_truth_tables_rollout import several

from rollkeel.errors import BadInput
from rollkeel.objectives import (
    RECIPES,
    ac_mis_po,
    build,
    compose,
    dapo,
    dppo_binary_kl,
    dppo_binary_tv,
    dppo_topk_kl,
    dppo_topk_tv,
    fixed_at_final_bound,
    gmpo,
    grpo,
    grpo_clip_higher,
    gspo,
    icepop,
    ipo,
    kpop,
    minirl,
    mis,
    mis_po,
    opsm,
    random_rejection,
)
from rollkeel.objectives.objective import Objective
from rollkeel.objectives.options import threshold
from rollkeel.objectives.thresholds import Budget, Controller, Fixed, Share
from rollkeel.types import TokenBatch

LOW, HIGH = math.log(1.0002), math.log(1.01)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- the controller alone ----------------------------------------------------------------------------------------------


def test_equations_by_hand():
    """Values 0, 1, 2, 3, 4: the 0.75-quantile is 3, the 0.5 one 2, the 0.55 one 2.2 (linear between order statistics)."""
    c = Controller(0.75, 0.25, steps=4, momentum=0.9, low=0.5, high=10.0, initial=9.0)
    assert (c.value, c.acceptance, c.target) == (9.0, None, 0.625)
    values = f64(3.0, 0.0, 4.0, 1.0, 2.0)
    c.update(values)  # k = 1: A* = 0.625, candidate 2.5
    assert c.value == pytest.approx(0.9 * 9.0 + 0.1 * 2.5)
    assert c.acceptance == 1.0
    c.update(values)  # k = 2: A* = 0.5, candidate 2
    assert c.value == pytest.approx(0.9 * 8.35 + 0.1 * 2.0)
    for _ in range(5):
        c.update(values)
    assert c.target == 0.25  # stays at the end of the schedule
    assert c.updates == 7
    assert c.acceptance == pytest.approx((values <= c.value).double().mean().item())


def test_clamps_order_and_infinities():
    c = Controller(0.5, 0.5, 0, momentum=0.0, low=LOW, high=HIGH, initial=99.0)
    assert c.value == HIGH
    c.update(f64(0.0, 0.0))
    assert c.value == LOW
    c.update(f64(5.0, 7.0))
    assert c.value == HIGH
    free = Controller(0.5, 0.5, 0, momentum=0.0, initial=1.0)
    free.update(f64(math.inf, 1.0, 2.0))
    assert free.value == 2.0  # infinite counts as the largest finite one
    free.update(f64(-math.inf, -math.inf, 2.0, 3.0, 4.0))
    assert free.value == 2.0
    free.update(f64(math.inf, math.inf))
    assert free.value == 2.0  # nothing to learn a bound from
    free.update(f64())
    assert free.value == 2.0


def test_the_lower_side_keeps_the_upper_quantile():
    c = Controller(0.75, 0.75, 0, momentum=0.0, initial=0.0, side="lower")
    c.update(f64(0.0, 1.0, 2.0, 3.0, 4.0))
    assert c.value == 1.0
    assert c.acceptance == 0.8


def test_state_round_trip():
    c = Controller(0.4, 0.2, 200, low=LOW, high=HIGH, initial=HIGH)
    for i in range(5):
        c.update(f64(0.001 * i, 0.002, 0.003))
    fresh = Controller(0.4, 0.2, 200, low=LOW, high=HIGH, initial=HIGH)
    fresh.load_state_dict(json.loads(json.dumps(c.state_dict())))
    c.update(f64(0.004, 0.001))
    fresh.update(f64(0.001, 0.004))
    assert fresh.state_dict() == c.state_dict()


def test_budget_and_share():
    assert Budget(0.5).solve(f64(0.25, 1.0, -math.inf, 0.5)) == 0.75  # means of .25, .5, 1: .25, .375, .583
    assert Budget(0.1).solve(f64(0.25, 1.0)) == 0.125
    assert Budget(9.0).solve(f64(0.25, 1.0)) == math.inf
    assert Budget(9.0).solve(f64()) == math.inf
    assert Share(0.5).solve(f64(0.4, 0.1, 0.2, 0.3)) == 0.25
    assert Share(0.0).solve(f64(0.4, 0.1)) == math.inf
    assert Share(1.0).solve(f64(0.4, 0.1)) == -math.inf


# ---- as options --------------------------------------------------------------------------------------------------------


def test_options_become_thresholds():
    fixed = threshold("x", 0.3, default=0.1)
    assert isinstance(fixed, Fixed)
    assert fixed.value == 0.3
    plain = threshold("x", {"drop_rate": 0.01}, default=0.1)
    assert isinstance(plain, Controller)
    assert (plain.rate_start, plain.rate_end, plain.momentum, plain.value) == (0.99, 0.99, 0.9, 0.1)
    given = {"drop_rate": [0.6, 0.8], "steps": 200, "momentum": 0.5, "low": 0.01, "high": 0.05, "initial": 1.0}
    full = threshold("x", given, default=0.1)
    assert isinstance(full, Controller)
    assert (full.rate_start, full.steps, full.low, full.high, full.value) == (pytest.approx(0.4), 200, 0.01, 0.05, 0.05)
    assert threshold("x", full, default=0.1) is full


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"drop_rat": 0.1}, r"x\.drop_rat.*did you mean drop_rate"),
        ({"steps": 3}, "number or a mapping with drop_rate"),
        ({"drop_rate": 1.0}, "drop_rate: expected a number < 1"),
        ({"drop_rate": -0.1}, "≥ 0"),
        ({"drop_rate": [0.1, 0.2]}, r"x\.steps: expected the number of updates"),
        ({"drop_rate": [0.1, 0.2, 0.3]}, r"\[first, last\]"),
        ({"drop_rate": 0.1, "low": 2, "high": 1}, "low ≤ high"),
        ({"drop_rate": 0.1, "momentum": 1.0}, "momentum: expected a number < 1"),
        ("0.1", "finite number"),
    ],
)
def test_wrong_drop_rates_are_refused(value, message):
    with pytest.raises(BadInput, match=message) as caught:
        threshold("x", value, default=0.1)
    assert "\n" not in str(caught.value)


# ---- inside objectives -------------------------------------------------------------------------------------------------


def noisy(step: int, count: int = 4000, sequences: int = 400) -> TokenBatch:
    """p, o, q a little apart, sequences of ten tokens, A = ±1 per sequence."""
    g = torch.Generator().manual_seed(step)
    gap = 0.2 * torch.randn(count, generator=g, dtype=torch.float64)
    q = -torch.empty(count, dtype=torch.float64).exponential_(1.0, generator=g) - 0.5
    sign = torch.where(torch.rand(sequences, generator=g) < 0.5, -1.0, 1.0).repeat_interleave(count // sequences)
    ids = torch.arange(sequences).repeat_interleave(count // sequences).tolist()
    old = (q + 0.2 * torch.randn(count, generator=g, dtype=torch.float64)).clamp(max=-1e-9)
    tokens = several([0.0] * count, sign.tolist(), ids, old_logprobs=old, rollout_logprobs=q)
    return TokenBatch(**{**vars(tokens), "logprobs": (old + gap).clamp(max=-1e-9)})


CASES: list[tuple[Objective, str, float, str]] = [
    # objective, controller's name, drop rate, the metric that must settle at it
    (kpop(phi={"drop_rate": 0.05}), "kpop", 0.05, "mask/kpop/dropped"),
    (icepop(high={"drop_rate": 0.03}), "icepop_high", 0.03, "mask/icepop/dropped_high"),
    (icepop(low={"drop_rate": 0.02}, high={"drop_rate": 0.03}), "icepop_low", 0.02, "mask/icepop/dropped_low"),
    (dppo_binary_kl(delta={"drop_rate": 0.05}), "dppo_binary_kl", 0.05, "mask/dppo_binary_kl/dropped"),
    (minirl(clip_high={"drop_rate": 0.04}), "minirl_clip_high", 0.04, "clip/high"),
    (grpo(clip_low={"drop_rate": 0.04}), "ppo_clip_clip_low", 0.04, "clip/low"),
    (gspo(clip_high={"drop_rate": 0.1}), "sequence_ppo_clip_clip_high", 0.1, "clip/high"),
    (gmpo(clip={"drop_rate": 0.02}), "geometric_ppo_clip_clip_high", 0.02, "clip/high"),
    (opsm(delta={"drop_rate": 0.1}), "opsm", 0.1, "mask/opsm/dropped"),
    (
        compose(masks=[{"at_most": {"statistic": "binary_tv", "value": {"drop_rate": 0.05}}}]),
        "at_most",
        0.05,
        "mask/at_most/dropped",
    ),
]


@pytest.mark.parametrize(("objective", "name", "rate", "metric"), CASES, ids=[c[1] for c in CASES])
def test_any_threshold_can_follow_a_drop_rate(objective, name, rate, metric):
    """The statistics are those of one distribution, so after the average has settled the share is the one asked for."""
    for step in range(80):
        tokens = noisy(step)
        objective.prepare(tokens)
    metrics = objective(tokens).metrics
    assert metrics[metric] == pytest.approx(rate, abs=0.02)
    assert metrics[f"controller/{name}/target"] == pytest.approx(1 - rate)
    assert metrics[f"controller/{name}/acceptance"] == pytest.approx(1 - metrics[metric], abs=1e-6)
    assert math.isfinite(metrics[f"controller/{name}/bound"])
    json.dumps(objective.describe(), allow_nan=False)


def test_only_rules_on_current_logprobs_ask_for_them():
    rate = {"drop_rate": 0.1}
    assert "prepare" not in kpop(phi=rate).needs  # o and q suffice
    assert "prepare" not in kpop(mode="rollout").needs
    assert "prepare" in kpop(phi=rate, mode="rollout").needs
    assert "prepare" in grpo(clip_low=rate).needs
    assert "prepare" in minirl(clip_high=rate).needs
    for name in ("ac_mis_po", "m2po"):
        assert "prepare" in RECIPES[name]().needs
    assert "prepare" not in random_rejection(acceptance=0.5).needs
    assert "prepare" not in random_rejection(like="icepop").needs
    assert "old_logprobs" in random_rejection(like="icepop").needs


def test_after_prepare_the_loss_is_a_pure_function():
    objective = ac_mis_po()
    tokens = noisy(0)
    objective.prepare(tokens)
    state = objective.state_dict()
    first, second = objective(tokens), objective(tokens)
    assert objective.state_dict() == state
    assert first.metrics == second.metrics
    assert first.loss.item() == objective.loss(tokens).item()


def test_the_only_controller_has_short_names_too():
    objective = ac_mis_po()
    assert "controller/acceptance" not in objective(noisy(0)).metrics  # no batch has been prepared
    objective.prepare(noisy(0))
    metrics = objective(noisy(0)).metrics
    for key in ("bound", "acceptance", "target"):
        assert metrics[f"controller/{key}"] == metrics[f"controller/trajectory/{key}"]
    assert metrics["mask/trajectory/bound"] == metrics["controller/bound"]
    two = icepop(low={"drop_rate": 0.1}, high={"drop_rate": 0.1})
    assert "controller/bound" not in two(noisy(0)).metrics


RATE = {"drop_rate": 0.1}
STARTS = [
    (grpo(clip_high=RATE), 0.2),
    (dapo(clip_high=RATE), 0.28),
    (gspo(clip_high=RATE), 4e-4),
    (gmpo(clip=RATE), 0.4),
    (mis(cap=RATE), 2.0),
    (mis(level="geometric", cap=RATE), 1.001),
    (mis_po(high=RATE), 2.0),
    (mis_po(trajectory_high=RATE), 1.001),
    (fixed_at_final_bound(trajectory_low=RATE), 0.9998),
    (dppo_binary_tv(delta=RATE, preset="scaling"), 0.2),
    (dppo_binary_kl(delta=RATE), 0.05),
    (dppo_topk_tv(delta=RATE), 0.2),
    (dppo_topk_kl(delta=RATE), 0.05),
    (grpo_clip_higher(clip_high=RATE, preset="scaling"), 0.27),
    (ipo(delta=RATE), 0.3),
    (opsm(delta=RATE), 1e-4),
    (opsm(delta={**RATE, "initial": 0.5}), 0.5),
]


@pytest.mark.parametrize(("objective", "first"), STARTS, ids=lambda v: getattr(v, "name", None))
def test_a_drop_rate_begins_at_the_recipe_s_own_default(objective, first):
    found = [rule.threshold.value for _, rule in objective.rules() if rule.threshold.adaptive]
    assert found == pytest.approx([first] * len(found))
    assert found


STATEFUL = [
    ("ac_mis_po", {}),
    ("kpop", {"phi": {"drop_rate": 0.1}}),
    ("grpo", {"clip_high": {"drop_rate": 0.1}}),
    ("random_rejection", {"acceptance": 0.5}),
    ("random_rejection", {"like": "ac_mis_po"}),
    ("gspo", {"perturb": [{"weight_noise": {"sigma": 0.3}}]}),
]


@pytest.mark.parametrize(("name", "options"), STATEFUL)
def test_a_resumed_objective_continues(name, options):
    first = build(name, options)
    for step in range(3):
        first.prepare(noisy(step))
    state = json.loads(json.dumps(first.state_dict()))
    second = build(name, options)
    assert second.state_dict() != state
    second.load_state_dict(state)
    for step in range(3, 5):
        first.prepare(noisy(step))
        second.prepare(noisy(step))
        assert first(noisy(step)).metrics == second(noisy(step)).metrics
        assert first.loss(noisy(step)).item() == second.loss(noisy(step)).item()


def test_state_of_another_composition_is_refused():
    with pytest.raises(BadInput, match="resume with the same"):
        kpop().load_state_dict(kpop(phi={"drop_rate": 0.1}).state_dict())
    with pytest.raises(BadInput, match="resume with the same"):
        kpop(phi={"drop_rate": 0.1}).load_state_dict(kpop().state_dict())


@pytest.mark.parametrize("damage", [{"updates": None}, {"bound": "x"}, {"bound": [1]}])
def test_damaged_state_is_named(damage):
    """A checkpoint cut short or edited says which part it is, and not a bare KeyError."""
    objective = kpop(phi={"drop_rate": 0.1})
    state = objective.state_dict()
    part = {**state["state"]["kpop/phi"], **damage}
    part = {key: value for key, value in part.items() if value is not None or key == "acceptance"}
    with pytest.raises(
        BadInput, match=r"saved state of kpop/phi is damaged \(\w+: .*\); resume from another checkpoint"
    ):
        objective.load_state_dict({**state, "state": {"kpop/phi": part}})
    assert kpop().state_dict() == {"name": "kpop"}
