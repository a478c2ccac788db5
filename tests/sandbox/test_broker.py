"""Jobs that are dropped, run twice or stuck behind a dead worker would be found days into a run, if at all; here any order of events is played.

The decision alone is tested, with made-up times: no threads, no programs. Not covered: whether the service carries the actions out
(test_service.py), and whether the estimate of when to come back is a good one.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollkeel_sandbox.broker import Abandon, Action, Broker, End, Fate, Interrupt, Open, Start, Worker
from rollkeel_sandbox.errors import BadInput
from rollkeel_sandbox.partition import Full, Partition

PARTS = (Partition(name="a", workers=2, queue=4), Partition(name="b", workers=1, queue=2))
BEAT_S, OPEN_S = 10.0, 30.0


class Machine(RuleBasedStateMachine):
    """Plays the threads: every worker that was opened may report, hang or be reported dead; all else is checked."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.broker = Broker(PARTS, beat_s=BEAT_S, open_s=OPEN_S)
        self.alive: dict[tuple[str, int], Worker] = {}
        self.ready: set[Worker] = set()
        self.running: dict[Worker, str] = {}
        self.dead: list[Worker] = []
        self.jobs: dict[str, tuple[str, int, int, float]] = {}
        """Partition, priority, turn, start deadline of accepted jobs that have not ended."""
        self.starts: Counter[str] = Counter()
        self.ended: dict[str, Fate] = {}
        self.accepted = 0
        self.take(self.broker.open(self.now))

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Open(worker):
                    assert worker[:2] not in self.alive
                    self.alive[worker[:2]] = worker
                case Start(worker, job, attempt):
                    self.check_start(worker, job, attempt)
                case Interrupt(worker, job):
                    assert self.running[worker] == job
                case Abandon(worker, job):
                    assert self.alive.pop(worker[:2]) == worker
                    self.ready.discard(worker)
                    held = self.running.pop(worker, None)
                    assert job is None or job == held
                    self.dead.append(worker)
                case End(job=job, fate=fate, attempts=attempts):
                    assert job in self.jobs, "it ended twice"
                    assert attempts == self.starts[job]
                    del self.jobs[job]
                    self.ended[job] = fate

    def check_start(self, worker: Worker, job: str, attempt: int) -> None:
        assert self.alive[worker[:2]] == worker
        assert worker in self.ready
        assert worker not in self.running
        assert job not in self.running.values(), "it runs twice at a time"
        partition, priority, turn, _ = self.jobs[job]
        assert worker.partition == partition
        waiting = [
            (-p, t)
            for id, (part, p, t, _) in self.jobs.items()
            if part == partition and id not in self.running.values()
        ]
        assert (-priority, turn) == min(waiting), "another one was before it"
        self.starts[job] += 1
        assert attempt == self.starts[job] <= 2
        self.running[worker] = job

    @rule(
        partition=st.sampled_from("ab"), priority=st.integers(-2, 2), patience=st.sampled_from([1.0, 5.0, float("inf")])
    )
    def submit(self, partition: str, priority: int, patience: float) -> None:
        job = f"job{self.accepted}"
        before = self.broker.figures(partition)["queued"]
        self.jobs[job] = (partition, priority, self.accepted, self.now + patience)
        try:
            actions = self.broker.submit(
                self.now, job, partition=partition, priority=priority, start_by=self.now + patience, allowed_s=3.0
            )
        except Full:
            del self.jobs[job]
            assert before >= self.broker.config(partition).queue
            assert 0 < self.broker.wait_s(partition) <= 60
            return
        assert before < self.broker.config(partition).queue
        self.accepted += 1
        self.take(actions)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.jobs)))
        self.take(self.broker.cancel(self.now, job))
        assert self.ended[job] is Fate.CANCELLED
        assert self.broker.cancel(self.now, job) == []

    @precondition(lambda self: len(self.ready) < len(self.alive))
    @rule(data=st.data())
    def come_up(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(set(self.alive.values()) - self.ready)))
        self.ready.add(worker)
        self.take(self.broker.beat(self.now, worker))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), lost=st.sampled_from(["", "", "the cage died"]))
    def finish(self, data: st.DataObject, lost: str) -> None:
        worker = data.draw(st.sampled_from(sorted(self.running)))
        job = self.running.pop(worker)
        live = job in self.jobs
        self.take(self.broker.finish(self.now, worker, lost=lost))
        if live and not lost:
            assert self.ended[job] is Fate.DONE
        if live and lost and self.starts[job] < 2:
            assert job in self.jobs, "its retry was forgotten"

    @precondition(lambda self: self.ready - set(self.running))
    @rule(data=st.data())
    def speak_twice(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.ready - set(self.running))))
        assert self.broker.finish(self.now, worker) == []

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def speak_from_the_grave(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.dead))
        assert self.broker.finish(self.now, worker) == []
        assert self.broker.beat(self.now, worker) == []
        assert self.broker.replace(self.now, worker, "dead") == []

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.alive.values())))
        self.take(self.broker.replace(self.now, worker, "it died"))

    @rule(seconds=st.sampled_from([0.5, 4.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        """Idle workers go on beating; busy and opening ones do not, and so hang after 3 and 30 s."""
        self.now += seconds
        for worker in self.ready - set(self.running):
            self.take(self.broker.beat(self.now, worker))
        late = [job for job, (*_, by) in self.jobs.items() if by <= self.now and not self.starts[job]]
        held = dict(self.running) if seconds >= 4.0 else {}
        self.take(self.broker.tick(self.now))
        assert all(self.ended[job] is Fate.EXPIRED for job in late if not self.starts[job])
        assert all(self.running.get(worker) != job for worker, job in held.items()), "a hung worker was left alone"

    @invariant()
    def nobody_idles_while_jobs_wait(self) -> None:
        for part in PARTS:
            idle = [w for w in self.ready - set(self.running) if w.partition == part.name]
            waiting = [j for j, (name, *_) in self.jobs.items() if name == part.name and j not in self.running.values()]
            assert not (idle and waiting)
            assert self.broker.figures(part.name)["queued"] == len(waiting)
            assert len([w for w in self.alive.values() if w.partition == part.name]) == part.workers

    @invariant()
    def every_job_is_somewhere_once(self) -> None:
        assert self.broker.busy == len(self.jobs)
        assert self.accepted == len(self.jobs) + len(self.ended)
        counts = [self.broker.counts(part.name) for part in PARTS]
        assert sum(c.accepted for c in counts) == self.accepted
        ended = Counter(self.ended.values())
        assert all(sum(c.ended[fate] for c in counts) == ended[fate] for fate in Fate)

    def teardown(self) -> None:
        """Whatever happened: with workers that answer, every accepted job ends."""
        for _ in range(100):
            for worker in sorted(set(self.alive.values()) - self.ready):
                self.ready.add(worker)
                self.take(self.broker.beat(self.now, worker))
            for worker in sorted(self.running):
                if self.running.pop(worker, None) is not None:
                    self.take(self.broker.finish(self.now, worker))
        assert not self.jobs
        assert len(self.ended) == self.accepted


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


def opened(*parts: Partition) -> tuple[Broker, list[Worker]]:
    broker = Broker(parts, beat_s=BEAT_S, open_s=OPEN_S)
    workers = [action.worker for action in broker.open(0.0) if isinstance(action, Open)]
    for worker in workers:
        broker.beat(0.0, worker)
    return broker, workers


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_priorities_first_and_first_come_first_served_within(priorities: list[int]) -> None:
    broker, (worker,) = opened(Partition(name="a", workers=1, queue=100))
    broker.submit(0.0, "first", partition="a", allowed_s=1.0)
    for i, priority in enumerate(priorities):
        assert broker.submit(0.0, str(i), partition="a", priority=priority, allowed_s=1.0) == []
    order = deque[str]()
    actions = broker.finish(0.0, worker)
    while starts := [a for a in actions if isinstance(a, Start)]:
        order.append(starts[0].job)
        actions = broker.finish(0.0, worker)
    keys = [(-priorities[int(job)], int(job)) for job in order]
    assert len(keys) == len(priorities)
    assert all(a < b for a, b in pairwise(keys))


def test_a_hung_worker_is_replaced_at_its_deadline_and_its_job_run_once_more_exactly() -> None:
    broker, (worker,) = opened(Partition(name="a", workers=1))
    broker.submit(0.0, "x", partition="a", allowed_s=3.0)
    assert broker.tick(2.9) == []
    abandon, opening = broker.tick(3.0)
    assert abandon == Abandon(worker, "x")
    assert isinstance(opening, Open)
    assert opening.worker == worker._replace(life=1)
    assert broker.finish(3.1, worker) == []
    assert broker.beat(3.2, opening.worker) == [Start(opening.worker, "x", 2)]
    abandon, opening, end = broker.tick(6.3)
    assert isinstance(end, End)
    assert (end.fate, end.attempts, end.reason) == (Fate.LOST, 2, "its worker hung, 2 times")
    assert broker.beat(6.4, opening.worker) == []  # type: ignore[union-attr]


def test_cancelled_and_refused_jobs_leave_nothing_behind() -> None:
    broker, _ = opened(Partition(name="a", workers=1, queue=3))
    broker.submit(0.0, "running", partition="a", allowed_s=1e9)
    for i in range(5000):
        broker.submit(0.0, f"{i}", partition="a", allowed_s=1.0)
        broker.cancel(0.0, f"{i}")
    assert broker.figures("a")["queued"] == 0
    assert len(broker._lines["a"].heap) <= 64
    for i in range(3):
        broker.submit(0.0, f"w{i}", partition="a", allowed_s=1.0)
    with pytest.raises(Full, match="no room for 1 more"):
        broker.submit(0.0, "over", partition="a", allowed_s=1.0)
    assert broker.counts("a").refused == 1
    assert broker.room("a") == 0


def test_unknown_partitions_and_bad_settings_get_one_line() -> None:
    broker, _ = opened(Partition(name="train"))
    with pytest.raises(BadInput, match="did you mean train"):
        broker.submit(0.0, "x", partition="trian", allowed_s=1.0)
    for bad in ({"name": "a b"}, {"name": ""}, {"name": "a", "workers": 0}, {"name": "a", "queue": 0}):
        with pytest.raises(BadInput, match="sandbox partition"):
            Partition(**bad)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="a name of its own"):
        Broker([Partition(name="a"), Partition(name="a")])
