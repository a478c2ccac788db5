"""Weights on their way to engine actors are all there and right, or not served; they never need the model's size of memory
between trainer and engines; and whoever dies on the way is named.

Real actors and a local Ray. Not covered: several hosts, devices other than a CPU, slices in every mode (test_stream.py).
"""

from __future__ import annotations

import os
import re
import signal
import sys
import weakref
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

import whole_weights
from engine_kit import drain, facts_of, model_of, prompts_of, requests_of, run, same
from whole_weights import OwnWeights, slices_of, stream

from rollkeel.cluster.engines import ActorEngine
from rollkeel.cluster.publish import StreamPublisher
from rollkeel.cluster.stream import Sink, send
from rollkeel.config import EngineConfig, LoraConfig, ModelConfig
from rollkeel.engines.workers import WorkerEngine
from rollkeel.errors import EngineFailure
from rollkeel.models.adapters import named_adapters, parameters
from rollkeel.models.loading import Policy, load_policy
from rollkeel.models.names import checkpoint_views
from rollkeel.sync.publish import DirectPublisher
from rollkeel.types import Status, WeightUpdate

pytestmark = pytest.mark.usefixtures("ray_cluster")
CONFIG = EngineConfig(slots=3, deadline_s=60)
BUCKET = 20_000


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    return model_of("tiny-qwen3", 0), model_of("tiny-qwen3", 1)


@pytest.fixture(scope="module")
def policy() -> Policy:
    policy = load_policy(ModelConfig(path="preset:tiny-qwen3"), lora=LoraConfig(rank=4))
    draw = torch.Generator().manual_seed(1)
    for p in parameters(policy.model).values():
        p.data += 0.05 * torch.randn(p.shape, generator=draw)
    return policy


@pytest.fixture(scope="module")
def actors(policy: Policy, ray_cluster: None) -> Iterator[ActorEngine]:
    engine = ActorEngine(policy.model.config, CONFIG, [{}], device="cpu", max_length=4000, lora=policy.lora)
    yield engine
    engine.close()


def publish(engine: ActorEngine, model: Any, version: int) -> None:
    own = OwnWeights(lambda: checkpoint_views(model).items(), bucket_bytes=BUCKET, deadline_s=60)
    assert StreamPublisher(engine, own).publish(None, version)["time/sync_s"] > 0
    assert engine.version == version


class Wrong(OwnWeights):
    """A source that makes one mistake."""

    def __init__(self, model: Any, fault: str) -> None:
        super().__init__(lambda: checkpoint_views(model).items())
        self.fault = fault

    def stream(self, head: WeightUpdate, sinks: Sequence[Sink]) -> list[int]:
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
        return [sent if self.fault == "dropped slice" else total + (self.fault == "wrong sum")]


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
    actors.submit(requests_of(prompts_of(6), max_new_tokens=3900))
    actors.poll(0.0)
    for version, (fault, message) in enumerate(FAULTS.items(), 51):
        refused(actors, Wrong(models[1], fault), version, message)
    publish(actors, models[1], 59)
    refused(
        actors,
        OwnWeights(lambda: checkpoint_views(models[0]).items()),
        58,
        "expected version 59, which this engine had, or a later one",
    )
    publish(actors, models[1], 60)
    actors.advance(1)
    actors.interrupt()
    done = drain(actors)
    assert len(done) == 6
    assert {v for s in done.values() for v in s.span.versions.tolist()} <= {50, 59, 60}
    assert {s.span.versions[-1] for s in done.values() if len(s.span)} == {60}


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

        ray.cloudpickle.register_pickle_by_value(whole_weights)  # which no worker finds
        kind: Any = ray.remote(num_cpus=0)(Rank)
        self.rank, self.pairs = kind.remote(), [(n, t.clone()) for n, t in checkpoint_views(model).items()]

    def prepare(self, head: WeightUpdate) -> None:
        pass

    def stream(self, head: WeightUpdate, sinks: Sequence[Sink]) -> list[int]:
        return [ray.get(self.rank.stream.remote(self.pairs, head, list(sinks)), timeout=60)]


