"""With adapters the base must stay as it was to the last bit, the gradient must be that of the model they make, and a resume must not
notice that only they were kept.

Real presets on the CPU. Not covered: CUDA, whether learning succeeds (tests/test_adapter_runs.py).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rollkeel import objectives
from rollkeel.batch.build import TrainingBatch, build_batch
from rollkeel.batch.packing import pack
from rollkeel.config import LoraConfig, ModelConfig, SftConfig, TrainConfig
from rollkeel.errors import BadInput
from rollkeel.models.adapters import parameters
from rollkeel.models.loading import Policy, load_policy, save_policy
from rollkeel.models.lora import ADAPTER
from rollkeel.train.logprobs import PolicyForward
from rollkeel.train.sft import run_sft
from rollkeel.train.trained import Trained
from rollkeel.train.trainer import LocalTrainer
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan

EXPERTS = [pytest.param("tiny-qwen3", False, id="dense"), pytest.param("tiny-qwen3-moe", True, id="moe-experts")]


def policy(preset: str = "tiny-qwen3-moe", lora: LoraConfig | None = None, path: str = "", **options: Any) -> Policy:
    lora = lora or LoraConfig(rank=4, experts="moe" in preset)
    return load_policy(ModelConfig(path=path or f"preset:{preset}", **options), lora=lora)


def trainer(p: Policy, **options: Any) -> LocalTrainer:
    config = TrainConfig(lr=3e-3, warmup_steps=0, lora=p.lora or LoraConfig(), **options)
    return LocalTrainer(p, config, temperature=1.0, total_updates=10)


def batch(seed: int = 0) -> TrainingBatch:
    r, rollouts = np.random.default_rng(seed), []
    for i, length in enumerate([3, 11, 7, 9]):
        prompt = Prompt(id=str(i), index=i, text="", token_ids=r.integers(8, 288, 5), answer="",
                        grader=GraderSpec(name="x"), task="t")  # fmt: skip
        span = TokenSpan(token_ids=r.integers(8, 288, length), logprobs=np.full(length, -5.6, np.float32),
                         kept_mass=np.ones(length, np.float32), versions=np.zeros(length, np.int64),
                         kv_versions=np.zeros(length, np.int64))  # fmt: skip
        rollouts.append(Rollout(id=i, group=i // 2, member=i % 2, prompt=prompt, span=span, status=Status.FINISHED,
                                sampling=SamplingParams(), engine="local", dtype="fp32", reward=0.0))  # fmt: skip
    return build_batch(rollouts, r.normal(size=4), "sequence_mean")


def base_of(p: Policy) -> dict[str, torch.Tensor]:
    return {name: w.detach().clone() for name, w in p.model.named_parameters() if ADAPTER not in name}


def adapters_of(p: Policy) -> dict[str, torch.Tensor]:
    return {name: w.detach().clone() for name, w in parameters(p.model).items()}


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def update(t: LocalTrainer, seed: int = 0) -> dict[str, float]:
    return t.update(batch(seed), objectives.grpo(), old_is_current=True).metrics


@pytest.mark.parametrize(("preset", "experts"), EXPERTS)
def test_updates_move_adapters_and_nothing_else(preset: str, experts: bool) -> None:
    p = policy(preset)
    t, base, before = trainer(p), base_of(p), adapters_of(p)
    update(t)  # B is 0 and A has no gradient yet
    update(t, 1)
    assert differ(base_of(p), base) == []
    assert len(differ(adapters_of(p), before)) == len(before) == (24 if experts else 28)
    assert all(w.grad is None for name, w in p.model.named_parameters() if ADAPTER not in name)
    assert len(t.state_dict()["optimizer"]["moments"]) == len(before)


@pytest.mark.parametrize(("preset", "experts"), EXPERTS)
def test_the_gradient_is_that_of_the_merged_weights(preset: str, experts: bool, tmp_path: Any) -> None:
    """W + sBA: dA = s Bᵀ dW and dB = s dW Aᵀ."""
    p = policy(preset)
    draw = torch.Generator().manual_seed(2)
    for w in parameters(p.model).values():
        w.data += 0.05 * torch.randn(w.shape, generator=draw)
    save_policy(p, tmp_path)
    merged = load_policy(ModelConfig(path=str(tmp_path)))
    for each in (p, merged):
        _loss(each, [np.arange(20, 60), np.arange(200, 210)]).backward()
    dense, scale = dict(merged.model.named_parameters()), 32.0 / 4
    for name, w in parameters(p.model).items():
        owner, _, rest = name.partition(ADAPTER)
        stack, _, letter = rest.rpartition(".")
        weight = dense[f"{owner}.{stack or 'weight'}"].grad
        other = parameters(p.model)[name[:-1] + "BA"["AB".index(letter)]].detach()
        assert weight is not None
        expected = other.mT @ weight if letter == "A" else weight @ other.mT
        assert w.grad is not None
        assert torch.allclose(w.grad, scale * expected, rtol=1e-3, atol=1e-5), name


def _loss(p: Policy, sequences: Sequence[np.ndarray]) -> torch.Tensor:
    starts = np.cumsum([0, *(len(s) - 1 for s in sequences[:-1])]).tolist()
    micro = pack(range(len(sequences)), sequences, [1] * len(sequences), starts, torch.device("cpu"))
    return PolicyForward(p.model.eval()).score(micro).logprobs.sum()


def test_the_reference_is_the_start_without_a_second_model() -> None:
    p = policy()
    t, data = trainer(p, kl_coefficient=0.1), batch()
    start = trainer(policy(lora=LoraConfig())).logprobs(data)[0]
    assert torch.equal(t.ref_logprobs(data), start), "adapters that never learnt are off"
    for _ in range(2):
        t.update(data, objectives.grpo(kl_coefficient=0.1), old_is_current=True, ref_logprobs=t.ref_logprobs(data))
    assert torch.equal(t.ref_logprobs(data), start)
    assert not torch.equal(t.logprobs(data)[0], start)
    assert t._reference is not None
    assert t._reference.packed.model is t.model


def test_resume_is_bit_identical_and_keeps_the_adapters_alone() -> None:
    options = {"kl_coefficient": 0.1}
    whole, first, second = (trainer(policy(), **options) for _ in range(3))
    for seed in range(4):
        update(whole, seed)
    for seed in range(2):
        update(first, seed)
    state = copy.deepcopy(first.state_dict())
    assert all(ADAPTER in name for part in ("weights", "reference") for name in state[part])
    second.load_state_dict(state)
    for seed in range(2, 4):
        update(second, seed)
    assert differ(adapters_of(second.policy), adapters_of(whole.policy)) == []
    assert torch.equal(second.ref_logprobs(batch()), whole.ref_logprobs(batch()))


def test_a_state_beside_another_base_is_refused() -> None:
    state = trainer(policy("tiny-qwen3")).state_dict()
    other = trainer(policy("tiny-qwen3", overrides={"initializer_range": 0.1}))
    with pytest.raises(BadInput, match="resume with the same base") as caught:
        other.load_state_dict(state)
    assert "preset:tiny-qwen3" in str(caught.value)
    assert "\n" not in str(caught.value)
    whole = trainer(load_policy(ModelConfig(path="preset:tiny-qwen3")))
    with pytest.raises(BadInput, match="resume with the same base"):
        whole.load_state_dict(state)


def test_a_policy_without_the_adapters_that_the_config_names_is_refused() -> None:
    with pytest.raises(BadInput, match=r"train\.lora"):
        LocalTrainer(load_policy(ModelConfig()), TrainConfig(lora=LoraConfig(rank=4)), temperature=1.0, total_updates=1)


@pytest.mark.slow
def test_helper_processes_learn_the_same() -> None:
    one, two = trainer(policy()), trainer(policy(), processes=2)
    try:
        for seed in range(2):
            a, b = update(one, seed), update(two, seed)
            assert a["optimizer/grad_norm"] == pytest.approx(b["optimizer/grad_norm"], rel=1e-5)
    finally:
        two.close()


def copying(indices: Sequence[int]) -> list[Any]:
    """Copy the last of a few letters, then stop."""
    draws = [np.random.default_rng(i).integers(100, 110, 2 + i % 3) for i in indices]
    return [(prompt, np.array([prompt[-1], 2])) for prompt in draws]


class Kept:
    """Keeps the state of a warm start in memory."""

    state: dict[str, Any] | None = None

    def load(self, trained: Trained) -> dict[str, Any] | None:
        if self.state is not None:
            trained.load_state_dict(self.state)
        return self.state

    def due(self) -> bool:
        return False

    def save(self, step: int, trained: Trained, about: dict[str, Any]) -> None:
        self.state = copy.deepcopy({**trained.state_dict(), **about})


def test_a_warm_start_trains_and_keeps_adapters_alone() -> None:
    config = SftConfig(steps=30, batch_size=16, lr=1e-2)
    p, losses = policy(), list[float]()
    base = base_of(p)
    run_sft(p, copying, config, progress=lambda _step, m: losses.append(m["sft/loss"]))
    assert losses[-1] < losses[0] - 1.0
    assert differ(base_of(p), base) == []
    again, kept, steps = policy(), Kept(), iter(range(100))
    run_sft(again, copying, config, kept=kept, should_stop=lambda: next(steps) >= 11)
    assert kept.state is not None
    assert all(ADAPTER in name for name in kept.state["weights"])
    resumed = policy()
    run_sft(resumed, copying, config, kept=kept)
    assert differ(adapters_of(resumed), adapters_of(p)) == []


def test_adapters_beside_bfloat16_stay_float32() -> None:
    p = policy(dtype="bfloat16")
    t = trainer(p)
    update(t)
    assert {w.dtype for w in parameters(p.model).values()} == {torch.float32}
    assert {w.dtype for w in base_of(p).values()} == {torch.bfloat16}
