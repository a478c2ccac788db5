"""Boxes of a mesh reach engine actors through shared memory and through Ray's object store alike, and what goes wrong on the way, or
whoever dies on it, leaves no engine that serves a mixture.

Real actors on a local Ray; the ranks are this process, one after the other. Not covered: trainers on ranks (test_cluster_runs.py), every
mesh, mode and fault (tests/sync/test_boxes_of_plans.py), several hosts.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))

from engine_kit import drain, engine_of, prompts_of, requests_of, run, same

from rollkeel.cluster.engines import ActorEngine
from rollkeel.cluster.line import Line
from rollkeel.cluster.publish import StreamPublisher
from rollkeel.cluster.sender import Sender
from rollkeel.cluster.stream import Calls, Sink
from rollkeel.config import EngineConfig, SyncConfig
from rollkeel.engines.shared_memory import ALIGN, Ring
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.models.names import checkpoint_views
from rollkeel.sync import sending
from rollkeel.sync.layouts import Held
from rollkeel.sync.plan import Plan
from rollkeel.sync.publish import full_update
from rollkeel.sync.sending import MADE, WINDOW, Outgoing, send_part
from rollkeel.train.mesh import Mesh as OwnPlace
from rollkeel.train.sharded import Layout, pieces_of
from rollkeel.types import WeightSlice, WeightUpdate
from tests.sync.box_kit import Fault, Ranks, doubled, dropped, flipped, model_of, permuted

pytestmark = pytest.mark.usefixtures("ray_cluster")
CONFIG, BUCKET = EngineConfig(slots=3, deadline_s=60, dtype="int8"), 40_000
MESH = {"shard": 2, "tensor": 2, "replicate": 2}


@pytest.fixture(scope="module")
def actors(ray_cluster: None) -> Iterator[ActorEngine]:
    engine = ActorEngine(model_of("tiny-qwen3-moe").config, CONFIG, [{}] * 2, device="cpu", max_length=96)
    yield engine
    engine.close()


@dataclass(frozen=True)
class Mesh(Ranks):
    """A source of all ranks, of which one makes a mistake in its first bucket."""

    transport: str = "shm"
    fault: Fault | None = None
    before: Callable[[int], None] = lambda rank: None
    """Called with a rank before it sends."""

    def stream(self, head: WeightUpdate, sinks: Sequence[Sink]) -> list[int]:
        assert head.mode is not None
        made, sums = self.plan([sink.rooms for sink in sinks], head.mode), [0] * len(sinks)
        about = Outgoing(sinks[0].rooms, head.mode, BUCKET)
        for rank in range(len(made.hosts[0])):
            self.before(rank)
            rings, lines = near(sinks) if self.transport == "shm" else (None, None)
            carrier: Any = Calls(head, sinks, 60, rings, lines=lines)
            if self.fault is not None and rank == 3:
                carrier = Faulty(carrier, self.fault)
            sums = [
                a + b for a, b in zip(sums, send_part(made, rank, self.weights(rank).held, about, carrier), strict=True)
            ]
        return [total % 2**64 for total in sums]


class Faulty:
    """Carries buckets, the first of them that it can with a fault."""

    def __init__(self, carrier: Calls, fault: Fault) -> None:
        self.carrier, self.fault, self.done = carrier, fault, False

    def put(self, bucket: Sequence[WeightSlice], to: Sequence[int]) -> None:
        changed = list(bucket) if self.done else self.fault(list(bucket), np.random.default_rng(0))
        self.done = self.done or [s.name for s in changed] != [s.name for s in bucket] or self.fault is flipped
        if changed:
            self.carrier.put(changed, to)

    def flush(self) -> None:
        self.carrier.flush()


_RINGS: dict[str, tuple[Ring, str]] = {}


def near(sinks: Sequence[Sink]) -> tuple[dict[int, Ring], dict[int, Line]]:
    """Rings of sinks, and new lines to them."""
    for sink in sinks:
        if sink.name not in _RINGS:
            ring = Ring(2 * BUCKET, WINDOW)
            refused, address = ray.get(sink.actor.attach.remote(ring.path))
            assert refused == ""
            _RINGS[sink.name] = ring, address
    found, lines = [_RINGS[sink.name] for sink in sinks], dict[int, Line]()
    for i, (_, address) in enumerate(found):
        with suppress(OSError):  # it is stopped
            lines[i] = Line(address)
    return {i: ring for i, (ring, _) in enumerate(found)}, lines


def test_both_ways_lead_to_the_engine_of_one_process(actors: ActorEngine) -> None:
    requests = requests_of(prompts_of(6), max_new_tokens=12)
    for version, (transport, seed) in enumerate([("shm", 1), ("ray", 2), ("shm", 3)], 10):
        model = model_of("tiny-qwen3-moe", seed)
        StreamPublisher(actors, Mesh(model, MESH, transport)).publish(None, version)
        assert actors.version == version
        alone = engine_of(model, dtype="int8")
        alone.update_weights(full_update(checkpoint_views(model).items(), version, "int8"))
        ours, theirs = run(actors, requests), run(alone, requests)
        assert all(same(ours[i].span, theirs[i].span) for i in theirs)


FAULTS: dict[Fault, str] = {
    flipped: "arrived with a wrong checksum",
    dropped: "weights did not arrive",
    doubled: "arrived twice",
    permuted: "arrived with a wrong checksum|arrived twice",
}


@pytest.mark.parametrize("transport", ["shm", "ray"])
def test_an_engine_that_was_sent_something_wrong_serves_nothing(transport: str, actors: ActorEngine) -> None:
    first = 20 if transport == "shm" else 40
    StreamPublisher(actors, Mesh(model_of("tiny-qwen3-moe"), MESH)).publish(None, first - 1)
    actors.submit(requests_of(prompts_of(2), max_new_tokens=9))
    for version, (fault, message) in enumerate(FAULTS.items(), first):
        source = Mesh(model_of("tiny-qwen3-moe", 2), MESH, transport, fault)
        with pytest.raises(EngineFailure, match=message) as refused:
            StreamPublisher(actors, source).publish(None, version)
        assert "\n" not in str(refused.value)
        assert actors.version == -1
        with pytest.raises(EngineFailure, match="no proven weights"):
            actors.advance(1)
    StreamPublisher(actors, Mesh(model_of("tiny-qwen3-moe"), MESH, transport)).publish(None, first + 9)
    assert {v for s in drain(actors).values() for v in s.span.versions.tolist()} == {first + 9}


def test_boxes_of_an_interrupted_publication_are_refused_by_the_next_one(actors: ActorEngine) -> None:
    class Old(Mesh):
        def stream(self, head: WeightUpdate, sinks: Sequence[Sink]) -> list[int]:
            return super().stream(head, [replace(sink, attempt=sink.attempt - 1) for sink in sinks])

    with pytest.raises(EngineFailure, match=r"a bucket of publication \d+ arrived in publication"):
        StreamPublisher(actors, Old(model_of("tiny-qwen3-moe"), MESH)).publish(None, 60)
    assert actors.version == -1


def test_a_rank_that_is_killed_in_the_middle_ends_the_publication_in_one_line(actors: ActorEngine) -> None:
    """Rank 5 is an actor that dies after its first bucket; what it has sent, others have not."""

    class Rank:
        def send(
            self, made: Plan, rank: int, held: Held, about: Outgoing, head: WeightUpdate, sinks: list[Sink]
        ) -> None:
            class Dying(Calls):
                def put(self, bucket: Sequence[WeightSlice], to: Sequence[int]) -> None:
                    super().put(bucket, to)
                    self.flush()
                    os._exit(1)

            send_part(made, rank, held, about, Dying(head, sinks, 60))

    class Killed(Mesh):
        def stream(self, head: WeightUpdate, sinks: Sequence[Sink]) -> list[int]:
            made = self.plan([sink.rooms for sink in sinks], "int8")
            about = Outgoing(sinks[0].rooms, "int8", BUCKET)
            kind: Any = ray.remote(num_cpus=0)(Rank)
            rank = kind.remote()
            ray.get(rank.send.remote(made, 5, self.weights(5).held, about, head, list(sinks)), timeout=60)
            raise AssertionError("it lives")

    model = model_of("tiny-qwen3-moe", 2)
    with pytest.raises(EngineFailure, match=r"what sends the weights failed before .* ActorDied") as died:
        StreamPublisher(actors, Killed(model, MESH)).publish(None, 61)
    assert "\n" not in str(died.value)
    assert actors.version == -1
    with pytest.raises(EngineFailure, match="weights did not arrive"):  # as if it had been told to go on
        StreamPublisher(actors, Partial(model, MESH)).publish(None, 62)
    StreamPublisher(actors, Mesh(model, MESH)).publish(None, 63)
    assert actors.version == 63


class Partial(Mesh):
    """All ranks but one."""

    def stream(self, head: WeightUpdate, sinks: Sequence[Sink]) -> list[int]:
        made = self.plan([sink.rooms for sink in sinks], "int8")
        about, sums = Outgoing(sinks[0].rooms, "int8", BUCKET), [0] * len(sinks)
        for rank in range(len(made.hosts[0])):
            if rank != 5:
                told = send_part(made, rank, self.weights(rank).held, about, Calls(head, sinks, 60))
                sums = [(a + b) % 2**64 for a, b in zip(sums, told, strict=True)]
        return sums


class OneRank:
    """A source that is a trainer's only rank, in this process."""

    def __init__(self, model: Any, **config: Any) -> None:
        self.trainer: Any = SimpleNamespace(model=model, parts=(Layout(model, OwnPlace()), pieces_of(model)), version=0)
        self.sender = Sender(self.trainer, OwnPlace(), SyncConfig(**config), 60)

    def prepare(self, head: WeightUpdate) -> None:
        self.sender.prepare(head)

    def stream(self, head: WeightUpdate, sinks: Sequence[Sink]) -> list[int]:
        return self.sender.send(head, sinks)[0]

    @property
    def rings(self) -> list[Ring | None]:
        return [ring for _, ring in self.sender._rings.values()]


