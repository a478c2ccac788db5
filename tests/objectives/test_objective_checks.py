"""A hole in a batch must stop the step with the rollout's name, and a wrong option must name the right one.

Covers refusals, the options of recipes, metrics of masks and the state; gradients are in test_gradients.py.
"""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from test_truth_tables_rollout import several

from rollkeel.errors import BadInput, NonFinite
from rollkeel.objectives import RECIPES, Objective, build, grpo, icepop, kpop
from rollkeel.objectives.masks import Mask
from rollkeel.objectives.surrogates import Surrogate, ratio
from rollkeel.objectives.terms import ROLLOUT
from rollkeel.objectives.weights import Weight
from rollkeel.types import TokenBatch


def batch(**changes) -> TokenBatch:
    """Two sequences of 2 and 3 tokens, everything present, all log-probs log ½ unless changed."""
    half = torch.full((5,), math.log(0.5))
    fields = {
        "logprobs": half.clone(),
        "old_logprobs": half.clone(),
        "rollout_logprobs": half.clone(),
        "ref_logprobs": half.clone(),
        "entropy": torch.ones(5),
        "advantages": torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]),
        "coefficients": torch.tensor([0.25, 0.25, 1 / 6, 1 / 6, 1 / 6]),
        "sequence_ids": torch.tensor([0, 0, 1, 1, 1]),
        "group_ids": torch.zeros(5, dtype=torch.int64),
        "rollout_ids": torch.tensor([70, 70, 71, 71, 71]),
    }
    return TokenBatch(**{**fields, **changes})


def with_value(name: str, at: int, value: float) -> TokenBatch:
    tensor = getattr(batch(), name).clone()
    tensor[at] = value
    return batch(**{name: tensor})


OBJECTIVE = kpop(kl_coefficient=0.1, entropy_coefficient=0.1)


@pytest.mark.parametrize("call", [OBJECTIVE.loss, OBJECTIVE])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "entropy", "advantages"]
)
def test_non_finite_names_sequence_and_position(call, name, value):
    with pytest.raises(NonFinite, match=rf"finite {name}.*sequence 1 \(rollout 71\) at position 2"):
        call(with_value(name, 4, value))


@pytest.mark.parametrize("value", [[0.0] * 5, np.zeros(5, dtype=np.float32)], ids=["list", "array"])
def test_what_is_no_tensor_is_named(value):
    with pytest.raises(
        BadInput, match=r"expected rollout_logprobs as a torch.Tensor, got (list|ndarray); use torch.as_tensor"
    ):
        OBJECTIVE(batch(rollout_logprobs=value))


def test_a_batch_that_is_not_flat_is_told_so():
    with pytest.raises(BadInput, match=r"expected logprobs of shape \[T\], got \[1, 5\]; flatten"):
        OBJECTIVE(batch(logprobs=batch().logprobs[None]))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"masks": (Mask("rare", lambda t: torch.ones(5)),)},
            r"mask rare to return bools \[5\], got torch.float32 \[5\]",
        ),
        (
            {"masks": (Mask("rare", lambda t: torch.tensor(True)),)},
            r"mask rare to return bools \[5\], got torch.bool \[\]",
        ),
        (
            {"weight": Weight("half", lambda t: torch.ones(2))},
            r"weight half to return floats \[5\], got torch.float32 \[2\]",
        ),
        (
            {"surrogate": Surrogate("log", lambda t: t.logprobs)},
            r"surrogate log to return a SurrogateValue .* got none",
        ),
        ({"surrogate": "ratio"}, "expected surrogate to be Surrogate, got 'ratio'"),
        ({"anchor": "rollout"}, "expected anchor to be Anchor, got 'rollout'"),
    ],
)
def test_a_part_of_one_s_own_that_returns_the_wrong_thing_is_named(parts, message):
    with pytest.raises(BadInput, match=message):
        Objective(**{"name": "own", "anchor": ROLLOUT, "surrogate": ratio(), **parts}).loss(batch())


def test_prepare_refuses_before_the_first_micro_batch():
    with pytest.raises(NonFinite, match="old_logprobs"):
        OBJECTIVE.prepare(with_value("old_logprobs", 0, math.nan))
    OBJECTIVE.prepare(batch(entropy=None))  # the differentiated pass makes it


