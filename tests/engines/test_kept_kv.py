"""A rollout may go on behind KV of older weights. Then every later token depends on which weights computed which entry: what
comes back must be what went out, and the stamps must say so.

The oracle for mixed weights is transformers' own cache, filled by one model and continued by another. Not covered: CUDA.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import drain, engine_of, model_of, prompts_of, requests_of, run, same, steps

from rollkeel.config import EngineConfig
from rollkeel.engines.workers import WorkerEngine
from rollkeel.errors import BadInput
from rollkeel.models.names import checkpoint_views
from rollkeel.sync.publish import full_update
from rollkeel.types import Request, Segment, Status, TokenSpan


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    return model_of(), model_of(seed=1)


def publish(engine: Any, model: Any, version: int) -> None:
    engine.update_weights(full_update(checkpoint_views(model).items(), version))


def parked(engine: Any) -> dict[int, Segment]:
    engine.interrupt()
    found = drain(engine)
    assert all(s.status is Status.INTERRUPTED for s in found.values())
    return found


def behind(requests: list[Request], found: dict[int, Segment], kv: bool = True) -> list[Request]:
    """The requests that go on where `found` stopped."""
    return [
        replace(r, prefix=r.prefix.append(found[r.id].span), kv=found[r.id].kv if kv else None)
        for r in requests
        if r.id in found
    ]


@torch.no_grad()
def mixed_logprobs(old: Any, new: Any, prompt: np.ndarray, answer: np.ndarray, switch: int) -> np.ndarray:
    """Log-probs of `answer`: `old` computes the cache of all before the last of `switch` tokens, `new` the rest."""
    ids = torch.tensor([[*prompt.tolist(), *answer.tolist()]])
    head = len(prompt) + switch - 1
    first = old(input_ids=ids[:, :head], use_cache=True)
    second = new(input_ids=ids[:, head:], past_key_values=first.past_key_values, use_cache=True)
    logits = torch.cat((first.logits, second.logits), 1)[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(answer)), torch.from_numpy(answer)].numpy()


@pytest.mark.parametrize("preset", ["tiny-qwen3-moe", "tiny-qwen3"])
@pytest.mark.parametrize("place", ["in the engine", "outside"])
def test_tokens_behind_kept_kv_are_those_of_mixed_weights(preset: str, place: str) -> None:
    old, new = model_of(preset), model_of(preset, seed=1)
    prompts = prompts_of(6)
    requests = requests_of(prompts, max_new_tokens=20)
    engine = engine_of(old, kv="keep", version=3)
    engine.submit(requests)
    steps(engine, 7)
    if place == "outside":
        found = parked(engine)
        publish(engine, new, 5)
        done = {i: s.span for i, s in run(engine, behind(requests, found)).items()}
        done = {i: found[i].span.append(span) for i, span in done.items()}
    else:
        publish(engine, new, 5)
        done = {i: s.span for i, s in drain(engine).items()}
    for request in requests:
        span = done[request.id]
        assert span.versions.tolist() == [3] * 7 + [5] * 13
        assert span.kv_versions.tolist() == [3] * 20
        expected = mixed_logprobs(old, new, request.prompt_ids, span.token_ids, 7)
        np.testing.assert_allclose(span.logprobs, expected, atol=1e-4)
        recomputed = mixed_logprobs(new, new, request.prompt_ids, span.token_ids, 7)
        assert np.abs(span.logprobs[7:] - recomputed[7:]).max() > 1e-2  # the oracle can tell them apart


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_out_and_in_again_changes_nothing(models: tuple[Any, Any], dtype: str) -> None:
    requests = requests_of(prompts_of(1, seed=4), max_new_tokens=40)
    whole = run(engine_of(models[0], dtype=dtype), requests)[0].span
    engine = engine_of(models[0], dtype=dtype, kv="keep")
    span, waiting = TokenSpan.empty(), requests
    for count in (1, 5, 0, 11, 16):
        engine.submit(waiting)
        steps(engine, count)
        found = parked(engine)
        span, waiting = span.append(found[0].span), behind(waiting, found)
    assert len(span) == 33
    span = span.append(run(engine, waiting)[0].span)
    assert span.token_ids.tolist() == whole.token_ids.tolist()
    assert span.logprobs.tobytes() == whole.logprobs.tobytes()


def test_sequences_stay_in_place_over_many_weights(models: tuple[Any, Any]) -> None:
    requests = requests_of([p for p in prompts_of(3) for _ in range(3)], max_new_tokens=30)
    engine = engine_of(models[0], kv="keep", slots=4)
    whole = run(engine_of(models[0], slots=4), requests)
    engine.submit(requests)
    done: dict[int, Segment] = {}
    for version in range(1, 60):
        done |= {s.request_id: s for s in steps(engine, 2)}
        publish(engine, models[0], version)  # the same weights under a new name: only the stamps may change
    done |= drain(engine)
    for request in requests:
        span = done[request.id].span
        assert same(span, whole[request.id].span)
        assert len(set(span.versions.tolist())) >= 14
        assert (np.diff(span.versions) >= 0).all()
        assert set(span.kv_versions.tolist()) == {int(span.versions[0])}
    assert len(engine._prompts) == 0
    assert engine._pool.free == engine._cache.num_blocks - 1  # all but the padding block


def test_a_prompt_that_comes_later_is_computed_under_the_new_weights(models: tuple[Any, Any]) -> None:
    prompt = prompts_of(1, seed=9, low=20, high=20)[0]
    first, later = requests_of([prompt] * 4, max_new_tokens=12), requests_of([prompt] * 4, first=4, max_new_tokens=12)
    engine = engine_of(models[0], kv="keep", version=1)
    engine.submit(first)
    steps(engine, 3)
    publish(engine, models[1], 2)
    engine.submit(later)
    found = drain(engine)
    expected = run(engine_of(models[1]), later)
    for request in later:
        assert same(found[request.id].span, expected[request.id].span)
        assert found[request.id].span.kv_versions.tolist() == [2] * 12


def test_kv_that_found_no_room_is_computed_again(models: tuple[Any, Any]) -> None:
    block = 2 * 2 * 2 * 32 * 4 * 16
    engine = engine_of(models[0], kv="keep", slots=6, kv_memory_gb=14.5 * block / 2**30, version=1)
    requests = requests_of(prompts_of(6, low=10, high=20), max_new_tokens=60)
    engine.submit(requests)
    steps(engine, 10)
    publish(engine, models[0], 2)
    found = drain(engine)
    whole = run(engine_of(models[0]), requests)
    kinds = set()
    for request in requests:
        span = found[request.id].span
        assert same(span, whole[request.id].span)
        assert (span.kv_versions <= span.versions).all()
        kinds |= set(span.kv_versions[span.versions == 2].tolist())
    assert kinds == {1, 2}


def test_an_engine_that_computes_again_ignores_kv(models: tuple[Any, Any]) -> None:
    requests = requests_of(prompts_of(4), max_new_tokens=20)
    keeper = engine_of(models[0], kv="keep")
    keeper.submit(requests)
    steps(keeper, 6)
    found = parked(keeper)
    plain = engine_of(models[1], version=7)
    given, bare = (run(plain, behind(requests, found, kv=kv)) for kv in (True, False))
    for i in given:
        assert same(given[i].span, bare[i].span, 0.0)
        assert given[i].span.kv_versions.tolist() == [7] * 14
    plain.submit(requests)
    steps(plain, 3)
    assert all(s.kv is None for s in parked(plain).values())


def test_what_waits_keeps_what_it_brought(models: tuple[Any, Any]) -> None:
    requests = requests_of(prompts_of(3), max_new_tokens=20)
    engine = engine_of(models[0], kv="keep", slots=1)
    engine.submit(requests)
    steps(engine, 5)
    first = parked(engine)
    assert [s.kv is None for _, s in sorted(first.items())] == [False, True, True]
    engine.submit([replace(requests[1]), *behind(requests[:1], first)])
    steps(engine, 2)  # the second request runs, the first waits with its KV
    second = parked(engine)
    assert second[0].kv is first[0].kv
    assert len(second[0].span) == 0


def test_kv_and_prefix_must_belong_together(models: tuple[Any, Any]) -> None:
    requests = requests_of(prompts_of(2), max_new_tokens=20)
    engine = engine_of(models[0], kv="keep")
    engine.submit(requests)
    steps(engine, 5)
    found = parked(engine)
    with pytest.raises(BadInput, match="request 0: expected KV of all but the last of"):
        engine.submit([replace(requests[0], kv=found[0].kv)])
    other = engine_of(model_of(num_key_value_heads=1), kv="keep")
    other.submit(behind(requests[:1], found))
    with pytest.raises(BadInput, match="expected 1 heads of 32 in layer 0, got 2 of 32"):
        other.advance(1)


def test_workers_hand_kv_out_and_take_it_back(models: tuple[Any, Any]) -> None:
    requests = requests_of(prompts_of(6), max_new_tokens=24)
    whole = run(engine_of(models[0]), requests)
    engine = WorkerEngine(models[0].config, EngineConfig(kv="keep", processes=2), max_length=96)
    try:
        publish(engine, models[0], 1)
        engine.submit(requests)
        engine.advance(9)
        engine.interrupt()
        found = {s.request_id: s for s in engine.advance(0)}
        assert all(s.kv is not None and s.kv.version == 1 for s in found.values())
        publish(engine, models[0], 2)
        again = run(engine, behind(requests, found))
    finally:
        engine.close()
    for i, segment in again.items():
        assert segment.span.kv_versions.tolist() == [1] * 15
        assert same(found[i].span.append(segment.span), whole[i].span)
