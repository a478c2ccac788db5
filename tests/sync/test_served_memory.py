"""Weights that did not arrive must stop a run in every numeric mode: otherwise its tokens are stamped with a version nobody serves.

Loads that go wrong inside the engine, whose memory the proof reads. Not covered: servers in other programs (`test_proof.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import TINY, cli

from rollkeel.config import EngineConfig
from rollkeel.engines import local, weights
from rollkeel.engines.weights import apply_update
from rollkeel.errors import EngineFailure
from rollkeel.models.names import checkpoint_views
from rollkeel.models.numerics import MODES, round_fp8, round_int4, round_int8
from rollkeel.models.presets import build_preset
from rollkeel.record.rollout_store import read_step
from rollkeel.sync.publish import DirectPublisher
from rollkeel.types import Request, SamplingParams, WeightUpdate

Load = Callable[[WeightUpdate, dict[str, torch.Tensor], str], None]
EXPERT = "model.layers.1.mlp.experts.{}.down_proj.weight"


def without(name: str) -> Load:
    def load(update: WeightUpdate, destinations: dict[str, torch.Tensor], mode: str) -> None:
        kept = destinations[name].clone()
        apply_update(update, destinations, mode)
        destinations[name].copy_(kept)

    return load


def swapped(one: str, other: str) -> Load:
    def load(update: WeightUpdate, destinations: dict[str, torch.Tensor], mode: str) -> None:
        apply_update(update, destinations | {one: destinations[other], other: destinations[one]}, mode)

    return load


def of_another(name: str) -> Load:
    """The rows of a fused weight one further than they belong."""

    def load(update: WeightUpdate, destinations: dict[str, torch.Tensor], mode: str) -> None:
        pieces = [replace(s, tensor=s.tensor.roll(1, 0)) if s.name == name else s for s in update.slices]
        apply_update(replace(update, slices=pieces), destinations, mode)

    return load


LOADS = {
    "skipped expert": (without(EXPERT.format(3)), EXPERT.format(3)),
    "skipped norm": (without("model.layers.0.self_attn.q_norm.weight"), "q_norm.weight"),
    "skipped key norm": (without("model.layers.1.self_attn.k_norm.weight"), "k_norm.weight"),
    "wrong norm": (of_another("model.layers.1.self_attn.q_norm.weight"), "q_norm.weight"),
    "swapped head norms": (
        swapped("model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.k_norm.weight"),
        "[qk]_norm.weight",
    ),
    "skipped embedding": (without("model.embed_tokens.weight"), "embed_tokens"),
    "wrong slice": (of_another("model.layers.0.self_attn.k_proj.weight"), "k_proj"),
    "wrong rows of the router": (of_another("model.layers.0.mlp.gate.weight"), "mlp.gate"),
    "swapped experts": (swapped(EXPERT.format(0), EXPERT.format(2)), "down_proj"),
    "swapped layers": (
        swapped("model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight"),
        "o_proj",
    ),
}


def model_of(seed: int, preset: str = "tiny-qwen3-moe") -> Any:
    model, _ = build_preset(preset, seed, {"initializer_range": 0.2})
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.empty_like(p).uniform_(0.5, 1.5))
    return model


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    return model_of(1), model_of(2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("forward", ["fast", "transformers"])
def test_a_load_that_went_wrong_is_refused_by_name_in_every_mode(
    models: tuple[Any, Any], mode: str, forward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = models
    engine = local.LocalEngine(first.config, EngineConfig(dtype=mode, forward=forward), max_length=32)  # type: ignore[arg-type]
    publisher = DirectPublisher([engine])
    publisher.publish(checkpoint_views(first).items(), 0)
    for version, (load, name) in enumerate(LOADS.values(), 1):
        with monkeypatch.context() as patch:
            patch.setattr(weights, "apply_update", load)
            with pytest.raises(EngineFailure, match=name) as refused:
                publisher.publish(checkpoint_views(second).items(), version)
        assert "skipped, misplaced or changed" in str(refused.value)
        assert "\n" not in str(refused.value)
        assert engine.version < 0
        publisher.publish(checkpoint_views(second).items(), version)
        publisher.publish(checkpoint_views(first).items(), version)
    assert engine.version == len(LOADS)


def sampled(engine: local.LocalEngine) -> list[bytes]:
    sampling = SamplingParams(max_new_tokens=6)
    engine.submit([Request(id=i, prompt_ids=np.arange(1, 9) * (i + 1), sampling=sampling) for i in range(3)])
    segments = []
    while part := engine.poll(30):
        segments += part
    return [
        x.tobytes() for s in sorted(segments, key=lambda s: s.request_id) for x in (s.span.token_ids, s.span.logprobs)
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("forward", ["auto", "fast", "transformers"])
@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-qwen3-moe"])
def test_what_a_proof_looks_at_is_all_that_is_computed_with(mode: str, forward: str, preset: str) -> None:
    """An engine whose proven memory is overwritten, and nothing else, is the other model: no kernel reads a copy."""
    engines = []
    for seed in (1, 2):
        model = model_of(seed, preset)
        engines.append(local.LocalEngine(model.config, EngineConfig(dtype=mode, forward=forward), max_length=32))  # type: ignore[arg-type]
        DirectPublisher([engines[-1]]).publish(checkpoint_views(model).items(), 0)
    one, other = engines
    assert sampled(one) != sampled(other)
    for name, view in one._forward.destinations.items():
        view.copy_(other._forward.destinations[name])
    one._prompts.evict()
    assert sampled(one) == sampled(other)


@pytest.mark.parametrize("mode", ["int8"])
def test_a_run_ends_before_a_token_is_stamped(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(update: WeightUpdate, destinations: dict[str, torch.Tensor], mode: str) -> None:
        (without("model.layers.1.self_attn.q_proj.weight") if update.version == 4 else apply_update)(
            update, destinations, mode
        )

    monkeypatch.setattr(weights, "apply_update", load)
    run = tmp_path / "run"
    words = [*TINY, "run.steps=5", "eval.every=0", f"engine.dtype={mode}", f"run.dir={run}"]
    code, _, err = cli(capsys, "train", *words)
    assert code == 3
    assert "q_proj" in err
    stamped = [
        v
        for file in (run / "rollouts").iterdir()
        for row in read_step(file).column("versions").to_pylist()
        for v in row
    ]
    assert set(stamped) == {0, 2}


@pytest.mark.parametrize("rounded", [round_fp8, round_int8, round_int4])
def test_compiled_rounding_is_the_plain_one_to_the_bit(rounded: Any) -> None:
    torch.manual_seed(3)
    spread = torch.randn(300, 96) * torch.logspace(-9, 0, 96)
    odd = torch.randn(4, 33)
    odd[1, 3], odd[2, 4] = torch.inf, torch.nan
    for x in (spread, odd, torch.randn(3, 5, 64) * 1e20, torch.randn(64, 8).t(), -torch.zeros(2, 32), torch.ones(0, 8)):
        compiled, plain = rounded(x), rounded(x.clone().requires_grad_()).detach()
        assert torch.equal(compiled.isnan(), plain.isnan())
        assert torch.equal(*(t.nan_to_num(7.0).contiguous().view(torch.int32) for t in (compiled, plain)))
