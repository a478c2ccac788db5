"""C3PO++ on a real engine (Ring-1T report §2.3.3, Algorithm 1): `Pool` decides, this module does what it says.

    begin ─▶ submit what the pool sends ─▶ one decode step ─▶ tell the pool ─▶ … budget spent ─▶ interrupt, park ─▶ settle
                       ▲                                          │
                       └──────────────────────────────────────────┘

The embedded engine's clock is decode steps, so process timing cannot change a run; a server's is the chunks that its streams
bring. An unfinished rollout keeps its tokens with their
log-probs and versions, and the next iteration resumes it. Its KV is computed again under the new weights, or with
`engine.kv=keep` leaves the engine with it and comes back: a resumed run batches the same rollouts in the same slots.
An episode (`rollkeel.rollout.episodes`) is a rollout of several turns: between two decode steps the environments of turns that
ended are waited for, and the next turns enter the engine. Every count is of tokens that the policy sampled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import numpy as np

from rollkeel.errors import BadInput, EngineFailure, Interrupted
from rollkeel.host import within
from rollkeel.protocols import Grader, SteppedEngine
from rollkeel.rollout.collect import begin, collect, extended, heard_from, hung, request_of, unbegun
from rollkeel.rollout.episodes import Gather, Table, answers, table_of
from rollkeel.rollout.pool import Member, Pool, PoolRules
from rollkeel.rollout.state import pack_kv, pack_rollouts, unpack_kv, unpack_rollouts
from rollkeel.types import KeptKV, Prompt, Rollout, SamplingParams, Segment, Status

GAUGES = ("parked", "held", "ready", "waiting", "queued_prompts", "age_max", "held_age_max")
SLACK = 0.02
"""Of a budget of finished tokens: the most that is sampled behind its end before a device is asked."""
BUCKETS = 4
"""Parts of `max_new_tokens` by which purge rates are reported."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """What the rollout phase of one iteration did."""

    ended: Sequence[Rollout]
    """Finished, or failed in the engine; ungraded, by id."""
    parked: Sequence[Rollout]
    """Interrupted by the end of the budget, by id."""
    purged: Sequence[Rollout]
    """Given up when the iteration began, with what they had."""
    steps: int
    """Decode steps; of a server, chunks waited for."""
    rounds: int
    """How often the budget was spent: more than once where groups were discarded."""
    graded: frozenset[int]
    """Of what ended, graded already."""
    discarded: Sequence[Rollout]
    """Complete groups whose rewards are all equal, in place of which others were sampled."""


@final
class BudgetedRollouts:
    """The pool with the rollouts behind its members: everything that one iteration hands to the next."""

    def __init__(
        self,
        rules: PoolRules,
        prompt: Callable[[int], Prompt],
        useless: Callable[[Sequence[Rollout]], None] = lambda rollouts: None,
    ) -> None:
        """`prompt(index)` looks a prompt up in the data source; `useless` hears of the groups that dynamic sampling drops, before
        others begin in their place."""
        self.pool = Pool(rules)
        self._prompt = lru_cache(maxsize=4096)(prompt)
        self._useless = useless
        self._rollouts: dict[int, Rollout] = {}
        """Parked rollouts, and finished ones whose group is not complete, by id."""
        self._kv: dict[int, KeptKV] = {}
        """What parked rollouts took along, by id."""

    def sample(
        self,
        engine: SteppedEngine,
        sampling: SamplingParams,
        tokenizer: Any,
        *,
        deadline_s: float,
        should_stop: Callable[[], bool] = lambda: False,
        check: Callable[[Sequence[Rollout]], Any] = lambda rollouts: None,
        grader: Grader | None = None,
        gather: Gather = collect,
        rounds: int = 1,
    ) -> Partition:
        """The rollout phase of an iteration: sample until the budget is spent, then park what runs. Follow with `settle`.

        `deadline_s`: longest silence, in which no rollout ends and none gains a token; then `EngineFailure`. `should_stop`
        is asked whenever the engine was; then everything is put back as it was and `Interrupted` raised. `check` sees
        all rollouts of the iteration whenever the engine failed one, and may raise. `grader` begins on each rollout as it ends.
        `gather` says whether prompts are answered in one turn or played. With `rounds` above 1, `grader` grades what ended when
        the budget is spent, complete groups of equal rewards leave the pool, and what they took of the budget is spent again.
        """
        before = self.pool.state_dict(), dict(self._rollouts), dict(self._kv)
        purged = [self._rollouts.pop(i) for i in self.pool.begin()]
        for rollout in purged:
            self._kv.pop(rollout.id, None)
        phase = _Phase(self.pool, engine, tokenizer, grader, table_of(gather, engine, tokenizer))
        try:
            while not self.pool.exhausted:
                phase.send([self._rollout(m, engine, sampling) for m in self.pool.refill()], self._kv)
                with within(deadline_s, hung(engine, deadline_s, f"a decode step of {len(phase.running)} rollouts")):
                    segments = phase.step(phase.ahead())
                if phase.take(segments, should_stop):
                    check([*phase.ended.values(), *phase.running.values()])
                phase.watch(deadline_s)
                if should_stop():
                    raise Interrupted("stopped while sampling; the step is repeated on resume")
                if self.pool.exhausted and phase.rounds < rounds:
                    self._discard(phase)
            parked = phase.park(should_stop)
        except Interrupted:
            engine.interrupt()
            engine.advance(0)
            self._put_back(*before)
            raise
        finally:
            phase.table.close()
        self._rollouts |= parked
        self._kv |= phase.kv
        ended = [phase.ended[i] for i in sorted(phase.ended)]
        return Partition(
            ended=ended,
            parked=list(parked.values()),
            purged=purged,
            steps=phase.steps,
            rounds=phase.rounds,
            graded=frozenset(phase.graded),
            discarded=phase.discarded,
        )

    def _put_back(self, pool: dict[str, Any], rollouts: dict[int, Rollout], kv: dict[int, KeptKV]) -> None:
        """Before the iteration. A mixture may fill its slots with other prompts when the step is repeated."""
        self.pool.load_state_dict(pool)
        self._rollouts, self._kv = rollouts, kv
        self._prompt.cache_clear()

    def _discard(self, phase: _Phase) -> None:
        """Dynamic sampling: drop the groups that are complete and have nothing to teach."""
        known, dropped = self._rollouts | phase.grade(), list[Rollout]()
        for group, ids in self.pool.complete.items():
            rewards = {known[i].reward for i in ids}
            if len(rewards) == 1 and None not in rewards:
                self.pool.discard(group)
                dropped += [known[i] for i in ids]
        phase.discarded += dropped
        self._useless(dropped)
        phase.rounds += not self.pool.exhausted

    def settle(self, graded: Sequence[Rollout]) -> list[Rollout]:
        """End the iteration: `graded` are its finished rollouts, as the grader returned them. Rollouts to train on now,
        whole groups by age, with `group="partial"` whatever finished. The others stay."""
        for rollout in graded:
            self._rollouts[rollout.id] = rollout
            if rollout.reward is None:
                self.pool.fail(rollout.id)
        batch = self.pool.end()
        chosen = [self._rollouts[i] for i in batch.ids]
        kept = {*batch.waiting, *batch.parked}
        self._rollouts = {i: r for i, r in self._rollouts.items() if i in kept}
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """Pool and rollouts, for `train.state.save_state`. Between iterations only."""
        rollouts = pack_rollouts(list(self._rollouts.values()))
        return {"pool": self.pool.state_dict(), "rollouts": rollouts, "kv": pack_kv(self._kv)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`. Raises `BadInput` when the data or the rules of groups are others."""
        self.pool.load_state_dict(state["pool"])
        self._rollouts = {r.id: r for r in unpack_rollouts(state["rollouts"], self._prompt)}
        self._kv = unpack_kv(state["kv"])

    def metrics(self, partition: Partition) -> dict[str, float]:
        """`rollout/…` and `pool/…` of the iteration that `settle` ended."""
        now, done = self.pool.counts, self.pool.since_begin
        seen = [*partition.ended, *partition.parked, *partition.purged]
        limit = max((r.sampling.max_new_tokens for r in seen), default=1)
        ended = [r for r in partition.ended if r.status.complete]
        groups = ([r.span.own_count for r in some] for some in (ended, partition.parked, partition.purged))
        finished, parked, purged = groups
        lengths = length_metrics(finished, parked, purged, limit)
        return {
            "rollout/budget_tokens": float(self.pool.spent),
            "rollout/overshoot": float(self.pool.overshoot),
            "rollout/generated_tokens": float(done["tokens_generated"]),
            "rollout/decode_steps": float(partition.steps),
            **{f"pool/{name}": float(now[name]) for name in GAUGES},
            **{
                f"pool/{name}": float(done[name])
                for name in ("started", "resumed", "finished", "purged", "failed", "reissued", "returned")
            },
            **lengths,
        }

    def _rollout(self, member: Member, engine: SteppedEngine, sampling: SamplingParams) -> Rollout:
        """The parked rollout of a member, or an empty one."""
        if member.id in self._rollouts:
            return self._rollouts[member.id]
        prompt = self._prompt(member.prompt)
        return unbegun(member.id, member.group, member.member, prompt, sampling, engine.capabilities)


