"""The real vLLM on this machine's CPU takes weights by the plan, into the tensors that it computes with, and proves them there.

Matters because stand-ins of vLLM's layers (test_vllm_memory.py) are what we believe of them. Run by `make test-vllm`. Not covered: CUDA,
where this has not run; experts dealt over ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from engine_kit import drain, model_of, prompts_of, requests_of
from test_vllm import AGREES, NEAR_TIES, PRESETS, change, gaps, publisher, start, wait_for_tokens

from rollkeel.engines import boxes
from rollkeel.engines.boxes import Calls
from rollkeel.errors import EngineFailure
from rollkeel.models.names import checkpoint_views
from rollkeel.sync.publish import full_update
from rollkeel.sync.sending import WholeFeed
from rollkeel.types import WeightSlice

pytestmark = pytest.mark.vllm


def fed(model: Any, **config: Any) -> Any:
    engine = start(model, **config)
    engine.boxes.feed = WholeFeed(0.1)  # several buckets even of a tiny model
    return engine


@pytest.fixture(scope="module", params=PRESETS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    model = model_of(request.param)
    engine = fed(model)
    yield model, engine
    engine.close()


def asked(engine: Any, step: str) -> list[dict[str, str]]:
    """What the workers answer, past the keeper."""
    return engine._behind.wait(engine._keeper._ask("rollkeel_boxes", json.dumps([step, None])), 60.0, step)


def label(engine: Any) -> str:
    async def get() -> str:
        return (await engine._keeper.http.get("/weight_info")).json()["weight_version"]

    return engine._behind.wait(get(), 60.0, "label")


def fifty(engine: Any, model: Any, count: int = 50) -> None:
    told = publisher(engine, model)
    for number in range(count):
        change(model, number, 0.02)
        version = max(engine.version, 0) + 1
        proof = told.publish(checkpoint_views(model).items(), version)
        assert engine.boxes.objection == ""
        assert proof["sync/probe_retries"] == 0
        assert proof["sync/probe_gap_median"] < AGREES / 10
        update = full_update(checkpoint_views(model).items(), version)
        sums = [int(answer["checksum"]) for answer in asked(engine, "checksum")]
        by_name = {piece.name: piece for piece in update.slices}
        assert sums == [engine.boxes._expected(by_name, rooms) for rooms in engine.boxes._rooms]
        if len(sums) == 1:
            assert sums == [update.checksum]
    assert not list(engine._scratch.glob("weights-*"))
    requests = requests_of(prompts_of(16), max_new_tokens=32)
    engine.submit(requests)
    assert (gaps(model, requests, drain(engine)) > AGREES).mean() <= NEAR_TIES


def test_fifty_publications_are_in_its_own_memory(served: tuple[Any, Any]) -> None:
    model, engine = served
    pid = engine.server_pid
    fifty(engine, model)
    assert engine.server_pid is not None
    assert pid in (None, engine.server_pid)


class Faulty(Calls):
    """Does something wrong with the third bucket."""

    fault, count = "", 0

    def put(self, bucket: Sequence[WeightSlice], to: Sequence[int]) -> None:
        type(self).count += 1
        if self.count == 3 and self.fault == "dropped":
            return
        tell = self._tell

        def told(message: str) -> Future[Any]:
            if self.count != 3:
                return tell(message)
            step, about = json.loads(message)
            if self.fault == "flipped":
                self._ring._bytes[about["start"] + 5] ^= 16
            if self.fault == "older":
                about["attempt"] -= 1
            if self.fault == "doubled":
                tell(message).result(60.0)
            return tell(json.dumps([step, about]))

        self._tell = told
        super().put(bucket, to)
        self._tell = tell


@pytest.mark.parametrize("fault", ["flipped", "dropped", "doubled", "older"])
def test_a_fault_is_refused_before_a_token_is_stamped(
    served: tuple[Any, Any], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine = served
    told = publisher(engine, model)
    first = max(engine.version, 0) + 1
    for version in (first, first + 1):  # the first of a server is a folder
        told.publish(checkpoint_views(model).items(), version)
    update = full_update(checkpoint_views(model).items(), first + 2)
    monkeypatch.setattr(boxes, "Calls", type("Struck", (Faulty,), {"fault": fault}))
    keeper = engine._keeper
    filling: Callable[[], Any] = lambda: keeper.boxes.fill(keeper._ask, update)  # noqa: E731
    with pytest.raises(EngineFailure, match="weight"):
        engine._behind.wait(keeper._backend.fill(keeper.http, update.version, filling), 120.0, "to fill")
    assert label(engine) == "-1"
    monkeypatch.undo()
    engine.boxes._refused = ""
    told.publish(checkpoint_views(model).items(), first + 3)
    assert label(engine) == str(first + 3)
    assert engine.boxes.objection == ""


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_new_weights_under_running_requests(kv: str) -> None:
    model, later = model_of("tiny-qwen3-moe"), model_of("tiny-qwen3-moe", seed=1)
    engine = fed(model, kv=kv)
    try:
        for version in (1, 2):
            publisher(engine, model).publish(checkpoint_views(model).items(), version)
        requests = requests_of(prompts_of(8), max_new_tokens=2400)
        engine.submit(requests)
        wait_for_tokens(engine, 200)
        publisher(engine, later).publish(checkpoint_views(later).items(), 3)
        got = drain(engine)
        assert engine.boxes.objection == ""
        for r in requests:
            span = got[r.id].span
            assert set(span.versions.tolist()) == {2, 3}
    finally:
        engine.close()


@pytest.mark.parametrize("preset", PRESETS)
def test_two_tensor_ranks_each_get_their_slices(preset: str) -> None:
    model = model_of(preset)
    engine = fed(model, server={"options": {"tensor_parallel_size": 2}})
    try:
        fifty(engine, model)
        halves = [rooms["model.layers.0.self_attn.o_proj.weight"] for rooms in engine.boxes._rooms]
        assert [(r.starts, r.stops) for r in halves] == [((0, 0), (64, 64)), ((0, 64), (64, 128))]
    finally:
        engine.close()


def test_bfloat16_goes_by_boxes() -> None:
    model = model_of("tiny-qwen3-moe")
    engine = fed(model, dtype="bf16")
    try:
        for version in range(1, 5):
            change(model, version)
            told = publisher(engine, model, "bf16").publish(checkpoint_views(model).items(), version)
            assert told["sync/probe_retries"] == 0
            assert engine.boxes.objection == ""
    finally:
        engine.close()
