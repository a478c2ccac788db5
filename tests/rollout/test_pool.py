"""A scheduler that loses, repeats or starves rollouts biases what is trained without any error, so every step is audited.

10,000 random schedules run against an independent ledger; group rules, limits and orders against tables worked out by
hand. Not covered: engines, spans of tokens, checkpoint files (tests/test_budgeted.py), and speed-ups (the simulator).
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_ledger import Ledger

from rollkeel.errors import BadInput, Corrupt
from rollkeel.rollout.pool import Batch, Member, Pool, PoolRules


def rules(**changes: Any) -> PoolRules:
    base: dict[str, Any] = {"budget": 10, "capacity": 4, "retention": 2, "samples": 2, "train_capacity": 0}
    return PoolRules(**(base | changes))


def reloaded(pool: Pool, new: PoolRules | None = None) -> Pool:
    other = Pool(new or pool.rules)
    other.load_state_dict(json.loads(json.dumps(pool.state_dict())))
    return other


# Random schedules


def random_rules(rng: random.Random) -> PoolRules:
    group = rng.choice(("wait", "partial"))
    samples = rng.randint(2 if group == "wait" else 1, 4)
    return PoolRules(
        budget=rng.randint(1, 16), capacity=rng.randint(1, 6), retention=rng.randint(0, 3), samples=samples,
        train_capacity=rng.choice((0, 0, samples, samples + 1, 2 * samples)), count=rng.choice(("finished", "generated")),
        group=group,
    )  # fmt: skip


def fail_some(pool: Pool, ledger: Ledger, rng: random.Random) -> None:
    alive = pool.of("waiting", "running", "parked", "finished")
    if not alive:
        return
    m = rng.choice(alive)
    if m.status == "waiting":  # never sent, so the ledger does not know its id yet
        place = ledger.groups[m.group][m.member]
        place.id, ledger.at[m.id] = m.id, place
        ledger.tally["unsent"] += 1
    ledger.fail(m.id)
    pool.fail(m.id)


def correct_some(pool: Pool, ledger: Ledger, rng: random.Random) -> None:
    """A server is lost that had brought a rollout's last tokens."""
    told = [p for p in ledger.having("running") if p.tokens > 0]
    if told:
        p = rng.choice(told)
        assert p.id is not None
        tokens = rng.randrange(p.tokens)
        pool.correct(p.id, tokens)
        ledger.correct(p.id, tokens)


def discard_some(pool: Pool, ledger: Ledger, rng: random.Random) -> None:
    """A group's rewards are all equal."""
    if pool.complete and pool.rules.group == "wait":
        group = rng.choice(list(pool.complete))
        pool.discard(group)
        ledger.discard(group)


def step(pool: Pool, ledger: Ledger, rng: random.Random, lengths: dict[int, int], tail: float) -> None:
    """One decode step: a token for each that runs; lengths are drawn when a rollout is first seen, 1 … 12, long-tailed."""
    generated: dict[int, int] = {}
    finished: dict[int, int] = {}
    for p in ledger.having("running"):
        assert p.id is not None
        length = lengths.setdefault(p.id, min(12, 1 + int(rng.expovariate(tail))))
        (finished if p.tokens + 1 >= length else generated)[p.id] = p.tokens + 1
    assert len(generated) + len(finished) <= ledger.rules.capacity
    pool.advance(generated, finished)
    ledger.advance(generated, finished)


FULL = [0]
"""Iterations that found a whole batch ready, in this process."""


