"""A loss that slips by a position, a mask or a denominator between two layouts trains another method without a word.

Every plug-in is given the batches of rollkeel.conformance in the layout of its trainer, and must have the stored gradients,
for every recipe that it takes. With `ROLLKEEL_CHECKOUTS` the trainers' own reducers and registries take part. Not covered:
the trainers' loops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkouts import checkout

from rollkeel.conformance import Batch, check
from rollkeel.conformance.adapters.published import modules
from rollkeel.conformance.batch import load, stored
from rollkeel.conformance.readings import compute
from rollkeel.conformance.runner import answer
from rollkeel.errors import BadInput
from rollkeel.integrations import areal, nemo_rl, prime_rl, skyrl, slime, verl
from rollkeel.integrations.padded import coefficients_of
from rollkeel.objectives import RECIPES, build

FEW = ("grpo", "kpop", "icepop", "mis", "gspo", "dppo_binary_tv", "mis_po", "sapo")
Plugin = Callable[[str, Batch], torch.Tensor]
NEEDS_THE_BATCH = {"ac_mis_po", "m2po", "random_rejection"}
TOKEN_WISE = [name for name in RECIPES if name not in NEEDS_THE_BATCH and "topk" not in name]


def token_mean(losses: torch.Tensor, mask: torch.Tensor, mode: str, batch_num_tokens: int, **_: Any) -> torch.Tensor:
    """What verl's `agg_loss` does in mode token-mean, with its arguments."""
    assert mode == "token-mean"
    return (losses * mask).sum() / batch_num_tokens


def through_verl(recipe: str, b: Batch, agg: Any = token_mean, bypass: bool = False) -> torch.Tensor:
    info = {"dp_size": 1, "batch_num_tokens": b.tokens, "global_batch_size": b.sequences}
    about = {"config": SimpleNamespace(global_batch_info=info), "loss_agg_mode": "token-mean"}
    old = b.rollout_logprobs if bypass else b.old_logprobs
    weights = None if bypass else (b.old_logprobs - b.rollout_logprobs).exp()
    mask = b.mask.to(b.logprobs.dtype)
    args = (old, b.logprobs, b.advantages, mask)
    return verl.policy_loss({"name": recipe}, agg)(*args, rollout_is_weights=weights, **about)[0]


def through_slime(recipe: str, b: Batch, reduce: Any = None) -> torch.Tensor:
    lengths = [int(row.nonzero().max()) + 1 for row in b.mask]

    def rows(values: torch.Tensor) -> list[torch.Tensor]:
        return [row[:n] for row, n in zip(values, lengths, strict=True)]

    batch = {"loss_masks": rows(b.mask.to(b.logprobs.dtype)), "advantages": rows(b.advantages)}
    batch |= {"log_probs": rows(b.old_logprobs), "rollout_log_probs": rows(b.rollout_logprobs)}

    def sum_of_sample_mean(x: torch.Tensor) -> torch.Tensor:
        parts = zip(x.split(lengths), batch["loss_masks"], strict=True)
        return torch.stack([(loss * mask).sum() / mask.sum() for loss, mask in parts]).sum()

    loss = slime.custom_loss(recipe, scores=lambda logits, *_: rows(logits))
    return loss(None, batch, b.logprobs, reduce(batch, lengths) if reduce else sum_of_sample_mean)[0] / b.sequences


def through_skyrl(recipe: str, b: Batch) -> torch.Tensor:
    mask = b.mask.to(b.logprobs.dtype)
    return skyrl.policy_loss(recipe)(
        b.logprobs, b.old_logprobs, b.advantages / b.tokens, None, mask, b.rollout_logprobs
    )[0]


def through_prime_rl(recipe: str, b: Batch) -> torch.Tensor:
    options = {"mode": "rollout"} if recipe == "kpop" else {}
    total = torch.zeros((), dtype=b.logprobs.dtype)
    for p, q, a, mask in zip(b.logprobs, b.rollout_logprobs, b.advantages, b.mask, strict=True):
        inputs = SimpleNamespace(
            trainer_logprobs=p, inference_logprobs=q, advantages=a, loss_mask=mask, loss_weights=None
        )
        total = total + prime_rl.loss_and_metrics(inputs, objective=recipe, **options)[0]
    return total / b.tokens


