"""Continuous batching must change speed only: slots, memory pressure, sharing, interrupts and block sizes may not change a token.

Real engine on tiny models, steps counted against hand-computed optima, blocks counted to the last one. Not covered:
throughput, contexts of thousands of tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_kit import (
    drain,
    engine_of,
    model_of,
    prompts_of,
    reference_logprobs,
    requests_of,
    resumed,
    run,
    same,
    steps,
)

from rollkeel.config import EngineConfig
from rollkeel.engines.kv import BlockPool
from rollkeel.engines.local import LocalEngine
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.types import Request, SamplingParams, Status

BLOCK_BYTES = 2 * 2 * 2 * 32 * 4
"""Of one cached token of the tiny preset: keys and values, 2 layers, 2 heads of 32 floats."""


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of(initializer_range=0.25)


def memory_for(blocks: int, block_size: int = 16) -> float:
    """`kv_memory_gb` that affords exactly `blocks` blocks (half a block to spare against rounding)."""
    return (blocks + 0.5) * block_size * BLOCK_BYTES / 2**30


def mixed_requests(count: int = 24, new: int = 24) -> list[Request]:
    """Groups of four that share a prompt, one-token prompts, different lengths and parameters."""
    prompts = prompts_of(count // 4, seed=5, low=1, high=40)
    prompts[0] = prompts[0][:1]
    rng = np.random.default_rng(1)
    out = []
    for i in range(count):
        params = SamplingParams(
            max_new_tokens=int(rng.integers(1, new + 1)), temperature=(1.0, 0.7, 0.0)[i % 3], top_k=(0, 0, 20, 5)[i % 4]
        )
        out.append(Request(id=i, prompt_ids=prompts[i // 4], sampling=params))
    return out


def test_free_slots_are_refilled_at_once(model: Any) -> None:
    """Two slots, lengths 5 | 1 1 3: five steps are the optimum, and a batch that waited for its longest would take 8."""
    engine = engine_of(model, slots=2)
    prompts = prompts_of(4)
    engine.submit([replace(r, sampling=SamplingParams(max_new_tokens=n)) for r, n in zip(requests_of(prompts), (5, 1, 1, 3), strict=True)])  # fmt: skip
    assert {i: len(s.span) for i, s in drain(engine).items()} == {0: 5, 1: 1, 2: 1, 3: 3}
    assert engine.steps == 5
    engine = engine_of(model, slots=16)
    run(engine, requests_of(prompts_of(64), max_new_tokens=4))
    assert engine.steps == 16  # 64 * 4 tokens / 16 slots


def test_late_requests_join_a_running_batch(model: Any) -> None:
    engine = engine_of(model, slots=8)
    engine.submit(requests_of(prompts_of(2), max_new_tokens=10))
    assert steps(engine, 4) == []
    engine.submit(requests_of(prompts_of(2, seed=9), first=2, max_new_tokens=6))
    assert sorted(drain(engine)) == [0, 1, 2, 3]
    assert engine.steps == 10


def test_stop_token_ends_the_sequence_and_is_its_last_token(model: Any) -> None:
    requests = requests_of(prompts_of(16), max_new_tokens=20)
    free = run(engine_of(model), requests)
    stop = int(free[0].span.token_ids[7])
    other = int(free[1].span.token_ids[3])
    stopped = run(engine_of(model), requests_of(prompts_of(16), max_new_tokens=20, stop_token_ids=(stop, other)))
    for i, segment in stopped.items():
        ids = free[i].span.token_ids
        hits = np.flatnonzero((ids == stop) | (ids == other))
        length = int(hits[0]) + 1 if hits.size else 20
        assert segment.span.token_ids.tolist() == ids[:length].tolist()
        assert segment.status is (Status.FINISHED if hits.size else Status.LENGTH)


def test_stop_tokens_of_one_request_do_not_stop_another(model: Any) -> None:
    prompt = prompts_of(1)[0]
    first = run(engine_of(model), requests_of([prompt], max_new_tokens=12, temperature=0.0))[0].span.token_ids
    stop = (999, int(first[4]), 998)
    requests = [
        Request(id=0, prompt_ids=prompt, sampling=SamplingParams(max_new_tokens=12, temperature=0.0)),
        Request(id=1, prompt_ids=prompt, sampling=SamplingParams(max_new_tokens=12, temperature=0.0, stop_token_ids=stop)),
        Request(id=2, prompt_ids=prompt, sampling=SamplingParams(max_new_tokens=12, temperature=0.0)),
    ]  # fmt: skip
    done = run(engine_of(model, slots=2), requests)
    assert len(done[0].span) == len(done[2].span) == 12
    assert len(done[1].span) == int(np.flatnonzero(first == first[4])[0]) + 1


@pytest.mark.parametrize(("prompt", "expected"), [(30, 2), (31, 1), (20, 12), (19, 12)])
def test_length_and_context_limits(model: Any, prompt: int, expected: int) -> None:
    engine = engine_of(model, max_length=32)
    requests = requests_of([np.arange(3, 3 + prompt)], max_new_tokens=12)
    segment = run(engine, requests)[0]
    assert (len(segment.span), segment.status) == (expected, Status.LENGTH)


def test_one_token_prompt_and_one_new_token(model: Any) -> None:
    done = run(engine_of(model), requests_of([np.array([5]), np.array([5]), np.array([7])], max_new_tokens=1))
    for i, prompt in enumerate(([5], [5], [7])):
        span = done[i].span
        assert len(span) == 1
        np.testing.assert_allclose(
            span.logprobs, reference_logprobs(model, np.array(prompt), span.token_ids), atol=1e-4
        )


def test_a_log_prob_that_cannot_be_is_a_failure_that_names_the_request(model: Any) -> None:
    engine = engine_of(model)
    engine.submit(requests_of([np.array([5])], max_new_tokens=4))
    engine.advance(2)
    engine._slots.logprobs.fill_(0.5)
    with pytest.raises(
        EngineFailure, match=r"engine local: request 0: .*expected finite values ≤ 0, got 0.5 at position"
    ):
        engine.interrupt()


def test_bad_requests_are_refused_whole_with_one_line(model: Any) -> None:
    engine = engine_of(model, max_length=32)
    good = requests_of(prompts_of(1))[0]
    bad: list[tuple[Request, str]] = [
        (replace(good, prompt_ids=np.zeros(0, np.int64)), "at least one token"),
        (replace(good, prompt_ids=np.arange(32)), "leaves no room in a context of 32"),
        (replace(good, prompt_ids=np.array([1, 288])), "token id 288 is outside the vocabulary of 288"),
        (replace(good, prompt_ids=np.array([1, -1])), "token id -1 is outside"),
        (replace(good, sampling=SamplingParams(return_topk=289)), "return_topk=289"),
    ]
    part = run(engine, [good])[0].span
    bad.append((replace(good, prefix=replace(part, token_ids=part.token_ids + 1000)), "outside the vocabulary"))
    for request, message in bad:
        with pytest.raises(BadInput, match=message) as caught:
            engine.submit([good, replace(request, id=7)])
        assert "\n" not in str(caught.value)
        assert not engine.busy
    with pytest.raises(BadInput, match="unique"):
        engine.submit([good, good])
    engine.submit([good])
    with pytest.raises(BadInput, match="in flight"):
        engine.submit([good])
    assert sorted(drain(engine)) == [good.id]
    with pytest.raises(BadInput, match="cannot return experts"):
        engine_of(model_of("tiny-qwen3")).submit([replace(good, sampling=SamplingParams(return_experts=True))])


def test_too_little_memory_for_one_sequence_is_refused(model: Any) -> None:
    config = EngineConfig(kv_memory_gb=memory_for(8))
    with pytest.raises(BadInput, match=r"kv_memory_gb.*one sequence of 96 tokens"):
        LocalEngine(model.config, config, max_length=96)
    LocalEngine(model.config, EngineConfig(kv_memory_gb=memory_for(9)), max_length=96)


def test_a_long_context_nobody_asked_for_is_cut_to_the_memory(model: Any) -> None:
    """Qwen3-0.6B's context takes 8.8 GB: with the default settings it was refused."""
    engine = LocalEngine(model.config, EngineConfig(kv_memory_gb=memory_for(9)))
    assert engine.capabilities.max_length == 96 < model.config.max_position_embeddings
    with pytest.raises(BadInput, match="leaves no room in a context of 96"):
        engine.submit(requests_of([np.arange(8, 104)], max_new_tokens=4))
    assert LocalEngine(model.config, EngineConfig()).capabilities.max_length == model.config.max_position_embeddings