def run_schedule(chosen: PoolRules, rng: random.Random, reloads: float = 0.02, iterations: int = 4) -> Pool:
    """Run a schedule under audit, with failures and detours through JSON at random moments (`reloads` per step)."""
    pool, ledger = Pool(chosen), Ledger(chosen)
    lengths: dict[int, int] = {}
    detours = random.Random(1)
    tail, failures, full = rng.uniform(0.1, 0.5), rng.choice((0.0, 0.0, 0.05, 0.4)), 0
    for _ in range(iterations):
        ledger.begin(pool.begin())
        for _ in range(40):
            if pool.exhausted or rng.random() < 0.005:  # a loop may also end an iteration early
                break
            if rng.random() < failures:
                fail_some(pool, ledger, rng)
            pool = reloaded(pool) if detours.random() < reloads else pool
            ledger.refill(pool.refill(), pool.exhausted)
            pool = reloaded(pool) if detours.random() < reloads else pool
            if rng.random() < failures / 4 and not ledger.full:
                discard_some(pool, ledger, rng)
            if rng.random() < failures / 4:
                correct_some(pool, ledger, rng)
            step(pool, ledger, rng, lengths, tail)
            assert chosen.count == "finished" or pool.overshoot < chosen.capacity
        assert pool.exhausted == (ledger.full or pool.spent >= chosen.budget)
        full += ledger.full
        assert not (ledger.full and pool.spent)
        assert (pool.spent, pool.overshoot) == (ledger.spent, max(0, ledger.spent - chosen.budget))
        if pool.exhausted:
            ledger.refill(pool.refill(), True)
        if rng.random() < failures:
            fail_some(pool, ledger, rng)  # a grader
        pool = reloaded(pool) if detours.random() < reloads else pool
        ledger.end(pool.end())
        ledger.conserves(pool)
    FULL[0] += full
    return pool


@pytest.mark.usually("0", "5")
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_random_schedules_keep_every_invariant(part: int) -> None:
    """Each rollout ends once; budget, σ and capacity hold; no token is lost or trained twice; groups as DESIGN.md says."""
    seen: Counter[str] = Counter()
    for seed in range(1000 * part, 1000 * (part + 1)):
        rng = random.Random(seed)
        chosen = random_rules(rng)
        try:
            seen += Counter(run_schedule(chosen, rng).counts)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}, {chosen}") from error
    assert min(seen[k] for k in ("trained", "purged", "failed", "reissued", "returned", "discarded")) > 100, seen
    assert FULL[0] > 20


@st.composite
def any_rules(draw: st.DrawFn) -> PoolRules:
    group = draw(st.sampled_from(("wait", "partial")))
    samples = draw(st.integers(2 if group == "wait" else 1, 5))
    return PoolRules(
        budget=draw(st.integers(1, 60)), capacity=draw(st.integers(1, 12)), retention=draw(st.integers(0, 4)),
        samples=samples, train_capacity=draw(st.sampled_from((0, samples, 2 * samples + 1))),
        count=draw(st.sampled_from(("finished", "generated"))), group=group,
    )  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(any_rules(), st.integers(0, 2**32))
def test_schedules_of_any_size_keep_every_invariant(chosen: PoolRules, seed: int) -> None:
    run_schedule(chosen, random.Random(seed), iterations=7)


@pytest.mark.parametrize("part", range(2))
def test_a_detour_through_json_at_every_moment_changes_nothing(part: int) -> None:
    for seed in range(100 * part, 100 * (part + 1)):
        rng = random.Random(seed)
        chosen, rest = random_rules(rng), rng.getstate()
        ends = []
        for reloads in (0.0, 1.0):
            rng.setstate(rest)
            pool = run_schedule(chosen, rng, reloads)
            ends.append((pool.state_dict(), pool.counts, pool.since_begin))
        assert ends[0] == ends[1], seed


@pytest.mark.parametrize("count", ["finished", "generated"])
def test_groups_begun_and_not_complete_stay_bounded(count: str) -> None:
    """A new group opens only when all others run: with nothing lost, at most Ω_infer incomplete ones, for ever."""
    for seed in range(20):
        rng = random.Random(seed)
        chosen = rules(retention=99, samples=3, count=count)
        pool, ledger = Pool(chosen), Ledger(chosen)
        lengths: dict[int, int] = {}
        for _ in range(30):
            ledger.begin(pool.begin())
            while not pool.exhausted:
                ledger.refill(pool.refill(), False)
                step(pool, ledger, rng, lengths, 0.1)
            ledger.end(pool.end())
            assert len(ledger.groups) <= pool.rules.capacity
        assert pool.counts["groups_trained"] > 10


