"""A token stamped with a version must come from that version's weights; an engine that cannot prove them must not sample.

Every way an update can be wrong, updates while sequences are on their way, tied embeddings, diverged weights. Not covered:
transport between machines; deltas (`sync/test_deltas.py`); adapters (test_adapters.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import drain, engine_of, model_of, prompts_of, reference_logprobs, requests_of, run, same, steps

from rollkeel.config import EngineConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.models.names import checkpoint_views
from rollkeel.models.presets import PRESETS
from rollkeel.sync.publish import full_update
from rollkeel.types import Status, WeightSlice, WeightUpdate


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of()


def update_of(model: Any, version: int = 1) -> WeightUpdate:
    return full_update(checkpoint_views(model).items(), version)


def swap_first(update: WeightUpdate, **changes: Any) -> WeightUpdate:
    return replace(update, slices=[replace(update.slices[0], **changes), *update.slices[1:]])


def flip_byte(update: WeightUpdate) -> WeightUpdate:
    tensor = update.slices[3].tensor.clone()
    tensor.view(torch.uint8).flatten()[17] ^= 4
    slices = list(update.slices)
    slices[3] = replace(slices[3], tensor=tensor)
    return replace(update, slices=slices)


WRONG: dict[str, tuple[Callable[[WeightUpdate], WeightUpdate], str]] = {
    "unknown name": (lambda u: swap_first(u, name="model.other.weight"), "no weight named model.other.weight"),
    "missing name": (lambda u: replace(u, slices=u.slices[1:]), "1 weights did not arrive, first lm_head.weight"),
    "nothing": (lambda u: replace(u, slices=[]), "weights did not arrive"),
    "wrong shape": (lambda u: swap_first(u, tensor=u.slices[0].tensor[:-1]), r"has shape \(287, 64\)"),
    "transposed": (lambda u: swap_first(u, tensor=u.slices[0].tensor.t()), r"has shape \(64, 288\)"),
    "offset": (lambda u: swap_first(u, offset=64), "at offset 64"),
    "flipped bit": (flip_byte, "arrived with a wrong checksum"),
    "other dtype": (lambda u: swap_first(u, tensor=u.slices[0].tensor.bfloat16()), "wrong checksum"),
    "delta of no mode": (
        lambda u: replace(u, kind="delta", base_version=0),
        "a delta of None weights 0, the engine has fp32",
    ),
    "other kind": (lambda u: replace(u, kind="patch"), "expected all weights or adapters, got 'patch'"),
    "wrong total": (lambda u: replace(u, checksum=u.checksum ^ 1), "expected"),
    "twice": (lambda u: replace(u, slices=[*u.slices, u.slices[0]]), "arrived twice"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_updates_are_refused_and_the_engine_then_serves_nothing(model: Any, case: str) -> None:
    change, message = WRONG[case]
    engine = engine_of(model)
    requests = requests_of(prompts_of(2), max_new_tokens=6)
    expected = run(engine, requests)
    with pytest.raises(EngineFailure, match=message) as caught:
        engine.update_weights(change(update_of(model)))
    assert "\n" not in str(caught.value)
    assert engine.version < 0
    engine.submit(requests)
    with pytest.raises(EngineFailure, match="no proven weights"):
        engine.poll(1.0)
    proof = engine.update_weights(update_of(model, 5))
    assert (proof.version, engine.version) == (5, 5)
    done = drain(engine)
    for i in expected:
        assert same(done[i].span, expected[i].span)
        assert set(done[i].span.versions.tolist()) == {5}


def test_an_engine_without_weights_does_not_sample(model: Any) -> None:
    engine = LocalEngine(model.config, EngineConfig(), max_length=64)
    assert engine.poll(0.0) == []
    engine.submit(requests_of(prompts_of(1)))
    with pytest.raises(EngineFailure, match="publish weights"):
        engine.poll(0.0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp8", "int8", "int4"])
def test_proof_is_the_checksum_of_what_was_sent(model: Any, dtype: Any) -> None:
    engine = LocalEngine(model.config, EngineConfig(dtype=dtype), max_length=64)
    update = update_of(model, 3)
    proof = engine.update_weights(update)
    assert (proof.version, proof.checksum) == (3, update.checksum)


def test_update_in_flight_is_stamped_per_token_and_recomputes_the_kv(model: Any) -> None:
    other = model_of(seed=1)
    prompts = prompts_of(6)
    engine = engine_of(model, version=4, slots=4)  # two requests wait: they belong to the new version alone
    engine.submit(requests_of(prompts, max_new_tokens=12))
    steps(engine, 5)
    engine.update_weights(update_of(other, 9))
    done = drain(engine)
    for i, prompt in enumerate(prompts):
        span, old = done[i].span, 5 if i < 4 else 0
        assert span.versions.tolist() == [4] * old + [9] * (12 - old)
        # KV is recomputed under the new weights, so nothing old is attended to.
        assert span.kv_versions.tolist() == span.versions.tolist()
        want = reference_logprobs(other, prompt, span.token_ids)
        if old:
            want[:old] = reference_logprobs(model, prompt, span.token_ids)[:old]
        np.testing.assert_allclose(span.logprobs, want, atol=1e-4)


def test_an_update_with_equal_weights_changes_no_token(model: Any) -> None:
    requests = requests_of(prompts_of(8), max_new_tokens=16)
    expected = run(engine_of(model), requests)
    engine = engine_of(model)
    engine.submit(requests)
    done = {}
    for version in range(1, 6):
        done |= {s.request_id: s for s in steps(engine, 3)}
        engine.update_weights(update_of(model, version))
    done |= drain(engine)
    assert all(same(done[i].span, expected[i].span) for i in expected)
    assert done[0].span.versions.tolist() == [v for v in range(5) for _ in range(3)] + [5]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("forward", ["fast", "transformers"])
def test_every_weight_of_every_preset_arrives(preset: str, forward: str) -> None:
    """After serving one model, an update must replace all of it: tied heads, fused projections, norms, experts."""
    first, second = model_of(preset, seed=1, initializer_range=0.1), model_of(preset, seed=2, initializer_range=0.1)
    with torch.no_grad():
        for p in second.parameters():
            if p.dim() == 1:
                p.uniform_(0.5, 1.5)
    engine = engine_of(first, forward=forward)
    prompts = prompts_of(3)
    run(engine, requests_of(prompts, max_new_tokens=2))
    engine.update_weights(update_of(second, 1))
    for i, segment in run(engine, requests_of(prompts, max_new_tokens=6)).items():
        want = reference_logprobs(second, prompts[i], segment.span.token_ids)
        np.testing.assert_allclose(segment.span.logprobs, want, atol=1e-4)


def test_a_tied_model_publishes_and_serves_its_embedding_once() -> None:
    model = model_of("tiny-qwen3-tied")
    names = list(checkpoint_views(model))
    assert "lm_head.weight" not in names
    engine = engine_of(model)
    extra = WeightSlice(name="lm_head.weight", tensor=model.lm_head.weight, checksum=0)
    update = update_of(model)
    with pytest.raises(EngineFailure, match=r"no weight named lm_head\.weight"):
        engine.update_weights(replace(update, slices=[*update.slices, extra]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_diverged_weights_stop_the_engine_with_one_line(value: float) -> None:
    model = model_of()
    with torch.no_grad():
        model.model.norm.weight[3] = value
    engine = engine_of(model)
    engine.submit(requests_of(prompts_of(3)))
    with pytest.raises(EngineFailure, match="not finite under version 0") as caught:
        engine.poll(5.0)
    assert "\n" not in str(caught.value)
    engine.close()


def test_interrupt_after_a_refused_update_still_returns_what_was_sampled(model: Any) -> None:
    engine = engine_of(model)
    engine.submit(requests_of(prompts_of(2), max_new_tokens=9))
    steps(engine, 4)
    with pytest.raises(EngineFailure):
        engine.update_weights(flip_byte(update_of(model)))
    engine.interrupt()
    done = drain(engine)
    assert [(len(s.span), s.status) for s in done.values()] == [(4, Status.INTERRUPTED)] * 2
    assert set(done[0].span.versions.tolist()) == {0}


def test_quantised_mode_that_would_round_nothing_is_refused() -> None:
    """GPT-2's layers are named `h.0`: int8 would silently be fp32."""
    from transformers import GPT2Config

    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    with pytest.raises(BadInput, match="int8"):
        LocalEngine(config, EngineConfig(dtype="int8"), max_length=32)
