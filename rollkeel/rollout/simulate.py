"""Policies of the rollout phase as discrete events, over the same `Pool` that decides in the real loop.

sync        all rollouts of the step, free slots refilled from its queue, a barrier at the end; at its own best slot count
oversample  more prompts than needed; when enough groups are complete, the rest is thrown away
april       the same, but the next step resumes the rest (as in APRIL, active partial rollouts)
c3po        C3PO++ (Ring-1T report §2.3.3): a token budget, parked rollouts, a retention limit
async       the pool again; generation overlaps with training, within a bound on staleness

Deterministic: the scenario fixes every number.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from rollkeel.rollout.fleet import Curve, Fleet
from rollkeel.rollout.ledger import Ledger, Result, Row
from rollkeel.rollout.pool import Member, Pool, PoolRules
from rollkeel.rollout.scenario import Lengths, Scenario


def simulate(scenario: Scenario, observed: np.ndarray | None = None) -> list[Result]:
    """Run every policy of the scenario; `sync` always, first, for the others are compared with it.

    `observed` are response lengths `[n]` drawn instead of the lognormal.
    """
    lengths = Lengths(scenario.lengths, scenario.seed, observed)
    curve = Curve(scenario.engine.curve)
    slots = scenario.engine.engines * (scenario.engine.slots or max(1, int(curve.widest)))
    runs: dict[str, Callable[[], Result]] = {
        "oversample": partial(counted, scenario, lengths, "oversample", slots, extra=scenario.oversample.extra),
        "april": partial(counted, scenario, lengths, "april", slots, extra=scenario.april.extra, keep=True),
        "c3po": partial(budgeted, scenario, lengths, slots),
        "async": partial(overlapped, scenario, lengths, slots),
    }
    return [best_barrier(scenario, lengths), *(run() for name, run in runs.items() if name in scenario.policies)]


def compare(results: list[Result]) -> list[dict[str, float | str]]:
    """Figures per policy with `speedup_rollout` and `speedup_step`: trained tokens per second over the barrier's."""
    base = results[0].metrics()
    table: list[dict[str, float | str]] = []
    for result in results:
        own = result.metrics()
        speedups = {f"speedup_{k}": own[f"{k}_tokens_s"] / base[f"{k}_tokens_s"] for k in ("rollout", "step")}
        table.append({"policy": result.name, **speedups, **own})
    return table


def best_barrier(scenario: Scenario, lengths: Lengths) -> Result:
    """The synchronous barrier at the slot count with the shortest rollout phase, of those on the curve and `engine.slots`."""
    engine, step = scenario.engine, scenario.rollout.prompts * scenario.rollout.samples
    per_engine = [*Curve(engine.curve).sequences, *([engine.slots] if engine.slots else [])]
    sizes = sorted({min(step, max(1, int(s * engine.engines))) for s in per_engine})
    runs = [counted(scenario, lengths, "sync", slots) for slots in sizes]
    return max(runs, key=lambda run: run.metrics()["rollout_tokens_s"])


