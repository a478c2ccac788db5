"""The control that tells the gap from the rounding needs a trainer on the engine's own grid: ρ = 1, and gradients that are right.

Tiny real models; an int4 engine samples. Not covered: CUDA, activations in fp8 (an engine's `fp8`), which no trainer here rounds.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from test_replay import make_batch, policy, weights

from rollkeel import objectives
from rollkeel.config import TrainConfig
from rollkeel.errors import BadInput, NonFinite
from rollkeel.lab.sampled import sample
from rollkeel.models.loading import Policy
from rollkeel.models.names import checkpoint_views
from rollkeel.models.numerics import is_quantised, round_int4
from rollkeel.train.trainer import LocalTrainer

MODES = ("fp8_weights", "int8", "int4")


def trainer(p: Policy | None = None, **options: object) -> LocalTrainer:
    """Its steps are lr · g / (|g| + eps) at first: with eps = 1 they tell the gradient."""
    plain = {"warmup_steps": 0, "lr": 1.0, "clip_norm": 1e9}
    mode = str(options.pop("rounding", "none"))
    config = TrainConfig.model_validate({**plain, **options})
    made = LocalTrainer(p or policy(), config, temperature=1.0, total_updates=10, rounding=mode)
    made._stepper.adamw.eps = 1.0
    return made


@pytest.mark.parametrize("mode", MODES)
def test_engine_and_trainer_on_one_grid_compute_one_function(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["sft.steps=20", "rollout.prompts=8", f"engine.dtype={mode}"]
    sampled = sample([*words, f"experiment.rounding={mode}"], 0)
    ratio = (sampled.trainer().score(sampled.batch).logprobs - sampled.batch.rollout_logprobs).exp()
    assert (ratio - 1).abs().max() < 1e-4
    apart = sample(words, 0)
    assert torch.equal(apart.batch.rollout_logprobs, sampled.batch.rollout_logprobs), "the same weights are published"
    ratio = (apart.trainer().score(apart.batch).logprobs - apart.batch.rollout_logprobs).exp()
    assert (ratio - 1).abs().max() > 1e-3


def on_grid(p: Policy) -> Policy:
    """The policy with its weights rounded to int4 for good."""
    out = Policy(copy.deepcopy(p.model), p.tokenizer)
    for name, view in checkpoint_views(out.model).items():
        if is_quantised(name, view):
            view.copy_(round_int4(view))
    return out


@pytest.mark.parametrize("processes", [1, 2])
def test_the_step_is_that_of_the_rounded_function_taken_from_the_exact_weights(processes: int) -> None:
    exact = policy()
    rounded = trainer(on_grid(exact))
    through = trainer(exact, rounding="int4", processes=processes)
    batch, starts = make_batch(), [weights(t) for t in (through, rounded)]
    assert not all(torch.equal(starts[0][name], starts[1][name]) for name in starts[0])
    try:
        assert torch.allclose(through.score(batch).logprobs, rounded.score(batch).logprobs, atol=1e-6)
        a, b = (t.update(batch, objectives.grpo(), old_is_current=True) for t in (through, rounded))
    finally:
        through.close()
    assert a.metrics["optimizer/grad_norm"] == pytest.approx(b.metrics["optimizer/grad_norm"], rel=1e-4)
    for name, after in weights(through).items():
        moved, expected = after - starts[0][name], weights(rounded)[name] - starts[1][name]
        assert expected.abs().max() > 1e-5, name
        assert torch.allclose(moved, expected, atol=1e-6), name


def test_outside_of_a_pass_the_weights_are_exact_whatever_happens_inside() -> None:
    t, batch = trainer(rounding="int4"), make_batch()
    before = weights(t)
    t.score(batch)
    with t.computing():
        assert any(not torch.equal(p, before[n]) for n, p in t.model.named_parameters())
        router, norm = "model.layers.0.mlp.gate.weight", "model.norm.weight"
        assert all(torch.equal(dict(t.model.named_parameters())[n], before[n]) for n in (router, norm))
    batch.coefficients.fill_(float("nan"))
    with pytest.raises(NonFinite):
        t.update(batch, objectives.grpo(), old_is_current=True)
    assert all(torch.equal(p, before[n]) for n, p in weights(t).items())


def test_what_is_saved_is_exact_and_goes_on_as_it_would_have() -> None:
    one, batch = trainer(rounding="int4", kl_coefficient=0.1), make_batch()
    assert torch.equal(one.ref_logprobs(batch), one.score(batch).logprobs), "the reference begins as the same policy"

    def go(t: LocalTrainer) -> None:
        t.update(batch, objectives.grpo(kl_coefficient=0.1), old_is_current=True, ref_logprobs=t.ref_logprobs(batch))

    go(one)
    other = trainer(rounding="int4", kl_coefficient=0.1)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert torch.equal(one.ref_logprobs(batch), other.ref_logprobs(batch))
    go(one)
    go(other)
    assert all(torch.equal(p, weights(other)[n]) for n, p in weights(one).items())


def test_no_rounding_is_nothing_and_nothing_to_round_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    t = trainer()
    before = weights(t)
    with t.computing():
        assert all(torch.equal(p, before[n]) for n, p in t.model.named_parameters())
    monkeypatch.setattr("rollkeel.train.rounding.is_quantised", lambda *_: False)
    with pytest.raises(
        BadInput, match=r"experiment\.rounding=int4: model Qwen3MoeForCausalLM has no projection weights"
    ):
        trainer(rounding="int4")
