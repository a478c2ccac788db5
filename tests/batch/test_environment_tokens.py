"""What an environment wrote must be read and never learnt: one token of it in a loss or a denominator poisons a run silently.

Spans, batches, denominators and gradients on a real tiny model, by hand and by property. Not covered: who plays the episodes.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkeel import objectives
from rollkeel.batch.build import TrainingBatch, build_batch
from rollkeel.config import ModelConfig, SftConfig, TrainConfig
from rollkeel.errors import BadInput
from rollkeel.models.loading import load_policy
from rollkeel.train.sft import run_sft
from rollkeel.train.trainer import LocalTrainer
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan

OWN, GIVEN = True, False


def turn(ids: list[int], version: int = 3, **more: np.ndarray) -> TokenSpan:
    n = len(ids)
    return TokenSpan(
        token_ids=np.array(ids, np.int64),
        logprobs=-np.arange(1, n + 1, dtype=np.float32) / 4,
        kept_mass=np.full(n, 0.5, np.float32),
        versions=np.full(n, version),
        kv_versions=np.full(n, version - 1),
        **more,
    )


def rollout(i: int, parts: list[tuple[bool, list[int]]], prompt: list[int] | None = None) -> Rollout:
    span = TokenSpan.empty()
    for own, ids in parts:
        span = span.append(turn(ids)) if own else span.given(np.array(ids), 3)
    source = Prompt(
        id="p", index=0, text="", token_ids=np.array(prompt or [5, 6]), answer="", grader=GraderSpec(name="x"), task="t"
    )
    return Rollout(
        id=i, group=i // 2, member=i % 2, prompt=source, span=span, status=Status.FINISHED, sampling=SamplingParams(),
        engine="local", dtype="fp32", reward=float(i % 2),
    )  # fmt: skip


def test_a_span_remembers_who_wrote_what() -> None:
    span = rollout(0, [(OWN, [9, 2]), (GIVEN, [7, 7, 7]), (OWN, [8, 2])]).span
    assert span.token_ids.tolist() == [9, 2, 7, 7, 7, 8, 2]
    assert span.own.tolist() == [0, 1, 5, 6]
    assert span.logprobs.tolist() == [-0.25, -0.5, 0, 0, 0, -0.25, -0.5]
    assert span.kept_mass.tolist() == [0.5, 0.5, 1, 1, 1, 0.5, 0.5]
    assert span.kv_versions.tolist() == [2, 2, 3, 3, 3, 2, 2]
    assert turn([1, 2]).own.tolist() == [0, 1]
    assert turn([1]).append(turn([2])).sampled is None
    assert turn([1, 2]).given(np.array([], np.int64), 0).sampled is None


def test_optional_facts_go_on_with_nothing_in_them() -> None:
    facts = {
        "experts": np.ones((2, 2, 1), np.int16),
        "topk_ids": np.ones((2, 3), np.int64),
        "topk_logprobs": np.full((2, 3), -1, np.float32),
    }
    span = turn([1, 2], **facts).given(np.array([4]), 3).append(turn([1, 2], **facts))
    assert span.experts is not None
    assert span.topk_logprobs is not None
    assert span.experts[:, 0, 0].tolist() == [1, 1, -1, 1, 1]
    assert span.topk_logprobs[:, 0].tolist() == [-1, -1, -np.inf, -1, -1]
    made = rollout(0, [(OWN, [1])])
    batch = build_batch([replace(made, span=span)], [1.0], "token_mean")
    assert batch.experts is not None
    assert batch.experts.tolist() == [[[1], [1]]] * 4
    assert batch.topk_ids is not None
    assert batch.topk_ids.tolist() == [[1, 1, 1]] * 4


def three() -> list[Rollout]:
    return [
        rollout(0, [(OWN, [9, 2]), (GIVEN, [7, 7, 7]), (OWN, [8, 2])]),
        rollout(1, [(OWN, [11, 12, 13])], prompt=[4]),
        rollout(2, [(OWN, [9]), (GIVEN, [6]), (OWN, [10]), (GIVEN, [6, 5]), (OWN, [2])]),
    ]


def test_flat_tensors_hold_sampled_tokens_alone() -> None:
    batch = build_batch(three(), [1.0, 2.0, 3.0], "sequence_mean")
    assert batch.sequences[0].tolist() == [5, 6, 9, 2, 7, 7, 7, 8, 2]
    assert [p.tolist() for p in batch.positions] == [[2, 3, 7, 8], [1, 2, 3], [2, 4, 7]]
    assert batch.response_lengths == (4, 3, 3)
    assert batch.token_ids.tolist() == [9, 2, 8, 2, 11, 12, 13, 9, 10, 2]
    assert batch.token_index.tolist() == [0, 1, 5, 6, 0, 1, 2, 0, 2, 5]
    assert batch.sequence_ids.tolist() == [0] * 4 + [1] * 3 + [2] * 3
    assert batch.coefficients.tolist() == pytest.approx([1 / 12] * 4 + [1 / 9] * 6)
    assert build_batch(three(), [1.0] * 3, "token_mean").coefficients.tolist() == pytest.approx([0.1] * 10)
    micro = next(iter(batch.micro_batches(1000)))  # from short to long: 1, 2, 0
    assert micro.sequences == (1, 2, 0)
    assert micro.targets.tolist() == [11, 12, 13, 9, 10, 2, 9, 2, 8, 2]
    assert micro.input_ids[micro.predict_index + 1].tolist() == micro.targets.tolist()
    assert micro.indices.tolist() == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3]
    assert micro.input_ids.tolist()[4:12] == [5, 6, 9, 6, 10, 6, 5, 2]


def test_an_episode_without_a_sampled_token_is_refused() -> None:
    made = rollout(0, [(OWN, [1])])
    only = replace(made, span=replace(made.span, sampled=np.zeros(1, bool)))
    with pytest.raises(BadInput, match="one response token that was sampled, got 2 and 0"):
        build_batch([only], [0.0], "token_mean")


Shape = list[tuple[int, int]]
SHAPES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SHAPES, min_size=1, max_size=4),
    st.sampled_from(["token_mean", "sequence_mean", "sequence_sum", "constant_length(9)"]),
)
def test_other_text_of_an_environment_changes_nothing_but_what_is_read(shapes: list[Shape], aggregate: str) -> None:
    def built(fill: int, length: int) -> TrainingBatch:
        """`fill`: the environment's token; its texts are `length` times as long."""
        rollouts = [
            rollout(i, [p for own, text in shape for p in ((OWN, [9] * own), (GIVEN, [fill] * (text * length)))][:-1])
            for i, shape in enumerate(shapes)
        ]
        return build_batch(rollouts, np.arange(len(rollouts)), aggregate)

    one, other, longer = built(7, 1), built(8, 1), built(7, 3)
    for f in fields(TrainingBatch):
        a, b, c = (getattr(batch, f.name) for batch in (one, other, longer))
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b), f.name
            assert torch.equal(a, c) or f.name == "token_index", f.name
    assert sum(len(p) for p in one.positions) == len(one) == sum(own for shape in shapes for own, _ in shape)