@pytest.mark.parametrize("group", ["wait", "partial"])
def test_what_is_ready_stays_bounded_when_training_takes_less_than_is_made(group: str) -> None:
    """Φ of 60 tokens is some ten rollouts of which Ω_train takes six: without back-pressure four more would wait each time."""
    chosen, rng = (
        rules(budget=60, train_capacity=6, capacity=12, retention=99, samples=3, group=group),
        random.Random(5),
    )
    pool, ledger, most, sampled = Pool(chosen), Ledger(chosen), 0, 0
    lengths: dict[int, int] = {}
    for _ in range(60):
        ledger.begin(pool.begin())
        assert pool.exhausted == (pool.counts["ready"] >= 6)
        sampled += not pool.exhausted
        while not pool.exhausted:
            ledger.refill(pool.refill(), False)
            step(pool, ledger, rng, lengths, 0.2)
        ledger.end(pool.end())
        ledger.conserves(pool)
        most = max(most, pool.counts["ready"])
    assert most < 6 + 60 // 2
    assert 20 < sampled < 55


# Group rules, by hand


def places(sent: list[Member]) -> list[tuple[int, int, int, int]]:
    """(group, prompt, place, issue) of what is sent."""
    return [(m.group, m.prompt, m.member, m.issue) for m in sent]


def end_as(pool: Pool, outcomes: dict[int, str]) -> Batch:
    """End an iteration in which members finish with 2 tokens (F), fail (X), or go on running with 1 token (P)."""
    pool.advance(dict.fromkeys(outcomes, 1), {i: 2 for i, how in outcomes.items() if how == "F"})
    for i, how in outcomes.items():
        if how == "X":
            pool.fail(i)
    return pool.end()


NEW = [(1, 1, 0, 0), (1, 1, 1, 0), (1, 1, 2, 0)]  # group 1: a fresh prompt
BACK = [(1, 0, 0, 0), (1, 0, 1, 0), (1, 0, 2, 0)]  # group 1: prompt 0 once more
WAIT_TABLE = {
    # how the members end: (trained in iteration 1, in iteration 2, sent in iteration 2)
    "FFF": ((0, 1, 2), (), NEW),
    "FFX": ((0, 1), (), NEW),
    "XFF": ((1, 2), (), NEW),
    "FFP": ((), (0, 1), NEW),
    "PFF": ((), (1, 2), NEW),
    "FPP": ((), (), [(0, 0, 1, 1), (0, 0, 2, 1), NEW[0]]),
    "PFX": ((), (), [(0, 0, 0, 1), (0, 0, 2, 1), NEW[0]]),
    "XXF": ((), (), [(0, 0, 0, 1), (0, 0, 1, 1), NEW[0]]),
    "PPP": ((), (), BACK),
    "PXP": ((), (), BACK),
    "XXX": ((), (), BACK),
}


@pytest.mark.parametrize("outcome", WAIT_TABLE)
def test_a_waiting_group_is_trained_completed_or_returned(outcome: str) -> None:
    first, second, sent = WAIT_TABLE[outcome]
    pool = Pool(rules(samples=3, capacity=3, retention=0, budget=100))
    assert pool.begin() == []
    assert places(pool.refill()) == [(0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 2, 0)]
    assert end_as(pool, dict(enumerate(outcome))).ids == first
    assert pool.begin() == [i for i, how in enumerate(outcome) if how == "P"]
    again = pool.refill()
    assert places(again) == sent
    assert [m.id for m in again] == [3, 4, 5]
    assert [m.tokens for m in again] == [0, 0, 0]
    assert pool.end().ids == second
    lost = 3 - outcome.count("F")
    now = pool.counts
    assert now["reissued"] == (lost if outcome.count("F") == 1 else 0)
    assert now["returned"] == (lost == 3)
    assert (now["purged"], now["failed"]) == (outcome.count("P"), outcome.count("X"))
    assert (now["tokens_purged"], now["tokens_failed"]) == (outcome.count("P"), outcome.count("X"))
    assert now["prompts_consumed"] == (1 if lost == 3 else 2)


