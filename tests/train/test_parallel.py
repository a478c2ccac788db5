"""Helper processes must change speed and nothing else: same loss, same gradients, same log-probs.

Matters because a lost or doubled micro-batch would train on, silently wrong. Does not cover speed (see benchmarks) or
several machines.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rollkeel import objectives
from rollkeel.batch.build import TrainingBatch, build_batch
from rollkeel.batch.packing import MicroBatch
from rollkeel.config import ModelConfig, TrainConfig
from rollkeel.errors import BadInput, NonFinite, RunStopped
from rollkeel.models.loading import load_policy
from rollkeel.train.balance import shares
from rollkeel.train.trainer import LocalTrainer
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan


def batch(lengths: list[int], seed: int = 0, extras: bool = False) -> TrainingBatch:
    """`extras`: with three most likely tokens and the experts of an engine, drawn at random."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for i, n in enumerate(lengths):
        stamp = np.zeros(n, np.int64)
        span = TokenSpan(
            token_ids=rng.integers(0, 264, n),
            logprobs=rng.normal(-5.6, 0.1, n).astype(np.float32),
            kept_mass=np.ones(n, np.float32),
            versions=stamp,
            kv_versions=stamp,
            topk_ids=rng.integers(0, 264, (n, 3)) if extras else None,
            topk_logprobs=-rng.uniform(1, 9, (n, 3)).astype(np.float32) if extras else None,
            experts=np.zeros((n, 2, 2), np.int16) if extras else None,
        )
        prompt = Prompt(
            id=str(i),
            index=i,
            text="",
            token_ids=rng.integers(0, 264, 5),
            answer="",
            grader=GraderSpec(name="x"),
            task="t",
        )
        rollouts.append(
            Rollout(
                id=i, group=i // 2, member=i % 2, prompt=prompt, span=span, status=Status.FINISHED,
                sampling=SamplingParams(), engine="fake", dtype="fp32", reward=0.0,
            )
        )  # fmt: skip
    return build_batch(rollouts, rng.normal(size=len(lengths)), "sequence_mean")


def trainer(processes: int, **options: object) -> LocalTrainer:
    config = TrainConfig(processes=processes, lr=1e-3, warmup_steps=0, **options)  # type: ignore[arg-type]
    return LocalTrainer(load_policy(ModelConfig()), config, temperature=1.0, total_updates=10)


def weights(t: LocalTrainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in t.model.named_parameters()}


@pytest.fixture(scope="module")
def pair(interrupted_at_birth: list[int]) -> Iterator[tuple[LocalTrainer, LocalTrainer]]:
    """Its helper gets Ctrl-C while it still imports, as from a terminal."""
    one, two = trainer(1), trainer(2)
    yield one, two
    two.close()


def test_log_probs_and_updates_are_those_of_one_process(pair: tuple[LocalTrainer, LocalTrainer]) -> None:
    one, two = pair
    data = batch([3, 17, 9, 30, 4, 12, 25, 1])
    objective = objectives.kpop(phi=0.1)
    for p, q in zip(one.logprobs(data), two.logprobs(data), strict=True):
        assert torch.allclose(p, q, atol=2e-6)
    for i in range(3):
        a = one.update(data, objective, old_is_current=True)
        b = two.update(data, objective, old_is_current=True)
        assert a.metrics["optimizer/grad_norm"] == pytest.approx(b.metrics["optimizer/grad_norm"], rel=1e-5), i
        assert torch.allclose(a.logprobs, b.logprobs, atol=5e-6)
    for name, w in weights(one).items():
        # Adam turns a gradient near 0 into a full step of either sign, so single weights may differ; nearly none do.
        differ = (w - weights(two)[name]).abs() > 5e-6
        assert differ.float().mean() < 2e-3, name


