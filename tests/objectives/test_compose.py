"""Inventing an objective must be as safe as using a named one: by parts in a config, or as a function of one's own.

Covers composition, registration, import by `module:function`, denominators and refusals; the parts have their own tests.
"""

import dataclasses
import json
import sys

import pytest
import torch
from test_perturbations import many
from test_truth_tables import at, coefficient, one
from test_truth_tables_rollout import coefficients, several

from rollkeel.errors import BadInput
from rollkeel.objectives import RECIPES, build, compose, register
from rollkeel.objectives.compose import MASKS
from rollkeel.objectives.masks import Mask
from rollkeel.objectives.objective import Objective
from rollkeel.objectives.surrogates import SURROGATES
from rollkeel.types import TokenBatch


def same(a: Objective, b: Objective, tokens: TokenBatch) -> None:
    assert coefficients(a, tokens) == coefficients(b, tokens)
    assert a(tokens).keep.equal(b(tokens).keep)
    assert a.needs == b.needs


def varied() -> TokenBatch:
    """o, q and p a few tenths apart."""
    g = torch.Generator().manual_seed(3)
    gaps = 0.6 * torch.randn(3, 60, generator=g, dtype=torch.float64)
    tokens = several(gaps[0].tolist(), [(-1.0) ** i for i in range(60)], [i // 6 for i in range(60)])
    return dataclasses.replace(tokens, old_logprobs=tokens.rollout_logprobs + gaps[1].clamp(max=1.0))


EQUALS = [
    ("kpop", {"masks": [{"binary_kl_bound": {"phi": 0.1}}], "weight": "mismatch"}),
    ("icepop", {"masks": ["ratio_band"], "weight": {"mismatch": {}}}),
    ("tis", {"weight": {"mismatch": {"cap": 2}}}),
    ("grpo", {"anchor": "old"}),
    ("pg_is", {"anchor": "rollout", "surrogate": "ratio"}),
    ("dppo_binary_tv", {"anchor": "rollout", "surrogate": "ratio", "masks": ["divergence"]}),
    (
        "minirl_tis",
        {"anchor": "mask_old", "surrogate": {"ratio": {"cap": 3}}, "masks": [{"ratio_clip": {"clip_high": 0.28}}]},
    ),
    ("gspo", {"anchor": "old", "surrogate": "sequence_ppo_clip"}),
    ("m2po", {"anchor": "rollout", "surrogate": "ratio", "masks": ["second_moment"]}),
    ("sapo", {"anchor": "old", "surrogate": "soft_gate"}),
]


@pytest.mark.parametrize(("name", "parts"), EQUALS, ids=[e[0] for e in EQUALS])
def test_recipes_are_compositions(name, parts):
    same(build(name), build("composed", parts), varied())


def test_masks_multiply_and_report_under_their_own_names():
    objective = build(
        "composed",
        {
            "masks": [
                {"ratio_band": {"high": 2.0}},
                {"ratio_band": {"name": "wide", "high": 8.0}},
                {"trajectory_bound": {"bound": {"drop_rate": 0.1}}},
            ],
            "aggregate": "token_mean",
            "advantage": "dr_grpo",
        },
    )
    assert (objective.aggregate, objective.advantage) == ("token_mean", "dr_grpo")
    tokens = varied()
    metrics = objective(tokens).metrics
    for name in ("ratio_band", "wide", "trajectory_bound"):
        assert f"mask/{name}/dropped" in metrics
    assert metrics["mask/wide/high"] == 8.0
    assert metrics["objective/kept"] == objective(tokens).keep.double().mean().item()
    shown = json.loads(json.dumps(objective.describe(), allow_nan=False))
    assert shown["masks"] == ["ratio_band", "wide", "trajectory_bound"]


def test_every_part_can_be_named_with_its_defaults():
    tokens = dataclasses.replace(
        varied(),
        entropy=torch.rand(60),
        token_ids=torch.ones(60, dtype=torch.int64),
        topk_ids=torch.zeros(60, 2, dtype=torch.int64),
        topk_logprobs=torch.full((60, 2), -1.0),
        rollout_topk_logprobs=torch.full((60, 2), -1.2),
    )
    for mask in MASKS:
        for anchor in ("old", "decoupled", "rollout", "mask_old"):
            assert compose(masks=[mask], anchor=anchor, surrogate="ratio")(tokens).keep.shape == (60,)
    for kind in ("topk_tv", "topk_kl"):
        compose(masks=[{"divergence": {"kind": kind}}], anchor="rollout")(tokens)
    for surrogate in SURROGATES:
        assert compose(surrogate=surrogate)(tokens).loss.isfinite()


WRONG = [
    ({"masks": ["ratio_bnd"]}, "did you mean ratio_band"),
    ({"masks": "ratio_band"}, "expected a list"),
    ({"masks": [{"ratio_band": {"hig": 2}}]}, r"ratio_band\.hig.*did you mean high"),
    ({"masks": [{"ratio_band": 3}]}, "mapping of options"),
    ({"masks": [3]}, "expected a name"),
    ({"masks": ["ratio_band", "ratio_band"]}, "masks of different names"),
    ({"masks": [{"divergence": {"kind": "binary_tw"}}]}, "did you mean binary_tv"),
    ({"masks": [{"at_most": {"statistic": "ratios"}}]}, "did you mean ratio"),
    ({"surrogate": "ppo_clop"}, "did you mean ppo_clip"),
    ({"weight": "mismatches"}, "did you mean mismatch"),
    ({"anchor": "rolout"}, "did you mean rollout"),
    ({"aggregates": "token_mean"}, "did you mean aggregate"),
    ({"masks": [{"divergence": {"kind": "topk_tv", "k": -3}}]}, r"divergence\.k: .*≥ 1"),
    ({"masks": [{"divergence": {"directional": "no"}}]}, "true or false"),
    ({"masks": [{"sequence_kl": {"negative_only": "no"}}]}, "true or false"),
    ({"masks": [{"at_most": {"directional": 1}}]}, "true or false"),
    ({"masks": [{"ratio_band": {"name": 5}}]}, "expected a name for its metrics"),
    ({"masks": [{"ratio_clip": {"name": "ppo_clip"}}]}, "different names"),  # its state would be the surrogate's
    ({"anchor": "rollout", "weight": "mismatch"}, "allow_double_correction"),
    ({"anchor": "mask_old", "weight": "mismatch"}, "allow_double_correction"),
    ({"denominator": "keptt"}, "original or kept"),
    ({"denominator": "kept", "aggregate": "sequence_sum"}, "expected aggregate token_mean or sequence_mean"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_compositions_are_refused_by_name(options, message):
    with pytest.raises(BadInput, match=message) as caught:
        build("composed", options)
    assert "\n" not in str(caught.value)


# ---- one's own ---------------------------------------------------------------------------------------------------------


def only_rare(below: float = 0.5) -> Mask:
    return Mask("only_rare", lambda terms: terms.reference.exp() < below, {"below": below})


@pytest.fixture
def registered():
    @register("mine")
    def mine(*, below: float = 0.5) -> Objective:
        return compose("mine", masks=[only_rare(below)], anchor="rollout", surrogate="ratio")

    yield mine
    del RECIPES["mine"]


def test_a_registered_function_is_an_objective_like_any_other(registered):
    objective = build(
        "mine", {"below": 0.3, "perturb": [{"distort_low_probability": {"delta": 2}}]}, kl_coefficient=0.1
    )
    assert objective.needs == {"ref_logprobs", "old_logprobs"}
    assert build("mine")(one(*at(0.4, 0.4, 0.4), 1.0)).metrics["mask/only_rare/below"] == 0.5
    assert coefficient(build("mine"), one(*at(0.8, 0.4, 0.4), 1.0)) == pytest.approx(2.0)
    assert coefficient(build("mine", {"below": 0.3}), one(*at(0.8, 0.4, 0.4), 1.0)) == 0.0
    with pytest.raises(BadInput, match="did you mean below"):
        build("mine", {"belo": 0.3})
    with pytest.raises(BadInput, match="did you mean mine"):
        build("minne")
    with pytest.raises(BadInput, match="taken"):
        register("kpop")(registered)


def test_defining_a_function_anew_replaces_it_and_another_of_its_name_is_refused():
    def define(phi):
        def again():
            return compose("again", masks=[{"binary_kl_bound": {"phi": phi}}])

        return again

    def other():
        return compose("again")

    try:
        register("again")(define(0.1))
        register("again")(define(0.2))
        assert build("again").masks[0].rules[0].threshold.value == 0.2
        with pytest.raises(BadInput, match="taken"):
            register("again")(other)
        with pytest.raises(BadInput, match="taken"):
            register("composed")(other)
    finally:
        del RECIPES["again"]


def test_a_function_is_imported_from_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "my_objectives.py").write_text(
        "from rollkeel.objectives import kpop\n\n\n"
        "def strict(*, phi=0.01):\n    return kpop(phi=phi)\n\n\n"
        "def broken():\n    return 3\n\n\ndef passing_on(**options):\n    return 4\n\n\nnumber = 4\n\n\n"
        "def pulled():\n    return kpop(kl_coefficient=0.1)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        assert build("my_objectives:strict").describe()["phi"] == 0.01
        assert build("my_objectives:strict", {"phi": 0.2, "denominator": "kept"}).denominator == "kept"
        with pytest.raises(BadInput, match="did you mean phi"):
            build("my_objectives:strict", {"ph": 1})
        with pytest.raises(BadInput, match="return an Objective, got int"):
            build("my_objectives:broken")
        with pytest.raises(BadInput, match="return an Objective, got int"):
            build("my_objectives:passing_on")
        assert build("my_objectives:pulled", kl_coefficient=0.1).kl_coefficient == 0.1
        with pytest.raises(BadInput, match=r"train\.kl_coefficient=0\.0, got 0\.1"):  # and not silently without it
            build("my_objectives:pulled")
        with pytest.raises(BadInput, match=r"no 'nothing' in .*my_objectives.py"):
            build("my_objectives:nothing")
        with pytest.raises(
            BadInput, match=r"expected a function that returns an Objective, got \d+ .*my_objectives.py:\d+"
        ):
            build("my_objectives:number")
    finally:
        sys.modules.pop("my_objectives", None)
    with pytest.raises(BadInput, match="no module not_there in "):
        build("not_there:thing")


# ---- denominators ------------------------------------------------------------------------------------------------------


def halves() -> TokenBatch:
    """Sequence 0 keeps 1 of 2 tokens, sequence 1 all of 2, sequence 2 none of 1 (u = 9 is outside [0.5, 5])."""
    far = 2.1972245773362196
    return several([far, 0.0, 0.0, 0.0, far], [1.0] * 5, [0, 0, 1, 1, 2], base=-3.0)


BAND = {"masks": ["ratio_band"], "anchor": "rollout", "surrogate": "ratio"}


def test_kept_over_sequences():
    """Each sequence's kept tokens carry what its tokens carried."""
    objective = compose(**BAND, aggregate="sequence_mean", denominator="kept")
    assert coefficients(objective, halves()) == pytest.approx([0.0, 2.0, 1.0, 1.0, 0.0])
    assert "prepare" not in objective.needs


def test_kept_over_the_batch_is_found_before_the_first_micro_batch():
    objective = compose(**BAND, aggregate="token_mean", denominator="kept")
    assert "prepare" in objective.needs
    expected = [0.0, 5 / 3, 5 / 3, 5 / 3, 0.0]
    assert coefficients(objective, halves()) == pytest.approx(expected)  # unprepared: the tokens given are the batch
    objective.prepare(halves())
    whole = halves()
    part = TokenBatch(**{k: None if v is None else v[:2] for k, v in vars(whole).items()})
    (gradient,) = torch.autograd.grad(objective.loss(part), whole.logprobs)
    assert (-gradient).tolist() == pytest.approx([0.0, 5 / 3, 0.0, 0.0, 0.0])
    objective.prepare(halves(), gather=lambda values: torch.cat([values, values]))  # a second rank that saw the same
    assert coefficients(objective, halves()) == pytest.approx(expected)
    nothing = compose(masks=[{"ratio_band": {"low": 7, "high": 8}}], aggregate="token_mean", denominator="kept")
    assert nothing.loss(halves()).item() == 0.0


def test_the_kl_term_is_not_rescaled():
    tokens = dataclasses.replace(halves(), ref_logprobs=halves().logprobs.detach() - 0.5)
    objective = compose(**BAND, aggregate="token_mean", denominator="kept", kl_coefficient=1.0, kl_estimator="k1")
    assert objective(tokens).metrics["loss/kl"] == pytest.approx(5 * 0.5)


def test_without_a_mask_kept_is_original():
    tokens = many(100)
    assert coefficients(build("grpo", {"denominator": "kept"}), tokens) == coefficients(build("grpo"), tokens)