INTERLEAVED = [
    ("gspo", {}),
    ("gmpo", {}),
    ("opsm", {}),
    ("mis_po", {}),
    ("mis", {"level": "sequence", "weight": "sequence"}),
    ("icepop", {"denominator": "kept"}),
    ("grpo", {"perturb": ["weight_noise"]}),
]


@pytest.mark.parametrize(("name", "options"), INTERLEAVED)
def test_a_sequence_in_pieces_is_refused_without_prepare(name, options):
    """Each piece would count as a sequence of its own; an objective of tokens alone does not care."""
    tokens = batch(sequence_ids=torch.tensor([0, 1, 0, 1, 1]), token_index=None)
    for call in (RECIPES[name](**options).loss, RECIPES[name](**options)):
        with pytest.raises(BadInput, match=r"side by side, got sequence 0 again at token 2 of the batch; sort"):
            call(tokens)
    assert kpop()(tokens).loss.isfinite()


def test_position_comes_from_token_index_and_rollout_id_is_optional():
    tokens = dataclasses.replace(
        with_value("logprobs", 3, math.nan), token_index=torch.tensor([0, 1, 7, 8, 9]), rollout_ids=None
    )
    with pytest.raises(NonFinite, match="in sequence 1 at position 8"):
        OBJECTIVE.loss(tokens)


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs"])
def test_positive_logprobs_are_refused_and_rounding_is_not(name):
    with pytest.raises(BadInput, match=rf"≤ 0 in {name}, got 0.00.* sequence 0 \(rollout 70\) at position 1"):
        OBJECTIVE.loss(with_value(name, 1, 1e-3))
    kpop(phi=100.0, kl_coefficient=0.1).loss(with_value(name, 1, 1e-6))


@pytest.mark.parametrize(
    "name", ["rollout_logprobs", "old_logprobs", "advantages", "coefficients", "group_ids", "rollout_ids"]
)
def test_mismatched_lengths_are_refused(name):
    with pytest.raises(BadInput, match=rf"{name} to have one entry per token"):
        OBJECTIVE.loss(batch(**{name: getattr(batch(), name)[:4]}))


def test_padded_layout_is_refused():
    shaped = {f.name: v[None] for f in dataclasses.fields(TokenBatch) if (v := getattr(batch(), f.name)) is not None}
    with pytest.raises(BadInput, match="flatten"):
        OBJECTIVE.loss(TokenBatch(**shaped))


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "entropy"])
def test_missing_tensor_is_refused(name):
    assert name in OBJECTIVE.needs
    with pytest.raises(BadInput, match=f"expected a batch with {name}, got None"):
        OBJECTIVE.loss(batch(**{name: None}))


def test_negative_coefficients_and_integer_advantages_are_refused():
    with pytest.raises(BadInput, match="non-negative coefficients"):
        OBJECTIVE.loss(with_value("coefficients", 2, -0.1))
    with pytest.raises(BadInput, match="advantages as floats"):
        OBJECTIVE.loss(batch(advantages=torch.ones(5, dtype=torch.int64)))


def test_an_entropy_bonus_without_gradient_is_refused():
    p = batch().logprobs.requires_grad_()
    with pytest.raises(BadInput, match="detached"):
        OBJECTIVE.loss(batch(logprobs=p))
    OBJECTIVE.loss(batch(logprobs=p, entropy=torch.ones(5, requires_grad=True)))
    OBJECTIVE(batch())  # nothing differentiates here


def test_an_empty_micro_batch_is_a_zero_with_a_graph():
    empty = torch.zeros(0, requires_grad=True)
    none, ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    tokens = TokenBatch(
        logprobs=empty,
        old_logprobs=none,
        rollout_logprobs=none,
        advantages=none,
        coefficients=none,
        sequence_ids=ids,
        group_ids=ids,
    )
    for name in RECIPES:
        objective = RECIPES[name]()
        if "topk_logprobs" in objective.needs:
            continue
        objective.prepare(tokens)
        loss = objective.loss(tokens)
        loss.backward()
        assert loss.item() == 0
        assert objective(tokens).keep.shape == (0,)


