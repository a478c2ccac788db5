"""Engines that come and go must change how fast a run samples, and nothing that it samples.

Real actors on a local Ray, which join, leave and die while requests are in flight. Runs of several minutes are slow. Not covered: places that
come with another machine (tests/cluster/test_node_faults.py), devices other than a CPU.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster_kit import TINY, assert_audited, run_of, tokens
from tiny_run import cli, events, rows

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))

from engine_kit import drain, engine_of, model_of, prompts_of, requests_of, run, same
from whole_weights import OwnWeights

from rollkeel.cluster.elastic import ElasticEngine, Seats
from rollkeel.cluster.patience import Patience
from rollkeel.cluster.publish import StreamPublisher
from rollkeel.cluster.wanted import ask, asked
from rollkeel.config import EngineConfig, LoraConfig, ModelConfig
from rollkeel.errors import BadInput, EngineFailure, RankLost
from rollkeel.models.adapters import named_adapters, parameters
from rollkeel.models.loading import Policy, load_policy
from rollkeel.models.names import checkpoint_views
from rollkeel.recipe import load
from rollkeel.types import Request

CONFIG = EngineConfig(slots=3, deadline_s=60)
MODEL = model_of(seed=0)


class Elastic:
    """An engine whose number of actors is set by hand, with what was told of them."""

    def __init__(self, count: int, renewals: int = 0, least: int = 1, policy: Policy | None = None) -> None:
        self.wanted, self.left, self.told = count, list[int](), list[tuple[str, int]]()
        self.places = 99
        seats = Seats(lambda index: {}, lambda index: index < self.places, self.left.append)
        about: dict[str, Any] = {"device": "cpu", "max_length": 4000, "renewals": renewals, "least": least}
        model = MODEL if policy is None else policy.model
        about |= {"lora": None if policy is None else policy.lora}
        self.engine = ElasticEngine(model.config, CONFIG, seats, count, wanted=lambda: self.wanted, **about)
        self.engine.tell = lambda what, part: self.told.append((what, part.index))
        self.adapters = {} if policy is None else named_adapters(policy.model)
        own = lambda: checkpoint_views(model).items()  # noqa: E731
        weights = OwnWeights(own, self.adapters.items, bucket_bytes=20_000, deadline_s=60)
        self.publisher, self.version = StreamPublisher(self.engine, weights), 0

    @property
    def here(self) -> list[int]:
        return [p.index for p in self.engine.parts if not p.dead]

    def publish(self) -> None:
        self.version += 1
        self.publisher.publish(None, self.version, self.adapters)

    def until(self, here: Sequence[int]) -> None:
        """Publish until these actors serve: those that are to join need seconds to start."""
        end = time.monotonic() + 60
        while self.here != list(here) and time.monotonic() < end:
            self.publish()
            time.sleep(0.05)
        assert self.here == list(here), [p.dead for p in self.engine.parts]

    def kill(self, index: int) -> None:
        os.kill(self.engine.parts[index].place[1], signal.SIGKILL)


@pytest.fixture
def elastic(ray_cluster: None) -> Iterator[list[Elastic]]:
    made = list[Elastic]()
    yield made
    for each in made:
        each.engine.end()


def forced(count: int, length: int, first: int = 0) -> list[Request]:
    return requests_of(prompts_of(count), first, max_new_tokens=length)


@pytest.mark.slow
def test_four_engines_then_one_then_three_while_requests_are_in_flight(elastic: list[Elastic]) -> None:
    elastic.append(made := Elastic(2))
    engine, requests = made.engine, forced(9, 60)
    made.publish()
    engine.submit(requests)
    done = {s.request_id: s for s in engine.advance(5)}
    made.wanted = 4
    made.publish()
    assert made.here == [0, 1]  # nobody waits for those that start
    made.until([0, 1, 2, 3])
    engine.submit(more := forced(4, 30, first=100))
    assert engine.shares == [0, 0, 2, 2]
    done |= {s.request_id: s for s in engine.advance(3)}
    made.wanted = 1
    made.publish()
    assert made.here == [0]
    assert made.left == [1, 2, 3]
    tokens = engine.progress()
    assert sorted([*tokens, *done]) == [*range(9), *range(100, 104)]
    assert all(tokens[r.id] == 3 for r in more if r.id in tokens), tokens  # what the others sampled was not lost
    done |= {s.request_id: s for s in engine.advance(4)}
    assert engine.poll(0.0) == []  # now it decodes on its own
    made.wanted = 3
    made.until([0, 1, 2])
    done |= drain(engine)
    alone = run(engine_of(MODEL, max_length=4000), [*requests, *more])
    assert done.keys() == alone.keys()
    for i, segment in done.items():
        assert segment.status is alone[i].status
        assert same(segment.span, alone[i].span, tolerance=1e-5)
        assert segment.span.versions.tolist() == sorted(segment.span.versions)
    assert sum(len(np.unique(s.span.versions)) > 1 for s in done.values()) > 5
    assert [told for told in made.told if told[0] == "left"] == [("left", 1), ("left", 2), ("left", 3)]


@pytest.mark.slow
def test_a_lost_engine_that_cannot_be_replaced_leaves_its_work_to_the_others(elastic: list[Elastic]) -> None:
    elastic.append(made := Elastic(2, renewals=1, least=1))
    engine, requests = made.engine, forced(6, 400)
    made.publish()
    engine.again = made.publisher.again
    made.places = 0  # its node is lost, too
    engine.submit(requests)
    assert engine.poll(0.0) == []
    made.kill(1)
    done = drain(engine)
    alone = run(engine_of(MODEL, max_length=4000), requests)
    assert done.keys() == alone.keys()
    assert all(same(done[i].span, alone[i].span) for i in alone)
    assert made.here == [0]
    made.publish()  # it is not waited for: nobody knows when there is a place
    made.places = 99
    made.until([0, 1])
    made.kill(1)
    made.publish()
    assert made.here == [0]  # this one was replaced as often as it may be
    made.publish()
    assert made.here == [0]
    made.kill(0)
    with pytest.raises(EngineFailure, match="engine"):
        made.publish()
    assert made.told == [("lost", 1), ("joined", 1), ("lost", 1), ("lost", 0)]


@pytest.mark.slow
def test_an_engine_that_stops_while_weights_are_on_their_way_to_it_is_replaced(elastic: list[Elastic]) -> None:
    """The sender names it, and it is no part of this process that waits for it: a run once ended there."""
    elastic.append(made := Elastic(2, renewals=1))
    made.publish()
    stopped = made.engine.parts[1]
    stopped.pulse.patience = Patience(2.0)
    inner, sent = made.publisher.source.stream, list[int]()

    def stream(head: Any, sinks: Sequence[Any]) -> Sequence[int]:
        sent.append(len(sinks))
        if len(sent) == 1:
            os.kill(stopped.place[1], signal.SIGSTOP)
            raise EngineFailure("engine actor 1 took no weights")
        return inner(head, sinks)

    made.publisher.source.stream = stream  # type: ignore[method-assign]
    made.publish()
    assert sent == [2, 1]
    assert made.engine.version == made.version
    made.until([0, 1])
    assert made.told == [("lost", 1), ("joined", 1)]
    requests = forced(4, 20)
    alone = run(engine_of(MODEL, max_length=4000), requests)
    done = run(made.engine, requests)
    assert all(same(done[i].span, alone[i].span) for i in alone)


@pytest.mark.slow
def test_the_last_engine_is_lost_where_no_other_one_can_get_what_it_served(elastic: list[Elastic]) -> None:
    """As in `async`: the loop goes back to a checkpoint, with engines that forgot everything."""
    elastic.append(made := Elastic(1, renewals=1))
    made.publish()
    made.engine.submit(forced(6, 400))
    assert made.engine.poll(0.0) == []
    made.kill(0)
    with pytest.raises(RankLost, match="no engine actor is left: actor 0 "):
        drain(made.engine)
    made.engine.empty()
    made.publish()
    requests = forced(4, 20)
    done, alone = run(made.engine, requests), run(engine_of(MODEL, max_length=4000), requests)
    assert all(same(done[i].span, alone[i].span) for i in alone)


@pytest.mark.slow
def test_who_stands_still_while_it_starts_is_no_engine_and_another_one_joins(elastic: list[Elastic]) -> None:
    elastic.append(made := Elastic(1, renewals=1))
    made.publish()
    made.wanted = 2
    made.publish()
    late, end = made.engine.parts[1], time.monotonic() + 60
    while not late.place[1] and time.monotonic() < end:
        assert not late.ready(0.05) or late.receive() is None
    os.kill(first := late.place[1], signal.SIGSTOP)
    late.pulse.patience = Patience(1.0)
    made.until([0, 1])
    assert late.place[1] != first
    joined, lost = ("joined", 1), ("lost", 1)
    assert made.told in ([joined], [joined, lost, joined])  # one that started quickly had joined before it was stopped


@pytest.mark.slow
def test_who_joins_gets_the_weights_that_adapters_stand_beside(elastic: list[Elastic]) -> None:
    policy = load_policy(ModelConfig(path="preset:tiny-qwen3"), lora=LoraConfig(rank=4))
    for p in parameters(policy.model).values():
        p.data += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    elastic.append(made := Elastic(1, policy=policy))
    made.publish()
    made.wanted = 2
    made.until([0, 1])
    requests = forced(6, 12)
    done = run(made.engine, requests)
    made.wanted = 1
    made.publish()
    alone = run(made.engine, requests)
    assert all(same(done[i].span, alone[i].span) for i in alone)


@pytest.mark.slow
def test_fewer_engines_than_the_least_are_refused(elastic: list[Elastic]) -> None:
    elastic.append(made := Elastic(2, least=2))
    made.publish()
    made.wanted = 1  # nobody may ask for fewer
    made.publish()
    assert made.here == [0, 1]
    made.kill(0)
    with pytest.raises(EngineFailure, match="1 engine actors are left, at least 2 are needed"):
        made.publish()
    assert made.engine.version < 0


# -- what a person asks for --------------------------------------------------------------------------------------------


def test_a_number_is_asked_for_in_the_folder_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(None, ["cluster.engines=3", "cluster.engines_min=2"])
    assert asked(tmp_path, config) == 3
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    code, out, _ = cli(capsys, "scale", tmp_path, "5")
    assert (code, out.count("\n")) == (0, 1)
    assert asked(tmp_path, config) == 5
    (tmp_path / "engines").write_text("many")  # by hand
    assert asked(tmp_path, config) == 3
    code, _, err = cli(capsys, "scale", tmp_path, "1")
    assert (code, err.count("\n")) == (2, 1)
    assert "at least 2 engines (cluster.engines_min), got 1" in err
    for words in (["run.steps=1"], ["cluster.engines=1", "cluster.placement=colocated"]):
        with pytest.raises(BadInput, match=r"scale: expected a run with cluster\.engines"):
            ask(tmp_path, load(None, words), 2)
    code, _, err = cli(capsys, "scale", tmp_path / "nothing", "1")
    assert (code, err.count("\n")) == (2, 1)


def scaled(folder: Path, numbers: Sequence[int], *words: str) -> Path:
    """A run that is asked for each of these numbers in turn, once it has the one before."""
    config, over = load(None, [*TINY, *words, f"run.dir={folder}"]), threading.Event()

    def person() -> None:
        while not over.wait(0.05) and not any(e["event"] == "stage" and e["step"] > 0 for e in events(folder)):
            pass
        for number in numbers:
            ask(folder, config, number)
            while not over.wait(0.05):
                here = set[str]()
                for event in events(folder):
                    name = str(event.get("name"))
                    if name.startswith("engine-"):
                        (here.discard if event["event"] in ("engine_left", "engine_lost") else here.add)(name)
                if len(here) == number:
                    break

    thread = threading.Thread(target=person, daemon=True)
    thread.start()
    try:
        return run_of(folder, *words)
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["sync", "async"])
def test_two_engines_then_four_then_one_then_three_during_a_run(ray_cluster: None, tmp_path: Path, loop: str) -> None:
    words = [f"run.loop={loop}", "cluster.trainers=1", "cluster.engines=2", "run.steps=120"]
    # Log-probs differ in their last bits with what is beside them in a batch: without a learning rate that does not grow into other weights.
    words += ["train.lr=1e-7"] if loop == "sync" else []
    run = scaled(tmp_path / "run", [4, 1, 3], *words)
    seen = [(e["event"], e["name"]) for e in events(run) if e["event"] in ("engine_joined", "engine_left")]
    names = [f"engine-{i}" for i in (2, 3, 1, 2, 3, 1, 2)]
    assert sorted(seen) == sorted(
        zip(["engine_joined"] * 2 + ["engine_left"] * 3 + ["engine_joined"] * 2, names, strict=True)
    )
    assert [row["step"] for row in rows(run)] == list(range(121))
    assert_audited(run)
    syncs = [row["time/sync_s"] for row in rows(run, volatile=True) if "time/sync_s" in row]
    print(f"{loop}: publications of {np.median(syncs):.2f} s in the middle, {max(syncs):.2f} s at most")
    if loop == "sync":
        assert tokens(run) == tokens(run_of(tmp_path / "one", *words, "cluster.engines=1"))
    else:
        limit = load(None, words).rollout.overlap.max_staleness
        assert 0 < max(row.get("staleness/max", 0) for row in rows(run)) <= limit
        assert json.loads((run / "events.jsonl").read_text().splitlines()[-1])["status"] == "done"
        assert not any(row.get("failures/engine", 0) for row in rows(run))
