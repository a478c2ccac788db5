"""C3PO++ on a real engine (Ring-1T report §2.3.3, Algorithm 1): `Pool` decides, this module does what it says.

    begin ─▶ submit what the pool sends ─▶ one decode step ─▶ tell the pool ─▶ … budget spent ─▶ interrupt, park ─▶ settle
                       ▲                                          │
                       └──────────────────────────────────────────┘

The engine's clock is decode steps, so process timing cannot change a run. An unfinished rollout keeps its tokens with their
log-probs and versions, and the next iteration resumes it. Its KV is computed again under the new weights, or with
`engine.kv=keep` leaves the engine with it and comes back: a resumed run batches the same rollouts in the same slots.
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
from rollkeel.rollout.collect import begin, extended, heard_from, hung, request_of, unbegun
from rollkeel.rollout.pool import Member, Pool, PoolRules
from rollkeel.rollout.state import pack_kv, pack_rollouts, unpack_kv, unpack_rollouts
from rollkeel.types import KeptKV, Prompt, Rollout, SamplingParams, Segment, Status

GAUGES = ("parked", "held", "ready", "waiting", "queued_prompts", "age_max", "held_age_max")
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
    """Decode steps."""


@final
class BudgetedRollouts:
    """The pool with the rollouts behind its members: everything that one iteration hands to the next."""

    def __init__(self, rules: PoolRules, prompt: Callable[[int], Prompt]) -> None:
        """`prompt(index)` looks a prompt up in the data source."""
        self.pool = Pool(rules)
        self._prompt = lru_cache(maxsize=4096)(prompt)
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
    ) -> Partition:
        """The rollout phase of an iteration: sample until the budget is spent, then park what runs. Follow with `settle`.

        `deadline_s`: longest silence, in which no rollout ends and none gains a token; then `EngineFailure`. `should_stop`
        is asked after every decode step; then everything is put back as it was and `Interrupted` raised. `check` sees
        all rollouts of the iteration whenever the engine failed one, and may raise. `grader` begins on each rollout as it ends.
        """
        before = self.pool.state_dict(), dict(self._rollouts), dict(self._kv)
        purged = [self._rollouts.pop(i) for i in self.pool.begin()]
        for rollout in purged:
            self._kv.pop(rollout.id, None)
        phase = _Phase(self.pool, engine, tokenizer, grader)
        while not self.pool.exhausted:
            phase.send([self._rollout(m, engine, sampling) for m in self.pool.refill()], self._kv)
            with within(deadline_s, hung(engine, deadline_s, f"a decode step of {len(phase.running)} rollouts")):
                failed = phase.step()
            if failed:
                check([*phase.ended.values(), *phase.running.values()])
            phase.watch(deadline_s)
            if should_stop():
                engine.interrupt()
                engine.advance(0)
                self.pool.load_state_dict(before[0])
                self._rollouts, self._kv = before[1:]
                raise Interrupted("stopped while sampling; the step is repeated on resume")
        parked = phase.park()
        self._rollouts |= parked
        self._kv |= phase.kv
        ended = [phase.ended[i] for i in sorted(phase.ended)]
        return Partition(ended=ended, parked=list(parked.values()), purged=purged, steps=phase.steps)

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
        finished = [len(r.span) for r in partition.ended if r.status is not Status.ENGINE_FAILURE]
        lengths = length_metrics(
            finished, [len(r.span) for r in partition.parked], [len(r.span) for r in partition.purged], limit
        )
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

    def __init__(self, pool: Pool, engine: SteppedEngine, tokenizer: Any, grader: Grader | None) -> None:
        self.pool, self.engine, self.tokenizer, self.grader = pool, engine, tokenizer, grader
        self.running: dict[int, Rollout] = {}
        self.ended: dict[int, Rollout] = {}
        self.kv: dict[int, KeptKV] = {}
        """Of what was parked, where the engine keeps it."""
        self.steps = 0
        self._heard, self._seen = time.monotonic(), -1

    def send(self, rollouts: Sequence[Rollout], kv: dict[int, KeptKV]) -> None:
        """Hand rollouts to the engine, behind what they have; takes their KV out of `kv`."""
        if not rollouts:
            return
        self.running |= {r.id: r for r in rollouts}
        self.engine.submit([request_of(r, kv.pop(r.id, None)) for r in rollouts])

    def step(self) -> bool:
        """One decode step, reported to the pool. True if the engine failed a rollout."""
        with heard_from(self.engine):
            segments = self.engine.advance(1)
        self.steps += 1
        self._heard = time.monotonic() if segments else self._heard
        failed = self._take(segments)
        if self.pool.rules.count == "generated":
            self.pool.advance(self.engine.progress(), {})
        return failed

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

    def park(self) -> dict[int, Rollout]:
        """Take everything out of the engine; parked rollouts by id, with all they have."""
        self.engine.interrupt()
        with heard_from(self.engine):
            segments = self.engine.advance(0)
        self._take(segments)
        if self.running:
            raise EngineFailure(
                f"engine {self.engine.capabilities.name}: {len(self.running)} interrupted rollouts did not come back"
            )
        parked = {i: r for i, r in self.ended.items() if r.status is Status.PARKED}
        self.ended = {i: r for i, r in self.ended.items() if i not in parked}
        self.pool.advance({i: len(r.span) for i, r in parked.items()}, {})
        return parked

    def _take(self, segments: Sequence[Segment]) -> bool:
        """File what left the engine; what ended is reported to the pool. True if a rollout failed."""
        failed, finished = False, {}
        for segment in segments:
            done = extended(self.running.pop(segment.request_id, None), segment, self.tokenizer, self.engine)
            if done.status is Status.PARKED:
                if segment.kv is not None:
                    self.kv[done.id] = segment.kv
            elif done.status.complete:
                begin(self.grader, [done])
                finished[done.id] = len(done.span)
            else:
                self.pool.fail(done.id)
                failed = True
            self.ended[done.id] = done
        self.pool.advance({}, finished)
        return failed


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
