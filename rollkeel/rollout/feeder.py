"""Sampling and grading beside training. Who does what at the same time, drawn once:

    trainer (main thread)        feeder (thread)               engine workers (processes) or server
    ─────────────────────        ───────────────               ────────────────────────────────────
    admit groups ── requests ──────────────────────────────▶  decode, each on its own
                                 poll ◀────── segments ──────  what ended
                                 begin to grade; collect
    batch of step s ◀─ rollouts ─ file                         decode on: rollouts of s+1 … s+K
    train: U updates             poll, grade, file …           …
    publish ────── weights ────────────────────────────────▶  between two decode steps; proof back
    admit groups ── requests ──▶                               decode on, under the new weights

| party | consumes | waits for | produces |
|---|---|---|---|
| trainer | the next step's graded rollouts | those rollouts (`batch`), its turn at the engine, proofs, interrupted rollouts (`park`) | weights, requests |
| feeder | segments, results of graders | segments, its turn at the engine | graded rollouts, in any order |
| worker | requests, weights, interruptions | its pipe, when it has nothing to decode | segments |

`Gate` decides which groups may be in the engine. The engine is not thread-safe: `Turns` hands it from one thread to the
other, and nobody keeps it while waiting long. What the threads share besides is changed under `_changed` alone. Every wait ends
after `engine.deadline_s` with a message that names what did not come; what goes wrong in the feeder is raised in the trainer.

For an evaluation or a checkpoint everything is parked: taken out of the engine with what it has, and handed in again
afterwards, behind its tokens. So a checkpoint holds every open rollout, and a resumed run does what the killed one did next.
Graders that work beside sampling (`OverlappedGrader`) are begun when a rollout ends and asked again and again; others run in the feeder:
they may not use signals (`signal.alarm`), and slow ones hold segments up, not the trainer.
Environments of episodes work in threads of theirs; the feeder submits a next turn when it is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from rollkeel.errors import BadInput, Corrupt, EngineFailure, Interrupted, RunStopped
from rollkeel.protocols import Engine, Grader, OverlappedGrader
from rollkeel.rollout.collect import begin, collect, extended, heard_from, issue, request_of
from rollkeel.rollout.episodes import Gather, table_of
from rollkeel.rollout.overlap import Gate
from rollkeel.rollout.schedule import ScheduledEngine
from rollkeel.rollout.state import pack_kv, pack_rollouts, unpack_kv, unpack_rollouts
from rollkeel.rollout.turns import Turns
from rollkeel.types import KeptKV, Prompt, Rollout, SamplingParams, Segment, Status

AWAITED_S, ASIDE_S, CHECK_S = 0.05, 0.004, 0.2
"""Longest poll while the trainer waits for rollouts; pause between polls while it trains; time between looks at Ctrl-C."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What rollouts are made of."""

    prompts: Callable[[Sequence[int]], list[Prompt]]
    """Prompts of the data source by index."""
    engine: Engine
    """Asked for its name and numeric mode only."""
    sampling: Callable[[], SamplingParams]
    tokenizer: Any
    """Used by the feeder alone."""
    grader: Grader
    """Used by the feeder alone."""
    gather: Gather = collect
    """Says whether prompts are answered in one turn or played."""