def test_a_rank_shares_memory_with_engines_of_its_host_if_it_may_and_can(
    actors: ActorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("tiny-qwen3-moe", 3)
    auto, stored = OneRank(model, buffer_mb=0.5), OneRank(model, transport="ray")
    for version, source in enumerate([auto, stored, auto], 80):
        StreamPublisher(actors, source).publish(None, version)
        assert actors.version == version
    assert [ring is not None for ring in auto.rings] == [True, True]
    assert stored.rings == [None, None]
    under_way = sum(len(ring._bytes) for ring in auto.rings if ring is not None)
    assert under_way + MADE * auto.sender._bucket_bytes <= 0.5 * 2**20 + 4 * ALIGN

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rollkeel.cluster.sender.Ring", full)
    StreamPublisher(actors, OneRank(model)).publish(None, 83)
    assert actors.version == 83
    with pytest.raises(
        BadInput, match=r"sync\.transport=shm: engine actor 0 .* shares no memory with this rank; set auto"
    ):
        StreamPublisher(actors, OneRank(model, transport="shm")).publish(None, 84)
    assert actors.version == -1


def test_sums_are_made_before_engines_are_told(monkeypatch: pytest.MonkeyPatch, ray_cluster: None) -> None:
    """From the second publication on, of what travels as it is."""
    model = model_of("tiny-qwen3-moe", 3)
    engine = ActorEngine(model.config, CONFIG.model_copy(update={"dtype": "fp32"}), [{}], device="cpu", max_length=96)
    source, made = OneRank(model, buffer_mb=0.1), list[str]()
    original, asked = sending.held_checksum, ActorEngine.publish

    def summed(name: str, *about: Any) -> int:
        made.append(name)
        return original(name, *about)

    def told(self: ActorEngine, *about: Any) -> Any:
        made.append("told")
        return asked(self, *about)

    monkeypatch.setattr(sending, "held_checksum", summed)
    monkeypatch.setattr(ActorEngine, "publish", told)
    publisher, every = StreamPublisher(engine, source), 0
    try:
        for version in (1, 2, 3):
            made.clear()
            source.trainer.version = version
            publisher.publish(None, version)
            assert engine.version == version
            assert made.index("told") == every
            every = len(made) - 1
        assert every > len(checkpoint_views(model))  # some in several pieces
        source.prepare = lambda head: (source.sender.prepare(head), setattr(source.trainer, "version", 5))  # type: ignore[method-assign]
        made.clear()
        publisher.publish(None, 5)
        assert (made.index("told"), len(made), engine.version) == (every, 2 * every + 1, 5)

        def changed(head: WeightUpdate) -> None:
            source.sender.prepare(head)
            with torch.no_grad():
                next(model.parameters()).mul_(2)

        source.prepare = changed  # type: ignore[method-assign]
        with pytest.raises(EngineFailure, match="arrived with a wrong checksum"):
            publisher.publish(None, 6)
        assert engine.version == -1
    finally:
        engine.close()


def mapped(part: Any) -> int:
    """Bytes of senders' rings that an engine has mapped."""
    lines = Path(f"/proc/{part.place[1]}/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if "rollkeel-weights" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


def test_the_buffer_holds_when_engines_join_and_nobody_keeps_memory_of_before(actors: ActorEngine) -> None:
    model = model_of("tiny-qwen3-moe", 3)
    StreamPublisher(actors, OneRank(model, transport="ray")).publish(None, 84)
    first, second = actors.parts
    before = mapped(first), mapped(second)
    source = OneRank(model, buffer_mb=0.5)
    publisher = StreamPublisher(actors, source)
    bounds = 0.5 * 2**20 + 4 * ALIGN
    for to in ([first], [second], None, [first]):  # one engine, and then more than the buckets were cut for
        publisher._bring("full", None, 84, to)
        rings = [len(ring._bytes) for ring in source.rings if ring is not None]
        assert sum(rings) + MADE * source.sender._bucket_bytes <= bounds
    pages = -(-rings[0] // mmap.PAGESIZE) * mmap.PAGESIZE
    assert (mapped(first), mapped(second)) == tuple(there + pages for there in before)


def test_memory_of_a_process_that_is_gone_cannot_be_mapped(actors: ActorEngine) -> None:
    said = ray.get(actors.parts[0].handle.attach.remote("/proc/1/fd/999"))
    assert said[0].startswith("cannot open the memory of another process: ")


def test_an_engine_that_is_stopped_in_the_middle_is_named_and_killed(
    actors: ActorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray says nothing of it: a rank that waits for it to take weights asks whether it lives."""
    monkeypatch.setattr("rollkeel.cluster.pulse.SILENT_S", 2.0)
    name, pid = actors.parts[0].name, actors.parts[0].place[1]
    stop = lambda rank: os.kill(pid, signal.SIGSTOP) if rank == 2 else None  # noqa: E731
    began = time.monotonic()
    with pytest.raises(EngineFailure, match=r"has said nothing for 2 s while it was to take weights") as stopped:
        StreamPublisher(actors, Mesh(model_of("tiny-qwen3-moe"), MESH, "shm", None, stop)).publish(None, 87)
    assert name in str(stopped.value)
    assert time.monotonic() - began < 20
    assert actors.version == -1
    assert "was stopped by a signal" in actors.parts[0].dead
    StreamPublisher(actors, Mesh(model_of("tiny-qwen3-moe"), MESH)).publish(None, 88)
    assert actors.version == 88


def test_an_engine_that_is_killed_in_the_middle_is_named(actors: ActorEngine) -> None:
    """It uses the engines up."""
    pid, name = actors.parts[1].place[1], actors.parts[1].name
    kill = lambda rank: os.kill(pid, signal.SIGKILL) if rank == 2 else None  # noqa: E731
    source = Mesh(model_of("tiny-qwen3-moe"), MESH, "shm", None, kill)
    with pytest.raises(EngineFailure, match="died while it took weights") as died:
        StreamPublisher(actors, source).publish(None, 90)
    assert name in str(died.value)
    assert "\n" not in str(died.value)
    assert actors.version == -1


@pytest.mark.slow
def test_an_engine_that_is_killed_in_the_middle_is_replaced_and_all_of_it_is_sent_again(ray_cluster: None) -> None:
    model = model_of("tiny-qwen3-moe", 2)
    engine = ActorEngine(model.config, CONFIG, [{}] * 2, device="cpu", max_length=96, renewals=1)
    try:
        StreamPublisher(engine, Mesh(model_of("tiny-qwen3-moe"), MESH)).publish(None, 1)
        pids = [part.place[1] for part in engine.parts]

        def once(rank: int) -> None:
            if rank == 2 and pids[0]:
                os.kill(pids[0], signal.SIGKILL)
                pids[0] = 0

        StreamPublisher(engine, Mesh(model, MESH, "shm", None, once)).publish(None, 2)
        assert engine.version == 2
        assert [part.place[1] == pid for part, pid in zip(engine.parts, pids, strict=True)] == [False, True]
        alone, requests = engine_of(model, dtype="int8"), requests_of(prompts_of(6), max_new_tokens=12)
        alone.update_weights(full_update(checkpoint_views(model).items(), 2, "int8"))
        ours, theirs = run(engine, requests), run(alone, requests)
        assert all(same(ours[i].span, theirs[i].span) for i in theirs)
    finally:
        engine.close()
