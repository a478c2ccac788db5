"""Publication is refused unless every engine proves the version and bytes it serves; otherwise a run trains on tokens of unknown weights.

Real engine and fakes that lie in known ways. Not covered: transport between machines.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollkeel.config import EngineConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.errors import EngineFailure
from rollkeel.models.checksum import MASK, tensor_checksum
from rollkeel.models.names import checkpoint_views
from rollkeel.models.presets import build_preset
from rollkeel.sync.publish import DirectPublisher, full_update
from rollkeel.types import Capabilities, Proof, Request, SamplingParams, WeightUpdate

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4)}


class LyingEngine:
    """Claims the proof it was told to; an honest one is `LyingEngine()`."""

    def __init__(self, version: int = 0, checksum: int = 0, serves: int = 0) -> None:
        self.lie, self.serves, self.seen = (version, checksum), serves, 0
        self.version = -1
        self.capabilities = Capabilities(name="liar", dtype="fp32", max_length=8)

    def update_weights(self, update: WeightUpdate) -> Proof:
        self.seen += 1
        self.version = update.version + self.serves
        return Proof(version=update.version + self.lie[0], checksum=(update.checksum + self.lie[1]) & MASK)


def publish(engines: list[Any], version: int = 7) -> Any:
    return DirectPublisher(engines).publish(iter(WEIGHTS.items()), version)


def test_full_update_lists_every_slice_with_checksums_that_sum_up() -> None:
    update = full_update(iter(WEIGHTS.items()), 3)
    assert (update.kind, update.base_version, update.version) == ("full", None, 3)
    assert [s.name for s in update.slices] == list(WEIGHTS)
    assert [s.checksum for s in update.slices] == [tensor_checksum(n, t) for n, t in WEIGHTS.items()]
    assert update.checksum == sum(s.checksum for s in update.slices) & MASK
    assert update.slices[0].tensor.data_ptr() == WEIGHTS["a.weight"].data_ptr()


def test_parameters_are_published_without_their_graph() -> None:
    update = full_update([("w", torch.nn.Parameter(torch.ones(3)))], 0)
    assert not update.slices[0].tensor.requires_grad


def test_every_engine_gets_the_weights_even_from_an_iterator() -> None:
    engines = [LyingEngine(), LyingEngine()]
    metrics = publish(engines)
    assert [e.seen for e in engines] == [1, 1]
    assert set(metrics) == {"time/sync_s"}
    assert metrics["time/sync_s"] >= 0


@pytest.mark.parametrize(
    ("liar", "message"),
    [
        (LyingEngine(version=1), "expected proof of version 7 .* got version 8"),
        (LyingEngine(checksum=1), "weights did not arrive"),
        (LyingEngine(serves=-1), "serves version 6 after publishing 7"),
    ],
)
def test_a_proof_that_does_not_match_stops_publication(liar: LyingEngine, message: str) -> None:
    with pytest.raises(EngineFailure, match=message) as refused:
        publish([LyingEngine(), liar])
    assert "\n" not in str(refused.value)
    assert "liar" in str(refused.value)


def test_an_engine_serves_what_the_model_was_at_publication() -> None:
    """Weights are copied into the engine: training on must not leak into it, publishing again must reach it."""
    model, _ = build_preset("tiny-qwen3", 0, {"initializer_range": 0.2})
    engine = LocalEngine(model.config, EngineConfig(), max_length=32)
    publisher = DirectPublisher([engine])
    request = Request(id=0, prompt_ids=np.arange(5, 12), sampling=SamplingParams(max_new_tokens=8))

    def tokens() -> list[int]:
        engine.submit([request])
        return engine.poll(10.0)[0].span.token_ids.tolist()

    publisher.publish(checkpoint_views(model).items(), 0)
    before = tokens()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    assert tokens() == before
    publisher.publish(checkpoint_views(model).items(), 1)
    assert engine.version == 1
    assert tokens() != before


def test_weights_of_another_shape_are_refused_by_name() -> None:
    model, _ = build_preset("tiny-qwen3")
    wide, _ = build_preset("tiny-qwen3", 0, {"hidden_size": 96})
    engine = LocalEngine(model.config, EngineConfig(), max_length=32)
    with pytest.raises(EngineFailure, match=r"has shape .* the engine expects"):
        DirectPublisher([engine]).publish(checkpoint_views(wide).items(), 0)
    assert engine.version < 0