def counted(
    scenario: Scenario, lengths: Lengths, name: str, slots: int, *, extra: float = 0.0, keep: bool = False
) -> Result:
    """Steps that end when `rollout.prompts` groups are complete, of (1 + `extra`) times as many that were started.

    The others are dropped, or with `keep` the next step resumes them first; complete ones beyond the number wait for it.
    """
    work, samples = scenario.rollout, scenario.rollout.samples
    target = work.prompts + round(extra * work.prompts)
    fleet, result = _fleet(scenario, slots), Result(name, slots, _peak(scenario), Ledger(lengths))
    book = result.ledger
    missing: dict[int, int] = {}  # open group → members that have not finished
    queue: deque[int] = deque()
    started = 0
    for step in range(scenario.iterations):
        before = _begin(scenario, result, fleet, step)
        while len(missing) < target:
            missing[started] = samples
            queue.extend(range(started * samples, (started + 1) * samples))
            started += 1
        complete = sum(left == 0 for left in missing.values())
        while complete < work.prompts:
            while queue and len(fleet) < slots * fleet.engines / scenario.engine.engines:
                id = queue.popleft()
                _admit(scenario, fleet, book, id, id // samples)
            done = fleet.finish_next()
            book.note(done)
            for id in done:
                missing[id // samples] -= 1
                complete += missing[id // samples] == 0
        parked = fleet.tokens()
        book.note(parked)
        fleet.clear()
        chosen = [g for g in sorted(missing) if missing[g] == 0][: work.prompts]
        trained = book.train(g * samples + i for g in chosen for i in range(samples))
        missing = {g: left for g, left in missing.items() if g not in set(chosen)} if keep else {}
        queue = deque([*parked, *queue]) if keep else deque()
        if not keep:
            book.drop(list(book.live))
        _train(scenario, result, fleet, before, trained)
    return result


def budgeted(scenario: Scenario, lengths: Lengths, slots: int) -> Result:
    """C3PO++: generation stops at the budget, training follows, parked rollouts resume under the new weights."""
    pool = Pool(_rules(scenario, lengths, slots, scenario.c3po.retention))
    fleet, result = _fleet(scenario, slots), Result("c3po", slots, _peak(scenario), Ledger(lengths))
    book = result.ledger
    for step in range(scenario.iterations):
        before = _begin(scenario, result, fleet, step)
        base = fleet.generated()
        book.drop(pool.begin())
        _send(scenario, fleet, book, pool.refill())
        while not pool.exhausted and _advance(fleet, book, pool, base) == "ended":
            _send(scenario, fleet, book, pool.refill())
        _report(fleet, book, pool)
        fleet.clear()
        _train(scenario, result, fleet, before, book.train(pool.end().ids))
    return result


def overlapped(scenario: Scenario, lengths: Lengths, slots: int) -> Result:
    """Generation overlaps with training: it hands over a full batch and stays one batch ahead at most.

    The first token of a rollout of age a was sampled at most a + 1 versions before it is trained on, so unfinished
    rollouts are purged above `staleness` − 1; finished ones that waited too long for their group are dropped.
    """
    share = scenario.asynchronous.share
    bound = scenario.asynchronous.staleness
    cost = scenario.train
    slots = max(1, int(slots * share))
    # One batch ahead is its own limit; the pool's would stop an engine that here never waits.
    pool = Pool(replace(_rules(scenario, lengths, slots, bound - 1), train_capacity=0))
    fleet, result = _fleet(scenario, slots, share), Result("async", slots, _peak(scenario) * share, Ledger(lengths))
    book = result.ledger
    publish_at = math.inf
    for step in range(scenario.iterations):
        before = _begin(scenario, result, fleet, step, share)
        base = fleet.generated()
        purged = pool.begin()
        for id in purged:
            fleet.remove(id)
        book.drop(purged)
        _send(scenario, fleet, book, pool.refill())
        while not pool.exhausted:
            event = _advance(fleet, book, pool, base, publish_at)
            if event == "budget":
                break
            if event == "until":
                publish_at = _publish(scenario, fleet, book, share)
            else:
                _send(scenario, fleet, book, pool.refill())
        _report(fleet, book, pool)
        rollout_s = fleet.now - before.now
        batch = pool.end()
        if publish_at < math.inf:  # the trainer is still at the batch before
            fleet.pause(publish_at - fleet.now)
            publish_at = _publish(scenario, fleet, book, share)
        stale = [i for i in batch.ids if book.version - book.live[i].versions[0][0] > bound]
        book.drop(stale)
        trained = book.train(i for i in batch.ids if i not in set(stale))
        if trained:
            publish_at = fleet.now + cost.fixed_s + trained / (cost.tokens_s * (1 - share))
        _close(result, fleet, before, rollout_s, trained)
    return result


@dataclass(frozen=True)
class _Before:
    now: float
    busy: float
    generated: int


def _begin(scenario: Scenario, result: Result, fleet: Fleet, step: int, share: float = 1.0) -> _Before:
    result.ledger.counting = step >= scenario.warmup
    _change(scenario, result, fleet, step, share)
    if step == scenario.iterations - 1:
        fleet.trace = [(fleet.now, len(fleet))]
    return _Before(fleet.now, fleet.busy, result.ledger.generated)


def _change(scenario: Scenario, result: Result, fleet: Fleet, step: int, share: float) -> None:
    """Engines come or go; others go on with what those that go have in flight."""
    for engines in (count for at, count in scenario.engine.changes if at == step):
        book, moved = result.ledger, fleet.resize(engines * share)
        book.note(moved)
        for id in moved:
            _admit(scenario, fleet, book, id, -1)


def _train(scenario: Scenario, result: Result, fleet: Fleet, before: _Before, trained: int) -> None:
    """The machines train and publish; an empty batch costs nothing and makes no version."""
    rollout_s = fleet.now - before.now
    if trained:
        cost = scenario.train
        fleet.run_to(fleet.now + cost.fixed_s + trained / cost.tokens_s + cost.publish_s)
        result.ledger.version += 1
    _close(result, fleet, before, rollout_s, trained)


def _close(result: Result, fleet: Fleet, before: _Before, rollout_s: float, trained: int) -> None:
    book = result.ledger
    if book.counting:
        result.rows.append(
            Row(
                rollout_s=rollout_s,
                step_s=fleet.now - before.now,
                busy=fleet.busy - before.busy,
                generated=book.generated - before.generated,
                trained=trained,
            )
        )
    result.trace = [(at - before.now, n) for at, n in fleet.trace or []]


def _advance(
    fleet: Fleet, book: Ledger, pool: Pool, base: float, until: float = math.inf
) -> Literal["ended", "budget", "until"]:
    """Run to the next event: rollouts end (reported to the pool), the `generated` budget is reached, or it is `until`."""
    by_tokens = pool.rules.count == "generated"

    def left() -> int:
        return math.ceil(pool.rules.budget - (fleet.generated() - base) - 1e-6)

    full = fleet.when_generated(left()) if by_tokens else math.inf
    ends = fleet.next_end()
    if until <= min(ends, full):
        fleet.run_to(max(until, fleet.now))
        return "until"
    if full < ends:
        fleet.run_to(full)
        return "budget"
    done = fleet.finish_next()
    while fleet.next_end() <= fleet.now:  # in the same decode step of other engines
        done |= fleet.finish_next()
    book.note(done)
    pool.advance({}, done)
    return "budget" if by_tokens and left() <= 0 else "ended"


def _publish(scenario: Scenario, fleet: Fleet, book: Ledger, share: float) -> float:
    """New weights between decode steps of the rollouts in flight; the time of the next publication: none is due."""
    flying = fleet.tokens()
    book.note(flying)
    book.version += 1
    speed = scenario.engine.prefill_tokens_s * scenario.engine.engines * share
    again = sum(flying.values()) + len(flying) * scenario.lengths.prompt_tokens / scenario.rollout.samples
    fleet.stall(scenario.train.publish_s + (again / speed if speed and scenario.kv == "recompute" else 0.0))
    return math.inf


def _report(fleet: Fleet, book: Ledger, pool: Pool) -> None:
    progress = fleet.tokens()
    book.note(progress)
    pool.advance(progress, {})


def _send(scenario: Scenario, fleet: Fleet, book: Ledger, members: Sequence[Member]) -> None:
    for member in members:
        if member.id not in fleet:
            _admit(scenario, fleet, book, member.id, member.prompt)


def _admit(scenario: Scenario, fleet: Fleet, book: Ledger, id: int, source: int) -> None:
    """Start or resume a rollout of prompt `source`."""
    if id not in book.live:
        book.issue(id, source)
    life = book.live[id]
    if life.tokens and scenario.kv == "keep":
        fleet.admit(id, life.tokens, life.length, 0, scenario.engine.resume_s)
    else:
        once = 1 / scenario.rollout.samples  # a group computes its prompt once
        tokens = once * scenario.lengths.prompt_tokens + life.tokens
        fleet.admit(id, life.tokens, life.length, tokens, (once + (life.tokens > 0)) * scenario.engine.prefill_s)


def _fleet(scenario: Scenario, slots: int, share: float = 1.0) -> Fleet:
    """Engines with so many slots in all."""
    engine = scenario.engine
    size = engine.engines * share
    return Fleet(Curve(engine.curve), size, engine.groups, engine.prefill_tokens_s, slots / size)


def _peak(scenario: Scenario) -> float:
    return Curve(scenario.engine.curve).peak * scenario.engine.engines


def _rules(scenario: Scenario, lengths: Lengths, capacity: int, retention: int) -> PoolRules:
    work, c3po = scenario.rollout, scenario.c3po
    return PoolRules(
        budget=c3po.budget or max(1, round(work.prompts * work.samples * lengths.mean())),
        capacity=capacity,
        train_capacity=c3po.train_capacity,
        retention=retention,
        samples=work.samples,
        count=c3po.count,
        group=c3po.group,
    )
