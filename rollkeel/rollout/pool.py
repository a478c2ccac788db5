"""C3PO++ (Ring-1T report §2.3.3, Algorithm 1) as a pure decision: which rollouts start, resume, park, are purged, are trained.

`Pool` knows neither engine nor clock nor tensors. The real loop and the simulator tell it what was generated and do
what it answers; its whole state is JSON. One iteration is

    begin → (refill → one decode step → advance) until `exhausted` → end

A *member* is one rollout of a *group*; a group is one occurrence of a prompt. Ids of members and groups only grow.

    waiting ─refill→ running ─advance→ finished ─end→ trained
                     ↑     │ end            └discard→ discarded
               refill└ parked ─begin, age > σ→ purged          fail: any of the four → failed

Decisions that the paper leaves open are listed at `PoolRules`, `Pool.begin` and `Pool.end`.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Literal, final

from rollkeel.errors import BadInput, Corrupt
from rollkeel.rollout.members import GAUGES, LOST, STATUSES, TOTALS, UNFINISHED, Batch, Member, MemberStatus, PoolRules


@final
class Pool:
    """State and decisions of C3PO++. `next_prompt()` names the next fresh prompt; without it, prompts are 0, 1, 2, …

    With its own `next_prompt` a caller restores the position of that source itself (`prompts_consumed` says how many
    were taken); without, the pool's state is all there is.
    """

    def __init__(self, rules: PoolRules, next_prompt: Callable[[], int] | None = None) -> None:
        self.rules = rules
        self._next_prompt = next_prompt
        self.members: dict[int, Member] = {}
        """Members the pool still needs, by id: the unfinished, the finished, and with `group="wait"` the lost ones of
        groups that are not decided yet."""
        self.iteration = 0
        """Iterations begun."""
        self.spent = 0
        """Tokens counted against Φ in this iteration."""
        self._active = self._full = False
        self._next_id = self._next_group = 0
        self._returned: deque[int] = deque()
        self._totals: Counter[str] = Counter()
        self._before: Counter[str] = Counter()
        self._running = 0
        self._queue: list[tuple[int, int, int]] = []

    # One iteration

    def begin(self) -> list[int]:
        """Start an iteration; ids of the members purged now because their age exceeds σ, ascending.

        With `group="wait"`, groups without an unfinished member are then decided; a failed member counts as a purged one.
        No finished member: the prompt returns to the source, to be served before fresh ones, first in first out.
        One: every lost member is issued again and waits for a place in the engine. Two or more: complete, for `end`.
        This is the only moment of such decisions, so in one iteration a prompt is served and a place issued at most once.
        An iteration that finds a whole batch of Ω_train ready samples nothing: otherwise a Φ above what Ω_train takes would
        let finished rollouts pile up and grow old.
        """
        self._require(not self._active, "begin() inside an iteration", "call end() first")
        self._active = True
        self.iteration += 1
        self.spent = 0
        self._before = self._totals.copy()
        purged = [m for m in self.members.values() if m.status == "parked" and m.age > self.rules.retention]
        for m in purged:
            self._lose(m, "purged")
        if self.rules.group == "wait":
            self._decide_groups()
        capacity = self.rules.train_capacity
        self._full = 0 < capacity <= sum(map(len, self._complete().values()))
        self._rebuild()
        return sorted(m.id for m in purged)

    def refill(self) -> list[Member]:
        """Members to send to the engine now, marked running: as many as there are free places, none once exhausted.

        Parked ones first (oldest age, then id), then waiting ones (oldest group, then id), then returned prompts, then
        fresh ones. The members of a new group that find no place wait.
        """
        self._require(self._active, "refill() outside an iteration", "call begin() first")
        sent: list[Member] = []
        while self._running < self.rules.capacity and not self.exhausted:
            m = self._pop()
            self._totals["resumed" if m.status == "parked" else "started"] += 1
            m.status = "running"
            self._running += 1
            sent.append(m)
        return sent

    def advance(self, generated: Mapping[int, int], finished: Mapping[int, int]) -> None:
        """Report a decode step. Both map ids of running members to response tokens so far, earlier iterations included.

        generated: progress; members may be left out and reported later. finished: those that ended by EOS or the length
        limit, with their total length (they need not be in `generated`).

        With one decode step per call the budget is overshot by less than Ω_infer tokens (`generated`), or by less than
        the rollouts that finish in the last step (`finished`). `BadInput`, with nothing changed, if an id is not running
        or a count shrinks.
        """
        self._require(self._active, "advance() outside an iteration", "call begin() first")
        for reported in (generated, finished):
            for i, tokens in reported.items():
                self._check_progress(i, tokens)
        for i, tokens in generated.items():
            if finished.get(i, tokens) < tokens:
                raise BadInput(f"pool: rollout {i} finished with {finished[i]} tokens but has generated {tokens}")
        for reported in (generated, finished):
            for i, tokens in reported.items():
                m = self.members[i]
                self._spend("generated", int(tokens) - m.tokens)
                m.tokens = int(tokens)
        for i in finished:
            m = self.members[i]
            m.status = "finished"
            self._running -= 1
            self._totals["finished"] += 1
            self._spend("finished", m.tokens)

    def correct(self, id: int, tokens: int) -> None:
        """A running rollout has fewer tokens than was reported: a server was lost that had brought the rest. They count nowhere."""
        m = self.members[id]
        self._spend("generated", int(tokens) - m.tokens)
        m.tokens = int(tokens)

    @property
    def complete(self) -> dict[int, list[int]]:
        """Ids of the finished members of each group that may be trained, oldest group first."""
        return {g: [m.id for m in members] for g, members in self._complete().items()}

    def discard(self, group: int) -> None:
        """Drop a complete group from which nothing is learned. Its tokens, those of earlier iterations too, count no longer."""
        self._require(
            self._active and self.rules.group == "wait", "discard()", "it is for whole groups, inside an iteration"
        )
        members = self._complete()[group]
        tokens = sum(m.tokens for m in members)
        self._totals["discarded"] += len(members)
        self._totals["tokens_discarded"] += tokens
        self.spent = max(0, self.spent - tokens)
        self.members = {i: m for i, m in self.members.items() if m.group != group}

    @property
    def exhausted(self) -> bool:
        """The budget of this iteration is reached, or a whole batch was ready before it: interrupt what runs, call `end`."""
        return self._full or self.spent >= self.rules.budget

    @property
    def overshoot(self) -> int:
        """Tokens counted beyond Φ in this iteration."""
        return max(0, self.spent - self.rules.budget)

    def fail(self, id: int) -> None:
        """Drop a member after an engine or grader failure: like a purge for its group, but counted apart.

        Possible at any time until `end` hands the member to a batch, so grade before `end`. Tokens already counted
        against the budget stay counted.
        """
        m = self.members.get(id)
        if m is None or m.status in LOST:
            raise BadInput(
                f"pool: cannot fail rollout {id}: {'not in the pool' if m is None else 'already ' + m.status}"
            )
        self._lose(m, "failed")

    def end(self) -> Batch:
        """End the iteration, exhausted or not: what runs is parked, and everything that was ever sent ages by 1.

        `group="wait"`: complete groups are trained (no unfinished member, at least two finished); `"partial"`: all
        finished members. Oldest groups first, until the next group would exceed Ω_train; no later group overtakes it.
        What is trained leaves the pool.
        """
        self._require(self._active, "end() outside an iteration", "call begin() first")
        self._active = False
        chosen = self._choose()
        groups = {g: tuple(m.id for m in members) for g, members in chosen.items()}
        tokens = sum(m.tokens for members in chosen.values() for m in members)
        for members in chosen.values():
            for m in members:
                m.status = "trained"
        gone = {m.id for m in self.members.values() if m.group in chosen and m.status in ("trained", *LOST)}
        self.members = {i: m for i, m in self.members.items() if i not in gone}
        self._totals["trained"] += sum(map(len, groups.values()))
        self._totals["groups_trained"] += len(groups)
        self._totals["tokens_trained"] += tokens
        for m in self.members.values():
            if m.status == "running":
                m.status = "parked"
            if m.status in ("parked", "finished"):
                m.age += 1
        self._running, self._queue = 0, []
        return Batch(groups=groups, waiting=self._ids("finished"), parked=self._ids("parked"), tokens=tokens)

    # What is in it

    @property
    def counts(self) -> dict[str, int]:
        """Totals since the run began, and what is in the pool now.

        Totals: `issued` members = `started` (sent to the engine) + never sent; `resumed`, `finished`, `trained`, `discarded`,
        `purged`, `failed`, `reissued` members; `returned` prompts, `prompts_consumed` from the source, `groups`, `groups_trained`;
        `tokens_generated`, `tokens_finished`, `tokens_trained`, `tokens_discarded`, `tokens_purged`, `tokens_failed`.
        Now: `waiting`, `running`, `parked`, `held` (finished, not trained), `ready` (those of them in groups that can be
        trained), `queued_prompts`, tokens of each (`tokens_running`, `tokens_parked`, `tokens_held`), and the highest ages
        `age_max` (running and parked) and `held_age_max`.

        issued = waiting + running + parked + held + trained + discarded + purged + failed, and the same for tokens.
        """
        totals = {name: self._totals[name] for name in TOTALS}
        pool: Counter[str] = Counter()
        for m in self.members.values():
            place = "held" if m.status == "finished" else m.status
            pool[place] += 1
            pool["tokens_" + place] += m.tokens
            oldest = {"held": "held_age_max", "running": "age_max", "parked": "age_max"}.get(place)
            if oldest:
                pool[oldest] = max(pool[oldest], m.age)
        pool["ready"] = sum(map(len, self._complete().values()))
        pool["queued_prompts"] = len(self._returned)
        return totals | {name: pool[name] for name in GAUGES}

    @property
    def since_begin(self) -> dict[str, int]:
        """The totals of `counts` for the current or last iteration alone; its `begin` is part of it."""
        return {name: self._totals[name] - self._before[name] for name in TOTALS}

    def of(self, *statuses: MemberStatus) -> list[Member]:
        """Members with one of these statuses, by id."""
        return sorted((m for m in self.members.values() if m.status in statuses), key=lambda m: m.id)

    def state_dict(self) -> dict[str, Any]:
        """The whole state as JSON, at any moment."""
        return {
            "rules": asdict(self.rules),
            "iteration": self.iteration,
            "active": self._active,
            "full": self._full,
            "spent": self.spent,
            "next_id": self._next_id,
            "next_group": self._next_group,
            "returned": list(self._returned),
            "totals": dict(self._totals),
            "before": dict(self._before),
            "members": [dict(vars(m)) for m in self.of(*STATUSES)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, also under other sizes; `samples` and `group` decide over groups already begun.

        `BadInput` if those two differ, `Corrupt` if the state is incomplete; the pool is then unchanged.
        """
        try:
            old = PoolRules(**state["rules"])
            members = [Member(**m) for m in state["members"]]
            if not all(m.status in STATUSES for m in members):
                raise ValueError(f"unknown status in {sorted({m.status for m in members})}")
            numbers = {name: int(state[name]) for name in ("iteration", "spent", "next_id", "next_group")}
            active, full, returned = (
                bool(state["active"]),
                bool(state["full"]),
                deque(int(p) for p in state["returned"]),
            )
            totals, before = Counter(state["totals"]), Counter(state["before"])
        except (KeyError, TypeError, ValueError) as error:
            raise Corrupt(
                f"pool: expected a state written by state_dict(), got one that cannot be read: {error!r}"
            ) from error
        for name in ("samples", "group"):
            if getattr(old, name) != getattr(self.rules, name):
                raise BadInput(
                    f"pool: the saved groups were begun with {name}={getattr(old, name)}, got "
                    f"{getattr(self.rules, name)}; resume with the same {name}"
                )
        self.iteration, self.spent = numbers["iteration"], numbers["spent"]
        self._next_id, self._next_group = numbers["next_id"], numbers["next_group"]
        self._active, self._full = active, full
        self._returned = returned
        self._totals = totals
        self._before = before
        self.members = {m.id: m for m in members}
        self._rebuild()

    # Inside

    def _require(self, holds: bool, what: str, instead: str) -> None:
        if not holds:
            raise BadInput(f"pool: {what} (iteration {self.iteration}); {instead}")

    def _check_progress(self, id: int, tokens: int) -> None:
        m = self.members.get(id)
        if m is None or m.status != "running":
            raise BadInput(
                f"pool: expected ids of running rollouts, got {id}, which is {m.status if m else 'not in the pool'}"
            )
        if tokens < m.tokens:
            raise BadInput(f"pool: rollout {id} had {m.tokens} tokens, got {tokens}; report its whole length so far")

    def _spend(self, reading: str, tokens: int) -> None:
        self._totals["tokens_" + reading] += tokens
        if reading == self.rules.count:
            self.spent += tokens

    def _lose(self, m: Member, status: Literal["purged", "failed"]) -> None:
        self._running -= m.status == "running"
        m.status = status
        self._totals[status] += 1
        self._totals["tokens_" + status] += m.tokens
        if self.rules.group == "partial":
            del self.members[m.id]

    def _groups(self) -> dict[int, list[Member]]:
        """Members of each group in order of their places, oldest group first."""
        groups: dict[int, list[Member]] = {}
        for m in sorted(self.members.values(), key=lambda m: (m.group, m.member)):
            groups.setdefault(m.group, []).append(m)
        return groups

    def _decide_groups(self) -> None:
        for members in self._groups().values():
            finished = sum(m.status == "finished" for m in members)
            if finished > 1 or any(m.status in UNFINISHED for m in members):
                continue
            lost = [m for m in members if m.status in LOST]
            for m in lost:
                del self.members[m.id]
                if finished:
                    self._issue(m.group, m.member, m.prompt, m.issue + 1)
            if finished:
                self._totals["reissued"] += len(lost)
            else:
                self._returned.append(members[0].prompt)
                self._totals["returned"] += 1

    def _complete(self) -> dict[int, list[Member]]:
        """Finished members of each group that may be trained, oldest group first."""
        waits = self.rules.group == "wait"
        complete: dict[int, list[Member]] = {}
        for g, members in self._groups().items():
            finished = [m for m in members if m.status == "finished"]
            if len(finished) > waits and not (waits and any(m.status in UNFINISHED for m in members)):
                complete[g] = finished
        return complete

    def _choose(self) -> dict[int, list[Member]]:
        room = self.rules.train_capacity or len(self.members)
        chosen: dict[int, list[Member]] = {}
        for g, members in self._complete().items():
            room -= len(members)
            if room < 0:
                break
            chosen[g] = members
        return chosen

    def _issue(self, group: int, place: int, prompt: int, issue: int) -> Member:
        m = Member(id=self._next_id, group=group, member=place, prompt=prompt, issue=issue)
        self._next_id += 1
        self._totals["issued"] += 1
        self.members[m.id] = m
        return m

    def _pop(self) -> Member:
        """The next member to send; opens a new group when none is left."""
        while self._queue:
            m = self.members.get(heapq.heappop(self._queue)[2])
            if m is not None and m.status not in LOST:  # failed since it was queued
                return m
        prompt = self._draw_prompt()
        for place in range(self.rules.samples):
            heapq.heappush(self._queue, _turn(self._issue(self._next_group, place, prompt, 0)))
        self._next_group += 1
        self._totals["groups"] += 1
        return self.members[heapq.heappop(self._queue)[2]]

    def _draw_prompt(self) -> int:
        if self._returned:
            return self._returned.popleft()
        prompt = int(self._next_prompt()) if self._next_prompt else self._totals["prompts_consumed"]
        self._totals["prompts_consumed"] += 1
        return prompt

    def _rebuild(self) -> None:
        self._running = sum(m.status == "running" for m in self.members.values())
        self._queue = [_turn(m) for m in self.members.values() if m.status in ("parked", "waiting")]
        heapq.heapify(self._queue)

    def _ids(self, status: MemberStatus) -> tuple[int, ...]:
        return tuple(m.id for m in self.of(status))


def _turn(m: Member) -> tuple[int, int, int]:
    """Sort key of `Pool.refill`, with the id last."""
    return (0, -m.age, m.id) if m.status == "parked" else (1, m.group, m.id)
