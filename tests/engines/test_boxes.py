"""Publications into the memory of a server's process: nothing passes a folder, and whatever goes wrong costs a new server, never a token
under other weights than its stamp says.

Matters because this is the way of every publication to a server on the same host. `fake_server.py` in a real process, with the worker's own
code over HTTP and shared memory. Not covered: where vLLM has its weights (test_vllm_memory.py), vLLM (test_vllm_boxes.py), several
processes of one server over HTTP.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import drain
from fake_backend import FakeBackend, assert_true, ends_well, fake_engine, requests, weights

from rollkeel.engines.shared_memory import AVAILABLE
from rollkeel.protocols import BoxedEngine
from rollkeel.sync.publish import DirectPublisher
from rollkeel.sync.sending import WholeFeed

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="Linux only")
BY_BOXES = ["begin", "take", "finish"]
BEGUN = ["rollkeel_stay_plain", "load", "rollkeel_rooms", "open"]


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[Any]:
    opened: list[Any] = []

    def make(**config: Any) -> tuple[Any, FakeBackend]:
        engine, backend = fake_engine(tmp_path, publish=False, **config)
        opened.append(engine)
        assert isinstance(engine, BoxedEngine)
        engine.boxes.feed = WholeFeed(1.0)
        return engine, backend

    yield make
    for engine in opened:
        engine.close()


def all_true(engine: Any, policies: dict[int, float], first: int) -> None:
    asked = requests(4, first)
    engine.submit(asked)
    got = drain(engine)
    for r in asked:
        assert ends_well(r, got[r.id])
        assert_true(r, got[r.id].span, policies)


def folders(engine: Any) -> list[str]:
    return sorted(path.name for path in engine._scratch.glob("weights-*"))


def test_only_the_first_publication_of_a_server_is_a_folder(open_engine: Any) -> None:
    engine, backend = open_engine()
    for version in range(1, 5):
        update = weights(float(version), version)
        assert engine.update_weights(update).checksum == update.checksum
        assert engine.boxes.objection == ""
        assert folders(engine) == (["weights-1"] if version == 1 else [])
        assert backend.state()["label"] == version
        all_true(engine, {version: float(version)}, version * 10)
    assert backend.state()["calls"] == BEGUN + BY_BOXES * 3
    assert backend.starts() == 1


@pytest.mark.slow
def test_a_publisher_feeds_it(open_engine: Any) -> None:
    engine, backend = open_engine()
    engine.boxes.feed = None
    DirectPublisher([engine])
    assert engine.boxes.feed is None
    told = DirectPublisher([engine], buffer_mb=0.5)
    for version in (1, 2):
        told.publish([("policy", torch.tensor([1.0])), ("rest", torch.zeros(3, 4))], version)
    assert backend.state()["calls"][-3:] == BY_BOXES
    feed: Any = engine.boxes.feed
    assert feed.bucket_bytes == int(0.5 * 2**20 / 3.5)


@pytest.mark.slow
def test_weights_come_under_running_requests(open_engine: Any) -> None:
    engine, backend = open_engine()
    engine.update_weights(weights(1.0, 1))
    asked = requests(4, length=150)
    engine.submit(asked)
    backend.until_sent(20)
    engine.update_weights(weights(2.0, 2))
    got = drain(engine)
    for r in asked:
        assert_true(r, got[r.id].span, {1: 1.0, 2: 2.0})
    assert {int(v) for s in got.values() for v in s.span.versions} == {1, 2}
    assert backend.state()["calls"] == BEGUN + BY_BOXES


@pytest.mark.slow
def test_a_server_killed_while_it_takes_ends_with_the_new_weights(open_engine: Any) -> None:
    engine, backend = open_engine()
    engine.update_weights(weights(1.0, 1))
    backend.set("crash_in_take")
    update = weights(2.0, 2)
    assert engine.update_weights(update).checksum == update.checksum
    assert backend.starts() == 2
    all_true(engine, {2: 2.0}, 10)
    engine.update_weights(weights(3.0, 3))
    all_true(engine, {3: 3.0}, 20)
    assert backend.state()["calls"] == BEGUN + BY_BOXES


def test_what_did_not_arrive_is_not_served_and_folders_follow(open_engine: Any) -> None:
    engine, backend = open_engine()
    engine.update_weights(weights(1.0, 1))
    backend.set("lose_take")
    engine.update_weights(weights(2.0, 2))
    assert backend.starts() == 2
    assert "2 weights did not arrive" in engine.boxes.objection
    all_true(engine, {2: 2.0}, 10)
    engine.update_weights(weights(3.0, 3))
    all_true(engine, {3: 3.0}, 20)
    assert backend.state()["calls"] == ["load", "load"]


@pytest.mark.slow
def test_a_server_whose_memory_is_not_what_it_loaded_takes_folders(open_engine: Any) -> None:
    engine, backend = open_engine()
    backend.set("other_memory")
    for version in (1, 2):
        engine.update_weights(weights(float(version), version))
        all_true(engine, {version: float(version)}, version * 10)
    assert engine.boxes.objection == "process 0 has other weights in memory than it loaded"
    assert backend.state()["calls"] == ["rollkeel_stay_plain", "load", "rollkeel_rooms", "load"]
    assert backend.starts() == 1


@pytest.mark.slow
def test_a_server_lost_between_publications_comes_back_with_its_weights(open_engine: Any) -> None:
    engine, backend = open_engine()
    for version in (1, 2):
        engine.update_weights(weights(float(version), version))
    asked = requests(6, length=100)
    engine.submit(asked)
    backend.until_sent(30)
    os.kill(backend.state()["pid"], signal.SIGKILL)
    got = drain(engine)
    for r in asked:
        assert ends_well(r, got[r.id])
        assert_true(r, got[r.id].span, {2: 2.0})
    assert folders(engine) == ["weights-2"]
    assert backend.starts() == 2


def test_a_server_lost_while_its_weights_are_trained_waits_for_the_next_ones(open_engine: Any) -> None:
    engine, backend = open_engine()
    engine.update_weights(weights(1.0, 1))
    update = weights(2.0, 2)
    engine.update_weights(update)
    asked = requests(6, length=100)
    engine.submit(asked)
    backend.until_sent(30)
    update.slices[1].tensor.add_(1.0)  # an optimizer's step
    os.kill(backend.state()["pid"], signal.SIGKILL)
    early, until = [], time.monotonic() + 30
    while not engine._keeper.awaits:
        early += engine.poll(0.1)
        assert time.monotonic() < until
    assert engine.version == -1
    assert engine.poll(0.05) == []
    assert len(early) < 6
    engine.update_weights(weights(3.0, 3))
    got = {s.request_id: s for s in early} | drain(engine)
    for r in asked:
        assert ends_well(r, got[r.id])
        assert_true(r, got[r.id].span, {2: 2.0, 3: 3.0})
    assert 3 in {int(v) for s in got.values() for v in s.span.versions}
    assert backend.starts() == 2