def test_needs():
    assert grpo().needs == {"old_logprobs"}
    assert icepop().needs == {"old_logprobs"}
    assert kpop().needs == {"old_logprobs"}
    assert kpop(mode="mask_only").needs == {"old_logprobs"}
    assert kpop(mode="rollout").needs == frozenset()
    assert grpo(kl_coefficient=0.1).needs == {"old_logprobs", "ref_logprobs"}
    for name in (
        "pg_is",
        "pg_tis",
        "grpo_clip_higher",
        "dppo_binary_tv",
        "dppo_binary_kl",
        "mask_negative",
        "relax_clip",
    ):
        assert RECIPES[name]().needs == frozenset()
    for name in ("mis_po", "fixed_at_final_bound", "ipo", "opsm", "trm"):
        assert RECIPES[name]().needs == frozenset()
    for name in ("minirl", "minirl_tis", "tis", "mis", "gspo", "gmpo", "cispo", "sapo"):
        assert RECIPES[name]().needs == {"old_logprobs"}
    assert RECIPES["dppo_binary_tv"](anchor="old").needs == {"old_logprobs"}
    assert RECIPES["dppo_topk_kl"]().needs == {"topk_logprobs", "rollout_topk_logprobs"}
    assert (RECIPES["dppo_topk_kl"](k=7).topk, kpop().topk) == (7, 0)
    assert RECIPES["random_rejection"](like={"name": "dppo_topk_tv", "k": 4}).topk == 4


def test_mask_metrics_by_hand():
    """Token 4 has ρ = 10 and is dropped: p = ½, entropy 3, |A| = 2 of Σ|A|(1−p) = (1+1+1+1+2)/2."""
    q = batch().rollout_logprobs
    q[4] = math.log(0.05)
    tokens = batch(
        rollout_logprobs=q,
        entropy=torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0]),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0, -2.0]),
    )
    out = icepop()(tokens)
    m = out.metrics
    assert out.keep.tolist() == [True, True, True, True, False]
    assert m["mask/icepop/dropped"] == pytest.approx(0.2)
    assert m["mask/icepop/dropped_entropy"] == pytest.approx(3.0)
    assert m["mask/icepop/dropped_probability"] == pytest.approx(0.5)
    assert m["mask/icepop/dropped_rollout_probability"] == pytest.approx(0.05)
    assert m["mask/icepop/dropped_gradient_mass"] == pytest.approx(1 / 3)
    assert (m["weight/mean"], m["weight/max"]) == (pytest.approx(1.0), pytest.approx(1.0))  # over kept tokens
    assert (m["mask/icepop/low"], m["mask/icepop/high"]) == (0.5, 5.0)
    assert kpop(phi=0.25)(tokens).metrics["mask/kpop/phi"] == 0.25
    json.dumps(dict(m), allow_nan=False)


def test_clips_say_what_they_cut():
    """Tokens 0 and 3 are cut by the surrogate (r 1.25 with A > 0, r 0.4 with A < 0); p ½, q as given."""
    o = torch.tensor([0.4, 0.5, 0.5, 1.0, 0.5]).log()
    q = torch.tensor([0.3, 0.5, 0.5, 0.9, 0.5]).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -2.0])
    m = RECIPES["grpo"]()(batch(old_logprobs=o, rollout_logprobs=q, advantages=advantages)).metrics
    assert (m["clip/high"], m["clip/low"], m["clip/cut"]) == pytest.approx((0.2, 0.2, 0.4))
    assert (m["clip/cut_probability"], m["clip/cut_rollout_probability"]) == pytest.approx((0.5, 0.6))
    assert m["clip/cut_gradient_mass"] == pytest.approx(2 / 6)
    assert "clip/cut_probability" not in RECIPES["grpo"]()(batch()).metrics  # a mean over no tokens


def test_means_over_no_dropped_tokens_are_left_out():
    m = icepop()(batch()).metrics
    assert m["mask/icepop/dropped"] == 0
    assert m["mask/icepop/dropped_gradient_mass"] == 0
    assert "mask/icepop/dropped_entropy" not in m
    assert "mask/icepop/dropped_probability" not in m
    assert "mask/icepop/dropped_gradient_mass" not in icepop()(batch(advantages=torch.zeros(5))).metrics


def test_half_precision_batches_are_computed_in_float32():
    tokens = batch(**{n: getattr(batch(), n).bfloat16() for n in ("logprobs", "old_logprobs", "rollout_logprobs")})
    assert kpop().loss(tokens).dtype == torch.float32