class _Phase:
    """One rollout phase: what is in the engine, and what came out of it."""

    def __init__(self, pool: Pool, engine: SteppedEngine, tokenizer: Any, grader: Grader | None, table: Table) -> None:
        self.pool = pool
        self.engine = engine
        self.tokenizer = tokenizer
        self.grader = grader
        self.table = table
        self.running: dict[int, Rollout] = {}
        self.ended: dict[int, Rollout] = {}
        self.kv: dict[int, KeptKV] = {}
        """Of what was parked, where the engine keeps it."""
        self.graded: set[int] = set()
        self.discarded: list[Rollout] = []
        self.steps, self.rounds = 0, 1
        self._heard, self._seen = time.monotonic(), -1

    def send(self, rollouts: Sequence[Rollout], kv: dict[int, KeptKV]) -> None:
        """Hand rollouts to the engine, behind what they have; takes their KV out of `kv`."""
        if not rollouts:
            return
        asked = [self.table.asked(r) for r in rollouts]
        self.running |= {r.id: r for r in asked}
        self.engine.submit([request_of(r, kv.pop(r.id, None)) for r in asked])

    def ahead(self) -> int:
        """Decode steps that can be made at once: as many as the engine likes, while the budget cannot end before the last of them. One of
        finished tokens may, where they are few beside it: by `SLACK` of it. What ends in between, a whole batch too, is seen then,
        and its places stay empty until then."""
        most, rules = self.engine.capabilities.look, self.pool.rules
        if most == 1 or self.table.busy:
            return 1
        running, left = max(1, len(self.running)), rules.budget - self.pool.spent
        if rules.count == "generated":
            return max(1, min(most, left // running))
        left -= sum(self.engine.progress().values())  # if all of them were to end
        return max(1, min(most, max(left, int(SLACK * rules.budget)) // running))

    def step(self, steps: int) -> list[Segment]:
        """So many decode steps."""
        with heard_from(self.engine):
            segments = self.engine.advance(steps)
        self.steps += steps
        self._heard = time.monotonic() if segments else self._heard
        return segments

    def take(self, segments: Sequence[Segment], should_stop: Callable[[], bool]) -> bool:
        """File what left the engine, and report the step to the pool. Episodes whose turn ended go on. True if a rollout failed."""
        failed = self._file(segments)
        if self.table.busy:
            answered = answers(self.table, should_stop)
            failed |= self._end([r for r in answered if r.status is not Status.PARKED])
            self.send([r for r in answered if r.status is Status.PARKED], {})
            self._heard = time.monotonic()
        if self.pool.rules.count == "generated":
            other = {i: len(r.span) - r.span.own_count for i, r in self.running.items()}
            made = self.engine.progress()
            self._report({i: made[i] - other[i] for i in other if i in made}, {})
        return failed

    def grade(self) -> dict[int, Rollout]:
        """Grade what ended since the last time. All that ended, by id."""
        new = [r for r in self.ended.values() if r.status.complete and r.id not in self.graded]
        assert self.grader is not None
        self.ended |= {r.id: r for r in self.grader.grade(new)}
        self.graded |= {r.id for r in new}
        self._heard = time.monotonic()
        return self.ended

    def watch(self, deadline_s: float) -> None:
        """Raise `EngineFailure` when nothing ended and nothing grew for `deadline_s`."""
        now = time.monotonic()
        if not self.running or now - self._heard <= deadline_s:
            return
        seen = sum(self.engine.progress().values())
        if seen == self._seen:
            raise EngineFailure(
                f"engine {self.engine.capabilities.name}: no token for {now - self._heard:.0f} s while waiting for"
                f" {len(self.running)} rollouts (engine.deadline_s={deadline_s:g})"
            )
        self._heard, self._seen = now, seen

    def park(self, should_stop: Callable[[], bool]) -> dict[int, Rollout]:
        """Take everything out of the engine; parked rollouts by id, with all they have."""
        self.engine.interrupt()
        with heard_from(self.engine):
            segments = self.engine.advance(0)
        self._file(segments)
        answered = answers(self.table, should_stop)
        self._end([self.table.park(r) if r.status is Status.PARKED else r for r in answered])
        if self.running:
            raise EngineFailure(
                f"engine {self.engine.capabilities.name}: {len(self.running)} interrupted rollouts did not come back"
            )
        parked = {i: self.ended[i] for i in sorted(self.ended) if self.ended[i].status is Status.PARKED}
        self.ended = {i: r for i, r in self.ended.items() if i not in parked}
        self._report({i: r.span.own_count for i, r in parked.items()}, {})
        return parked

    def _file(self, segments: Sequence[Segment]) -> bool:
        """What left the engine, to its environment or to the end. True if a rollout failed."""
        left: list[Rollout] = []
        for segment in segments:
            turn = extended(self.running.pop(segment.request_id, None), segment, self.tokenizer, self.engine)
            if segment.kv is not None and turn.status is Status.PARKED:
                self.kv[turn.id] = segment.kv
            if (rollout := self.table.take(turn)) is not None:
                left.append(rollout)
        return self._end(left)

    def _end(self, rollouts: Sequence[Rollout]) -> bool:
        """Rollouts that are done, or parked; what ended is reported to the pool. True if one failed."""
        failed, finished = False, {}
        for done in rollouts:
            if done.status.complete:
                begin(self.grader, [done])
                finished[done.id] = done.span.own_count
            elif done.status is not Status.PARKED:
                self.pool.fail(done.id)
                failed = True
            self.ended[done.id] = done
        self._report({}, finished)
        return failed

    def _report(self, generated: dict[int, int], finished: dict[int, int]) -> None:
        """See `Pool.advance`. A server that was lost may have less of a rollout than it told before."""
        for i, tokens in (generated | finished).items():
            if tokens < self.pool.members[i].tokens:
                self.pool.correct(i, tokens)
        self.pool.advance(generated, finished)


def length_metrics(
    finished: Sequence[int], parked: Sequence[int], purged: Sequence[int], limit: int
) -> dict[str, float]:
    """What stopping on tokens does to lengths (tokens of rollouts that finished, were parked, were purged).

    `rollout/finished_length_mean` against `rollout/issued_length_mean`, over all that were in the engine, those that are
    parked with what they have so far: short answers finish first, so the former is the smaller one while long ones wait.
    `pool/purge_rate_by_length/<from>-<to>`: of rollouts that left for good with a length in that range of percent of
    `limit`, the share that was purged.
    """
    out: dict[str, float] = {}
    if finished:
        out["rollout/finished_length_mean"] = float(np.mean(finished))
    if finished or parked:
        out["rollout/issued_length_mean"] = float(np.mean([*finished, *parked]))
    width = 100 // BUCKETS
    for bucket in range(BUCKETS):
        gone, done = (sum(_bucket(n, limit) == bucket for n in lengths) for lengths in (purged, finished))
        if gone + done:
            out[f"pool/purge_rate_by_length/{bucket * width}-{(bucket + 1) * width}"] = gone / (gone + done)
    return out


def _bucket(length: int, limit: int) -> int:
    return min(BUCKETS * length // max(limit, 1), BUCKETS - 1)


def stepped(engine: Any) -> SteppedEngine:
    """`engine`, if it can be advanced by decode steps; `BadInput` otherwise."""
    if not isinstance(engine, SteppedEngine):
        raise BadInput(
            f"run.loop=budgeted: engine {type(engine).__name__} cannot be advanced by decode steps; use engine.kind=local"
        )
    return engine