@pytest.mark.parametrize("outcome", WAIT_TABLE)
def test_partial_groups_train_what_finished_and_bring_nothing_back(outcome: str) -> None:
    pool = Pool(rules(samples=3, capacity=3, retention=0, budget=100, group="partial"))
    pool.begin()
    pool.refill()
    batch = end_as(pool, dict(enumerate(outcome)))
    assert batch.ids == tuple(i for i, how in enumerate(outcome) if how == "F")
    assert batch.waiting == ()
    assert pool.begin() == [i for i, how in enumerate(outcome) if how == "P"]
    assert places(pool.refill()) == NEW
    assert (pool.counts["reissued"], pool.counts["returned"]) == (0, 0)


def test_members_of_a_partial_group_that_finish_later_are_trained_later() -> None:
    pool = Pool(rules(samples=2, capacity=2, group="partial", budget=100))
    pool.begin()
    pool.refill()
    assert end_as(pool, {0: "P", 1: "F"}).groups == {0: (1,)}
    pool.begin()
    assert [m.id for m in pool.refill()] == [0, 2]
    assert end_as(pool, {0: "F"}).groups == {0: (0,)}


def test_members_issued_again_compete_for_places_and_can_be_issued_again() -> None:
    """Places 1 and 2 are lost with one finished; they need two of two places, are lost again, and get issue 2."""
    pool = Pool(rules(samples=3, capacity=2, retention=0, budget=100))
    pool.begin()
    pool.refill()
    end_as(pool, {0: "F", 1: "P"})  # place 2 was never sent: it waits, and has not aged
    assert pool.begin() == [1]
    assert places(pool.refill()) == [(0, 0, 2, 0), (1, 1, 0, 0)]  # member 2 can still finish: not decided yet
    end_as(pool, {2: "X", 3: "P"})
    assert pool.begin() == [3]
    assert places(pool.refill()) == [(0, 0, 1, 1), (0, 0, 2, 1)]  # in front of group 1, whose members 4 and 5 wait
    assert pool.counts["running"] == 2
    assert pool.counts["waiting"] == 2
    end_as(pool, {6: "P", 7: "P"})
    assert pool.begin() == [6, 7]
    assert places(pool.refill()) == [(0, 0, 1, 2), (0, 0, 2, 2)]
    assert pool.counts["held_age_max"] == 3  # member 0 finished three iterations ago
    assert end_as(pool, {8: "F", 9: "F"}).groups == {0: (0, 8, 9)}


def test_a_finished_member_whose_grader_fails_counts_as_lost() -> None:
    pool = Pool(rules(samples=2, capacity=2, budget=4))
    pool.begin()
    pool.refill()
    pool.advance({}, {0: 2, 1: 2})
    pool.fail(1)
    assert pool.exhausted
    assert pool.end().ids == ()
    pool.begin()
    assert places(pool.refill()) == [(0, 0, 1, 1), (1, 1, 0, 0)]
    pool.fail(2)
    assert pool.of("failed") == [pool.members[2]]
    pool.end()
    pool.fail(0)  # the last one, between iterations: now nothing is left of the group
    pool.begin()
    assert places(pool.refill()) == [(1, 1, 0, 0), (1, 1, 1, 0)]
    pool.fail(3)
    pool.fail(4)
    assert places(pool.refill()) == [(2, 0, 0, 0), (2, 0, 1, 0)]  # prompt 0; prompt 1 returns with the next begin


def test_returned_prompts_come_first_in_first_out_and_once_per_iteration() -> None:
    pool = Pool(rules(samples=2, capacity=4, retention=0, budget=100))
    pool.begin()
    pool.refill()
    for i in range(4):
        pool.fail(i)
    assert [m.prompt for m in pool.refill()] == [2, 2, 3, 3]  # not 0 and 1: a broken prompt must not spin
    pool.end()
    pool.begin()
    assert pool.counts["returned"] == 4
    assert pool.counts["queued_prompts"] == 4
    assert [m.prompt for m in pool.refill()] == [0, 0, 1, 1]
    pool.advance({}, {8: 1, 9: 1, 10: 1, 11: 1})
    assert [m.prompt for m in pool.refill()] == [2, 2, 3, 3]
    pool.advance({}, {12: 1, 13: 1})
    assert [m.prompt for m in pool.refill()] == [4, 4]
    assert pool.counts["prompts_consumed"] == 5