def test_build_gives_the_recipe_and_describe_is_json():
    objective = build("kpop", {"phi": 0.2, "mode": "mask_only"}, kl_coefficient=0.1, kl_estimator="k2")
    shown = objective.describe()
    assert (shown["phi"], shown["mode"], shown["kl_estimator"], shown["masks"]) == (0.2, "mask_only", "k2", ["kpop"])
    assert build("kpop", {}).describe()["phi"] == 0.1
    for name in RECIPES:
        shown = json.loads(json.dumps(build(name).describe(), allow_nan=False))
        assert shown["name"] == name


DEFAULTS = {
    ("sequence_mean", "grpo"): "grpo tis mis icepop kpop gspo gmpo sapo",
    ("token_mean", "grpo"): "dapo mis_po ac_mis_po fixed_at_final_bound m2po random_rejection cispo vespo",
    ("constant_length(1024)", "dr_grpo"): "dr_grpo",
    ("sequence_sum", "dr_grpo"): (
        "pg_is pg_tis grpo_clip_higher minirl minirl_tis dppo_binary_tv dppo_binary_kl dppo_topk_tv dppo_topk_kl"
        " mask_negative relax_clip topr"
    ),
    ("token_mean", "dr_grpo"): "ipo",
    ("sequence_mean", "dr_grpo"): "opsm",
    ("sequence_sum", "grpo"): "trm luspo",
    ("token_mean", "gpg"): "gpg",
}


def test_aggregation_and_advantage_of_every_recipe():
    found = {name: (RECIPES[name]().aggregate, RECIPES[name]().advantage) for name in RECIPES}
    assert found == {name: pair for pair, names in DEFAULTS.items() for name in names.split()}