@final
class OverlappedRollouts:
    """Every rollout that was admitted and not trained, and the thread that receives and grades them."""

    def __init__(self, gate: Gate, engine: ScheduledEngine, source: Source, *, deadline_s: float) -> None:
        """Nothing is sampled before `begin`."""
        self.gate = gate
        self._engine = engine
        self._source = source
        self._deadline_s = deadline_s
        self.turns = Turns(deadline_s)
        self._changed = threading.Condition()
        self._flying: dict[int, Rollout] = {}
        self._grading: dict[int, Rollout] = {}
        """Those in flight that have ended, as they were handed to the grader."""
        self._table = table_of(source.gather, source.engine, source.tokenizer)
        self._acting = set[int]()
        """Those in flight whose turn has ended and whose next has not begun; `_answered`: whose environment has answered."""
        self._answered: dict[int, Rollout] = {}
        self._parked: dict[int, Rollout] = {}
        self._ended: dict[int, Rollout] = {}
        self._kv: dict[int, KeptKV] = {}
        """What parked rollouts took along, where the engine keeps it."""
        self._thread: threading.Thread | None = None
        self._stopping = self._parking = self._awaited = False
        self._error: BaseException | None = None
        self._heard = time.monotonic()
        self._calls, self._stalled_at = 0, -1
        """Calls to the engine that change what it samples, and how many there had been when it last had nothing to do."""

    # -- the trainer's side --------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """False when nothing is in the engine and nobody listens to it: before `begin` and after `park`."""
        return self._thread is not None

    def begin(self) -> None:
        """Hand parked rollouts and admitted groups to the engine and listen to it."""
        self._stopping = self._parking = False
        self._engine.begin()
        self._thread = threading.Thread(target=self._feed, name="rollkeel-feeder", daemon=True)
        self._thread.start()
        self.send()

    def send(self) -> None:
        """Hand what the gate admits now to the engine, and what was parked behind its tokens before that."""
        groups = self.gate.admit()
        fresh = issue(
            self._source.prompts(groups), self.gate.samples, self._source.sampling(), groups.start, self._source.engine
        )
        with self._changed:
            rollouts = [self._table.asked(r) for r in (*(self._parked[i] for i in sorted(self._parked)), *fresh)]
            self._parked = {}
            self._flying |= {r.id: r for r in rollouts}
            self._heard = time.monotonic()
            self._changed.notify_all()
        if rollouts:
            with self._call("submit rollouts"):
                self._engine.submit([request_of(r, self._kv.pop(r.id, None)) for r in rollouts])

    def batch(self, should_stop: Callable[[], bool] = lambda: False) -> list[Rollout] | None:
        """Wait for the rollouts of the next step, graded, in order. None when a replayed run was interrupted here.

        Raises `Interrupted` when asked to stop, `EngineFailure` after `deadline_s` in which nothing ended, and whatever went
        wrong in the feeder.
        """
        if self._engine.due == "interrupt":
            return None
        began = time.monotonic()
        with self._changed:
            self._awaited = True
            try:
                while missing := self.gate.missing():
                    self._raise()
                    if self._engine.due == "interrupt":
                        return None
                    if should_stop():
                        raise Interrupted("stopped while sampling; rollouts in flight are kept for the resumed run")
                    if self._stalled_at == self._calls:
                        raise BadInput(
                            f"experiment.schedule: step {self.gate.done + 1} waits for {missing} rollouts that the recorded run had;"
                            " replay with the config and the code of that run"
                        )
                    silent = time.monotonic() - max(began, self._heard)
                    if silent > self._deadline_s:
                        raise EngineFailure(
                            f"engine: no rollout ended for {silent:.0f} s while step {self.gate.done + 1} waits for {missing}"
                            f" of {len(self.gate.batch())}{f', {len(self._grading)} in grading' if self._grading else ''}"
                            f" (engine.deadline_s={self._deadline_s:g})"
                        )
                    self._changed.wait(CHECK_S)
            finally:
                self._awaited = False
            self._raise()
            return [self._ended[i] for i in self.gate.batch()]

    def finish(self) -> None:
        """The batch was trained and its weights are published: forget it."""
        with self._changed:
            trained = self.gate.batch()
            self.gate.finish()
            for i in trained:
                del self._ended[i]

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Hold the engine to hand it new weights."""
        with self._call("publish weights"), self._engine.publishing():
            yield

    def park(self) -> None:
        """Take everything out of the engine and stop listening; open rollouts keep what they have. Nothing if not running."""
        if self._thread is None:
            return
        self._await_turns()
        with self._changed:
            self._raise()
            self._parking = self._awaited = True
        with self._call("interrupt rollouts"):
            self._engine.interrupt()
        with self._changed:
            limit = self._deadline_s + self._table.patience_s
            back = self._changed.wait_for(lambda: not self._flying or self._error is not None, limit)
            left, self._awaited = len(self._flying), False
        self._join()
        self._raise()
        if not back:
            raise EngineFailure(f"engine: waited {limit:g} s for {left} interrupted rollouts to come back")

    def commit(self, step: int) -> None:
        """What was done so far is part of the run up to and with `step`."""
        self._engine.commit(step)

    def discard(self) -> None:
        """What was done since the last commit is not part of the run."""
        self._engine.discard()

    @property
    def replayed(self) -> bool:
        """True if the calls follow the schedule of another run."""
        return self._engine.due is not None

    def close(self) -> None:
        """Stop listening, whatever is in flight."""
        self._join(5.0)
        self._table.close()

    def metrics(self) -> dict[str, float]:
        """`async/ahead`: steps whose rollouts have been admitted beyond the one that is trained next."""
        return {"async/ahead": self.gate.admitted / self.gate.prompts - self.gate.done - 1}

    def state_dict(self) -> dict[str, Any]:
        """Gate and open rollouts, for `train.state.save_state`. When parked only."""
        if self.running or self._flying:
            raise RunStopped(f"{len(self._flying)} rollouts are in flight; park before a checkpoint")
        held = self._parked | self._ended
        rollouts = pack_rollouts([held[i] for i in sorted(held)])
        return {"gate": self.gate.state_dict(), "rollouts": rollouts, "kv": pack_kv(self._kv)}

    def load_state_dict(self, state: Mapping[str, Any], *, version: int, updates: int, limit: int) -> None:
        """Continue from `state_dict()` under weights `version`, with `updates` per step.

        Raises `BadInput` when data or rules are others, or a token may be older than `limit` when its step begins; `Corrupt`
        for a missing rollout.
        """
        rollouts = unpack_rollouts(state["rollouts"], lambda index: self._source.prompts([index])[0])
        self.gate.load_state_dict(state["gate"])
        if [r.id for r in rollouts] != list(self.gate.open()):
            raise Corrupt(f"checkpoint: expected the rollouts {self.gate.open()}, got {len(rollouts)} others")
        for r in rollouts:
            begins = version + updates * (r.group // self.gate.prompts - self.gate.done)
            if len(r.span) and begins - int(r.span.versions.min()) > limit:
                raise BadInput(
                    f"rollout.overlap.max_staleness: the checkpoint's rollout {r.id} may be {begins - int(r.span.versions.min())}"
                    f" versions old when it is trained, expected at most {limit}; resume with the bound it was sampled under"
                )
        self._parked = {r.id: r for r in rollouts if r.status is Status.PARKED}
        self._ended = {r.id: r for r in rollouts if r.status is not Status.PARKED}
        self._kv = unpack_kv(state["kv"])
        for i in self._ended:
            self.gate.end(i)

    def _await_turns(self) -> None:
        """In a replay: until the turns have been submitted that came before the trainer's next call."""
        with self._changed:
            self._changed.wait_for(lambda: self._engine.due != "turns" or self._error is not None, self._deadline_s)

    @contextmanager
    def _call(self, what: str) -> Iterator[None]:
        self._await_turns()
        with self.turns.turn(what):
            try:
                yield
            finally:
                self._calls += 1

    def _join(self, timeout_s: float | None = None) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(self._deadline_s if timeout_s is None else timeout_s)
            if self._thread.is_alive() and timeout_s is None:
                raise EngineFailure(f"feeder: waited {self._deadline_s:g} s for it to grade what it holds")
            self._thread = None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    # -- the feeder's side ---------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        try:
            while not self._stopping:
                if not self._flying:
                    with self._changed:
                        self._changed.wait_for(lambda: self._flying or self._stopping, CHECK_S)
                elif len(self._flying) > len(self._grading) + len(self._acting):
                    self._listen()
                else:
                    with self._changed:
                        self._changed.wait(ASIDE_S)
                self._play()
                self._collect()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _listen(self) -> None:
        calls = self._calls
        with self.turns.turn("poll", patient=True), heard_from(self._source.engine):
            segments = self._engine.poll(AWAITED_S if self._awaited else 0.0)
        if segments:
            self._file(segments)
        elif self._engine.stalled and not (self._grading or self._table.busy or self._engine.going_on(self._answered)):
            with self._changed:
                self._stalled_at = calls
                self._changed.notify_all()
                self._changed.wait(ASIDE_S)
        elif not self._awaited:
            with self._changed:
                self._changed.wait(ASIDE_S)

    def _file(self, segments: Sequence[Segment]) -> None:
        """Put segments behind what their rollouts have; begin to grade what is complete."""
        parked, ended = [], []
        waiting = {i: r for i, r in self._flying.items() if i not in self._grading and i not in self._acting}
        self._heard = time.monotonic()
        for segment in segments:
            turn = extended(waiting.pop(segment.request_id, None), segment, self._source.tokenizer, self._source.engine)
            if (rollout := self._table.take(turn)) is None:
                self._acting.add(turn.id)
            elif rollout.status is not Status.PARKED:
                ended.append(rollout)
            elif self._parking:
                parked.append(rollout)
                if segment.kv is not None:
                    self._kv[rollout.id] = segment.kv
            else:
                raise EngineFailure(f"engine: request {segment.request_id}: interrupted, which nobody asked for")
        self._end(ended, parked)

    def _end(self, ended: Sequence[Rollout], parked: Sequence[Rollout]) -> None:
        begin(self._source.grader, ended)
        self._grading |= {r.id: r for r in ended if r.status.complete}
        self._settle([r for r in ended if not r.status.complete], parked)

    def _play(self) -> None:
        """Let episodes go on, or keep them, whose environments have answered."""
        answered = self._table.ready(0.0)
        ended = [r for r in answered if r.status is not Status.PARKED]
        self._answered |= {r.id: r for r in answered if r.status is Status.PARKED}
        parked = [self._table.park(self._answered.pop(i)) for i in list(self._answered) if self._parking]
        self._acting.difference_update(r.id for r in (*ended, *parked))
        if ended or parked:
            self._end(ended, parked)
        if self._answered and self._engine.going_on(self._answered):
            self._go_on()

    def _go_on(self) -> None:
        with self.turns.turn("submit turns", patient=True):
            if self._parking:  # since it was asked: nothing enters behind the interruption
                return
            asked = [self._table.asked(self._answered.pop(i)) for i in self._engine.going_on(self._answered)]
            with self._changed:
                self._flying |= {r.id: r for r in asked}
            self._acting.difference_update(r.id for r in asked)
            self._engine.submit([request_of(r) for r in asked], turns=True)
            self._calls += 1
        with self._changed:
            self._changed.notify_all()

    def _collect(self) -> None:
        """File what the grader is done with, all at once if it does not work beside this."""
        grader = self._source.grader
        ready = grader.ready if isinstance(grader, OverlappedGrader) else lambda rollout: True
        done = [r for r in self._grading.values() if ready(r)]
        if done:
            graded = grader.grade(done)
            for r in done:
                del self._grading[r.id]
            self._settle(graded, [])

    def _settle(self, ended: Sequence[Rollout], parked: Sequence[Rollout]) -> None:
        with self._changed:
            for r in ended:
                self.gate.end(r.id)
                self._ended[r.id] = r
            self._parked |= {r.id: r for r in parked}
            for r in (*ended, *parked):
                del self._flying[r.id]
            self._heard = time.monotonic()
            self._changed.notify_all()


def check_staleness(rollouts: Sequence[Rollout], version: int, limit: int) -> None:
    """Raise `RunStopped` for a token that weights older than `version` − `limit`, or newer than `version`, sampled. The gate
    rules that out (see `overlap.py`): this is the proof in a running system, not a filter."""
    for r in rollouts:
        lag = version - r.span.versions
        if len(lag) and not 0 <= int(lag.min()) <= int(lag.max()) <= limit:
            raise RunStopped(
                f"rollout {r.id}: expected tokens of versions {version - limit} to {version}, got {int(r.span.versions.min())} to"
                f" {int(r.span.versions.max())}; the staleness bound rollout.overlap.max_staleness={limit} is broken"
            )
