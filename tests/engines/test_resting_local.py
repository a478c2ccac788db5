"""An engine that gave its memory away must sample as if it had kept it: KV that reads as rubbish, or a recorded step that reads freed
memory, would be served without any error.

On a CPU, on the pretend device with recorded steps, and with a stand-in for torch_memory_saver. Not covered: the real one; CUDA's graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engine_kit import drain, model_of, prompts_of, requests_of
from pretend import DEVICE, JOURNAL
from recorded_graph import RecordedGraphs

from rollkeel.config import EngineConfig, ModelConfig
from rollkeel.engines import resting
from rollkeel.engines.resting import KV, WEIGHTS, RestingLocal
from rollkeel.errors import EngineFailure
from rollkeel.models.loading import load_policy
from rollkeel.models.names import checkpoint_views
from rollkeel.sync.publish import full_update


def twice(engine: RestingLocal, model: Any, rested: Any = lambda: None) -> None:
    """Samples, rests, and samples the same again."""
    requests, said = requests_of(prompts_of(6), max_new_tokens=8, seed=1), []
    for _ in range(2):
        engine.update_weights(full_update(checkpoint_views(model).items(), 0, engine.capabilities.dtype))
        engine.submit(requests)
        with pytest.raises(EngineFailure, match="requests are in flight, it cannot rest"):
            engine.rest()
        said.append({i: (s.span.token_ids.tolist(), s.span.logprobs.tolist()) for i, s in drain(engine).items()})
        engine.rest()
        assert engine.version == -1
        rested()
    assert said[0] == said[1]
    engine.submit(requests)
    with pytest.raises(EngineFailure, match="publish weights"):
        drain(engine)


@pytest.mark.parametrize("config", [{}, {"forward": "fast"}, {"dtype": "int8"}], ids=str)
def test_on_a_cpu_pages_are_gone_and_addresses_are_not(config: dict[str, Any]) -> None:
    model = model_of()
    engine = RestingLocal(model.config, EngineConfig(**config), max_length=96, weights=True)
    largest = max(engine.weights.values(), key=lambda t: t.numel()).flatten()
    address = largest.data_ptr()

    def rested() -> None:
        assert largest.numel() > 4096
        assert not largest[1024:-1024].any()
        assert largest.data_ptr() == address
        assert not any(t.flatten()[1024:-1024].any() for t in engine._cache.tensors())

    twice(engine, model, rested)


def test_weights_that_others_hold_too_stay() -> None:
    model = model_of()
    engine = RestingLocal(model.config, EngineConfig(), max_length=96, weights=False)
    engine.update_weights(full_update(checkpoint_views(model).items(), 4, "fp32"))
    before = {name: tensor.clone() for name, tensor in engine.weights.items()}
    engine.rest()
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.weights.items())
    assert engine.retire() == 4  # adapters may still come beside them


class Saver:
    """torch_memory_saver's surface. What is paused reads as rubbish, and weights come back, as those with a copy do."""

    def __init__(self) -> None:
        self.log, self.engine = list[str](), None

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        assert enable_cpu_backup == (tag == WEIGHTS)
        self.log.append(f"in {tag}")
        yield

    def pause(self, tag: str) -> None:
        self.log.append(f"pause {tag}")
        engine: Any = self.engine
        for tensor in engine._cache.tensors() if tag == KV else ():
            tensor.fill_(float("nan"))

    def resume(self, tag: str) -> None:
        self.log.append(f"resume {tag}")


@pytest.mark.parametrize("saves", [False, True], ids=["storages", "torch_memory_saver"])
def test_recorded_steps_read_no_memory_that_was_given_away(saves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, graphs = Saver(), RecordedGraphs()
    monkeypatch.setattr(resting, "saver", lambda: saver if saves else None)
    overrides = {"hidden_size": 32, "initializer_range": 0.3, "num_hidden_layers": 2}
    model = load_policy(ModelConfig(path="preset:tiny-qwen3", overrides=overrides), DEVICE).model
    config = EngineConfig(forward="fast", slots=6)
    engine = RestingLocal(model.config, config, device=DEVICE, max_length=96, graphs=graphs, weights=True)
    saver.engine, records = engine, list[int]()  # type: ignore[assignment]
    JOURNAL.clear()
    twice(engine, model, lambda: records.append(len(graphs.records)))
    assert JOURNAL.mixed == {}
    assert records[0] > 0
    assert records[1] == records[0] * (1 if saves else 2)
    if saves:
        rests = [f"{what} {tag}" for what in ("pause", "resume") for tag in (KV, WEIGHTS)]
        assert [line for line in saver.log if not line.startswith("in")] == [*rests, *rests[:2]]
        assert saver.log[0] == f"in {WEIGHTS}"
        assert saver.log.count(f"in {KV}") == 4  # keys and values of two layers