def through_nemo_rl(recipe: str, b: Batch, sequence_level: bool = False) -> torch.Tensor:
    def shifted(values: torch.Tensor) -> torch.Tensor:
        return torch.cat((torch.full_like(values[:, :1], -9), values), 1)

    data = {"generation_logprobs": shifted(b.rollout_logprobs), "prev_logprobs": shifted(b.old_logprobs)}
    data |= {"advantages": shifted(b.advantages), "token_mask": shifted(b.mask.long()).clamp(min=0)}
    data["sample_mask"] = torch.ones(len(b.groups))
    counts = (torch.tensor(float(b.sequences)), torch.tensor(float(b.tokens)))
    return nemo_rl.RollkeelLoss(recipe, sequence_level)(b.logprobs, data, *counts)[0]


def through_areal(recipe: str, b: Batch, packed: bool = False) -> torch.Tensor:
    data: dict[str, Any] = {"logprobs": b.rollout_logprobs, "prox_logp": b.old_logprobs, "advantages": b.advantages}
    data["loss_mask"], p = b.mask, b.logprobs
    if packed:
        data, p = {name: value.flatten() for name, value in data.items()}, p.flatten()
        data["cu_seqlens"] = torch.arange(0, b.mask.numel() + 1, b.mask.shape[1])
    return areal.loss_fn(recipe)(p, torch.zeros_like(p), data) * b.mask.sum() / b.tokens


PLUGINS: dict[str, tuple[Plugin, str]] = {
    "verl": (through_verl, "token_mean"),
    "slime": (through_slime, "sequence_mean"),
    "skyrl": (through_skyrl, "token_mean"),
    "nemo_rl": (through_nemo_rl, "token_mean"),
    "nemo_rl sequence level": (lambda r, b: through_nemo_rl(r, b, True), "sequence_mean"),
    "areal": (through_areal, "token_mean"),
    "areal packed": (lambda r, b: through_areal(r, b, packed=True), "token_mean"),
}


def same(plugin: Plugin, aggregate: str, recipe: str, options: dict[str, Any]) -> None:
    """In float32 by the stored answers; in float64 to 1e-6."""
    verdict = check(lambda b: plugin(recipe, b), recipe, {**options, "aggregate": aggregate})
    assert verdict.passed, (recipe, verdict.findings, verdict.differences[:2], verdict.invariances)
    for name in stored():
        b = load(name)
        gradient, _ = answer(lambda batch: plugin(recipe, batch), b, recipe)
        right = -compute(build(recipe, options), b.fresh()).coefficient * b.coefficients(aggregate)
        assert (b.flat(gradient) - right).abs().max() <= 1e-6


@pytest.mark.parametrize("name", list(PLUGINS))
def test_gradients_are_the_recipes(name: str) -> None:
    plugin, aggregate = PLUGINS[name]
    for recipe in TOKEN_WISE if name == "verl" else FEW:
        same(plugin, aggregate, recipe, {})


def test_a_slip_by_one_position_is_caught() -> None:
    def slipped(b: Batch) -> torch.Tensor:
        moved = b.rollout_logprobs.roll(1, 1)
        return through_nemo_rl("icepop", replace(b, rollout_logprobs=moved))

    assert not check(slipped, "icepop", {"aggregate": "token_mean"}).passed


def test_prime_rl_and_verls_bypass_mode_take_recipes_anchored_at_the_sampler() -> None:
    for recipe in ("dppo_binary_tv", "pg_is", "ipo", "mis_po", "trm", "vespo"):
        same(through_prime_rl, "token_mean", recipe, {})
        same(lambda r, b: through_verl(r, b, bypass=True), "token_mean", recipe, {})
    same(through_prime_rl, "token_mean", "kpop", {"mode": "rollout"})
    with pytest.raises(BadInput, match="needs old_logprobs, which its losses are not given"):
        check(lambda b: through_prime_rl("grpo", b), "grpo")


@pytest.mark.parametrize("recipe", sorted(NEEDS_THE_BATCH - {"random_rejection"}))
def test_what_needs_the_whole_batch_is_refused(recipe: str) -> None:
    with pytest.raises(BadInput, match="decides over the whole optimizer batch, and verl gives micro-batches"):
        verl.policy_loss(recipe, token_mean)


