"""A rule that stops a run must be right: it may not end an honest one, and may not pass what no number explains.

Hand-computed gaps, thresholds that are the doctor's, and a trainer whose weights must keep their bits. Not covered: whole runs
(tests/test_fault_patterns.py), honest runs of recipes (benchmarks/healthy.py).
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollkeel import objectives
from rollkeel.batch.build import TrainingBatch
from rollkeel.config import TrainConfig
from rollkeel.errors import Impossible
from rollkeel.recipe import load
from rollkeel.train import soundness
from rollkeel.train.mesh import Mesh
from rollkeel.train.optimizer import Stepper
from rollkeel.train.soundness import Fresh, judged
from rollkeel.train.trainer import LocalTrainer
from rollkeel_doctor import thresholds
from tests.train.test_trainer import make_batch, policy

HALF = math.log(0.5)


def batch(n: int = 8, **facts: Any) -> TrainingBatch:
    """At least 40 tokens that the newest weights sampled, each with probability ½."""
    made = make_batch(n)
    tokens = len(made)
    assert tokens >= soundness.LEAST
    whole = {"rollout_logprobs": torch.full((tokens,), HALF), "kept_mass": torch.ones(tokens)}
    return replace(
        made, versions=torch.zeros(tokens).long(), kv_versions=torch.zeros(tokens).long(), **{**whole, **facts}
    )


def shifted(tokens: int, by: float) -> torch.Tensor:
    """Log-probs whose logits are `by` above 0."""
    return torch.full((tokens,), -math.log1p(math.exp(-by)), dtype=torch.float64)


def test_the_limits_are_the_doctor_s_and_add_up() -> None:
    assert (soundness.NOISE, soundness.K3) == (thresholds.NOISE, thresholds.K3)
    fresh = Fresh.of(load(None, ["engine.dtype=fp8", "sampling.temperature=0.5", "model.dtype=bfloat16"]))
    assert fresh.noise == pytest.approx(3 * 2 * (0.20 + 0.055))
    assert fresh.k3 == pytest.approx(3 * 4 * (1.5e-2 + 3e-3))
    assert fresh.stops
    assert not Fresh.of(load(None, ["alarms.on_impossible=warn"])).stops
    assert Fresh.of(load(None, ["run.parity=true"])).k3 == 0


def test_a_gap_by_hand() -> None:
    made, fresh = batch(), Fresh(noise=0.1, k3=1.0)
    found = fresh.apart(made, shifted(len(made), 0.05), 0)
    ratio = 2 / (1 + math.exp(-0.05))
    assert found.noise == pytest.approx(1.4826 * 0.05, rel=1e-4)
    assert found.k3 == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-3)
    assert found.times == pytest.approx(0.7413, rel=1e-3)
    # A few tokens that are far off, as those of a flipped expert, move the median of none.
    few = shifted(len(made), 0.0)
    few[:3] = -9.0
    assert fresh.apart(made, few, 0).noise == pytest.approx(0, abs=1e-6)
    cut = batch(rollout_logprobs=torch.zeros(len(made)), kept_mass=torch.full((len(made),), 0.5))
    assert fresh.apart(cut, shifted(len(made), 0.0), 0).times == pytest.approx(0, abs=1e-5)


def test_what_is_not_fresh_or_too_little_is_not_judged() -> None:
    made, fresh, far = batch(), Fresh(noise=0.1, k3=0.01), -9.0
    logprobs = torch.full((len(made),), far)
    assert fresh.apart(made, logprobs, 0).times > 1
    assert fresh.apart(made, logprobs, 1).tokens == 0
    old = replace(made, kv_versions=made.kv_versions - 1)
    assert fresh.apart(old, logprobs, 0).tokens == 0
    few = replace(made, versions=made.versions + (torch.arange(len(made)) >= soundness.LEAST - 1))
    assert fresh.apart(few, logprobs, 0) == (soundness.LEAST - 1, 0.0, 0.0, 0.0)


def test_equal_bits_are_asked_of_parity_alone() -> None:
    made = batch()
    exact, off = Fresh(noise=0.0, k3=0.0), made.rollout_logprobs.clone()
    assert exact.judge(made, off, 0) == {"mismatch/beyond_dtypes_max": 0.0}
    off[3] = torch.nextafter(off[3], torch.tensor(0.0))
    with pytest.raises(Impossible, match="differ by up to"):
        exact.judge(made, off, 0)
    assert replace(exact, stops=False).judge(made, off, 0) == {"mismatch/beyond_dtypes_max": 1e9}


def test_an_error_goes_to_every_rank() -> None:
    told: list[Any] = []

    class Others(Mesh):
        def agree(self, error: Exception | None) -> None:
            told.append(error)

    made = batch()
    assert judged(Fresh(noise=0.1, k3=0.01), made, torch.full((len(made),), -9.0), 0, Others()) == {}
    assert isinstance(told[0], Impossible)
    there = pickle.loads(pickle.dumps(told[0]))
    assert (there.check, str(there), there.seen[1].tolist()) == ("fresh_ratio", str(told[0]), [-9.0] * len(made))


def trainer(fresh: Fresh | None = None) -> LocalTrainer:
    made = LocalTrainer(policy(), TrainConfig(warmup_steps=0), temperature=1.0, total_updates=4)
    made.fresh = fresh
    return made


def bits(made: LocalTrainer) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in made.named_weights()}


def refusal(made: LocalTrainer, given: TrainingBatch, **terms: Any) -> str:
    """What an update is refused with; empty if it is made. Refused, it changes nothing."""
    before, updates = bits(made), made.version
    try:
        made.update(
            given, objectives.build("grpo", {}, **terms), old_is_current=True, ref_logprobs=given.rollout_logprobs
        )
    except Impossible as error:
        assert (bits(made), made.version) == (before, updates)
        assert not made._stepper.state_dict()["moments"] or updates
        return error.check
    assert made.version == updates + 1
    return ""


def test_other_log_probs_of_the_same_weights_leave_them_as_they_are() -> None:
    sound, wrong = trainer(fresh=Fresh(noise=0.1, k3=0.01)), batch()
    assert refusal(sound, wrong) == "fresh_ratio"
    with pytest.raises(Impossible):
        sound.score(wrong)
    honest = replace(wrong, rollout_logprobs=trainer().score(wrong).logprobs)
    assert refusal(sound, honest) == ""
    assert refusal(sound, replace(wrong, versions=wrong.versions - 1)) == ""
    assert refusal(trainer(fresh=Fresh(noise=0.1, k3=0.01, stops=False)), wrong) == ""


@pytest.mark.parametrize(
    ("terms", "check"), [({}, "stray_gradient"), ({"kl_coefficient": 0.1}, ""), ({"entropy_coefficient": 0.1}, "")]
)
def test_a_batch_without_credit_has_no_gradient_unless_something_else_is_paid(
    terms: dict[str, float], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = replace(batch(), advantages=torch.zeros(len(batch())))
    judge = Fresh(noise=1e9, k3=1e9)
    assert refusal(trainer(judge), nothing, **terms) == ""
    left: Callable[[Any, Any], torch.Tensor] = Stepper._norm
    monkeypatch.setattr(Stepper, "_norm", lambda self, grads: left(self, grads) + 0.1)
    assert refusal(trainer(judge), nothing, **terms) == check
    assert refusal(trainer(judge), batch(), **terms) == ""
    assert refusal(trainer(replace(judge, stops=False)), nothing, **terms) == ""
