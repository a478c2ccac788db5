"""Replayed routing (R3) is whole only with the experts of what was read: a prompt's other experts are other keys for every answer.

Engines must tell the experts that their own prefill chose, for shared, riding, put back and interrupted prompts and for text of
environments; the reference is transformers' routers on the whole sequence in float32. Not covered: CUDA, a live vLLM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import drain, engine_of, model_of, prompts_of, requests_of, resumed, run, steps

from rollkeel.engines.flights import Flight
from rollkeel.errors import BadInput
from rollkeel.models.names import checkpoint_views
from rollkeel.sync.publish import full_update
from rollkeel.types import Request, SamplingParams, TokenSpan

ASKED: dict[str, Any] = {"max_new_tokens": 7, "return_experts": True, "return_prompt_experts": True}


@torch.no_grad()
def chosen(model: Any, ids: np.ndarray) -> np.ndarray:
    """`[n, layers, k]`: what transformers' routers choose for a whole sequence, ascending."""
    seen: list[np.ndarray] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _a, out: seen.append(out[2].numpy()))
        for layer in model.model.layers
    ]
    model(input_ids=torch.from_numpy(ids)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return np.sort(np.stack(seen, 1), -1)


def assert_true(model: Any, prompt: np.ndarray, span: TokenSpan) -> None:
    """Every token but the last went where transformers sends it."""
    assert span.prompt_experts is not None
    assert span.experts is not None
    assert len(span.prompt_experts) == len(prompt) - 1
    told = np.sort(np.concatenate([span.prompt_experts, span.experts]), -1)
    np.testing.assert_array_equal(told, chosen(model, np.concatenate([prompt, span.token_ids]))[:-1])


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of()


WAYS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "riding": {"slots": 2},
    "blocks of 4": {"block_size": 4},
    "alone": {"prefix_sharing": False},
    "fast": {"forward": "fast", "prefill_tokens": 16},
    "transformers": {"forward": "transformers"},
    "kept": {"kv": "keep"},
}


@pytest.mark.parametrize("way", WAYS)
def test_prompts_tell_where_they_were_sent(model: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "compiled":
        monkeypatch.setattr("rollkeel.engines.local.RIDERS", 0)
    prompts = [p for p in prompts_of(5, high=40) for _ in range(3)] + [np.array([5])]
    engine = engine_of(model, **WAYS[way])
    done = run(engine, requests_of(prompts, **ASKED))
    for i, prompt in enumerate(prompts):
        assert_true(model, prompt, done[i].span)
    plain = run(engine, requests_of(prompts[:2], max_new_tokens=3, return_experts=True))
    assert plain[0].span.prompt_experts is None


def test_they_are_refused_without_those_of_the_answer(model: Any) -> None:
    with pytest.raises(BadInput, match="request 0: return_prompt_experts goes with return_experts; set both"):
        engine_of(model).submit(requests_of(prompts_of(1), return_prompt_experts=True))


@pytest.mark.parametrize("kv", ["recompute", "keep"])
@pytest.mark.parametrize("first", [0, 3])
def test_an_interrupted_answer_keeps_or_learns_them(model: Any, kv: str, first: int) -> None:
    """Also with nothing sampled yet, and in an engine whose blocks have held other prompts."""
    prompts = prompts_of(4, seed=3, low=20, high=30)
    engine = engine_of(model, kv=kv, slots=4)
    run(engine, requests_of(prompts_of(8, seed=9, high=30), first=50, **ASKED))
    requests = requests_of(prompts, **ASKED)
    engine.submit(requests)
    if first:
        steps(engine, first)
    engine.interrupt()
    parts = {s.request_id: s for s in engine.poll(0.0)}
    run(engine, requests_of(prompts_of(8, seed=11, high=30), first=90, **ASKED))
    engine.submit([replace(resumed(r, parts[r.id].span), kv=parts[r.id].kv) for r in requests])
    done = drain(engine)
    for r in requests:
        assert len(parts[r.id].span) == first
        assert_true(model, r.prompt_ids, parts[r.id].span.append(done[r.id].span))


def test_new_weights_before_the_first_token_tell_the_new_choice(model: Any) -> None:
    other, requests = model_of(seed=4), requests_of(prompts_of(3, low=10), **ASKED)
    engine = engine_of(model, slots=1)
    engine.submit(requests)
    steps(engine, 1)
    engine.update_weights(full_update(checkpoint_views(other).items(), 1))
    done = drain(engine)
    for r in requests[1:]:
        assert_true(other, r.prompt_ids, done[r.id].span)


@pytest.mark.parametrize("options", [{}, {"forward": "fast"}], ids=str)
def test_text_of_an_environment_tells_too(model: Any, options: dict[str, Any]) -> None:
    prompt, engine = prompts_of(1, low=20)[0], engine_of(model, **options)
    span = TokenSpan.empty()
    for turn in range(3):
        sampling = SamplingParams(**{**ASKED, "max_new_tokens": len(span) + 5})
        span = span.append(run(engine, [Request(id=1, prompt_ids=prompt, sampling=sampling, prefix=span)])[1].span)
        if turn < 2:
            span = span.given(np.arange(30, 37), 0)
            assert (span.experts[-7:] == -1).all()  # type: ignore[index]
    assert span.own_count == 15
    assert_true(model, prompt, span)


def test_a_server_is_asked_for_them_once() -> None:
    request = Request(id=3, prompt_ids=np.array([9, 8, 7, 30]), sampling=SamplingParams(**ASKED))
    flight = Flight(request, 7)
    assert flight.wanted("a", 0).experts_from == 0
    flight.tokens = [5, 6]
    assert flight.wanted("b", 0).experts_from == 5
    rows = np.zeros((2, 1, 2), np.int16)
    part = TokenSpan(
        token_ids=np.array([5, 6]), logprobs=np.zeros(2, np.float32), kept_mass=np.ones(2, np.float32),
        versions=np.zeros(2, np.int64), kv_versions=np.zeros(2, np.int64), experts=rows, prompt_experts=rows,
    )  # fmt: skip
    assert Flight(replace(request, prefix=part), 7).wanted("d", 0).experts_from == 5
    assert Flight(replace(request, prefix=part.given(np.array([7]), 0)), 7).wanted("e", 0).experts_from == 0
    plain = replace(request, sampling=replace(request.sampling, return_prompt_experts=False))
    assert Flight(plain, 7).wanted("c", 0).experts_from == 3
