"""A batch must arrive at the ranks as it was: one wrong number per token would be trained on, silently.

Not covered: arrays by themselves (tests/test_arrays.py), and what Ray does with the bytes.
"""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from rollkeel.batch.build import TrainingBatch
from rollkeel.cluster import wire
from tests.train.mesh_ranks import LENGTHS, Case, batch


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def carried(told: Any) -> Any:
    return pickle.loads(pickle.dumps(told))


def assert_same(a: TrainingBatch, b: TrainingBatch) -> None:
    assert [f.name for f in fields(TrainingBatch) if not same(getattr(a, f.name), getattr(b, f.name))] == []


def parts(whole: TrainingBatch) -> list[TrainingBatch]:
    return whole.parts([[0.5] * 4, [0.25, -0.5] * ((len(LENGTHS) - 4) // 2)], "sequence_mean")


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("prompt", [5, 80])
@pytest.mark.parametrize("part", [False, True])
def test_every_field_of_a_batch_arrives(experts: bool, prompt: int, part: bool) -> None:
    sent = batch(3, Case(replay=experts, prompt=prompt))
    if part:  # views of a larger batch, which must not bring it along
        sent = parts(sent)[1]
    assert_same(wire.batch_in(carried(wire.batch_out(sent))), sent)


def test_without_replay_a_batch_tells_how_many_experts_there_are() -> None:
    sent = batch(3, Case(replay=True))
    assert sent.experts is not None
    got = wire.batch_in(carried(wire.batch_out(sent, replays=False)))
    assert_same(got, replace(sent, experts=torch.zeros_like(sent.experts), read_experts=None))


@pytest.mark.parametrize("experts", [False, True])
def test_parts_of_a_batch_are_told_by_their_rows(experts: bool) -> None:
    whole = batch(3, Case(replay=experts))
    there = wire.batch_in(carried(wire.batch_out(whole)))
    for sent, rows in zip(parts(whole), (slice(0, 4), slice(4, len(LENGTHS))), strict=True):
        assert wire.rows_of(sent, whole) == rows
        told = carried(wire.part_out(sent, rows))
        assert_same(wire.part_in(there, told), sent)
        assert len(pickle.dumps(told)) < 500


def test_another_batch_is_no_part() -> None:
    whole = batch(3, Case())
    part = parts(whole)[1]
    assert wire.rows_of(batch(3, Case()), whole) is None  # the same numbers, which need not stay the same
    assert wire.rows_of(replace(part, rollout_logprobs=part.rollout_logprobs.clone()), whole) is None
    assert wire.rows_of(whole, part) is None


def test_rows_of_what_was_told_are_named() -> None:
    told = torch.rand(10, 3)[2:]
    assert wire.view_out(told[1:4], told) == (1, 4)
    assert wire.view_out(told, told) == (0, 8)
    assert wire.view_out(told[1:4].clone(), told) is None
    assert wire.view_out(told[:, :2], told) is None
    assert wire.view_out(told, None) is None


def test_a_prompt_travels_once_and_a_token_takes_what_it_tells() -> None:
    long, short = (len(pickle.dumps(wire.batch_out(batch(3, Case(prompt=n))))) for n in (800, 80))
    pairs = len(LENGTHS) // 2
    assert long - short < 1.1 * pairs * 720 * 9 / 8 + 200  # nine bits tell 264 ids apart
    tokens = sum(LENGTHS)
    assert short < pairs * 80 * 9 / 8 + tokens * (4 + 9 / 8) + 60 * len(LENGTHS) + 1000
