"""Requests and segments must arrive as they were sent: a prompt, a prefix or a log-prob of another sequence would be trained on, silently.

Not covered: what carries the bytes, and parts that die.
"""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from rollkeel.engines.messages import requests_in, requests_out, segments_in, segments_out
from rollkeel.types import KeptKV, Request, SamplingParams, Segment, Status, TokenSpan


def span(n: int, seed: int = 0, **facts: Any) -> TokenSpan:
    rng = np.random.default_rng(seed)
    return TokenSpan(
        token_ids=rng.integers(0, 9, n),
        logprobs=-rng.random(n).astype(np.float32),
        kept_mass=np.ones(n, np.float32),
        versions=np.full(n, seed),
        kv_versions=np.full(n, seed),
        **facts,
    )


def routed(n: int, seed: int, prompt: int = 0) -> TokenSpan:
    rng = np.random.default_rng(seed + 7)
    experts = rng.integers(0, 8, (n, 2, 2)).astype(np.int16)
    read = rng.integers(0, 8, (prompt, 2, 2)).astype(np.int16) if prompt else None
    return span(n, seed, experts=experts, prompt_experts=read)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return type(a) is type(b) and a == b


def kv() -> KeptKV:
    return KeptKV(keys=np.ones((1, 1, 2, 3), np.float32), values=np.zeros((1, 1, 2, 3), np.float32), version=4)


def topk(n: int, k: int) -> TokenSpan:
    return span(n, 1, topk_ids=np.arange(n * k).reshape(n, k), topk_logprobs=np.full((n, k), -np.inf, np.float32))


SPANS = [span(3, 1), TokenSpan.empty(), routed(2, 2, 4), routed(5, 3), topk(2, 3), topk(4, 2)]
SPANS += [span(2, 4, sampled=np.array([True, False]))]


@pytest.mark.parametrize("spans", [SPANS, SPANS[::-1], SPANS[:1], SPANS[1:2], [TokenSpan.empty()] * 3])
def test_requests_and_segments_arrive_as_they_were_sent(spans: list[TokenSpan]) -> None:
    trained, greedy = SamplingParams(stop_token_ids=(1, 2), seed=5), SamplingParams(temperature=0.0, evaluation=True)
    requests = [
        Request(
            id=90 - i,
            prompt_ids=np.arange(1, 3 + i // 2),
            sampling=greedy if i % 3 else trained,
            prefix=prefix,
            kv=kv() if i == 2 else None,
        )
        for i, prefix in enumerate(spans)
    ]
    got = requests_in(pickle.loads(pickle.dumps(requests_out(requests))))
    assert all(map(same, requests, got))
    assert len(requests) == len(got)
    ends = [(Status.FINISHED, ""), (Status.ENGINE_FAILURE, "why"), (Status.LENGTH, "")]
    segments = [
        Segment(request_id=7 * i, span=one, status=ends[i % 3][0], detail=ends[i % 3][1], kv=kv() if i == 1 else None)
        for i, one in enumerate(spans)
    ]
    back = segments_in(pickle.loads(pickle.dumps(segments_out(segments))))
    assert all(map(same, segments, back))
    assert len(segments) == len(back)


def test_nothing_arrives_as_nothing() -> None:
    assert segments_in(segments_out([])) == []


def test_a_group_sends_its_prompt_once_and_a_token_takes_what_it_tells() -> None:
    prompt = np.random.default_rng(0).integers(0, 9, 1000)
    requests = [Request(id=i, prompt_ids=prompt.copy(), sampling=SamplingParams()) for i in range(16)]
    assert len(pickle.dumps(requests_out(requests))) < 1000 / 2 + 900
    segments = [Segment(request_id=i, span=span(256, i), status=Status.FINISHED) for i in range(16)]
    assert len(pickle.dumps(segments_out(segments))) < 16 * 256 * 4.6 + 900  # a log-prob, and an id of four bits
