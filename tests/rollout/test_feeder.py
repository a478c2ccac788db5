"""The feeder beside the trainer: whatever the timing, every rollout arrives once, with its tokens in order; what goes wrong in
it reaches the trainer with its message; a recorded schedule gives the same rollouts again.

A counted engine of several workers whose progress at every poll is random stands for timing; threads are real. Not covered:
real workers and training (tests/test_async.py), the gate by itself (tests/rollout/test_overlap.py).
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollkeel.errors import BadInput, Corrupt, EngineFailure, Interrupted, RunStopped
from rollkeel.protocols import CountedEngine
from rollkeel.rollout.feeder import OverlappedRollouts, Source, check_staleness
from rollkeel.rollout.overlap import Gate
from rollkeel.rollout.schedule import Recorded, Replayed, ScheduledEngine, read_schedule
from rollkeel.types import (
    Capabilities,
    GraderSpec,
    Prompt,
    Request,
    Rollout,
    SamplingParams,
    Segment,
    Status,
    TokenSpan,
)

UPDATES, BOUND = 2, 4


def span(tokens: Sequence[tuple[int, int]]) -> TokenSpan:
    """Of (token, version) pairs."""
    ids, versions = np.array(tokens, np.int64).reshape(-1, 2).T
    zeros = np.zeros(len(ids), np.float32)
    return TokenSpan(token_ids=ids, logprobs=zeros, kept_mass=zeros + 1, versions=versions, kv_versions=versions)


class Workers:
    """Two workers with two slots each. A token says at which decode step of which worker, in which slot, it was sampled: two runs
    agree only if everything took effect at the same steps."""

    def __init__(self, timing: random.Random) -> None:
        self.timing, self.version = timing, 0
        self.steps: list[int | None] = [0, 0]
        self.shares: list[int] = []
        self.queues: list[list[tuple[Request, list[tuple[int, int]]]]] = [[], []]
        self.done: list[Segment] = []
        self.broken: Exception | None = None
        self.silent = False
        self.capabilities = Capabilities(
            name="fake", dtype="fp32", max_length=999, returns_experts=False, returns_topk=False
        )
        self.free = False
        self._inside = threading.Lock()

    def submit(self, requests: Sequence[Request], shares: Sequence[int] | None = None) -> None:
        with self.alone():
            self._run(2)
            first = self.timing.randint(0, len(requests))
            self.shares = list(shares) if shares is not None else [first, len(requests) - first]
            for i, request in enumerate(requests):
                self.queues[i >= self.shares[0]].append((request, []))

    def poll(self, timeout_s: float) -> list[Segment]:
        with self.alone():
            if self.broken is not None:
                raise self.broken
            if self.silent:
                return []
            self.free = True
            if not self.done:
                self._run(3)
            out, self.done = self.done, []
            return out

    def advance_each(self, steps: Sequence[int]) -> list[Segment]:
        with self.alone():
            self.free = False
            for worker, count in enumerate(steps):
                self._decode(worker, count)
            out, self.done = self.done, []
            return out

    def interrupt(self, ids: Sequence[int] | None = None) -> None:
        with self.alone():
            self._run(2)
            for worker in range(2):
                for request, made in self.queues[worker]:
                    self.done.append(Segment(request_id=request.id, span=span(made), status=Status.INTERRUPTED))
                self.queues[worker] = []

    def update_weights(self, update: Any) -> Any:
        with self.alone():
            self._run(2)
            self.version += UPDATES

    def close(self) -> None: ...

    def alone(self) -> Any:
        assert self._inside.acquire(blocking=False), "two threads in the engine"
        engine = self

        class Leave:
            def __enter__(self) -> None: ...
            def __exit__(self, *_: object) -> None:
                engine._inside.release()

        return Leave()

    def _run(self, most: int) -> None:
        """What free workers do meanwhile."""
        for worker in range(2) if self.free else ():
            self._decode(worker, self.timing.randint(0, most))

    def _decode(self, worker: int, count: int) -> None:
        for _ in range(count):
            if not self.queues[worker]:
                return
            now = self.steps[worker]
            assert now is not None
            self.steps[worker] = now + 1
            running = self.queues[worker][:2]
            for slot, (_, made) in enumerate(running):
                made.append((now * 100 + worker * 10 + slot, self.version))
            ended = [(r, made) for r, made in running if len(r.prefix) + len(made) == 1 + r.id * 7 % 11]
            self.queues[worker] = [q for q in self.queues[worker] if not any(q[0] is r for r, _ in ended)]
            self.done += [Segment(request_id=r.id, span=span(made), status=Status.FINISHED) for r, made in ended]


class Tokenizer:
    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


class Judge:
    def grade(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        return [replace(r, reward=float(len(r.span))) for r in rollouts]


class Beside:
    """The same judgement at its own pace: a rollout is ready after it was asked for a number of times that is drawn."""

    def __init__(self, timing: random.Random) -> None:
        self.timing, self.left = timing, dict[int, int]()
        self.begun: list[int] = []
        self.held = 0

    def begin(self, rollouts: Sequence[Rollout]) -> None:
        self.begun += [r.id for r in rollouts]
        self.left |= {r.id: self.timing.randrange(6) for r in rollouts}

    def ready(self, rollout: Rollout) -> bool:
        self.left[rollout.id] -= 1
        self.held += self.left[rollout.id] >= 0
        return self.left[rollout.id] < 0

    def grade(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        assert all(self.left.pop(r.id) < 0 for r in rollouts)
        return Judge().grade(rollouts)


class Deaf:
    def grade(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        raise BadInput("grader nobody: unknown") if rollouts else AssertionError


def prompts(indices: Sequence[int]) -> list[Prompt]:
    return [
        Prompt(
            id=f"{i:x}",
            index=i,
            text="",
            token_ids=np.array([i + 1]),
            answer="",
            grader=GraderSpec(name="exact"),
            task="t",
        )
        for i in indices
    ]


def overlapped(
    engine: Any, calls: ScheduledEngine, *, grader: Any = None, steps: int = 8, deadline_s: float = 30.0
) -> OverlappedRollouts:
    source = Source(
        prompts=prompts, engine=engine, sampling=SamplingParams, tokenizer=Tokenizer(), grader=grader or Judge()
    )
    gate = Gate(prompts=2, samples=3, look_ahead=BOUND // UPDATES, steps=steps)
    return OverlappedRollouts(gate, calls, source, deadline_s=deadline_s)


def facts(r: Rollout) -> tuple[Any, ...]:
    return r.id, r.group, r.prompt.index, r.reward, r.text, r.span.token_ids.tolist(), r.span.versions.tolist()


def drive(
    make: Callable[[Any, int, dict[str, Any] | None], OverlappedRollouts], timing: random.Random, parks: set[int]
) -> list[Any]:
    """Train eight steps; after those in `parks` a checkpoint, from which a new process goes on. All rollouts, in order."""
    engine = Workers(timing)
    rollouts, seen = make(engine, 0, None), []
    for step in range(1, 9):
        if not rollouts.running:
            rollouts.begin()
        while (found := rollouts.batch()) is None:
            rollouts.park()
            rollouts.begin()
        check_staleness(found, UPDATES * (step - 1), BOUND)
        seen += [facts(r) for r in found]
        with rollouts.publishing():
            engine.update_weights(None)
        rollouts.finish()
        rollouts.park() if step in parks else rollouts.send()
        rollouts.commit(step)
        if step in parks and step % 2:
            state, version = rollouts.state_dict(), engine.version
            rollouts.close()
            engine = Workers(timing)
            engine.version = version
            rollouts = make(engine, step, state)
    rollouts.close()
    return seen


def making(
    calls: Callable[[Any, int], ScheduledEngine], grader: Any = None
) -> Callable[[Any, int, dict[str, Any] | None], OverlappedRollouts]:
    def make(engine: Any, step: int, state: dict[str, Any] | None) -> OverlappedRollouts:
        rollouts = overlapped(engine, calls(engine, step), grader=grader)
        if state is not None:
            rollouts.load_state_dict(state, version=engine.version, updates=UPDATES, limit=BOUND)
        return rollouts

    return make


@pytest.mark.parametrize("seed", range(12))
def test_every_rollout_arrives_once_and_the_schedule_gives_it_again(seed: int, tmp_path: Path) -> None:
    draw, file = random.Random(seed), tmp_path / "schedule.jsonl"
    parks = set(draw.sample(range(1, 8), 3))
    assert isinstance(Workers(draw), CountedEngine)

    def keep(row: Mapping[str, Any]) -> None:
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")

    def recorded(engine: Any, step: int) -> ScheduledEngine:
        return Recorded(engine, keep)

    grader = Beside(random.Random(seed)) if seed % 2 else None
    seen = drive(making(recorded, grader), random.Random(seed), parks)
    if grader is not None:  # the replay below has another one, and gives the same
        assert (sorted(grader.begun), grader.left) == ([r[0] for r in seen], {})
        assert grader.held > 0
    assert [r[0] for r in seen] == list(range(8 * 6))
    for _, group, prompt, reward, text, tokens, versions in seen:
        assert group == prompt
        assert len(tokens) == reward == len(text.split())
        assert versions == sorted(versions)
    replayed = drive(making(lambda engine, step: Replayed(engine, file, step)), random.Random(99), parks)
    assert replayed == seen


def recorded(engine: Any) -> tuple[Recorded, list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    return Recorded(engine, lambda row: rows.append(dict(row))), rows


def test_timing_alone_changes_a_run(tmp_path: Path) -> None:
    """Else the replay above would prove nothing."""
    one, two = (drive(making(lambda e, s: recorded(e)[0]), random.Random(seed), set()) for seed in (1, 2))
    assert [r[0] for r in one] == [r[0] for r in two]
    assert one != two


def test_what_breaks_in_the_feeder_is_raised_in_the_trainer() -> None:
    engine = Workers(random.Random(0))
    rollouts = overlapped(engine, recorded(engine)[0], grader=Deaf())
    rollouts.begin()
    for wait in (rollouts.batch, rollouts.park):
        with pytest.raises(BadInput, match="grader nobody: unknown"):
            wait()
    rollouts.close()


def test_an_engine_that_breaks_or_returns_what_nobody_asked_for_stops_the_run() -> None:
    strange = [
        Segment(request_id=99, span=span([(1, 0)]), status=Status.FINISHED),
        Segment(request_id=1, span=span([(1, 0)]), status=Status.INTERRUPTED),
    ]
    for segment, message in zip(
        strange, ("request 99: .* not in flight", "request 1: interrupted, which nobody asked"), strict=True
    ):
        engine = Workers(random.Random(0))
        engine.done.append(segment)
        rollouts = overlapped(engine, recorded(engine)[0])
        rollouts.begin()
        with pytest.raises(EngineFailure, match=message):
            rollouts.batch()
        rollouts.close()
    engine = Workers(random.Random(0))
    engine.broken = EngineFailure("the server is gone")
    rollouts = overlapped(engine, recorded(engine)[0])
    rollouts.begin()
    with pytest.raises(EngineFailure, match="the server is gone"):
        rollouts.batch()
    rollouts.close()


def test_silence_ends_with_what_was_waited_for() -> None:
    engine = Workers(random.Random(0))
    engine.silent = True
    rollouts = overlapped(engine, recorded(engine)[0], deadline_s=0.3)
    rollouts.begin()
    with pytest.raises(EngineFailure, match=r"while step 1 waits for 6 of 6 \(engine.deadline_s=0.3\)"):
        rollouts.batch()
    with pytest.raises(EngineFailure, match=r"waited 0.3 s for 18 interrupted rollouts"):
        rollouts.park()
    rollouts.close()


def test_a_stop_keeps_everything_in_flight() -> None:
    engine = Workers(random.Random(3))
    calls, rows = recorded(engine)
    rollouts = overlapped(engine, calls)
    rollouts.begin()
    engine.silent = True
    with pytest.raises(RunStopped, match="park before a checkpoint"):
        rollouts.state_dict()
    with pytest.raises(Interrupted):
        rollouts.batch(lambda: True)
    engine.silent = False
    rollouts.park()
    rollouts.commit(0)
    state = rollouts.state_dict()
    assert sorted(f["id"] for f in state["rollouts"]["facts"]) == list(range(18))
    assert [call["call"] for call in rows[0]["calls"]] == ["submit", "interrupt"]
    rollouts.park()  # nothing to do
    rollouts.discard()
    state["rollouts"]["facts"].pop()
    with pytest.raises(Corrupt, match="expected the rollouts"):
        overlapped(engine, calls).load_state_dict(state, version=0, updates=UPDATES, limit=BOUND)


def test_a_tighter_bound_on_resume_is_refused() -> None:
    engine = Workers(random.Random(3))
    rollouts = overlapped(engine, recorded(engine)[0], steps=3)
    rollouts.begin()
    for _ in range(2):
        rollouts.batch()
        with rollouts.publishing():
            engine.update_weights(None)
        rollouts.finish()
    rollouts.park()
    state = rollouts.state_dict()
    begun = [f for f in state["rollouts"]["facts"] if f["length"]]
    assert begun
    fresh = overlapped(engine, recorded(engine)[0], steps=3)
    fresh.load_state_dict(state, version=4, updates=UPDATES, limit=4)
    with pytest.raises(BadInput, match=r"max_staleness: the checkpoint's rollout \d+ may be"):
        overlapped(engine, recorded(engine)[0], steps=3).load_state_dict(state, version=99, updates=UPDATES, limit=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{", "cannot be read"),
        ('{"step": 1}', "line 1 is not a step"),
        ('{"step": 1, "calls": [{"call": "submit", "at": [0, 0]}]}', "line 1 is not a step"),
        (
            '{"step": 4, "calls": [{"call": "publish", "at": [3, null]}]}',
            "lost or got an engine worker before the end of step 4",
        ),
    ],
)
def test_a_schedule_that_is_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.jsonl"
    file.write_text(text)
    with pytest.raises(BadInput, match=message) as refused:
        read_schedule(file)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([{"call": "publish", "at": [0, 0]}], "expected the call publish, got submit"),
        ([{"call": "submit", "at": [0, 0], "shares": [9, 8]}], "expected 17 requests, got 18"),
        ([{"call": "submit", "at": [0, 0, 0], "shares": [9, 9, 0]}], "recorded with engine.processes=3, got 2"),
        (
            [{"call": "submit", "at": [0, 0], "shares": [9, 9]}, {"call": "publish", "at": [1, 1]}],
            "step 1 waits for . rollouts that the recorded run had",
        ),
        ([{"call": "submit", "at": [0, 0], "shares": [9, 9]}], "step 1 waits for 6 rollouts"),
    ],
)
def test_a_schedule_of_another_run_is_refused_and_not_waited_for(
    calls: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "schedule.jsonl"
    file.write_text(json.dumps({"step": 1, "calls": calls}) + "\n")
    engine = Workers(random.Random(0))

    def play() -> None:
        rollouts = overlapped(engine, Replayed(engine, file))
        try:
            rollouts.begin()
            rollouts.batch()
        finally:
            rollouts.close()

    with pytest.raises(BadInput, match=message) as refused:
        play()
    assert "\n" not in str(refused.value)