def test_best_tokens_and_experts_come_back_from_the_helper(pair: tuple[LocalTrainer, LocalTrainer]) -> None:
    one, two = pair
    two.load_state_dict(one.state_dict())
    data = batch([8, 8, 20, 5], seed=5, extras=True)
    a, b = (t.score(data).topk_logprobs for t in (one, two))
    assert a is not None
    assert b is not None
    assert torch.allclose(a, b, atol=5e-6)
    objective = objectives.RECIPES["dppo_topk_tv"](k=3)
    x, y = (t.update(data, objective, experts=True) for t in (one, two))
    assert x.metrics["optimizer/grad_norm"] == pytest.approx(y.metrics["optimizer/grad_norm"], rel=1e-5)
    assert x.experts is not None
    assert y.experts is not None
    assert torch.equal(x.experts.sort(-1).values, y.experts.sort(-1).values)
    assert x.experts.any()


def test_the_entropy_bonus_reaches_the_helper(pair: tuple[LocalTrainer, LocalTrainer]) -> None:
    one, two = pair
    two.load_state_dict(one.state_dict())
    data = batch([8, 8, 20, 5], seed=3)
    objective = objectives.build("grpo", entropy_coefficient=0.5)
    a, b = (t.update(data, objective, old_is_current=True) for t in (one, two))
    assert a.metrics["optimizer/grad_norm"] == pytest.approx(b.metrics["optimizer/grad_norm"], rel=1e-5)
    assert a.metrics["loss/entropy"] == pytest.approx(b.metrics["loss/entropy"], rel=1e-6)


def test_a_bad_log_prob_in_the_helper_stops_the_step_and_the_next_step_works(
    pair: tuple[LocalTrainer, LocalTrainer],
) -> None:
    _, two = pair
    data = batch([8, 8, 20, 5], seed=4)
    before, version = weights(two), two.version
    bad = data.rollout_logprobs.clone()
    bad[:] = float("nan")
    broken = TrainingBatch(**{**{f: getattr(data, f) for f in data.__dataclass_fields__}, "rollout_logprobs": bad})
    with pytest.raises(NonFinite):
        two.update(broken, objectives.kpop(), old_is_current=True)
    assert two.version == version
    assert all(torch.equal(w, before[n]) for n, w in weights(two).items())
    assert two.update(data, objectives.kpop(), old_is_current=True).metrics["optimizer/grad_norm"] > 0


def test_ctrl_c_while_a_helper_starts_is_the_trainers(
    pair: tuple[LocalTrainer, LocalTrainer], interrupted_at_birth: list[int]
) -> None:
    assert interrupted_at_birth == [h._process.pid for h in pair[1]._helpers]


def test_shared_memory_has_no_name_that_a_kill_could_leave_behind(pair: tuple[LocalTrainer, LocalTrainer]) -> None:
    for pid in (os.getpid(), pair[1]._helpers[0]._process.pid):
        mapped = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line]
        assert mapped
        assert all(line.endswith("(deleted)") for line in mapped)


def test_a_killed_helper_is_named_and_the_weights_stay(pair: tuple[LocalTrainer, LocalTrainer]) -> None:
    """The last one with this helper."""
    _, two = pair
    data = batch([8, 8, 20, 5])
    before, process = weights(two), two._helpers[0]._process
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(RunStopped, match="helper 1: died with exit code -9"):
        two.update(data, objectives.kpop(), old_is_current=True)
    assert all(torch.equal(w, before[n]) for n, w in weights(two).items())


def test_shares_are_whole_balanced_and_repeatable() -> None:
    def micro(i: int, n: int) -> MicroBatch:
        z = torch.zeros(n, dtype=torch.long)
        return MicroBatch(
            sequences=(i,), input_ids=z, position_ids=z, cu_seqlens=z, predict_index=z, targets=z, indices=z
        )

    micros = [micro(i, n) for i, n in enumerate([5, 9, 2, 7, 7])]
    got = [[m.sequences[0] for m in share] for share in shares(micros, 2)]
    # by hand: 9→A, 7→B, 7→B? no: loads 9 and 7, so the second 7 goes to B (14), 5 to A (14), 2 to A (tie, first)
    assert got == [[1, 0, 2], [3, 4]]


def test_helpers_are_refused_off_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(ModelConfig())
    monkeypatch.setattr(type(policy.model), "to", lambda self, *_a, **_k: self)
    with pytest.raises(BadInput, match=r"train\.processes=2"):
        LocalTrainer(policy, TrainConfig(processes=2), temperature=1.0, total_updates=1, device="cuda")
