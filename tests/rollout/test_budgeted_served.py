"""C3PO++ on a server that is slow, is killed and forgets: a token counted twice, lost or stamped with the wrong weights would be
trained on, and a pool that counts what never came would end its iterations early.

A real server process with known behaviour (tests/engines/fake_server.py): every token says what came before it and which weights
sampled it. Not covered: a real model on a real server (tests/engines/test_vllm.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))

from fake_backend import FakeBackend, assert_true, fake_engine, request, weights
from fake_server import STOP, next_token
from pool_ledger import Logged
from test_episodes import TOKENIZER, Shell, episodes, prompts
from test_episodes import FakeTools as Tools

from rollkeel.cli.talk import stream
from rollkeel.errors import Interrupted
from rollkeel.rollout.budgeted import BudgetedRollouts, Partition
from rollkeel.rollout.pool import PoolRules
from rollkeel.types import GraderSpec, Prompt, Request, Rollout, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=90, stop_token_ids=(STOP,))
BUDGET = 300
VERSIONS = (1, 2, 3, 4, 5)
POLICIES = {version: float(version) for version in VERSIONS}


@pytest.fixture
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Any, FakeBackend]]:
    engine, backend = fake_engine(tmp_path, slots=6, **getattr(request, "param", {}))
    yield engine, backend
    engine.close()


def prompt(index: int) -> Prompt:
    spec = GraderSpec(name="exact")
    ids = np.array([index % 40, 3])
    return Prompt(id=f"p{index}", index=index, text="", token_ids=ids, answer="", grader=spec, task="t")


def pooled(source: Callable[[int], Prompt] = prompt, **rules: Any) -> tuple[BudgetedRollouts, Logged]:
    """And the log of what its pool was told."""
    state = BudgetedRollouts(
        PoolRules(**{"budget": BUDGET, "capacity": 8, "retention": 1, "samples": 2, **rules}), source
    )
    log: Any = Logged(state.pool)
    state.pool = log
    return state, log


def true(rollout: Rollout) -> None:
    ids = rollout.prompt.token_ids
    assert_true(Request(id=rollout.id, prompt_ids=ids, sampling=rollout.sampling), rollout.span, POLICIES)


def run(engine: Any, state: BudgetedRollouts, sampling: SamplingParams, **more: Any) -> list[Partition]:
    """One iteration for each version, with new weights in between; every token of every rollout is looked at."""
    parts = []
    for version in VERSIONS:
        if version > 1:
            engine.update_weights(weights(float(version), version))
        part = state.sample(engine, sampling, TOKENIZER, deadline_s=30, **more)
        for r in (*part.ended, *part.parked):
            assert r.status.complete or r.status == "parked", r.detail
            assert len(set(r.span.versions.tolist())) <= state.pool.rules.retention + 1
        chosen = state.settle([replace(r, reward=float(r.id)) for r in part.ended])
        assert state.metrics(part)["rollout/budget_tokens"] >= BUDGET
        assert {r.group: 0 for r in chosen} == dict.fromkeys({r.group for r in chosen}, 0)
        parts.append(part)
    return parts


@pytest.mark.usually("generated-served1", "finished-served0")
@pytest.mark.parametrize("served", [{"kv": "recompute"}, {"kv": "keep"}], indirect=True)
@pytest.mark.parametrize("count", ["generated", "finished"])
def test_every_token_is_counted_once_and_of_the_weights_it_says(served: tuple[Any, FakeBackend], count: str) -> None:
    engine, backend = served
    state, log = pooled(count=count)
    parts = run(engine, state, SAMPLING)
    for part in parts:
        for r in (*part.ended, *part.parked):
            true(r)
    assert any(len(set(r.span.versions.tolist())) > 1 for part in parts for r in part.ended)
    ledger = log.audit()
    assert backend.state()["sent"] >= ledger.tally["generated"] >= len(VERSIONS) * BUDGET * (count == "generated")
    assert backend.starts() == 1


@pytest.mark.usually("generated")
@pytest.mark.parametrize("count", ["generated", "finished"])
def test_a_killed_server_loses_nothing(served: tuple[Any, FakeBackend], count: str) -> None:
    engine, backend = served
    state, log = pooled(count=count)

    def kill() -> bool:
        if backend.starts() > len(killed) and len(killed) < 2:
            killed.append(backend.starts())
            backend.set("crash_after", 250)
        return False

    killed = list[int]()
    for part in run(engine, state, SAMPLING, should_stop=kill):
        for r in (*part.ended, *part.parked):
            true(r)
    assert backend.starts() == 3
    assert log.audit().tally["failed"] == 0
    assert "correct" not in {name for name, _, _ in log.log}


def test_tokens_that_a_lost_server_takes_along_are_not_counted(served: tuple[Any, FakeBackend]) -> None:
    """Its experts come at a stream's end: without that the tokens are sampled again."""
    engine, backend = served
    state, log = pooled(count="generated")
    backend.set("crash_after", 120)
    for part in run(engine, state, replace(SAMPLING, return_experts=True)):
        for r in (*part.ended, *part.parked):
            true(r)
            assert r.span.experts is not None or not len(r.span)
    assert backend.starts() == 2
    assert "correct" in {name for name, _, _ in log.log}
    log.audit()


