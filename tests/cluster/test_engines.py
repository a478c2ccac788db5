"""Engines in Ray actors must be invisible except in where they run: the bits of worker processes, deaths that are reported and
not waited for, and weights that are all there or not served.

Real actors and a local Ray. Not covered: several hosts, devices other than a CPU, slices in every mode (test_stream.py).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))

from engine_kit import drain, engine_of, model_of, prompts_of, requests_of, run, same

from rollkeel.cluster.engines import ActorEngine, _Actor
from rollkeel.cluster.publish import OwnWeights, StreamPublisher
from rollkeel.cluster.stream import Sink, send, slices_of, stream
from rollkeel.config import EngineConfig, LoraConfig, ModelConfig
from rollkeel.engines import parts
from rollkeel.engines.parts import PartedEngine
from rollkeel.engines.workers import WorkerEngine
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.models.adapters import named_adapters, parameters
from rollkeel.models.loading import load_policy
from rollkeel.models.names import checkpoint_views
from rollkeel.protocols import CountedEngine, RestingEngine, SteppedEngine
from rollkeel.sync.publish import DirectPublisher, full_update
from rollkeel.types import Request, Segment, Status, WeightUpdate

pytestmark = pytest.mark.usefixtures("ray_cluster")
CONFIG = EngineConfig(slots=3, deadline_s=60)
BUCKET = 20_000
LENGTHS = [3, 9, 5, 1, 12, 4, 7, 2, 8, 6, 10, 11]


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    return model_of(seed=0), model_of(seed=1)


@pytest.fixture(scope="module")
def actors(models: tuple[Any, Any], ray_cluster: None) -> Iterator[ActorEngine]:
    engine = ActorEngine(models[0].config, CONFIG, [{}] * 3, device="cpu", max_length=4000)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def workers(models: tuple[Any, Any], actors: ActorEngine) -> Iterator[WorkerEngine]:
    engine = WorkerEngine(models[0].config, CONFIG.model_copy(update={"processes": 3}), max_length=4000)
    yield engine
    engine.close()


def source(model: Any) -> OwnWeights:
    return OwnWeights(lambda: checkpoint_views(model).items(), bucket_bytes=BUCKET, deadline_s=60)


def publish(engine: PartedEngine[Any], model: Any, version: int) -> None:
    if isinstance(engine, ActorEngine):
        assert StreamPublisher(engine, source(model)).publish(None, version)["time/sync_s"] > 0
    else:
        DirectPublisher([engine]).publish(checkpoint_views(model).items(), version)
    assert engine.version == version


def forced(lengths: Sequence[int], first: int = 0) -> list[Request]:
    """Requests that end after exactly so many tokens."""
    return [
        requests_of([prompt], first + i, max_new_tokens=length)[0]
        for i, (prompt, length) in enumerate(zip(prompts_of(len(lengths)), lengths, strict=True))
    ]


def facts(segment: Segment) -> tuple[Any, ...]:
    """All of a segment, its arrays as bytes."""
    span = vars(segment.span)
    return (
        segment.request_id,
        segment.status,
        *((k, v.tobytes() if isinstance(v, np.ndarray) else v) for k, v in span.items()),
    )


def script(engine: Any, models: tuple[Any, Any]) -> Iterator[Any]:
    """Everything that a schedule may do, with what it saw."""
    publish(engine, models[0], 10)
    first = run(engine, requests_of(prompts_of(31), max_new_tokens=24))  # they decode on their own
    yield [facts(first[i]) for i in sorted(first)], engine.shares, engine.steps
    queue, flying = forced(LENGTHS), 0
    while queue or flying:
        new = [queue.pop(0) for _ in range(min(7 - flying, len(queue)))]
        engine.submit(new)
        ended = engine.advance(1)
        flying += len(new) - len(ended)
        yield [facts(s) for s in ended], engine.shares, engine.steps, engine.progress()
    engine.submit(forced([40] * 7), shares=[4, 1, 2])
    yield [facts(s) for s in engine.advance_each([5, 0, 9])], engine.steps, engine.progress()
    publish(engine, models[1], 11)  # in flight: tokens of both versions in one sequence
    yield [facts(s) for s in engine.advance_each([2, 3, 4])], engine.steps
    engine.interrupt([1, 4])
    yield [facts(s) for s in engine.advance(3)], engine.steps
    engine.interrupt()
    yield [facts(s) for s in engine.advance(0)], engine.steps, engine.progress()


def test_the_same_bits_as_worker_processes(actors: ActorEngine, workers: WorkerEngine, models: tuple[Any, Any]) -> None:
    for kind in (SteppedEngine, CountedEngine, RestingEngine):
        assert isinstance(actors, kind)
    assert actors.capabilities == workers.capabilities
    count = 0
    for ours, theirs in zip(script(actors, models), script(workers, models), strict=True):
        assert ours == theirs
        count += 1
    assert count > 10
    publish(actors, models[0], 12)
    requests = requests_of(prompts_of(9), max_new_tokens=24)
    done, here = run(actors, requests), run(engine_of(models[0]), requests)
    assert all(same(done[i].span, here[i].span) for i in here)


def test_they_wait_between_steps_and_stop_when_steps_are_told(actors: ActorEngine, models: tuple[Any, Any]) -> None:
    publish(actors, models[0], 20)
    actors.submit(forced([3900] * 4))  # longer than an actor can decode before it hears of the steps
    assert actors.poll(0.0) == []
    assert actors.advance(1) == []
    before = actors.progress()
    time.sleep(0.1)
    assert actors.progress() == before
    actors.advance(2)
    assert actors.progress() == {i: n + 2 for i, n in before.items()}
    actors.rest()  # the embedded engine has nothing to give away
    actors.interrupt()
    assert {s.status for s in actors.advance(0)} == {Status.INTERRUPTED}


def test_weights_and_interrupts_reach_actors_that_decode_on_their_own(
    actors: ActorEngine, models: tuple[Any, Any]
) -> None:
    publish(actors, models[0], 30)
    actors.submit(forced([3900] * 4))
    with pytest.raises(BadInput, match="in flight"):
        actors.submit(requests_of(prompts_of(1)))
    assert actors.poll(0.05) == []
    publish(actors, models[1], 31)
    actors.interrupt([0])
    assert [s.request_id for s in actors.poll(30)] == [0]
    actors.interrupt()
    done = drain(actors)
    assert sorted(done) == [1, 2, 3]
    for segment in done.values():
        versions = segment.span.versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) <= {30, 31}
    assert actors.poll(0.0) == []


def test_bad_requests_and_a_whole_update_whose_bytes_changed(actors: ActorEngine, models: tuple[Any, Any]) -> None:
    publish(actors, models[0], 40)
    good = requests_of(prompts_of(6), max_new_tokens=5)
    expected = run(actors, good)
    with pytest.raises(BadInput, match="outside the vocabulary"):
        actors.submit([*good, replace(good[0], id=9, prompt_ids=np.array([999]))])
    update = full_update(checkpoint_views(models[0]).items(), 41)
    broken = replace(update, slices=[replace(update.slices[0], checksum=1), *update.slices[1:]])
    with pytest.raises(EngineFailure, match=r"wrong checksum \(engine actor 0 \(node 127\.0\.0\.1, process \d+\)\)"):
        actors.update_weights(broken)
    assert actors.version < 0
    proof = actors.update_weights(update)
    assert (proof.version, proof.checksum) == (41, update.checksum)
    done = run(actors, good)
    assert all(same(done[i].span, expected[i].span) for i in expected)


class Wrong(OwnWeights):
    """A source that makes one mistake."""

    def __init__(self, model: Any, fault: str) -> None:
        super().__init__(lambda: checkpoint_views(model).items())
        self.fault = fault

    def stream(self, head: WeightUpdate, sinks: Sequence[Sink]) -> int:
        slices, place = list(slices_of(self._weights(), head.mode, 4_000)), 40
        total = sum(s.checksum for s in slices) % 2**64
        if self.fault == "dropped slice":
            del slices[place]
        elif self.fault == "doubled slice":
            slices.insert(place, slices[place])
        elif self.fault == "wrong bytes":
            slices[place] = replace(slices[place], tensor=slices[place].tensor + 1)
        elif self.fault == "of an earlier publication":
            sinks = [replace(s, attempt=s.attempt - 1) for s in sinks]
        sent = send(slices, head, sinks, BUCKET, 60)
        return sent if self.fault == "dropped slice" else total + (self.fault == "wrong sum")


FAULTS = {
    "dropped slice": "1 weights did not arrive",
    "doubled slice": "arrived twice",
    "wrong bytes": "arrived with a wrong checksum",
    "of an earlier publication": "a bucket of publication",
    "wrong sum": "its slices have checksum",
}


def refused(engine: ActorEngine, of: Any, version: int, message: str) -> None:
    """Publishing fails in one line, and nothing is served afterwards."""
    with pytest.raises(EngineFailure, match=message) as error:
        StreamPublisher(engine, of).publish(None, version)
    assert "\n" not in str(error.value)
    assert engine.version < 0
    with pytest.raises(EngineFailure, match="no proven weights"):
        engine.poll(1.0)
    with pytest.raises(EngineFailure, match="no proven weights"):
        engine.advance(1)


def test_no_token_is_stamped_with_a_version_whose_stream_went_wrong(
    actors: ActorEngine, models: tuple[Any, Any]
) -> None:
    publish(actors, models[0], 50)
    actors.submit(forced([3900] * 6))
    actors.poll(0.0)
    for version, (fault, message) in enumerate(FAULTS.items(), 51):
        refused(actors, Wrong(models[1], fault), version, message)
    publish(actors, models[1], 59)
    refused(actors, source(models[0]), 58, "expected version 59, which this engine had, or a later one")
    publish(actors, models[1], 60)
    actors.advance(1)
    actors.interrupt()
    done = drain(actors)
    assert len(done) == 6
    assert {v for s in done.values() for v in s.span.versions.tolist()} <= {50, 59, 60}
    assert {s.span.versions[-1] for s in done.values()} == {60}


class Ranks:
    """A source whose weights are in another actor, as those of a trainer's ranks; after some of them it may die."""

    def __init__(self, model: Any, after: int) -> None:
        class Rank:
            def stream(self, pairs: list[Any], head: WeightUpdate, sinks: list[Sink]) -> int:
                def some() -> Iterator[Any]:
                    for i, pair in enumerate(pairs):
                        if i == after:
                            os._exit(1)
                        yield pair

                return stream(some(), head, sinks, bucket_bytes=BUCKET, deadline_s=60)

        kind: Any = ray.remote(num_cpus=0)(Rank)
        self.rank, self.pairs = kind.remote(), [(n, t.clone()) for n, t in checkpoint_views(model).items()]

    def stream(self, head: WeightUpdate, sinks: Sequence[Sink]) -> int:
        return ray.get(self.rank.stream.remote(self.pairs, head, list(sinks)), timeout=60)