@pytest.mark.parametrize("only", [None, (1, 3, 9, 77)])
def test_interrupt_returns_what_there_is_and_leaves_the_others(model: Any, only: tuple[int, ...] | None) -> None:
    requests = requests_of(prompts_of(12), max_new_tokens=15)
    whole = run(engine_of(model), requests)
    engine = engine_of(model, slots=6)  # ids 6… wait in the queue
    engine.submit(requests)
    assert steps(engine, 5) == []
    engine.interrupt(only)
    done = drain(engine)
    assert sorted(done) == list(range(12))
    for i, segment in done.items():
        if only is None or i in only:
            assert segment.status is Status.INTERRUPTED
            assert len(segment.span) == (5 if i < 6 else 0)
        else:
            assert segment.status is Status.LENGTH
        assert same(segment.span, _head(whole[i].span, len(segment.span)))
    assert not engine.busy


def _head(span: Any, n: int) -> Any:
    fields = ("token_ids", "logprobs", "kept_mass", "versions", "kv_versions")
    return replace(span, **{f: getattr(span, f)[:n] for f in fields})


@pytest.mark.parametrize("after", [1, 4, 11])
def test_resuming_from_a_prefix_is_the_uninterrupted_run(model: Any, after: int) -> None:
    requests = mixed_requests()
    whole = run(engine_of(model), requests)
    engine = engine_of(model, slots=16)
    engine.submit(requests)
    first = {s.request_id: s for s in steps(engine, after)}
    engine.interrupt()
    first |= drain(engine)
    again = [resumed(r, first[r.id].span) for r in requests if first[r.id].status is Status.INTERRUPTED]
    assert again
    second = run(engine_of(model, slots=3, block_size=4), again)
    for request in requests:
        span = first[request.id].span
        if request.id in second:
            span = span.append(second[request.id].span)
            assert second[request.id].status is whole[request.id].status
        assert same(span, whole[request.id].span)