# Limits, by hand


@pytest.mark.parametrize("retention", [0, 1, 2, 5])
def test_a_rollout_runs_in_sigma_plus_one_iterations_and_is_then_purged(retention: int) -> None:
    pool = Pool(rules(retention=retention, capacity=1, budget=100))
    for ran in range(retention + 1):
        assert pool.begin() == []
        assert [(m.id, m.age, m.tokens) for m in pool.refill()] == [(0, ran, ran)]
        pool.advance({0: ran + 1}, {})
        assert pool.end().parked == (0,)
        assert pool.counts["age_max"] == ran + 1
    assert pool.begin() == [0]
    assert [(m.id, m.age) for m in pool.refill()] == [
        (1, 0)
    ]  # the other of its group waited all the time, without ageing
    assert pool.counts["tokens_purged"] == retention + 1


def test_finished_members_that_wait_grow_old_without_being_purged() -> None:
    pool = Pool(rules(retention=3, capacity=2, budget=100))
    pool.begin()
    pool.refill()
    end_as(pool, {0: "F", 1: "P"})
    for age in (1, 2, 3):
        assert pool.counts["held_age_max"] == age
        assert pool.begin() == []
        pool.refill()
        pool.end()
    assert (pool.counts["held"], pool.counts["ready"], pool.counts["tokens_held"]) == (1, 0, 2)
    assert pool.begin() == [1]
    assert pool.members[0].age == 4
    assert pool.members[0].status == "finished"


def finish_groups(pool: Pool, sizes: list[int]) -> None:
    """Finish `size` members of each new group and fail the rest."""
    sent = pool.refill()
    for g in sorted({m.group for m in sent}):
        mine = [m for m in sent if m.group == g]
        pool.advance({}, {m.id: 1 for m in mine[: sizes[g]]})
        for m in mine[sizes[g] :]:
            pool.fail(m.id)


def test_a_full_batch_leaves_the_youngest_groups_waiting() -> None:
    pool = Pool(rules(samples=2, capacity=6, train_capacity=5, budget=6))
    pool.begin()
    finish_groups(pool, [2, 2, 2])
    assert pool.counts["ready"] == 6
    batch = pool.end()
    assert (dict(batch.groups), batch.waiting, batch.tokens) == ({0: (0, 1), 1: (2, 3)}, (4, 5), 4)
    assert (pool.counts["ready"], pool.counts["held"], pool.counts["held_age_max"]) == (2, 2, 1)
    pool.begin()
    assert dict(pool.end().groups) == {2: (4, 5)}
    pool.begin()
    assert dict(pool.end().groups) == {}


def test_a_small_group_does_not_overtake_one_that_does_not_fit() -> None:
    pool = Pool(rules(samples=3, capacity=9, train_capacity=5, budget=100))
    pool.begin()
    finish_groups(pool, [3, 3, 2])
    assert list(pool.end().groups) == [0]
    pool.begin()
    assert list(pool.end().groups) == [1, 2]


def test_the_older_group_is_trained_first_also_when_it_completes_later() -> None:
    pool = Pool(rules(samples=2, capacity=6, train_capacity=3, budget=100))
    pool.begin()
    pool.refill()
    assert list(end_as(pool, {0: "P", 1: "F", 2: "F", 3: "F", 4: "F", 5: "F"}).groups) == [1]
    pool.begin()
    pool.refill()
    assert list(end_as(pool, {0: "F"}).groups) == [0]  # group 2 has been ready for longer
    pool.begin()
    assert list(pool.end().groups) == [2]


def decode(pool: Pool, lengths: dict[int, int], default: int = 3) -> int:
    """Decode until the budget is spent; the number of steps."""
    steps = 0
    while not pool.exhausted:
        pool.refill()
        now = {m.id: m.tokens + 1 for m in pool.of("running")}
        done = {i: n for i, n in now.items() if n >= lengths.get(i, default)}
        pool.advance({i: n for i, n in now.items() if i not in done}, done)
        steps += 1
    return steps


