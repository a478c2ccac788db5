"""Engines in Ray actors must be invisible except in where they run: the bits of worker processes, and deaths that are reported
and not waited for.

Real actors and a local Ray. Not covered: several hosts, devices other than a CPU, weights (test_publications.py, test_stream.py).
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
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))

from engine_kit import drain, engine_of, facts_of, model_of, prompts_of, requests_of, run, same
from whole_weights import OwnWeights

from rollkeel.cluster.engines import ActorEngine, _Actor
from rollkeel.cluster.publish import StreamPublisher
from rollkeel.config import EngineConfig
from rollkeel.engines import parts
from rollkeel.engines.parts import PartedEngine
from rollkeel.engines.workers import WorkerEngine
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.models.names import checkpoint_views
from rollkeel.protocols import CountedEngine, RestingEngine, SteppedEngine
from rollkeel.sync.publish import DirectPublisher, full_update
from rollkeel.types import Request, Segment, Status

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


def script(engine: Any, models: tuple[Any, Any]) -> Iterator[Any]:
    """Everything that a schedule may do, with what it saw."""
    publish(engine, models[0], 10)
    first = run(engine, requests_of(prompts_of(31), max_new_tokens=24))  # they decode on their own
    yield [facts_of(first[i]) for i in sorted(first)], engine.shares, engine.steps
    queue, flying = forced(LENGTHS), 0
    while queue or flying:
        new = [queue.pop(0) for _ in range(min(7 - flying, len(queue)))]
        engine.submit(new)
        ended = engine.advance(1)
        flying += len(new) - len(ended)
        yield [facts_of(s) for s in ended], engine.shares, engine.steps, engine.progress()
    engine.submit(forced([40] * 7), shares=[4, 1, 2])
    yield [facts_of(s) for s in engine.advance_each([5, 0, 9])], engine.steps, engine.progress()
    publish(engine, models[1], 11)  # in flight: tokens of both versions in one sequence
    yield [facts_of(s) for s in engine.advance_each([2, 3, 4])], engine.steps
    engine.interrupt([1, 4])
    yield [facts_of(s) for s in engine.advance(3)], engine.steps
    engine.interrupt()
    yield [facts_of(s) for s in engine.advance(0)], engine.steps, engine.progress()


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


def test_weights_of_some_do_not_say_what_the_others_serve(actors: ActorEngine, models: tuple[Any, Any]) -> None:
    """One that takes the place of another first gets the weights that adapters stand beside, of another version."""
    publish(actors, models[0], 50)
    before = actors.version, actors.checksum
    stream = StreamPublisher(actors, source(models[1]))
    for outer in (50, -1):  # between two publications, and within one
        actors._version = outer
        stream._bring("full", None, 51, actors.parts[:1])
        assert (actors.version, actors.checksum) == (outer, before[1])
    publish(actors, models[0], 52)


def test_what_cannot_be_placed_is_said_in_one_line(models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert f"{names[1]} said nothing for 3 s and was killed" == done[2].detail.partition(";")[0]
    assert done[2].detail.endswith(f"process {pids[1]} was stopped by a signal")
    assert [steps is None for steps in actors.steps] == [True, True, False]

    actors.submit(forced([20, 20]))
    assert actors.advance(1) == []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for i, pair in enumerate(checkpoint_views(models[1]).items()):
            if i == 10:
                os.kill(pids[2], signal.SIGSTOP)
            yield pair

    own = OwnWeights(weights, bucket_bytes=BUCKET, deadline_s=2)
    with pytest.raises(EngineFailure, match=r"waited 2 s for engine actor 2 .* to take weights"):
        StreamPublisher(actors, own).publish(None, 81)
    with pytest.raises(
        EngineFailure, match=r"no engine actor is left .*actor 2 .* said nothing for .* was stopped by a signal"
    ):
        publish(actors, models[1], 82)  # it did not answer either, when the sender despaired of it
    assert [s.status for s in actors.poll(0.0)] == [Status.ENGINE_FAILURE] * 2
    actors.close()
    actors.close()
    end = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