def test_a_prefix_that_is_complete_comes_back_at_once(model: Any) -> None:
    request = requests_of(prompts_of(1), max_new_tokens=4)[0]
    whole = run(engine_of(model), [request])[0].span
    engine = engine_of(model)
    segment = run(engine, [resumed(request, whole)])[0]
    assert (len(segment.span), segment.status, engine.steps) == (0, Status.LENGTH, 0)


@pytest.mark.parametrize(
    "config",
    [
        {"slots": 1},
        {"slots": 3, "block_size": 1},
        {"slots": 64, "block_size": 5},
        {"slots": 5, "block_size": 64},
        {"prefix_sharing": False},
        {"prefill_tokens": 1},
        {"prefill_tokens": 50, "slots": 7},
        {"forward": "transformers"},
        {"forward": "fast", "scores": 300},
        {"forward": "transformers", "scores": 1, "prefill_tokens": 60},
        {"slots": 24, "kv_memory_gb": memory_for(9)},
        {"slots": 24, "kv_memory_gb": memory_for(13)},
        {"slots": 24, "kv_memory_gb": memory_for(35, 4), "block_size": 4},
        {"slots": 24, "kv_memory_gb": memory_for(120, 1), "block_size": 1, "prefix_sharing": False},
    ],
)
def test_configuration_changes_no_token_and_loses_no_block(model: Any, config: dict[str, Any]) -> None:
    requests = mixed_requests()
    expected = run(engine_of(model), requests)
    engine = engine_of(model, **config)
    free = engine._pool.free
    done = run(engine, requests)
    assert sorted(done) == [r.id for r in requests]
    for i, segment in done.items():
        assert segment.status is expected[i].status
        assert same(segment.span, expected[i].span)
        np.testing.assert_allclose(segment.span.kept_mass, expected[i].span.kept_mass, atol=1e-4)
    assert engine._pool.free == free
    assert len(engine._prompts) == 0