def test_a_finished_budget_counts_whole_lengths_and_a_generated_one_counts_tokens() -> None:
    """Two places; rollout 1 has 8 tokens, all others 3.

    finished, Φ = 10: rollouts 0, 2 end with steps 3, 6 (6 tokens), rollout 1 with step 8 (14). Rollout 3 has 2 tokens
    then and counts with all 3 of them next time: 3, then two more of 3 per 3 steps.
    generated, Φ = 10: two tokens a step are 5 steps; rollouts 1 and 2 have 5 and 2 tokens.
    """
    pool = Pool(rules(samples=1, group="partial", capacity=2, budget=10))
    pool.begin()
    assert decode(pool, {1: 8}) == 8
    assert (pool.spent, pool.overshoot) == (14, 4)
    assert pool.end().ids == (0, 1, 2)
    pool.begin()
    assert decode(pool, {}) == 6  # step 1: 3; step 3: 6 (rollout 4); step 4: 9 (5); step 6: 12 (6)
    assert (pool.spent, pool.overshoot) == (12, 2)
    assert pool.since_begin["tokens_generated"] == 12
    assert pool.since_begin["tokens_finished"] == 12

    pool = Pool(rules(samples=1, group="partial", capacity=2, budget=10, count="generated"))
    pool.begin()
    assert decode(pool, {1: 8}) == 5
    assert (pool.spent, pool.overshoot) == (10, 0)
    assert (pool.end().ids, pool.counts["tokens_parked"]) == ((0,), 7)
    pool.begin()
    assert decode(pool, {1: 8}) == 5  # the 7 tokens of before are not counted again
    assert (pool.since_begin["tokens_generated"], pool.since_begin["tokens_finished"]) == (10, 8 + 3 + 3)


def test_places_go_to_the_oldest_parked_then_waiting_then_returned_then_fresh() -> None:
    pool = Pool(rules(samples=2, capacity=2, retention=1, budget=100))
    pool.begin()
    pool.refill()
    end_as(pool, {0: "X", 1: "P"})  # member 1 has age 1
    pool.begin()
    assert [m.id for m in pool.refill()] == [1, 2]
    end_as(pool, {1: "P", 2: "P"})  # ages 2 and 1
    assert pool.begin() == [1]  # group 0 is wholly lost: prompt 0 returns; member 3 of group 1 waits
    assert [(m.id, m.prompt) for m in pool.refill()] == [(2, 1), (3, 1)]
    pool.fail(2)
    pool.advance({}, {3: 1})
    assert [(m.id, m.prompt) for m in pool.refill()] == [(4, 0), (5, 0)]
    pool.advance({}, {4: 1, 5: 1})
    assert [(m.id, m.prompt) for m in pool.refill()] == [(6, 2), (7, 2)]


def test_the_oldest_parked_rollout_resumes_first_when_places_become_fewer() -> None:
    pool = Pool(rules(capacity=2, budget=100, retention=9))
    pool.begin()
    pool.refill()
    end_as(pool, {0: "F", 1: "P"})
    pool.begin()
    pool.refill()
    end_as(pool, {1: "P", 2: "P"})
    pool = reloaded(pool, rules(capacity=1, budget=100, retention=9))
    pool.begin()
    assert [(m.id, m.age) for m in pool.refill()] == [(1, 2)]
    pool.end()
    assert [m.age for m in pool.of("parked")] == [3, 2]  # ageing does not depend on a place


def test_prompts_come_from_the_source_in_its_order() -> None:
    source = iter([7, 3, 9])
    pool = Pool(rules(capacity=5, retention=0), lambda: np.int64(next(source)))  # pyright: ignore[reportArgumentType]
    pool.begin()
    assert [m.prompt for m in pool.refill()] == [7, 7, 3, 3, 9]
    assert pool.counts["prompts_consumed"] == 3
    json.dumps(pool.state_dict())


def test_numbers_of_numpy_survive_json() -> None:
    pool = Pool(rules(count="generated"))
    pool.begin()
    pool.refill()
    pool.advance({np.int64(0): np.int64(2)}, {1: np.int32(3)})  # pyright: ignore[reportArgumentType]
    assert reloaded(pool).state_dict() == pool.state_dict()