def test_a_source_in_another_actor_sends_past_this_process_and_may_die(
    actors: ActorEngine, models: tuple[Any, Any]
) -> None:
    publish(actors, models[0], 70)
    expected = run(actors, forced([9] * 6))
    actors.submit(forced([9] * 6))
    refused(actors, Ranks(models[1], after=20), 71, r"what sends the weights failed before .* ActorDied")
    StreamPublisher(actors, Ranks(models[0], after=10_000)).publish(None, 72)
    done = drain(actors)
    assert all(same(done[i].span, expected[i].span) for i in expected)
    assert {v for s in done.values() for v in s.span.versions.tolist()} == {72}


def test_adapters_go_the_same_way(ray_cluster: None) -> None:
    policy = load_policy(ModelConfig(path="preset:tiny-qwen3"), lora=LoraConfig(rank=4))
    draw = torch.Generator().manual_seed(1)
    for p in parameters(policy.model).values():
        p.data += 0.05 * torch.randn(p.shape, generator=draw)
    options = {"max_length": 96, "lora": policy.lora}
    engine = ActorEngine(policy.model.config, CONFIG, [{}], device="cpu", **options)
    adapters = named_adapters(policy.model)
    own = OwnWeights(lambda: checkpoint_views(policy.model).items(), adapters.items)
    StreamPublisher(engine, own).publish(None, 3, adapters)
    here = WorkerEngine(policy.model.config, CONFIG.model_copy(update={"processes": 1}), **options)
    try:
        DirectPublisher([here]).publish(checkpoint_views(policy.model).items(), 3, adapters)
        requests = requests_of(prompts_of(4), max_new_tokens=12)
        ours, theirs = run(engine, requests), run(here, requests)
    finally:
        engine.close()
        here.close()
    assert [facts(ours[i]) for i in range(4)] == [facts(theirs[i]) for i in range(4)]