@pytest.mark.parametrize("blocks", range(9, 20, 2))
def test_starved_groups_with_shared_prompts_keep_their_tokens(model: Any, blocks: int) -> None:
    """Shared prompts are evicted while others of their group are being admitted: the hardest moment for block ownership."""
    rng = np.random.default_rng(blocks)
    prompts = [rng.integers(3, 280, n) for n in (17, 33, 20, 49, 2, 18)]
    requests = [
        Request(
            id=i, prompt_ids=prompts[i % 6 if blocks % 4 == 1 else i // 4], sampling=SamplingParams(max_new_tokens=30)
        )
        for i in range(24)
    ]
    expected = run(engine_of(model, prefix_sharing=False), requests)
    engine = engine_of(model, slots=24, kv_memory_gb=memory_for(blocks))
    free = engine._pool.free
    done = run(engine, requests)
    assert all(same(done[i].span, expected[i].span) for i in range(24))
    assert engine._pool.free == free


def test_starvation_really_requeues(model: Any) -> None:
    """Without requeueing, nine blocks could not carry what they carried above: more steps than with memory to spare."""
    requests = requests_of(prompts_of(8, low=10, high=14), max_new_tokens=60)
    rich, poor = engine_of(model), engine_of(model, kv_memory_gb=memory_for(12))
    assert all(same(a.span, b.span) for a, b in zip(run(rich, requests).values(), _sorted(run(poor, requests)), strict=True))  # fmt: skip
    assert rich.steps == 60
    assert poor.steps > 60


def _sorted(done: dict[int, Any]) -> list[Any]:
    return [done[i] for i in sorted(done)]


def test_shared_half_filled_block_is_copied_before_it_is_written(model: Any) -> None:
    """Eight answers to one prompt of 20 tokens (16 + 4): each must see its own continuation of the shared block."""
    prompt = prompts_of(1, low=20, high=20)[0]
    engine = engine_of(model)
    free = engine._pool.free
    engine.submit(requests_of([prompt] * 8, max_new_tokens=20))
    steps(engine, 1)
    # 1 whole block shared, 1 half-filled kept by the prompt, and one or two of its own for each (positions 16…31).
    assert free - engine._pool.free == 2 + 8
    done = drain(engine)
    assert len({tuple(s.span.token_ids.tolist()) for s in done.values()}) > 4
    for segment in done.values():
        want = reference_logprobs(model, prompt, segment.span.token_ids)
        np.testing.assert_allclose(segment.span.logprobs, want, atol=1e-4)
    assert engine._pool.free == free


def test_blocks_return_after_interrupt_and_update(model: Any) -> None:
    engine = engine_of(model, slots=8)
    free = engine._pool.free
    engine.submit(mixed_requests())
    steps(engine, 3)
    assert engine._pool.free < free
    engine.interrupt()
    assert engine._pool.free == free
    drain(engine)
    assert len(engine._prompts) == 0


def test_topk_survives_neighbours_that_ask_for_more_or_less(model: Any) -> None:
    prompts, wanted, lengths = prompts_of(4), (2, 0, 5, 3), (12, 12, 4, 9)
    params = [SamplingParams(max_new_tokens=n, return_topk=k) for n, k in zip(lengths, wanted, strict=True)]
    requests = [Request(id=i, prompt_ids=p, sampling=s) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
    engine = engine_of(model)
    engine.submit([requests[0]])
    steps(engine, 3)
    engine.submit(requests[1:])
    done = drain(engine)
    for request, k in zip(requests, wanted, strict=True):
        alone, span = run(engine_of(model), [request])[request.id].span, done[request.id].span
        if k == 0:
            assert span.topk_ids is None
            continue
        assert span.topk_logprobs is not None
        assert alone.topk_logprobs is not None
        assert span.topk_logprobs.shape == (len(span), k)
        np.testing.assert_array_equal(span.topk_ids, alone.topk_ids)
        np.testing.assert_allclose(span.topk_logprobs, alone.topk_logprobs, atol=1e-4)
        assert (np.diff(span.topk_logprobs, axis=1) <= 0).all()


def test_experts_are_those_of_the_position_that_produced_the_token(model: Any) -> None:
    params = SamplingParams(max_new_tokens=6, return_experts=True)
    prompts = prompts_of(3)
    mixed = [Request(id=i, prompt_ids=p, sampling=params if i != 1 else SamplingParams(max_new_tokens=9)) for i, p in enumerate(prompts)]  # fmt: skip
    done = run(engine_of(model), mixed)
    assert done[1].span.experts is None
    experts = done[0].span.experts
    assert experts is not None
    assert experts.shape == (6, 2, 2)
    chosen: list[np.ndarray] = []
    handles = [
        layer.mlp.gate.register_forward_hook(lambda _m, _a, out: chosen.append(out[2].numpy()))
        for layer in model.model.layers
    ]
    reference_logprobs(model, prompts[0], done[0].span.token_ids)
    for handle in handles:
        handle.remove()
    start = len(prompts[0]) - 1
    want = np.stack([c[start : start + 6] for c in chosen], 1)
    np.testing.assert_array_equal(np.sort(experts, -1), np.sort(want, -1))


def test_polling_with_nothing_in_flight_returns_at_once(model: Any) -> None:
    assert engine_of(model).poll(30.0) == []


def test_block_pool_refuses_double_release_and_exhaustion() -> None:
    pool = BlockPool(2)
    a, b = pool.take(), pool.take()
    with pytest.raises(EngineFailure, match="no free block"):
        pool.take()
    pool.share([a])
    pool.release([a])
    assert pool.free == 0
    pool.release([a, b])
    assert pool.free == 2
    with pytest.raises(EngineFailure, match="more often"):
        pool.release([a])
    with pytest.raises(EngineFailure, match="nobody holds"):
        pool.share([b])


@pytest.mark.parametrize("sharing", [True, False])
def test_prompts_that_ride_on_a_decode_step_change_no_token(
    model: Any, sharing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that come one by one to a busy engine, groups whose shared prompt ends inside a block among them."""
    requests = [
        replace(r, sampling=replace(r.sampling, return_experts=True))
        for r in mixed_requests()
        if len(r.prompt_ids) < 40
    ]
    found, ridden = [], []
    for most in (0, 8, 256):
        monkeypatch.setattr("rollkeel.engines.local.RIDERS", most)
        engine = engine_of(model, slots=5, block_size=16, prefix_sharing=sharing, kv_memory_gb=memory_for(24))
        compiled = engine._compiled
        assert compiled is not None
        step, count = compiled.hidden, [0]

        def spy(active: Any, state: Any, experts: Any, riding: Any, step: Any = step, count: Any = count) -> Any:
            count[0] += sum(len(ids) for _, ids, _ in riding)
            return step(active, state, experts, riding)

        monkeypatch.setattr(compiled, "hidden", spy)
        done = []
        for request in requests:
            engine.submit([request])
            done += steps(engine, 2)
        found.append({s.request_id: s for s in [*done, *drain(engine).values()]})
        ridden.append(count[0])
    assert ridden[0] == 0
    assert 0 < ridden[1] < ridden[2]
    for other in found[1:]:
        assert set(other) == {r.id for r in requests}
        for i, segment in found[0].items():
            assert same(segment.span, other[i].span)
            assert segment.span.experts is not None
            assert np.array_equal(segment.span.experts, other[i].span.experts)


def test_a_sequence_put_back_before_its_prompt_was_computed_writes_into_nobody_elses_blocks(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when room runs out in the very step on which a prompt rides: what it would have written is written before its blocks go."""
    engine = engine_of(model, slots=2)
    requests = requests_of(prompts_of(2, seed=3, low=20, high=20), max_new_tokens=30, temperature=1.0, seed=7)
    whole = run(engine_of(model, slots=2), requests)
    engine.submit(requests[:1])
    steps(engine, 5)
    grow, put_back = engine._grow_tables, []

    def starve() -> None:
        if engine._riding and not put_back:
            slot = next(reversed(engine._active))
            put_back.append(engine._active[slot].request.id)
            engine._requeue(slot)
            assert not engine._riding
        grow()

    monkeypatch.setattr(engine, "_grow_tables", starve)
    engine.submit(requests[1:])
    found = drain(engine)
    assert put_back == [1]
    assert all(same(found[i].span, whole[i].span) for i in (0, 1))
