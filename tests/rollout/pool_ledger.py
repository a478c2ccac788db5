"""An independent account of what a C3PO++ pool must do, and a log of what one was told and answered, for tests of pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rollkeel.rollout.pool import Batch, Member, Pool, PoolRules


@dataclass
class Place:
    """One place of a group as the outside world sees it."""

    issue: int = 0
    id: int | None = None  # known once it is sent
    status: str = "waiting"
    tokens: int = 0
    age: int = 0


@dataclass
class Ledger:
    """Checks each answer of a pool against the rules, from what was sent and reported alone."""

    rules: PoolRules
    groups: dict[int, list[Place]] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)
    returned: list[int] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    fresh: int = 0
    spent: int = 0
    full: bool = False
    """Whether the iteration began with a whole batch ready."""
    last_step: int = 0
    """Tokens counted since places were last filled."""
    ended: dict[int, str] = field(default_factory=dict)
    at: dict[int, Place] = field(default_factory=dict)
    tally: Counter[str] = field(default_factory=Counter)

    def having(self, *statuses: str) -> list[Place]:
        return [p for p in self.at.values() if p.status in statuses]

    def close(self, place: Place, how: str) -> None:
        assert place.id is not None
        assert place.id not in self.ended, "a rollout ended twice"
        self.ended[place.id] = how
        place.status = how
        self.tally[how] += 1
        self.tally["tokens_" + how] += place.tokens
        del self.at[place.id]

    def begin(self, purged: list[int]) -> None:
        self.spent = self.last_step = 0
        self.served = []
        assert purged == sorted(
            p.id for p in self.having("parked") if p.id is not None and p.age > self.rules.retention
        )
        for i in purged:
            self.close(self.at[i], "purged")
        for g in sorted(self.groups) if self.rules.group == "wait" else ():
            places = self.groups[g]
            kinds = Counter(p.status for p in places)
            if kinds["waiting"] + kinds["parked"] == 0 and kinds["finished"] <= 1:
                if kinds["finished"] == 0:
                    self.returned.append(self.prompts[g])
                    del self.groups[g]
                else:
                    self.groups[g] = [p if p.status == "finished" else Place(p.issue + 1) for p in places]
                    self.tally["reissued"] += len(places) - 1
        ready, most = 0, self.rules.train_capacity
        for places in self.groups.values():
            kinds = Counter(p.status for p in places)
            whole = kinds["waiting"] + kinds["parked"] == 0 and kinds["finished"] >= 2
            ready += kinds["finished"] if whole or self.rules.group == "partial" else 0
        self.full = most > 0 and ready >= most

    def refill(self, sent: list[Member], exhausted: bool) -> None:
        self.last_step = self.last_step if exhausted else 0
        before = len(self.having("running"))
        assert before + len(sent) == (before if exhausted else self.rules.capacity)
        parked = sorted(self.having("parked"), key=lambda p: (-p.age, p.id))
        expected = [p.id for p in parked[: len(sent)]]
        assert [m.id for m in sent[: len(expected)]] == expected, "parked first: oldest age, then id"
        rest = sent[len(expected) :]
        assert [m.group for m in rest] == sorted(m.group for m in rest)
        for m in rest:
            if m.group not in self.groups:
                assert not any(p.status == "waiting" for places in self.groups.values() for p in places), (
                    "new before waiting"
                )
                self.open(m)
            self.send(m)
        for m in sent:
            place = self.at[m.id]
            place.status = "running"
            assert m.age == place.age <= self.rules.retention
            assert (m.tokens, m.status) == (place.tokens, "running")

    def open(self, m: Member) -> None:
        if self.returned:
            assert m.prompt == self.returned.pop(0), "returned prompts first, first in first out"
        else:
            assert m.prompt == self.fresh
            self.fresh += 1
        assert m.prompt not in self.served, "a prompt was served twice in one iteration"
        self.served.append(m.prompt)
        assert m.group > max(self.prompts, default=-1)
        self.groups[m.group] = [Place() for _ in range(self.rules.samples)]
        self.prompts[m.group] = m.prompt

    def send(self, m: Member) -> None:
        assert m.id not in self.ended.keys() | self.at.keys(), "ids are never used again"
        place = self.groups[m.group][m.member]
        assert (place.status, place.issue, self.prompts[m.group]) == ("waiting", m.issue, m.prompt)
        place.id, place.status = m.id, "running"
        self.at[m.id] = place

    def advance(self, generated: dict[int, int], finished: dict[int, int]) -> None:
        for i, tokens in (generated | finished).items():
            new = tokens - self.at[i].tokens
            self.at[i].tokens = tokens
            self.tally["generated"] += new
            counted = new if self.rules.count == "generated" else tokens if i in finished else 0
            self.last_step += counted
            self.spent += counted
        for i in finished:
            self.at[i].status = "finished"

    def correct(self, i: int, tokens: int) -> None:
        assert self.at[i].status == "running"
        lost = self.at[i].tokens - tokens
        assert lost > 0
        self.at[i].tokens = tokens
        self.tally["generated"] -= lost
        self.spent -= lost if self.rules.count == "generated" else 0

    def discard(self, group: int) -> None:
        places = self.groups.pop(group)
        done = [p for p in places if p.status == "finished"]
        assert self.rules.group == "wait"
        assert len(done) >= 2
        assert all(p.status in ("finished", "purged", "failed") for p in places)
        self.spent = max(0, self.spent - sum(p.tokens for p in done))
        for p in done:
            self.close(p, "discarded")

    def fail(self, i: int) -> None:
        self.close(self.at[i], "failed")

    def end(self, batch: Batch) -> None:
        over = self.spent - self.rules.budget
        assert over < max(1, self.last_step), "the budget was reached before the last step"
        expected = self.batch()
        assert dict(batch.groups) == expected
        assert list(batch.groups) == list(expected)
        assert batch.tokens == sum(self.at[i].tokens for i in batch.ids)
        for i in batch.ids:
            self.close(self.at[i], "trained")
        for g in expected if self.rules.group == "wait" else ():
            del self.groups[g]
        for p in self.having("running"):
            p.status = "parked"
        for p in self.at.values():
            p.age += 1
        assert list(batch.parked) == sorted(i for i, p in self.at.items() if p.status == "parked")
        assert list(batch.waiting) == sorted(i for i, p in self.at.items() if p.status == "finished")

    def batch(self) -> dict[int, tuple[int, ...]]:
        room, chosen = self.rules.train_capacity or 10**9, {}
        for g, places in sorted(self.groups.items()):
            done = tuple(p.id for p in places if p.status == "finished" and p.id is not None)
            if self.rules.group == "wait":
                settled = all(p.status in ("finished", "purged", "failed") for p in places)
                done = done if settled and len(done) >= 2 else ()
            if len(done) > room:
                break
            if done:
                room -= len(done)
                chosen[g] = done
        return chosen

    def conserves(self, pool: Pool) -> None:
        """Every rollout and every token is in exactly one place, and the pool says the same."""
        c = pool.counts
        states = {"running": "running", "parked": "parked", "finished": "held"}
        for mine, theirs in states.items():
            assert c[theirs] == len(self.having(mine))
            assert c["tokens_" + theirs] == sum(p.tokens for p in self.having(mine))
        for how in ("trained", "discarded", "purged", "failed"):
            assert (c[how], c["tokens_" + how]) == (self.tally[how], self.tally["tokens_" + how])
        gone = c["trained"] + c["discarded"] + c["purged"] + c["failed"]
        assert c["issued"] == gone + c["waiting"] + c["running"] + c["parked"] + c["held"]
        assert c["started"] == len(self.ended) + len(self.at) - self.tally["unsent"]
        assert c["tokens_generated"] == self.tally["generated"] == sum(c["tokens_" + k] for k in TOKENS)
        assert (c["prompts_consumed"], c["queued_prompts"]) == (self.fresh, len(self.returned))
        assert c["reissued"] == self.tally["reissued"]
        undecided = [p.id for places in self.groups.values() for p in places if p.status in ("purged", "failed")]
        kept = sorted(i for i in undecided if i is not None) if self.rules.group == "wait" else []
        assert [m.id for m in pool.of("purged", "failed")] == kept, "the pool must not grow with what is gone"
        assert c["held_age_max"] == max((p.age for p in self.having("finished")), default=0)
        assert c["age_max"] == max((p.age for p in self.having("running", "parked")), default=0)


TOKENS = ("trained", "discarded", "purged", "failed", "running", "parked", "held")


class Logged:
    """A pool that keeps its event log: each call, with its answer as it was then."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.log: list[tuple[str, tuple[Any, ...], Any]] = []

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.pool, name)
        if name not in ("begin", "refill", "advance", "correct", "discard", "fail", "end"):
            return member
        return lambda *given: self._noted(name, member, given)

    def _noted(self, name: str, call: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        answer = call(*given)
        if name == "refill":
            given, kept = (self.pool.exhausted,), [replace(m) for m in answer]
        else:
            kept = answer
        self.log.append((name, given, kept))
        return answer

    def audit(self) -> Ledger:
        """Hold the log against the ledger: every rule of the pool, at every event."""
        ledger = Ledger(self.pool.rules)
        for name, given, answer in self.log:
            told = {"refill": (answer, *given), "begin": (answer,), "end": (answer,)}.get(name, given)
            getattr(ledger, name)(*told)
        ledger.conserves(self.pool)
        return ledger