def resident(pid: int | str, kind: str) -> int:
    """Bytes of memory, `RssAnon` of its own or `RssShmem` shared."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))


def test_a_publication_needs_some_buckets_and_never_the_model(ray_cluster: None) -> None:
    """200 MB of weights, which no process but the engine's ever holds, in buckets of 8 MB."""
    config, bucket, seen = model_of("tiny-qwen3").config, 8 << 20, list[tuple[int, ...]]()
    config.vocab_size, config.num_hidden_layers = 288, 40
    config.intermediate_size, config.hidden_size = 2048, 192
    config.layer_types = ["full_attention"] * 40
    with torch.device("meta"):
        shapes = {n: t.shape for n, t in checkpoint_views(AutoModelForCausalLM.from_config(config)).items()}
    assert 4 * sum(shape.numel() for shape in shapes.values()) > 190 << 20
    engine = ActorEngine(config, CONFIG, [{}], device="cpu", max_length=32)
    assert engine.capabilities
    actor = engine.parts[0].place[1]

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in shapes.items():
            seen.append((resident(actor, "RssAnon"), resident("self", "RssAnon"), resident("self", "RssShmem")))
            yield name, torch.rand(shape)

    publisher = StreamPublisher(engine, OwnWeights(weights, bucket_bytes=bucket))
    publisher.publish(None, 0)  # the engine's own memory is touched for the first time, and kernels are compiled
    second = len(seen)
    publisher.publish(None, 1)
    engine.close()
    of_actor, own, store = np.max(seen[second:], axis=0) - np.array(seen[second])
    assert of_actor < 2 * bucket
    assert own < 8 * bucket  # of 24: one that fills, and what the allocator keeps
    assert store < 4 * bucket
    assert seen[-1][2] - seen[0][2] < 4 * bucket  # all that was ever in the store at one time