# Refusals


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"budget": 0}, "budget must be an integer ≥ 1, got 0"),
        ({"budget": 1.5}, "budget must be an integer"),
        ({"capacity": 0}, "capacity must be"),
        ({"capacity": True}, "capacity must be"),
        ({"retention": -1}, "retention must be an integer ≥ 0"),
        ({"train_capacity": -1}, "train_capacity must be"),
        ({"samples": 1}, "group=wait needs samples ≥ 2, got 1"),
        ({"samples": 0, "group": "partial"}, "samples must be"),
        ({"samples": 4, "train_capacity": 3}, "train_capacity must be 0 .* ≥ samples=4, got 3"),
        ({"count": "tokens"}, "count must be one of finished, generated, got 'tokens'"),
        ({"group": "all"}, "group must be one of wait, partial, got 'all'"),
    ],
)
def test_rules_that_could_never_train_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        rules(**changes)


@pytest.mark.parametrize(
    ("generated", "finished", "says"),
    [
        ({9: 1}, {}, "expected ids of running rollouts, got 9, which is not in the pool"),
        ({0: 2}, {}, "got 0, which is finished"),
        ({}, {4: 1}, "got 4, which is not in the pool"),
        ({1: 2}, {}, "rollout 1 had 3 tokens, got 2"),
        ({1: 5}, {1: 4}, "finished with 4 tokens but has generated 5"),
        ({1: 9}, {2: -1}, "rollout 2 had 0 tokens, got -1"),
    ],
)
def test_a_report_that_cannot_be_true_changes_nothing(
    generated: dict[int, int], finished: dict[int, int], says: str
) -> None:
    pool = Pool(rules(count="generated", budget=100))
    pool.begin()
    pool.refill()
    pool.advance({1: 3}, {0: 4})
    before = pool.state_dict()
    with pytest.raises(BadInput, match=says):
        pool.advance(generated, finished)
    assert pool.state_dict() == before


def test_calls_out_of_turn_are_refused() -> None:
    pool = Pool(rules())
    for call in (pool.refill, pool.end, lambda: pool.advance({}, {})):
        with pytest.raises(BadInput, match=r"outside an iteration \(iteration 0\); call begin\(\) first"):
            call()
    pool.begin()
    with pytest.raises(BadInput, match=r"inside an iteration .* call end\(\) first"):
        pool.begin()
    pool.refill()
    pool.fail(0)
    for id, says in ((0, "already failed"), (77, "not in the pool")):
        with pytest.raises(BadInput, match=says):
            pool.fail(id)


def test_a_trained_rollout_cannot_fail() -> None:
    pool = Pool(rules())
    pool.begin()
    pool.refill()
    assert end_as(pool, {0: "F", 1: "F"}).ids == (0, 1)
    with pytest.raises(BadInput, match="cannot fail rollout 1: not in the pool"):
        pool.fail(1)


def test_a_state_loads_under_other_sizes_but_not_under_other_groups() -> None:
    pool = run_schedule(rules(), random.Random(3))
    assert reloaded(pool, rules(budget=99, capacity=1, retention=0, count="generated", train_capacity=2)).of("parked")
    for changes in ({"samples": 3}, {"group": "partial"}):
        with pytest.raises(BadInput, match="resume with the same"):
            reloaded(pool, rules(**changes))


@pytest.mark.parametrize("damage", [{"members": [{"id": 0}]}, {"rules": {}}, {"spent": "x"}, {"returned": None}])
def test_a_damaged_state_is_refused_and_leaves_the_pool_as_it_was(damage: dict[str, Any]) -> None:
    pool = run_schedule(rules(), random.Random(4))
    before = pool.state_dict()
    for broken in (before | damage, {k: v for k, v in before.items() if k not in damage}):
        with pytest.raises(Corrupt, match="cannot be read"):
            pool.load_state_dict(broken)
    unknown = before | {"members": [m | {"status": "lost"} for m in before["members"]]}
    with pytest.raises(Corrupt, match="unknown status"):
        pool.load_state_dict(unknown)
    assert pool.state_dict() == before
