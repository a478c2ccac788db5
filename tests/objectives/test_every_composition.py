"""Parts may be put together freely only if a part means the same beside every other part.

Every mask × surrogate × weight of the registries, so that a new part is covered the day it is registered: a dropped token has
a gradient of exactly 0, and weights and perturbations multiply each token's own gradient. What each part computes is in
test_reference.py and the truth tables.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from reference_tokens import random_tokens
from test_parallel_invariance import tensors

from rollkeel.objectives import Objective, compose
from rollkeel.objectives.compose import MASKS
from rollkeel.objectives.surrogates import SURROGATES
from rollkeel.objectives.terms import make_terms
from rollkeel.objectives.weights import WEIGHTS
from rollkeel.types import TokenBatch

WEIGHT_NAMES = (None, *WEIGHTS)
TIGHT = {"fallen": {"delta": 0.02}, "second_moment": {"tau": 1e-3}}
"""Masks whose own defaults drop nothing on these tokens."""
PERTURB = [{"weight_noise": {"sigma": 0.5}}, {"distort_low_probability": {"delta": 3.0}}]


@pytest.fixture(scope="module")
def tokens() -> TokenBatch:
    found = tensors(random_tokens(700, seed=8))
    return dataclasses.replace(found, logprobs=found.logprobs.requires_grad_())


def gradient(objective: Objective, tokens: TokenBatch) -> torch.Tensor:
    return torch.autograd.grad(objective.loss(tokens), tokens.logprobs)[0]


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("anchor", ["decoupled", "rollout"])
def test_masks_weights_and_perturbations_multiply_each_token_s_gradient(tokens, surrogate, anchor):
    plain = compose(surrogate=surrogate, anchor=anchor)
    plain.prepare(tokens)
    alone = gradient(plain, tokens)
    assert alone.count_nonzero() > 100
    for mask, weight in itertools.product(MASKS, WEIGHT_NAMES):
        objective = compose(
            masks=[{mask: TIGHT.get(mask, {})}],
            weight=weight,
            surrogate=surrogate,
            anchor=anchor,
            perturb=PERTURB,
            allow_double_correction=True,
        )
        objective.prepare(tokens)
        out, found = objective(tokens), gradient(objective, tokens)
        assert (found[~out.keep] == 0).all(), mask
        factor = torch.stack([f.multiplier(make_terms(tokens, objective.anchor)) for f in objective.factors]).prod(0)
        expected = torch.where(out.keep, out.weight * factor * alone, 0.0)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-18, msg=f"{mask} {weight}")
        assert 0 < out.keep.sum() < len(out.keep), mask  # one that drops nothing would pass whatever it did
