"""A plug-in that takes a padding for a token, or counts a micro-batch for the batch, trains something else in silence.

What an objective sees of padded tensors is compared with what rollkeel's own batch gives it. Not covered: the trainers
themselves (test_trl_plugin.py, test_plugins_of_others.py).
"""

from __future__ import annotations

import pytest
import torch

from rollkeel.batch.coefficients import KNOWN, coefficients
from rollkeel.conformance import Batch, check, golden
from rollkeel.conformance.batch import load
from rollkeel.errors import BadInput
from rollkeel.integrations.padded import flat, objective_of, shares
from rollkeel.integrations.trl import MISSING, RollkeelGRPOTrainer
from rollkeel.objectives import RECIPES, kpop


def through(recipe: str) -> object:
    def loss(b: Batch) -> torch.Tensor:
        objective = golden.objective(recipe, {})
        tokens = flat(
            b.logprobs,
            b.mask,
            rollout_logprobs=b.rollout_logprobs,
            advantages=b.advantages[:, 0],
            coefficients=shares(objective.aggregate, b.mask, b.groups),
            groups=b.groups,
            old_logprobs=b.old_logprobs,
            ref_logprobs=b.ref_logprobs,
        )
        objective.prepare(tokens)
        return objective.loss(tokens)

    return loss


def test_every_recipe_has_its_gradient_through_padded_tensors() -> None:
    """Answers with holes, padding and different lengths; see rollkeel.conformance."""
    for recipe in (*RECIPES, "kl:rk3"):
        if recipe not in golden.LEFT_OUT and "topk" not in recipe:
            verdict = check(through(recipe), recipe)  # type: ignore[arg-type]
            assert verdict.passed, (recipe, verdict.findings, verdict.invariances)


@pytest.mark.parametrize("aggregate", [name.replace("(n)", "(16)") for name in KNOWN])
def test_shares_are_the_batchs_coefficients_and_answers_without_tokens_count_nowhere(aggregate: str) -> None:
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0]])
    groups = torch.tensor([4, 4, 9])
    made = shares(aggregate, mask, groups)
    assert made.shape == mask.shape
    assert (made[mask == 0] == 0).all()
    assert torch.equal(made[mask.bool()], coefficients(aggregate, [3, 2], [4, 9]))
    assert shares(aggregate, mask[1:2], groups[1:2]).sum() == 0


def test_rounding_above_zero_is_taken_off_without_its_gradient() -> None:
    b = load("answers")
    p = (b.logprobs.detach() * 0 + 1e-7).requires_grad_()
    about = {
        "rollout_logprobs": p.detach(),
        "advantages": b.rewards,
        "coefficients": shares("token_sum", b.mask, b.groups),
    }
    tokens = flat(p, b.mask, **about)
    assert (tokens.logprobs == 0).all()
    assert (tokens.rollout_logprobs == 0).all()
    (gradient,) = torch.autograd.grad(tokens.logprobs.sum(), p)
    assert torch.equal(gradient, b.mask.to(gradient.dtype))
    assert tokens.token_index is not None
    assert tokens.token_index.max() < b.mask.shape[1]


def test_what_a_padded_batch_cannot_carry_is_refused() -> None:
    assert objective_of({"name": "kpop", "phi": 0.3}, "TRL").parameters["phi"] == 0.3
    assert objective_of(kpop(), "TRL", kl_coefficient=0.1).kl_coefficient == 0.1
    with pytest.raises(BadInput, match="needs log-probs of 20 tokens per position, which TRL does not return"):
        objective_of("dppo_topk_tv", "TRL")
    with pytest.raises(BadInput, match=r"entropy_coefficient=0\.1 is not taken here"):
        objective_of(kpop(entropy_coefficient=0.1), "TRL")
    with pytest.raises(BadInput, match="did you mean kpop"):
        objective_of("kpopp", "TRL")
    with pytest.raises(BadInput, match="expected a name"):
        objective_of({"phi": 0.1}, "TRL")


@pytest.mark.skipif(MISSING is None, reason="TRL is installed here")
def test_the_plug_in_imports_without_trl_and_names_its_extra() -> None:
    with pytest.raises(BadInput, match=r"needs TRL .*pip install 'rollkeel\[trl\]'"):
        RollkeelGRPOTrainer(model="x")