PARAMETERS = {
    "dapo": {"clip_low": 0.2, "clip_high": 0.28},
    "tis": {"cap": 2.0},
    "icepop": {"low": 0.5, "high": 5.0, "clip_low": 0.2, "clip_high": 0.2},
    "kpop": {"phi": 0.1, "mode": "decoupled"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gmpo": {"clip": 0.4},
    "pg_is": {"cap": None},
    "pg_tis": {"cap": 3.0},
    "grpo_clip_higher": {"clip_low": 0.2, "clip_high": 0.28, "cap": None},
    "minirl": {"clip_high": 0.28, "cap": None},
    "minirl_tis": {"clip_high": 0.28, "cap": 3.0},
    "dppo_binary_tv": {"delta": 0.15, "cap": None},
    "dppo_binary_kl": {"delta": 0.05, "cap": None},
    "dppo_topk_tv": {"delta": 0.2, "k": 20, "cap": 5.0},
    "dppo_topk_kl": {"delta": 0.05, "k": 20, "cap": 5.0},
    "mask_negative": {"delta": 0.5, "cap": None},
    "relax_clip": {"alpha": 0.1, "side": "both", "clip_low": 0.2, "clip_high": 0.28},
    "mis_po": {"low": 0.5, "high": 2.0, "trajectory_low": 0.996, "trajectory_high": 1.001},
    "fixed_at_final_bound": {"trajectory_low": 0.9998, "trajectory_high": 1.0002},
    "ac_mis_po": {
        "acceptance_start": 0.4,
        "acceptance_end": 0.2,
        "steps": 200,
        "momentum": 0.9,
        "bound_low": math.log(1.0002),
        "bound_high": math.log(1.01),
    },
    "m2po": {"tau": 0.04},
    "luspo": {"clip_low": 2e-3, "clip_high": 2.5e-3},
    "vespo": {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0},
    "topr": {"low": 0.0, "high": 1.0, "level": "sequence"},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_defaults_are_those_of_the_papers(name):
    shown = RECIPES[name]().describe()
    assert {key: shown[key] for key in PARAMETERS[name]} == PARAMETERS[name]


SCALING = {
    "pg_is": {"cap": 5.0},
    "pg_tis": {"cap": 5.0},
    "grpo_clip_higher": {"clip_low": 0.2, "clip_high": 0.27, "cap": 5.0},
    "dppo_binary_tv": {"delta": 0.2, "cap": 5.0},
    "dppo_binary_kl": {"delta": 0.05, "cap": 5.0},
}


@pytest.mark.parametrize("name", SCALING)
def test_scaling_presets(name):
    shown = RECIPES[name](preset="scaling").describe()
    assert {key: shown[key] for key in SCALING[name]} == SCALING[name]
    assert RECIPES[name](preset="scaling", cap=7.0).describe()["cap"] == 7.0  # what is given wins


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_computes_with_what_it_asks_for_and_nothing_else(name):
    """In float32 and in bfloat16; without a field of its needs it says which."""
    objective = RECIPES[name]()
    fields = objective.needs - {"prepare"}
    spare = {"old_logprobs", "ref_logprobs", "entropy"} - fields
    for dtype in (torch.float32, torch.bfloat16):
        tokens = with_topk(dtype, **dict.fromkeys(spare))
        objective.prepare(tokens)
        out = objective(tokens)
        assert out.loss.dtype == torch.float32
        assert out.loss.isfinite()
        json.dumps(dict(out.metrics), allow_nan=False)
        for key in ("bias/delta_j", "bias/delta_j_ratio", "bias/j", "objective/kept", "loss/total"):
            assert key in out.metrics
        for mask in objective.masks:
            assert {f"mask/{mask.name}/{key}" for key in ("kept", "dropped", "dropped_gradient_mass")} <= set(
                out.metrics
            )
    for field in fields:
        for call in (objective.prepare, objective.loss, objective):
            with pytest.raises(BadInput, match=f"{name}: expected a batch with {field}, got None"):
                call(dataclasses.replace(with_topk(torch.float32), **{field: None}))


def with_topk(dtype: torch.dtype, **changes) -> TokenBatch:
    """`batch` with the two likeliest tokens of every position, the sampled one (p = ½) among them."""
    top = torch.tensor([[0.5, 0.3]]).log().expand(5, 2).to(dtype)
    fields = {
        n: getattr(batch(), n).to(dtype) for n in ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs")
    }
    named = {"topk_logprobs": top, "old_topk_logprobs": top, "rollout_topk_logprobs": top}
    ids = {"token_ids": torch.arange(5), "topk_ids": torch.zeros(5, 2, dtype=torch.int64)}
    return batch(**{**fields, **ids, **named, **changes})


def test_topk_logprobs_are_checked():
    objective = RECIPES["dppo_topk_tv"]()
    good = with_topk(torch.float32)
    assert good.topk_logprobs is not None
    bad = good.topk_logprobs.clone()
    bad[3, 1] = math.nan
    with pytest.raises(NonFinite, match=r"no NaN in topk_logprobs.*sequence 1 \(rollout 71\) at position 1"):
        objective.loss(dataclasses.replace(good, topk_logprobs=bad))
    bad[3, 1] = 0.5
    with pytest.raises(BadInput, match=r"log-probs ≤ 0 in topk_logprobs, got 0.5 in sequence 1"):
        objective.loss(dataclasses.replace(good, topk_logprobs=bad))
    with pytest.raises(BadInput, match=r"rollout_topk_logprobs of shape \[T, K\]"):
        objective.loss(dataclasses.replace(good, rollout_topk_logprobs=bad[:, :1]))
    with pytest.raises(BadInput, match="one entry per token"):
        objective.loss(dataclasses.replace(good, topk_logprobs=good.topk_logprobs[:4]))
    truncated = good.topk_logprobs.clone()
    truncated[:, 1] = -math.inf  # a token that top-p left out
    assert objective.loss(dataclasses.replace(good, rollout_topk_logprobs=truncated)).isfinite()


WRONG = [
    ("kpopp", {}, "did you mean kpop"),
    ("kpop", {"phy": 0.1}, r"objective\.phy.*did you mean phi"),
    ("grpo", {"phi": 0.1}, "not an option of grpo"),
    ("kpop", {"kl_coefficient": 0.1}, r"set train\.kl_coefficient"),
    ("kpop", {"phi": "0.1x"}, "expected a finite number"),
    ("kpop", {"phi": True}, "expected a finite number"),
    ("kpop", {"phi": math.nan}, "expected a finite number"),
    ("kpop", {"phi": 0.0}, "> 0"),
    ("kpop", {"mode": "decoupeld"}, "did you mean decoupled"),
    ("kpop", {"mode": "mask_only", "weight_cap": 2.0}, "no weight to cap"),
    ("kpop", {"cap": 2.0}, "mode=rollout"),
    ("kpop", {"mode": "rollout", "clip_high": 0.3}, "no PPO clip"),
    ("kpop", {"allow_double_correction": 1}, "true or false"),
    ("grpo", {"clip_low": -0.1}, "≥ 0"),
    ("grpo", {"clip_low": 1.5}, "≤ 1"),
    ("icepop", {"low": 6.0}, "low ≤ high"),
    ("icepop", {"aggregate": "mean"}, "token_mean, sequence_mean"),
    ("icepop", {"aggregate": "constant_length(0)"}, "constant_length"),
    ("icepop", {"aggregate": 3}, "token_mean, sequence_mean"),
    ("mis", {"level": "sequences"}, "did you mean sequence"),
    ("mis", {"cap": 0}, "> 0"),
    ("dr_grpo", {"length": 0}, "≥ 1"),
    ("pg_is", {"preset": "scale"}, "did you mean scaling"),
    ("dppo_binary_tv", {"anchor": "decoupled"}, "expected one of rollout, old"),
    ("dppo_topk_tv", {"k": 0}, "≥ 1"),
    ("relax_clip", {"side": "hig"}, "did you mean high"),
    ("relax_clip", {"alpha": 1.5}, "≤ 1"),
    ("mis_po", {"low": 3.0}, "low ≤ high"),
    ("ac_mis_po", {"acceptance_end": 0.0}, "> 0"),
    ("ac_mis_po", {"momentum": 1.0}, r"momentum in \[0, 1\)"),
    ("m2po", {"tau": 0}, "> 0"),
    ("random_rejection", {"acceptance": 1.5}, "≤ 1"),
    ("random_rejection", {"acceptance": 0.5, "like": "mis_po"}, "got both"),
    ("random_rejection", {"like": "grpo"}, "drops something"),
    ("random_rejection", {"like": "mispo"}, "did you mean mis_po"),
    ("sapo", {"tau_positive": 0}, "> 0"),
    ("ipo", {"gap_penalty": -1}, "≥ 0"),
    ("dr_grpo", {"length": 10.5}, "whole number"),
    ("dr_grpo", {"aggregate": ""}, "token_mean, sequence_mean"),
    ("ac_mis_po", {"steps": 3.5}, "whole number"),
    ("dppo_topk_tv", {"k": 3.5}, "whole number"),
    ("dppo_topk_tv", {"other": "no"}, "true or false"),
    ("random_rejection", {"seed": 1.5}, "whole number"),
    ("random_rejection", {"like": 5}, "expected a name"),
    ("random_rejection", {"like": {}}, "expected a name"),
    ("cispo", {"low": 5.0, "high": 1.0}, "low ≤ high"),
    ("gspo", {"perturb": [{"weight_noise": {"seed": s}} for s in (1, 2)]}, "different names"),
    ("gspo", {"perturb": [{"weight_noise": {"seed": 0.5}}]}, "whole number"),
    ("ipo", {"directional": 1}, "true or false"),
    ("opsm", {"anchor": "ol"}, "did you mean old"),
    ("trm", {"estimator": "k4"}, "expected one of"),
    ("trm", {"reduce": "median"}, "max, mean, sum"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG)
def test_wrong_options_are_refused_by_name(name, options, message):
    with pytest.raises(BadInput, match=message) as caught:
        build(name, options)
    assert "\n" not in str(caught.value)


def test_wrong_trainer_options_and_keywords_are_refused():
    with pytest.raises(BadInput, match="≥ 0"):
        build("grpo", kl_coefficient=-1.0)
    with pytest.raises(BadInput, match="kl_estimator"):
        build("grpo", kl_estimator="k4")
    with pytest.raises(BadInput, match="did you mean phi"):
        kpop(phj=0.1)
    assert build("icepop", {"aggregate": "constant_length(1024)"}).aggregate == "constant_length(1024)"
    for option in ("kl_coefficient", "entropy_coefficient", "gap_penalty"):
        for wrong in (-1.0, math.nan):
            with pytest.raises(BadInput, match=option):
                dataclasses.replace(kpop(), **{option: wrong})


def test_state_round_trip_and_refusal_of_another_objective():
    state = json.loads(json.dumps(kpop().state_dict()))
    kpop().load_state_dict(state)
    with pytest.raises(BadInput, match="grpo"):
        grpo().load_state_dict(state)


def test_a_sequence_in_pieces_is_refused():
    """Each piece would be taken for a sequence of its own by every mean over sequences."""
    tokens = several([0.0] * 5, [1.0] * 5, [7, 7, 3, 3, 7])
    for objective in (grpo(), kpop()):
        with pytest.raises(BadInput, match="sequence 7 again at token 4 of the batch"):
            objective.prepare(tokens)