def gradients(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def test_the_gradient_is_that_of_the_sampled_positions_by_hand() -> None:
    policy = load_policy(ModelConfig(path="preset:tiny-qwen3"))
    trainer = LocalTrainer(policy, TrainConfig(warmup_steps=0, updates_per_step=1), temperature=1.0, total_updates=1)
    batch = build_batch(three(), [0.5, -1.0, 2.0], "token_mean")
    kept: dict[str, torch.Tensor] = {}
    step = trainer._stepper.step

    def watched(*judge: Any) -> dict[str, float]:
        kept.update(gradients(trainer))
        return step(*judge)

    trainer._stepper.step = watched  # type: ignore[method-assign]
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    output = trainer.update(batch, objectives.grpo(), old_is_current=True)
    assert len(output.logprobs) == 10
    for n, p in trainer.model.named_parameters():
        p.data.copy_(before[n])
    trainer.model.zero_grad()
    loss, places = torch.zeros(()), [[2, 3, 7, 8], [1, 2, 3], [2, 4, 7]]
    for sequence, at, advantage in zip(batch.sequences, places, (0.5, -1.0, 2.0), strict=True):
        ids = torch.from_numpy(sequence)
        log_p = trainer.model(input_ids=ids[None]).logits[0].log_softmax(-1)
        loss = loss - advantage * sum(log_p[t - 1, ids[t]] for t in at) / 10
    loss.backward()
    by_hand = gradients(trainer)
    assert kept.keys() == by_hand.keys()
    for name, value in by_hand.items():
        torch.testing.assert_close(kept[name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_sft_learns_what_the_mask_marks() -> None:
    """Of two demonstrations that differ in the mask alone, the loss is the mean over what is marked."""
    policy = load_policy(ModelConfig(path="preset:tiny-qwen3"))
    prompt, response = np.array([5, 6]), np.array([9, 2, 7, 7, 8, 2])
    mask = np.array([True, True, False, False, True, True])
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        log_p = policy.model(input_ids=ids).logits[0].log_softmax(-1)
    each = np.array([-float(log_p[t - 1, ids[0, t]]) for t in range(2, 8)])
    config = SftConfig(steps=1, batch_size=1, lr=1e-9)

    def loss(*example: np.ndarray) -> dict[str, float]:
        return run_sft(policy, lambda _: [example], config)

    assert loss(prompt, response)["sft/loss"] == pytest.approx(each.mean(), rel=1e-4)
    marked = loss(prompt, response, mask)
    assert marked["sft/loss"] == pytest.approx(each[mask].mean(), rel=1e-4)
    assert marked["sft/tokens"] == 4