def test_stopping_in_the_middle_puts_everything_back(served: tuple[Any, FakeBackend]) -> None:
    engine, backend = served
    state, _ = pooled(count="generated")
    state.settle([replace(r, reward=0.0) for r in state.sample(engine, SAMPLING, TOKENIZER, deadline_s=30).ended])
    before = state.state_dict()
    sent = backend.state()["sent"]
    with pytest.raises(Interrupted):
        state.sample(
            engine, SAMPLING, TOKENIZER, deadline_s=30, should_stop=lambda: backend.state()["sent"] > sent + 30
        )
    assert backend.state()["running"] == []
    assert state.state_dict()["pool"] == before["pool"]
    assert engine.poll(0.0) == []


@pytest.mark.parametrize("killed", [False, True])
def test_episodes_on_a_server(served: tuple[Any, FakeBackend], killed: bool) -> None:
    """The budget counts what the policy sampled; what the environment said is in the prefix, and not counted."""
    engine, backend = served
    environment = Shell()
    environment.tools = Tools({})
    engine._vocab_size = len(TOKENIZER)  # what the environment says; the server draws from a part of it
    state, log = pooled(lambda i: prompts(i + 1)[i], count="generated", retention=2)
    gather = episodes(environment, turn_tokens=5)
    if killed:
        backend.set("crash_after", 400)
    parts = run(engine, state, SamplingParams(max_new_tokens=18, stop_token_ids=(STOP,)), gather=gather)
    gather.close()
    for r in [r for part in parts for r in (*part.ended, *part.parked)]:
        ids = r.prompt.token_ids.tolist()
        own = np.ones(len(r.span), bool) if r.span.sampled is None else r.span.sampled
        for token, version, mine in zip(r.span.token_ids.tolist(), r.span.versions.tolist(), own, strict=True):
            assert not mine or token == next_token(ids, POLICIES[version])
            ids.append(token)
    assert any(r.span.sampled is not None and not r.span.sampled.all() for part in parts for r in part.ended)
    assert any(len(set(r.span.versions[r.span.own])) > 1 for part in parts for r in part.ended)
    assert log.audit().tally["failed"] == 0
    assert backend.starts() == 1 + killed


def test_an_answer_is_streamed(served: tuple[Any, FakeBackend]) -> None:
    """The server makes no tenth token before the first piece is out."""
    asked = request(1, 40, stop_token_ids=())
    ids = [*asked.prompt_ids.tolist()]
    served[1].set("hold_at", served[1].state()["sent"] + 9)
    for piece in stream(served[0], asked):
        assert len(ids) > 2 or len(piece) <= 9
        for token in piece:
            assert token == next_token(ids, 1.0)
            ids.append(token)
        (served[1].faults / "hold_at").unlink(missing_ok=True)
    assert len(ids) == 42
