"""One C3PO++ iteration by hand: the rollout phase must do exactly what the pool says, and keep every token it has.

The engine is a fake that samples one known token per step, so that steps can be counted on paper. Not covered: the pool's
own rules (tests/rollout/test_pool.py), real engines and the loop (tests/test_budgeted.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollkeel.errors import BadInput, Corrupt, EngineFailure, Interrupted
from rollkeel.rollout.budgeted import BudgetedRollouts, Partition, length_metrics, stepped
from rollkeel.rollout.pool import PoolRules
from rollkeel.rollout.state import pack_rollouts, unpack_rollouts
from rollkeel.train.state import load_state, save_state
from rollkeel.types import (
    Capabilities,
    GraderSpec,
    Prompt,
    Proof,
    Request,
    Rollout,
    SamplingParams,
    Segment,
    Status,
    TokenSpan,
    WeightUpdate,
)

SAMPLING = SamplingParams(max_new_tokens=16, stop_token_ids=(1,))


class Counting:
    """Samples token 100 + position; rollout `i` ends after `lengths[i]` tokens. `broken`: ids that fail in their first step."""

    def __init__(self, lengths: Mapping[int, int], broken: Sequence[int] = (), dead: bool = False) -> None:
        self.lengths, self.broken, self.dead, self.version, self.steps = lengths, broken, dead, 0, 0
        self.flying: dict[int, tuple[Request, int]] = {}
        self.done: list[Segment] = []
        self.capabilities = Capabilities(name="counting", dtype="fp32", max_length=64, returns_experts=True)

    def submit(self, requests: Sequence[Request]) -> None:
        self.flying |= {r.id: (r, 0) for r in requests}

    def advance(self, steps: int) -> list[Segment]:
        for _ in range(0 if self.dead else steps):
            self.steps += 1
            for i, (request, made) in list(self.flying.items()):
                self.flying[i] = request, made + 1
                if i in self.broken:
                    self._leave(i, Status.ENGINE_FAILURE)
                elif len(request.prefix) + made + 1 == self.lengths[i]:
                    self._leave(i, Status.FINISHED)
        done, self.done = sorted(self.done, key=lambda s: s.request_id), []
        return done

    def progress(self) -> dict[int, int]:
        return {i: len(r.prefix) + made for i, (r, made) in self.flying.items()}

    def interrupt(self, ids: Sequence[int] | None = None) -> None:
        for i in list(self.flying):
            self._leave(i, Status.INTERRUPTED)

    def _leave(self, i: int, status: Status) -> None:
        request, made = self.flying.pop(i)
        span = TokenSpan.empty() if status is Status.ENGINE_FAILURE else tokens(len(request.prefix), made, self.version)
        self.done.append(Segment(request_id=i, span=span, status=status, detail="broke" if i in self.broken else ""))

    def poll(self, timeout_s: float) -> list[Segment]:
        return self.advance(1)

    def update_weights(self, update: WeightUpdate) -> Proof:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Letters:
    """A tokenizer whose text is the number of its tokens."""

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return str(len(ids))


def tokens(start: int, count: int, version: int) -> TokenSpan:
    stamp = np.full(count, version, np.int64)
    return TokenSpan(
        token_ids=np.arange(start, start + count, dtype=np.int64) + 100,
        logprobs=np.full(count, -1.0 - version, np.float32),
        kept_mass=np.ones(count, np.float32),
        versions=stamp,
        kv_versions=stamp,
        experts=np.full((count, 2, 3), version, np.int16) if count else None,
    )


def prompt(index: int) -> Prompt:
    ids = np.array([3, index])
    spec = GraderSpec(name="exact")
    return Prompt(id=f"p{index}", index=index, text="", token_ids=ids, answer="", grader=spec, task="t")


def pooled(**rules: Any) -> BudgetedRollouts:
    wanted: dict[str, Any] = {"budget": 6, "capacity": 4, "retention": 1, "samples": 2, **rules}
    return BudgetedRollouts(PoolRules(**wanted), prompt)


def phase(state: BudgetedRollouts, engine: Counting, **more: Any) -> Partition:
    return state.sample(engine, SAMPLING, Letters(), deadline_s=60, **more)


def graded(partition: Partition) -> list[Rollout]:
    return [replace(r, reward=float(r.id)) for r in partition.ended if r.status.complete]


def test_two_iterations_by_hand() -> None:
    """Groups (0, 1), (2, 3), (4, 5), …; four at once; a budget of six finished tokens.

    Step 2 ends rollouts 0 and 1 (4 tokens), rollouts 4 and 5 take their places; step 3 ends rollout 2 (7 tokens, over).
    """
    state, engine = pooled(), Counting({0: 2, 1: 2, 2: 3, 3: 7, 4: 3, 5: 9, 6: 2, 7: 9, 8: 9, 9: 9})
    first = phase(state, engine)
    assert (first.steps, engine.steps) == (3, 3)
    assert [(r.id, len(r.span), r.status, r.text) for r in first.ended] == [
        (i, n, Status.FINISHED, str(n)) for i, n in ((0, 2), (1, 2), (2, 3))
    ]
    assert [(r.id, len(r.span), r.status) for r in first.parked] == [
        (i, n, Status.PARKED) for i, n in ((3, 3), (4, 1), (5, 1))
    ]
    assert [r.id for r in state.settle(graded(first))] == [0, 1]  # rollout 2 waits for 3
    metrics = state.metrics(first)
    assert metrics["rollout/budget_tokens"] == 7
    assert metrics["rollout/overshoot"] == 1
    assert metrics["rollout/generated_tokens"] == 12
    assert (metrics["pool/parked"], metrics["pool/held"], metrics["pool/started"]) == (3, 1, 6)
    # Step 2 of the next iteration ends 4 (3 tokens) and 6 (2); 7 goes on; step 4 ends 3 (7): 12 tokens.
    engine.version = 5
    second = phase(state, engine)
    assert [(r.id, len(r.span)) for r in second.ended] == [(3, 7), (4, 3), (6, 2)]
    assert second.ended[0].span.versions.tolist() == [0, 0, 0, 5, 5, 5, 5]
    assert second.ended[0].span.logprobs.tolist() == [-1, -1, -1, -6, -6, -6, -6]
    assert second.ended[0].span.token_ids.tolist() == list(range(100, 107))
    assert second.ended[0].prompt.index == 1
    chosen = state.settle(graded(second))
    assert [(r.id, r.reward) for r in chosen] == [(2, 2.0), (3, 3.0)]
    assert state.metrics(second)["pool/resumed"] == 3


class Judge:
    """Group 0 is all right; of others, the second member."""

    def grade(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        return [replace(r, reward=1.0 if r.group == 0 else float(r.member)) for r in rollouts]


@pytest.mark.parametrize(("rounds", "steps", "spent"), [(1, 3, 10), (2, 5, 10), (3, 5, 10)])
def test_what_equal_groups_took_of_a_budget_is_spent_again(rounds: int, steps: int, spent: int) -> None:
    """Steps 2 and 3 end rollouts 0 to 3: 10 of 8 tokens, and 6 without group 0. Then 6 and 7 enter, and end with step 5: 10 again, in
    groups that teach."""
    lengths = {0: 2, 1: 2, 2: 3, 3: 3, 4: 4, 5: 4, 6: 2, 7: 2, **dict.fromkeys(range(8, 40), 9)}
    state = pooled(budget=8)
    part = phase(state, Counting(lengths), grader=Judge(), rounds=rounds)
    assert (part.steps, state.pool.spent) == (steps, spent)
    assert [r.id for r in part.discarded] == ([] if rounds == 1 else [0, 1])
    assert part.rounds == min(rounds, 2)
    rest = [r for r in part.ended if r.id not in part.graded]
    chosen = state.settle([*Judge().grade(rest), *(r for r in part.ended if r.id in part.graded)])
    assert {r.group for r in chosen} == ({0, 1} if rounds == 1 else {1, 3})
    assert state.pool.counts["discarded"] == 2 * (rounds > 1)
    assert state.state_dict()["pool"]["totals"].get("tokens_discarded", 0) == 4 * (rounds > 1)


def test_a_generated_budget_ends_within_one_step() -> None:
    state = pooled(budget=10, count="generated")
    found = phase(state, Counting(dict.fromkeys(range(99), 50)))
    assert found.steps == 3  # 4, 8, 12 tokens
    assert [len(r.span) for r in found.parked] == [3] * 4


@pytest.mark.parametrize(
    ("budget", "count", "look", "asked"),
    [
        (110, "generated", 16, [16, 11, 1]),  # behind 108 tokens another step spends it
        (10, "generated", 16, [2, 1]),
        (110, "generated", 1, [1] * 28),
        (150, "finished", 10, [10, 10, 10, 7] + [1] * 13),  # behind 148 tokens all four may end and spend it
        (3, "finished", 16, [1] * 50),
    ],
)
def test_an_engine_that_is_asked_now_and_then_ends_in_the_same_step(
    budget: int, count: str, look: int, asked: list[int]
) -> None:
    """Steps that a device makes before anybody asks; what is sampled and parked is the same as with a look at every step."""
    lengths, longer = dict.fromkeys(range(99), 50), replace(SAMPLING, max_new_tokens=60)
    found = list[Partition]()
    for engine in (Counting(lengths), Counting(lengths)):
        seen = list[int]()
        own = engine.advance
        engine.advance = lambda steps, own=own, seen=seen: seen.append(steps) or own(steps)  # type: ignore[method-assign]
        engine.capabilities = replace(engine.capabilities, look=look if found else 1)
        found.append(pooled(budget=budget, count=count).sample(engine, longer, Letters(), deadline_s=60))
    assert [steps for steps in seen if steps] == asked
    one, other = found
    assert one.steps == other.steps == sum(asked)
    for name in ("ended", "parked"):
        mine, theirs = ([(r.id, r.span.token_ids.tolist()) for r in getattr(p, name)] for p in found)
        assert mine == theirs


@pytest.mark.parametrize("seed", range(5))
def test_a_budget_of_finished_tokens_ends_within_a_fiftieth_of_it(seed: int) -> None:
    """Rollouts of 1 to 59 tokens, eight at a time: what a device samples behind the end is few tokens beside the budget."""
    rng, longer = np.random.default_rng(seed), replace(SAMPLING, max_new_tokens=60)
    lengths, spent = {i: int(rng.integers(1, 60)) for i in range(999)}, list[int]()
    for look in (1, 16):
        engine = Counting(lengths)
        engine.capabilities = replace(engine.capabilities, look=look)
        state = pooled(budget=4000, capacity=8, count="finished")
        found = state.sample(engine, longer, Letters(), deadline_s=60)
        assert state.pool.spent >= 4000
        spent.append(sum(len(r.span) for r in [*found.ended, *found.parked]))
    assert spent[1] <= spent[0] + 0.02 * 4000 + 8 * 60


def test_places_of_what_ends_in_between_are_filled_at_the_next_look() -> None:
    """Rollouts of 10 tokens, four at a time, 16 steps between two looks: their places are empty for six of them."""
    engine = Counting(dict.fromkeys(range(99), 10))
    engine.capabilities = replace(engine.capabilities, look=16)
    found = phase(pooled(budget=100, capacity=4, count="generated"), engine)
    assert found.steps == 16 + 15 + 5  # 40 tokens, (100 − 40) / 4 steps that end 40 more, and (100 − 80) / 4
    assert [len(r.span) for r in [*found.ended, *found.parked]] == [10] * 8 + [5] * 4


def test_what_exceeds_its_retention_is_purged_with_what_it_had() -> None:
    state, engine = pooled(retention=0), Counting({0: 6, 1: 6, 2: 9, 3: 9, **dict.fromkeys(range(4, 40), 6)})
    first = phase(state, engine)
    assert [r.id for r in first.parked] == [2, 3]
    state.settle(graded(first))
    second = phase(state, engine)
    assert [(r.id, len(r.span)) for r in second.purged] == [(2, 6), (3, 6)]


def test_stopping_in_the_middle_puts_everything_back() -> None:
    state, engine = pooled(), Counting(dict.fromkeys(range(99), 5))
    state.settle(graded(phase(state, Counting({0: 2, 1: 2, 2: 3, 3: 7, 4: 3, 5: 9}))))
    before = state.state_dict()
    with pytest.raises(Interrupted):
        phase(state, engine, should_stop=lambda: engine.steps >= 2)
    assert engine.flying == {}
    again = state.state_dict()
    assert again["pool"] == before["pool"]
    assert again["rollouts"]["facts"] == before["rollouts"]["facts"]


def test_failures_are_dropped_checked_and_never_trained() -> None:
    engine = Counting(dict.fromkeys(range(99), 3), broken=[1, 2])
    state, seen = pooled(), list[list[tuple[int, Status]]]()
    found = phase(state, engine, check=lambda rollouts: seen.append([(r.id, r.status) for r in rollouts]))
    failed = [(1, Status.ENGINE_FAILURE), (2, Status.ENGINE_FAILURE)]
    assert seen == [[*failed, (0, Status.PARKED), (3, Status.PARKED)]]
    assert [(r.id, r.detail) for r in found.ended if not r.status.complete] == [(1, "broke"), (2, "broke")]
    assert state.settle(graded(found)) == []  # each group has one finished member: its place is issued again
    assert state.metrics(found)["pool/failed"] == 2
    second = phase(state, Counting(dict.fromkeys(range(99), 3)))
    assert state.pool.since_begin["reissued"] == 2
    assert {(r.group, r.member) for r in second.parked} == {(0, 1), (1, 0)}
    assert [r.id for r in state.settle(graded(second))] == [4, 5]
    third = phase(state, Counting(dict.fromkeys(range(99), 3)))
    broken = {r.id for r in third.ended if r.group == 0}
    assert broken
    judged = [replace(r, reward=None, status=Status.GRADER_FAILURE) if r.id in broken else r for r in graded(third)]
    chosen = state.settle(judged)
    assert {r.group for r in chosen} == {1}  # of group 0 one member is left, and it is asked again
    assert state.pool.since_begin["failed"] == len(broken)


def test_a_silent_engine_is_an_error_that_says_what_was_awaited() -> None:
    engine = Counting({}, dead=True)
    with pytest.raises(EngineFailure, match=r"engine counting: no token for .* waiting for 4 rollouts") as failed:
        pooled().sample(engine, SAMPLING, Letters(), deadline_s=0.0)
    assert "\n" not in str(failed.value)
    with pytest.raises(BadInput, match="cannot be advanced by decode steps"):
        stepped(object())


def test_a_state_on_disk_continues_like_the_one_in_memory(tmp_path: Path) -> None:
    lengths = {i: 1 + (5 * i + 3) % 11 for i in range(400)}
    here, there = pooled(), pooled()
    for iteration in range(12):
        engines = [Counting(lengths), Counting(lengths)]
        found = []
        for state, engine in zip((here, there), engines, strict=True):
            engine.version = iteration
            part = phase(state, engine)
            found.append((part, state.settle(graded(part)), state.metrics(part)))
        assert found[0][2] == found[1][2]
        for mine, theirs in zip(found[0][1], found[1][1], strict=True):
            assert (mine.id, mine.reward, mine.text) == (theirs.id, theirs.reward, theirs.text)
            assert mine.span.versions.tolist() == theirs.span.versions.tolist()
            assert mine.span.experts is not None
            assert theirs.span.experts is not None
            assert mine.span.experts.dtype == theirs.span.experts.dtype == np.int16
            assert np.array_equal(mine.span.experts, theirs.span.experts)
        save_state(tmp_path / str(iteration), there.state_dict())
        there = pooled()
        there.load_state_dict(load_state(tmp_path / str(iteration)))
    assert here.pool.counts["purged"] > 0
    assert here.pool.counts["trained"] > 20


def test_rollouts_travel_through_a_file_unchanged(tmp_path: Path) -> None:
    base = Rollout(
        id=7, group=3, member=1, prompt=prompt(4), span=tokens(0, 3, 2).append(tokens(3, 2, 9)), status=Status.PARKED,
        sampling=replace(SAMPLING, top_p=0.1 + 0.2), engine="counting", dtype="fp32",
    )  # fmt: skip
    some = [
        base,
        replace(base, id=8, span=TokenSpan.empty()),
        replace(
            base, id=10, span=replace(tokens(0, 2, 1), prompt_experts=np.arange(30, dtype=np.int16).reshape(5, 2, 3))
        ),
        replace(base, id=9, reward=1 / 3, text="ä", span=tokens(0, 1, 1)),
    ]
    save_state(tmp_path, pack_rollouts(some))
    state = load_state(tmp_path)
    for a, b in zip(some, unpack_rollouts(state, prompt), strict=True):
        assert replace(a, span=b.span, prompt=b.prompt) == b
        assert b.prompt.id == "p4"
        for name in TokenSpan.__dataclass_fields__:
            mine, theirs = getattr(a.span, name), getattr(b.span, name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine.dtype == theirs.dtype
                np.testing.assert_array_equal(mine, theirs)
    with pytest.raises(BadInput, match="rollout 7: the data source has another prompt at index 4"):
        unpack_rollouts(state, lambda index: prompt(index + 1))
    state["tokens"]["versions"] = state["tokens"]["versions"][:-1]
    with pytest.raises(Corrupt, match="rollout 9: versions ends after 0 of 1 tokens"):
        unpack_rollouts(state, prompt)
    assert unpack_rollouts(pack_rollouts([]), prompt) == []


def test_lengths_by_hand() -> None:
    """Limit 16: ranges end at 4, 8, 12. Finished 2, 5, 6; parked 9, 13; purged 5, 16."""
    found = length_metrics([2, 5, 6], [9, 13], [5, 16], 16)
    assert found == {
        "rollout/finished_length_mean": pytest.approx(13 / 3),
        "rollout/issued_length_mean": 7.0,
        "pool/purge_rate_by_length/0-25": 0.0,
        "pool/purge_rate_by_length/25-50": pytest.approx(1 / 3),
        "pool/purge_rate_by_length/75-100": 1.0,
    }
    assert length_metrics([], [], [], 16) == {}