@pytest.mark.slow
def test_a_source_in_another_actor_sends_past_this_process_and_may_die(
    actors: ActorEngine, models: tuple[Any, Any]
) -> None:
    publish(actors, models[0], 70)
    expected = run(actors, requests_of(prompts_of(6), max_new_tokens=9))
    actors.submit(requests_of(prompts_of(6), max_new_tokens=9))
    refused(actors, Ranks(models[1], after=20), 71, r"what sends the weights failed before .* ActorDied")
    StreamPublisher(actors, Ranks(models[0], after=10_000)).publish(None, 72)
    done = drain(actors)
    assert all(same(done[i].span, expected[i].span) for i in expected)
    assert {v for s in done.values() for v in s.span.versions.tolist()} == {72}


def test_adapters_go_the_same_way(actors: ActorEngine, policy: Policy) -> None:
    adapters = named_adapters(policy.model)
    own = OwnWeights(lambda: checkpoint_views(policy.model).items(), adapters.items)
    StreamPublisher(actors, own).publish(None, 83, adapters)
    here = WorkerEngine(
        policy.model.config, CONFIG.model_copy(update={"processes": 1}), max_length=4000, lora=policy.lora
    )
    try:
        DirectPublisher([here]).publish(checkpoint_views(policy.model).items(), 83, adapters)
        requests = requests_of(prompts_of(4), max_new_tokens=12)
        ours, theirs = run(actors, requests), run(here, requests)
    finally:
        here.close()
    assert [facts_of(ours[i]) for i in range(4)] == [facts_of(theirs[i]) for i in range(4)]


def resident(pid: int, kind: str) -> int:
    """Bytes of memory, `RssAnon` of its own or `RssShmem` shared."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))


@pytest.mark.slow
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

    living, draw = [0], np.random.default_rng(0)

    def gone(size: int) -> None:
        living[0] -= size

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in shapes.items():
            seen.append((resident(actor, "RssAnon"), resident(os.getpid(), "RssShmem"), living[0]))
            array = draw.random(shape, np.float32)
            living[0] += array.nbytes
            weakref.finalize(array, gone, array.nbytes)  # when no tensor needs it any more
            yield name, torch.from_numpy(array)
            del array

    publisher = StreamPublisher(engine, OwnWeights(weights, bucket_bytes=bucket))
    publisher.publish(None, 0)  # the engine's own memory is touched for the first time
    second = len(seen)
    publisher.publish(None, 1)
    engine.close()
    assert np.max(seen[second:], axis=0)[0] - seen[second][0] < 2 * bucket
    assert seen[-1][1] - seen[0][1] < 4 * bucket  # all that was ever in the object store at one time
    assert bucket / 2 < np.max(seen, axis=0)[2] < 2 * bucket  # of tensors that the sender holds: the bucket that fills


def test_an_engine_that_dies_while_it_takes_weights_is_named(actors: ActorEngine, policy: Policy) -> None:
    """It uses the engine up."""
    publish(actors, policy.model, 94)
    name, pid = actors.parts[0].name, actors.parts[0].place[1]
    actors.submit(requests_of(prompts_of(2), max_new_tokens=9))

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for i, pair in enumerate(checkpoint_views(policy.model).items()):
            if i == 10:
                os.kill(pid, signal.SIGKILL)
            yield pair

    with pytest.raises(EngineFailure, match=re.escape(f"engine {name} died while it took weights (ActorDiedError)")):
        StreamPublisher(actors, OwnWeights(weights, bucket_bytes=BUCKET)).publish(None, 95)
    assert actors.version < 0
    with pytest.raises(EngineFailure, match=r"died|no engine actor is left"):
        publish(actors, policy.model, 96)
    failed = actors.poll(0.0)
    assert [(s.request_id, s.status) for s in failed] == [(i, Status.ENGINE_FAILURE) for i in range(2)]
