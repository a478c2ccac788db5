"""The answers by which other libraries are judged must be right themselves: `golden.json` is what the objectives give, and
what an independent float64 reference gives that shares no line with them.

Not covered: `random_rejection`, whose answer is a draw.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import reference as ref
import torch
from reference_tokens import Tokens

from rollkeel.conformance import golden
from rollkeel.conformance.batch import Batch, load, stored
from rollkeel.objectives import RECIPES

NOT_IN_REFERENCE = {"random_rejection"}
ALIASES = {"dr_grpo": "grpo"}


def tokens(batch: Batch) -> Tokens:
    """The stored batch as the reference takes it."""

    def flat(values: torch.Tensor) -> Any:
        return batch.flat(values).detach().numpy()

    p, o, q = (flat(x) for x in (batch.logprobs, batch.old_logprobs, batch.rollout_logprobs))
    tops = [
        batch.topk_logprobs[batch.mask],
        batch.old_topk_logprobs[batch.mask],
        batch.rollout_topk_logprobs[batch.mask],
    ]
    top_p, top_o, top_q = (t.numpy() for t in tops)
    listed = (batch.topk_ids[batch.mask] == 0).numpy()
    rests = [
        1 - np.exp(t).sum(1) - np.where(listed.any(1), 0.0, np.exp(x)) for t, x in ((top_p, p), (top_o, o), (top_q, q))
    ]
    ids = flat(torch.arange(len(batch.groups)))
    a = flat(batch.advantages)
    return Tokens(p, o, q, a, np.ones_like(p), ids, top_p, top_o, top_q, listed, *rests)


def test_the_file_is_what_the_objectives_give() -> None:
    made, kept = json.loads(golden.text()), golden.stored()
    assert made["recipes"].keys() == kept["recipes"].keys()
    assert made["advantages"].keys() == kept["advantages"].keys()
    for entry, values in made["recipes"].items():
        assert values["source"] == kept["recipes"][entry]["source"]
        for batch in stored():
            np.testing.assert_allclose(kept["recipes"][entry][batch], values[batch], rtol=1e-8, atol=1e-12)
    assert {name.split(" ")[0] for name in kept["recipes"] if ":" not in name} == set(RECIPES) - NOT_IN_REFERENCE


@pytest.mark.parametrize("batch", list(stored()))
@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - NOT_IN_REFERENCE))
def test_the_file_is_what_an_independent_reference_gives(recipe: str, batch: str) -> None:
    t = tokens(load(batch))
    for options in ({}, *golden.VARIANTS.get(recipe, ())):
        if recipe == "ac_mis_po":
            options = {"bound": ref.ac_mis_po_bounds(t, 1)[0]}
        right = getattr(ref, ALIASES.get(recipe, recipe))(t, **options).coefficient
        kept = golden.stored()["recipes"][golden.key(recipe, {} if recipe == "ac_mis_po" else options)][batch]
        np.testing.assert_allclose(kept, right, rtol=1e-7, atol=1e-9, err_msg=f"{recipe} {options}")


def test_every_rule_that_drops_decides_both_ways_about_some_token() -> None:
    """A table in which a mask keeps everything would pass whoever left it out."""
    drops_nothing = {"cispo", "sapo", "pg_is", "pg_tis", "topr", "vespo", "gpg"}
    for recipe in set(RECIPES) - NOT_IN_REFERENCE:
        entry = golden.stored()["recipes"][recipe]
        a = np.concatenate([tokens(load(batch)).a for batch in stored()])
        came = np.concatenate([entry[batch] for batch in stored()])
        assert (came[a == 0] == 0).all()
        dropped = (came[a != 0] == 0).any()
        assert dropped == (recipe not in drops_nothing), recipe
        assert (came != 0).any()


def test_a_few_answers_by_hand() -> None:
    """r 1.1, A 1 → 1.1. r 1.42 is cut. ρ 2.6 under a cap of 2, A ½ → 1. ρ 6 is outside of [0.5, 5]."""
    kept = golden.stored()["recipes"]
    assert kept["grpo"]["branches"][1:4] == [1.1, 0.0, 0.0]
    assert kept["tis"]["branches"][15] == pytest.approx(2 * 0.5)
    assert kept["icepop"]["branches"][17] == 0.0
    assert kept["pg_is"]["branches"][4] == pytest.approx(0.7 / 0.2)
