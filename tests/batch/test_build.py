"""From rollouts to tensors: nothing with a hole in it may train, and every fact must stay with its token.

Not covered: grading, advantages.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from rollkeel.batch.build import build_batch, split_by_groups
from rollkeel.errors import BadInput
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan


def rollout(i: int, group: int, prompt: list[int], response: list[int], **changes) -> Rollout:
    n = len(response)
    span = TokenSpan(
        token_ids=np.array(response, dtype=np.int64),
        logprobs=-np.arange(1, n + 1, dtype=np.float32) - i,
        kept_mass=np.full(n, 0.5, np.float32),
        versions=np.arange(n) + 10 * i,
        kv_versions=np.arange(n) + 10 * i - 1,
    )
    source = Prompt(
        id="p",
        index=0,
        text="",
        token_ids=np.array(prompt, dtype=np.int64),
        answer="",
        grader=GraderSpec(name="x"),
        task="t",
    )
    base = Rollout(
        id=i, group=group, member=0, prompt=source, span=span, status=Status.FINISHED, sampling=SamplingParams(),
        engine="local", dtype="fp32", reward=1.0,
    )  # fmt: skip
    return replace(base, **changes)


def two() -> list[Rollout]:
    return [rollout(7, 42, [1, 2], [3, 4, 5]), rollout(9, 40, [6], [7], status=Status.LENGTH)]


def test_every_fact_stays_with_its_token() -> None:
    batch = build_batch(two(), [0.5, -1.0], "sequence_mean")
    assert [s.tolist() for s in batch.sequences] == [[1, 2, 3, 4, 5], [6, 7]]
    assert batch.prompt_lengths == (2, 1)
    assert batch.response_lengths == (3, 1)
    assert batch.rollout_logprobs.tolist() == [-8, -9, -10, -10]
    assert batch.advantages.tolist() == [0.5, 0.5, 0.5, -1.0]
    assert batch.coefficients.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    assert batch.sequence_ids.tolist() == [0, 0, 0, 1]
    assert batch.group_ids.tolist() == [0, 0, 0, 1]
    assert batch.rollout_ids.tolist() == [7, 7, 7, 9]
    assert batch.token_index.tolist() == [0, 1, 2, 0]
    assert batch.versions.tolist() == [70, 71, 72, 90]
    assert batch.kv_versions.tolist() == [69, 70, 71, 89]
    assert batch.kept_mass.tolist() == [0.5] * 4


def test_tokens_of_a_micro_batch_are_those_of_the_whole_batch() -> None:
    batch = build_batch(two(), [0.5, -1.0], "token_mean")
    old = torch.tensor([-0.1, -0.2, -0.3, -0.4])
    whole = batch.tokens(torch.zeros(4), old_logprobs=old)
    seen = []
    for micro in batch.micro_batches(5):
        part = batch.tokens(torch.zeros(len(micro.indices)), old_logprobs=old, indices=micro.indices)
        assert part.old_logprobs is not None
        assert whole.old_logprobs is not None
        for name in ("rollout_logprobs", "advantages", "coefficients", "sequence_ids", "old_logprobs", "token_index"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[micro.indices])
        seen += micro.indices.tolist()
    assert sorted(seen) == [0, 1, 2, 3]


def routed(i: int, response: list[int], k: int = 3, **changes) -> Rollout:
    """A rollout whose span carries K best tokens and experts that name rollout, token and place."""
    base, n = rollout(i, 0, [1, 2], response), len(response)
    places = 100 * i + 10 * np.arange(n)[:, None] + np.arange(k)
    extra = {
        "topk_ids": places,
        "topk_logprobs": -places.astype(np.float32),
        "experts": np.stack([places, places + 1], 1).astype(np.int16),
    }
    return replace(base, span=replace(base.span, **{**extra, **changes}))


def test_best_tokens_and_experts_stay_with_their_token() -> None:
    batch = build_batch([routed(1, [3, 4, 5]), routed(2, [6])], [0.5, -1.0], "token_mean").to("cpu")
    assert batch.topk_ids is not None
    assert batch.topk_ids.tolist() == [[100, 101, 102], [110, 111, 112], [120, 121, 122], [200, 201, 202]]
    assert batch.rollout_topk_logprobs is not None
    assert torch.equal(batch.rollout_topk_logprobs, -batch.topk_ids.float())
    assert batch.experts is not None
    assert (batch.experts.dtype, list(batch.experts.shape)) == (torch.int16, [4, 2, 3])
    assert torch.equal(batch.experts[:, 1], batch.topk_ids.short() + 1)
    old = -torch.arange(12.0).view(4, 3)
    for micro in batch.micro_batches(5):
        assert micro.topk_ids is not None
        assert torch.equal(micro.topk_ids, batch.topk_ids[micro.indices])
        p = torch.zeros(len(micro.indices))
        part = batch.tokens(p, topk_logprobs=old[micro.indices], old_topk_logprobs=old, indices=micro.indices)
        for mine, whole in (
            (part.topk_ids, batch.topk_ids),
            (part.topk_logprobs, old),
            (part.old_topk_logprobs, old),
            (part.rollout_topk_logprobs, batch.rollout_topk_logprobs),
        ):
            assert mine is not None
            assert torch.equal(mine, whole[micro.indices])


def test_without_them_there_are_none_and_a_mixed_batch_is_refused() -> None:
    batch = build_batch(two(), [0.5, -1.0], "token_mean")
    assert batch.topk_ids is batch.rollout_topk_logprobs is batch.experts is None
    assert all(micro.topk_ids is None for micro in batch.micro_batches(5))
    assert batch.tokens(torch.zeros(4)).topk_ids is None
    for other in (routed(2, [6], topk_ids=None, topk_logprobs=None), routed(2, [6], k=2)):
        with pytest.raises(BadInput, match=r"rollout 2: expected topk_ids of shape \(3,\) per token like rollout 1"):
            build_batch([routed(1, [3, 4]), other], [0.0, 0.0], "token_mean")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (rollout(3, 0, [1], [2], reward=None), "rollout 3: expected a reward"),
        (rollout(3, 0, [1], [2], status=Status.PARKED), "rollout 3: expected a complete rollout, got status parked"),
        (rollout(3, 0, [1], [2], status=Status.GRADER_FAILURE), "got status grader_failure"),
        (rollout(3, 0, [1], []), "rollout 3: expected at least one prompt and one response token"),
        (rollout(3, 0, [], [2]), "rollout 3: expected at least one prompt"),
    ],
)
def test_a_rollout_with_a_hole_is_refused(bad: Rollout, message: str) -> None:
    with pytest.raises(BadInput, match=message) as error:
        build_batch([*two(), bad], [0.0, 0.0, 0.0], "token_mean")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("advantages", [[1.0], [1.0, float("nan")], []])
def test_advantages_must_fit(advantages: list[float]) -> None:
    with pytest.raises(BadInput, match="one finite advantage"):
        build_batch(two(), advantages, "token_mean")


def test_no_rollouts_are_refused() -> None:
    with pytest.raises(BadInput, match="at least one rollout"):
        build_batch([], [], "token_mean")


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "prompt_mean", "constant_length(9)"])
def test_parts_are_the_batches_that_would_have_been_laid_out_alone(aggregate: str) -> None:
    rollouts = [routed(i, list(range(3 + i % 3)), k=2) for i in range(7)]
    rollouts = [replace(r, group=g) for r, g in zip(rollouts, (5, 5, 3, 3, 8, 5, 9), strict=True)]
    credit = [[0.5, -1.0], [2.0, 0.0, 1.0], [-3.0, 0.25]]
    whole = build_batch(rollouts, None, aggregate)
    assert whole.advantages.isnan().all()
    first = 0
    for part, given in zip(whole.parts(credit, aggregate), credit, strict=True):
        alone = build_batch(rollouts[first : first + len(given)], given, aggregate)
        first += len(given)
        for name in (f.name for f in fields(alone)):
            mine, its = getattr(part, name), getattr(alone, name)
            if name in ("sequences", "positions"):
                assert [a.tolist() for a in mine] == [a.tolist() for a in its]
            elif isinstance(its, torch.Tensor):
                assert torch.equal(mine, its), name
                assert mine.dtype == its.dtype
            else:
                assert mine == its, name


def test_parts_want_an_advantage_for_each_sequence() -> None:
    whole = build_batch(two(), None, "token_mean")
    with pytest.raises(BadInput, match="an advantage for each of 2 sequences, got 3"):
        whole.parts([[1.0], [1.0, 0.0]], "token_mean")
    with pytest.raises(BadInput, match="one finite advantage"):
        whole.parts([[1.0], [float("inf")]], "token_mean")


@pytest.mark.parametrize(
    ("groups", "n", "sizes"), [(8, 4, [2, 2, 2, 2]), (5, 2, [2, 3]), (3, 5, [1, 1, 1]), (4, 1, [4])]
)
def test_split_keeps_groups_whole_and_balanced(groups: int, n: int, sizes: list[int]) -> None:
    rollouts = [rollout(10 * g + m, g, [1], [2]) for m in range(3) for g in range(groups)]
    parts = split_by_groups(rollouts, n)
    assert [len({r.group for r in part}) for part in parts] == sizes
    assert [len(part) for part in parts] == [3 * s for s in sizes]
    assert sorted(r.id for part in parts for r in part) == sorted(r.id for r in rollouts)


def test_split_of_nothing() -> None:
    assert split_by_groups([], 3) == []
    with pytest.raises(BadInput, match="n ≥ 1"):
        split_by_groups(two(), 0)
