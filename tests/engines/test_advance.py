"""A schedule counted in decode steps must be the same on every machine; a budgeted run is reproducible only because of this.

In this process and over real worker processes: exact steps, refills in between, interruption, death of a worker. Not
covered: CUDA, whether a schedule is a good one (tests/rollout/test_budgeted.py).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from engine_kit import drain, engine_of, model_of, prompts_of, requests_of, resumed, run, same

from rollkeel.config import EngineConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.engines.parts import even_shares
from rollkeel.engines.workers import WorkerEngine
from rollkeel.errors import EngineFailure
from rollkeel.models.names import checkpoint_views
from rollkeel.protocols import SteppedEngine
from rollkeel.sync.publish import full_update
from rollkeel.types import Request, Segment, Status

LENGTHS = [3, 9, 5, 1, 12, 4, 7, 2, 8, 6, 10, 11]


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of()


@pytest.fixture(scope="module")
def workers(model: Any) -> Iterator[WorkerEngine]:
    engine = WorkerEngine(model.config, EngineConfig(processes=2, slots=3, deadline_s=60), max_length=4000)
    engine.update_weights(full_update(checkpoint_views(model).items(), 0))
    yield engine
    engine.close()


def forced(lengths: list[int], first: int = 0) -> list[Request]:
    """Requests that end after exactly so many tokens."""
    return [
        requests_of([prompt], first + i, max_new_tokens=length)[0]
        for i, (prompt, length) in enumerate(zip(prompts_of(len(lengths)), lengths, strict=True))
    ]


def schedule(engine: SteppedEngine, capacity: int = 5) -> list[tuple[int, Segment]]:
    """Step and segment of everything, refilling to `capacity` after every decode step."""
    queue, out, step, flying = forced(LENGTHS), [], 0, 0
    while queue or flying:
        new = [queue.pop(0) for _ in range(min(capacity - flying, len(queue)))]
        if new:
            engine.submit(new)
        ended = engine.advance(1)
        step += 1
        flying += len(new) - len(ended)
        assert [s.request_id for s in ended] == sorted(s.request_id for s in ended)
        out += [(step, s) for s in ended]
    return out


def test_exactly_as_many_steps_as_asked_and_progress_counts_them(model: Any) -> None:
    engine: LocalEngine = engine_of(model, slots=4)
    assert isinstance(engine, SteppedEngine)
    assert engine.advance(3) == []
    assert engine.steps == 0  # nothing in flight, nothing decoded
    engine.submit(forced([9, 2, 5, 1, 4]))
    assert engine.progress() == dict.fromkeys(range(5), 0)
    assert [s.request_id for s in engine.advance(1)] == [3]
    assert engine.progress() == {0: 1, 1: 1, 2: 1, 4: 0}  # the fifth waited for a slot
    ended = engine.advance(3)
    assert [(s.request_id, len(s.span)) for s in ended] == [(1, 2)]
    assert engine.steps == 4
    assert engine.progress() == {0: 4, 2: 4, 4: 3}
    assert [s.request_id for s in engine.advance(100)] == [0, 2, 4]
    assert engine.steps == 9
    assert engine.progress() == {}


def test_steps_give_the_tokens_that_polling_gives(model: Any) -> None:
    polled = run(engine_of(model), forced(LENGTHS))
    for step in (1, 4):
        engine = engine_of(model)
        engine.submit(forced(LENGTHS))
        found: list[Segment] = []
        while engine.busy:
            found += engine.advance(step)
        assert sorted(s.request_id for s in found) == sorted(polled)
        assert all(same(s.span, polled[s.request_id].span) for s in found)


def test_no_steps_hand_over_what_was_interrupted_and_a_resumed_request_goes_on(model: Any) -> None:
    whole = run(engine_of(model), forced([8, 8]))
    engine = engine_of(model)
    engine.submit(forced([8, 8]))
    assert engine.advance(5) == []
    engine.interrupt()
    parts = engine.advance(0)
    assert [(s.request_id, len(s.span), s.status) for s in parts] == [(i, 5, Status.INTERRUPTED) for i in (0, 1)]
    again = [resumed(r, s.span) for r, s in zip(forced([8, 8]), parts, strict=True)]
    engine.submit(again)
    assert engine.progress() == {0: 5, 1: 5}
    for request, segment in zip(again, engine.advance(8), strict=True):
        assert len(segment.span) == 3
        assert same(request.prefix.append(segment.span), whole[request.id].span)


def test_steps_without_weights_are_refused(model: Any) -> None:
    engine = LocalEngine(model.config, EngineConfig(), max_length=96)
    engine.submit(forced([2]))
    with pytest.raises(EngineFailure, match="publish weights"):
        engine.advance(1)


@pytest.mark.parametrize(
    ("loads", "count", "shares"),
    [
        ([0, 0], 5, [3, 2]),
        ([0, 0, 0], 2, [1, 1, 0]),
        ([3, 0], 2, [0, 2]),
        ([3, 0], 5, [1, 4]),
        ([1, 4, 2], 4, [3, 0, 1]),
        ([2, 2], 0, [0, 0]),
    ],
)
def test_new_requests_even_out_what_is_in_flight(loads: list[int], count: int, shares: list[int]) -> None:
    assert even_shares(loads, count) == shares


def test_workers_keep_step_whatever_the_timing(workers: WorkerEngine, model: Any) -> None:
    """Twice the same schedule, with polling and idling in between: the same steps, tokens and bits."""
    assert isinstance(workers, SteppedEngine)
    first = schedule(workers)
    polled = run(workers, forced(LENGTHS))
    time.sleep(0.05)
    second = schedule(workers)
    assert [(step, s.request_id) for step, s in first] == [(step, s.request_id) for step, s in second]
    for (_, a), (_, b) in zip(first, second, strict=True):
        assert len(a.span) == LENGTHS[a.request_id]
        np.testing.assert_array_equal(a.span.token_ids, b.span.token_ids)
        np.testing.assert_array_equal(a.span.logprobs, b.span.logprobs)
        assert same(a.span, polled[a.request_id].span)
    # Five in flight fit the slots: a request ends as many steps after its submission as it has tokens, as in one process.
    alone = schedule(engine_of(model, slots=6))
    assert [(step, s.request_id) for step, s in first] == [(step, s.request_id) for step, s in alone]


def test_workers_wait_between_steps(workers: WorkerEngine) -> None:
    workers.submit(forced([40, 40, 40]))
    time.sleep(0.1)
    assert workers.progress() == {0: 0, 1: 0, 2: 0}
    assert workers.advance(7) == []
    time.sleep(0.1)
    assert workers.progress() == {0: 7, 1: 7, 2: 7}
    workers.submit(forced([1], first=3))  # to the worker with one request
    assert workers.progress() == {0: 7, 1: 7, 2: 7, 3: 0}
    assert [s.request_id for s in workers.advance(1)] == [3]
    workers.interrupt([1])
    assert [(s.request_id, len(s.span)) for s in workers.advance(0)] == [(1, 8)]
    assert [len(s.span) for s in drain(workers).values()] == [40, 40]  # polled, they run by themselves
    workers.submit(forced([2, 2]))
    time.sleep(0.1)
    assert workers.progress() == {0: 0, 1: 0}  # a worker that ran empty waits again
    assert len(workers.advance(9)) == 2


def test_steps_after_polling_stop_the_workers(workers: WorkerEngine) -> None:
    workers.submit(forced([3900] * 4))  # longer than a worker can decode before it hears of the steps
    assert workers.poll(0.0) == []
    assert workers.advance(1) == []
    before = workers.progress()
    time.sleep(0.1)
    assert workers.progress() == before
    workers.advance(2)
    assert workers.progress() == {i: n + 2 for i, n in before.items()}
    workers.interrupt()
    assert {s.status for s in workers.advance(0)} == {Status.INTERRUPTED}
    assert workers.advance(1) == []


def test_a_killed_worker_fails_its_own_requests_in_the_same_step(workers: WorkerEngine) -> None:
    """Last on purpose: it uses the shared engine up."""
    workers.submit(forced([20, 20, 20, 2]))
    assert workers.advance(1) == []
    os.kill(workers.parts[0].process.pid, signal.SIGKILL)
    workers.parts[0].process.join()
    ended = workers.advance(1)
    assert [(s.request_id, s.status) for s in ended] == [
        (0, Status.ENGINE_FAILURE),
        (1, Status.ENGINE_FAILURE),
        (3, Status.LENGTH),
    ]
    assert workers.progress() == {2: 2}
    workers.submit(forced([2], first=4))
    assert [s.request_id for s in workers.advance(2)] == [4]