def test_what_cannot_be_hosted_or_placed_is_said_in_one_line(
    models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match=r"engine\.kind=vllm: actors host the embedded engine alone"):
        ActorEngine(models[0].config, EngineConfig(kind="vllm"), [{}])
    monkeypatch.setattr(parts, "START_S", 0.5)
    engine = ActorEngine(models[0].config, CONFIG, [{"resources": {"nowhere": 1}}], device="cpu")
    with pytest.raises(EngineFailure, match=r"engine actor 0 \(not placed yet\): waited 0\.5 s for it to start"):
        _ = engine.capabilities
    engine.close()


def test_an_actor_is_late_only_while_somebody_listens() -> None:
    """A trainer may compute for hours between two polls."""

    class Handle:
        class take:
            remote = staticmethod(object)

    part = _Actor(0, "actor 0", handle=Handle, free=True, flying={1: forced([1])[0]}, heard=-1e9)
    assert part.hung(60)
    part.listen()
    assert not part.hung(60)
    part.heard -= 61
    part.listen()  # nothing came since
    assert part.hung(60)
    part.flying.clear()
    assert not part.hung(60)


def test_deaths_are_reported_by_name_and_close_leaves_nothing(actors: ActorEngine, models: tuple[Any, Any]) -> None:
    """Last on purpose: it uses the shared engine up."""
    publish(actors, models[0], 80)
    pids = [p.place[1] for p in actors.parts]
    names = [p.name for p in actors.parts]
    actors.submit(forced([3900] * 6))
    assert actors.poll(0.0) == []
    os.kill(pids[0], signal.SIGKILL)
    os.kill(pids[1], signal.SIGSTOP)
    actors._deadline_s, start, done = 3.0, time.monotonic(), dict[int, Segment]()
    while len(done) < 6 and time.monotonic() - start < 30:
        done |= {s.request_id: s for s in actors.poll(0.5)}
    assert 2.0 < time.monotonic() - start < 15
    assert [done[i].status for i in range(6)] == [Status.ENGINE_FAILURE] * 4 + [Status.LENGTH] * 2
    assert done[0].detail.startswith(f"{names[0]} died")
    assert f"{names[1]} said nothing for 3 s and was killed" == done[2].detail
    assert [steps is None for steps in actors.steps] == [True, True, False]

    actors.submit(forced([20, 20]))
    assert actors.advance(1) == []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for i, pair in enumerate(checkpoint_views(models[1]).items()):
            if i == 10:
                os.kill(pids[2], signal.SIGSTOP)
            yield pair
        left.append("nothing")

    left = list[str]()
    own = OwnWeights(weights, bucket_bytes=BUCKET, deadline_s=2)
    with pytest.raises(EngineFailure, match=r"waited 2 s for engine actor 2 .* to take weights"):
        StreamPublisher(actors, own).publish(None, 81)
    assert left == ["nothing"]  # other ranks are not left waiting in a collective
    with pytest.raises(EngineFailure, match=r"actor 2 .*: waited 3 s for it to await weights"):
        publish(actors, models[1], 82)
    with pytest.raises(EngineFailure, match="no engine actor is left"):
        publish(actors, models[1], 83)
    assert [s.status for s in actors.poll(0.0)] == [Status.ENGINE_FAILURE] * 2
    actors.close()
    actors.close()
    end = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