def test_skyrl_refuses_a_term_that_its_denominator_does_not_reach() -> None:
    with pytest.raises(BadInput, match="has a term without A"):
        skyrl.policy_loss({"name": "ipo", "gap_penalty": 0.001})


def test_a_reducers_coefficients_are_found_whatever_it_is() -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    found = coefficients_of(lambda x: ((x * mask).sum(1) / mask.sum(1)).mean(), mask)
    assert torch.equal(found, torch.tensor([[0.25, 0.25, 0.0], [0.5, 0.0, 0.0]]))


def test_without_their_trainers_the_files_say_what_is_missing() -> None:
    calls = [
        lambda: verl.register("kpop"),
        lambda: skyrl.register("kpop"),
        lambda: nemo_rl.loss_function("kpop"),
        lambda: prime_rl.loss(None),
        lambda: slime._megatrons(torch.zeros(1), None, {}),
    ]
    for call in calls:
        with pytest.raises(BadInput, match=r"needs .*(install .* beside rollkeel|run it inside)"):
            call()


# -- their own reducers and registries ---------------------------------------------------------------------------------


@pytest.mark.checkout
def test_verls_own_aggregation_and_registry() -> None:
    (core,) = modules(("verl.trainer.ppo.core_algos",), checkout("verl"))
    core.register_policy_loss("rollkeel_icepop")(verl.policy_loss("icepop", core.agg_loss))
    assert core.get_policy_loss_fn("rollkeel_icepop")
    same(lambda r, b: through_verl(r, b, agg=core.agg_loss), "token_mean", "icepop", {})


@pytest.mark.checkout
def test_slimes_own_means() -> None:
    (parallel,) = modules(("slime.backends.megatron_utils.cp_utils",), checkout("slime"))
    parallel.mpu = SimpleNamespace(get_context_parallel_world_size=lambda: 1)

    def reduce(batch: dict[str, Any], lengths: list[int]) -> Any:
        masks = batch["loss_masks"]
        return parallel.get_sum_of_sample_mean(lengths, lengths, masks, [m.sum() for m in masks], False)

    for recipe in ("icepop", "kpop", "gspo"):
        same(lambda r, b: through_slime(r, b, reduce), "sequence_mean", recipe, {})


@pytest.mark.checkout
def test_prime_rls_own_sum() -> None:
    (losses,) = modules(("prime_rl.trainer.rl.loss",), checkout("prime_rl"), below="src")

    def through(recipe: str, b: Batch) -> torch.Tensor:
        def loss(inputs: Any) -> Any:
            return losses.LossOutputs(*prime_rl.loss_and_metrics(inputs, objective=recipe))

        rows = [list(x.unbind()) for x in (b.logprobs, b.rollout_logprobs, b.advantages, b.mask)]
        return losses.compute_loss(*rows[:2], None, *rows[2:], None, None, None, loss, b.tokens, 1, 1)[0]

    for recipe in ("dppo_binary_tv", "mis_po"):
        same(through, "token_mean", recipe, {})


@pytest.mark.checkout
def test_skyrls_own_registry_and_reduction() -> None:
    name = "skyrl.backends.skyrl_train.utils.ppo_utils"
    (losses,) = modules((name,), checkout("skyrl"))

    def through(recipe: str, b: Batch) -> torch.Tensor:
        mask = b.mask.to(b.logprobs.dtype)
        scaled = losses.apply_loss_reduction_to_advantages_minibatch(b.advantages, mask, "sequence_mean", *mask.shape)
        scaled = scaled * len(b.groups) / b.sequences
        return skyrl.policy_loss(recipe)(b.logprobs, b.old_logprobs, scaled, None, mask, b.rollout_logprobs)[0]

    for recipe in ("icepop", "dppo_binary_tv", "gspo"):
        same(through, "sequence_mean", recipe, {})


def test_the_page_names_every_plug_in() -> None:
    folder = Path(verl.__file__).parent
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
    files = {f.stem for f in folder.glob("*.py")} - {"__init__", "padded", "traces", "hub"}
    assert {name for name in files if f"rollkeel.integrations.{name}" not in page} == set()
