"""Rollouts that are played turn by turn with an environment, `collect` for prompts that begin one. A round, drawn once:

    engine                         threads                          rollout
    turns of open episodes   ──▶   step of each turn as it ends  ─▶  sampled ids as they are, then the environment's text
            ▲                                                              │
            └───────── when all turns and all steps are there ◀────────────┘

Steps run while other turns decode; the next turns begin together. So the engine's input does not depend on how
long a step took, and a run is the same to the bit whatever the threads did. The price is the slowest turn of each round.
The environment's text is tokenised once, alone; ids that were sampled are decoded to be read, and never encoded again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, Protocol, final

from rollkeel import plugins
from rollkeel.errors import BadInput, Interrupted
from rollkeel.protocols import Engine, Grader
from rollkeel.rollout.collect import completed, decode
from rollkeel.tasks.base import TaskItem
from rollkeel.tasks.environment import Environment, Step, ToolLost, taken
from rollkeel.tasks.turns import Dialogue
from rollkeel.types import Rollout, Status

CHECK_S = 0.2
"""Time between looks at Ctrl-C."""


class Gather(Protocol):
    """Samples issued rollouts to their end: `collect`, or `Episodes`."""

    def __call__(
        self,
        engine: Engine,
        issued: Sequence[Rollout],
        tokenizer: Any,
        *,
        deadline_s: float,
        should_stop: Callable[[], bool] = ...,
        grader: Grader | None = ...,
    ) -> list[Rollout]: ...


@final
class Episodes:
    """Plays the episodes that prompts of one environment begin. Implements `Gather`."""

    def __init__(
        self,
        environment: Environment[Any],
        dialogue: Dialogue,
        *,
        turn_tokens: int,
        deadline_s: float,
        threads: int = 8,
    ) -> None:
        """`turn_tokens`: most of one turn, 0 is no limit; `threads`: steps at one time; `deadline_s`: longest silence of
        environments that owe an answer."""
        if environment.uses_tool and environment.tools is None:
            raise BadInput(f"task {environment.name}: expected a tool to play with, got none; hand one in")
        self._environment, self._dialogue, self._turn_tokens = environment, dialogue, turn_tokens
        self._count, self._deadline_s = threads, deadline_s
        self._threads = _Threads(threads)

    def __call__(
        self,
        engine: Engine,
        issued: Sequence[Rollout],
        tokenizer: Any,
        *,
        deadline_s: float,
        should_stop: Callable[[], bool] = lambda: False,
        grader: Grader | None = None,
    ) -> list[Rollout]:
        """Play every issued rollout to its end; returned in the order given, with their rewards.

        `sampling.max_new_tokens` counts the tokens that the policy samples in a whole episode. One that a limit ends has
        `Status.LENGTH` and the reward so far; a broken environment is `Status.GRADER_FAILURE` and no reward: it is the
        grader, and `grader` has nothing to begin on. Raises as `collect` does.
        """
        playing = {r.id: _Episode(r, self._environment.fresh()) for r in issued}
        try:
            self._await({self._threads.submit(e.begin): e for e in playing.values()}, should_stop)
            while live := [e for e in playing.values() if not e.ended]:
                asked = [e.asked(self._turn_tokens) for e in live]
                steps: dict[Future[None], _Episode] = {}
                for turn in completed(engine, asked, tokenizer, deadline_s=deadline_s, should_stop=should_stop):
                    episode = playing[turn.id]
                    action = episode.take(turn, tokenizer)
                    if action is not None:
                        steps[self._threads.submit(lambda e=episode, a=action: e.act(a))] = episode
                self._await(steps, should_stop)
                for episode in live:
                    episode.go_on(self._dialogue, engine)
        finally:
            for episode in playing.values():
                episode.close()
        return [playing[r.id].result(tokenizer) for r in issued]

    def close(self) -> None:
        """End the threads and the tools."""
        self._threads.close()
        if self._environment.tools is not None:
            self._environment.tools.close()

    def _await(self, steps: dict[Future[None], _Episode], should_stop: Callable[[], bool]) -> None:
        """Wait for steps; a step that hangs fails, and fresh threads run the waiting ones."""
        left, heard = set(steps), time.monotonic()
        while left:
            done, left = wait(left, CHECK_S, FIRST_COMPLETED)
            if should_stop():
                raise Interrupted("stopped while environments were at work; the step is repeated on resume")
            if done or time.monotonic() - heard < self._deadline_s:
                heard = time.monotonic() if done else heard
                continue
            waiting = {future: steps[future] for future in left if future.cancel()}
            for future in (f for f in left if f.running()):
                steps[future].hang(f"no answer for {self._deadline_s:g} s (6 times reward.graders.deadline_s)")
            self._threads.close()
            self._threads = _Threads(self._count)
            steps = {self._threads.submit(e.pending): e for e in waiting.values()}
            left, heard = set(steps), time.monotonic()


class _Episode:
    """One episode: its actions and their steps. Its thread and the caller's never touch it at the same time."""

    def __init__(self, rollout: Rollout, environment: Environment[Any]) -> None:
        self._rollout, self._environment = rollout, environment
        self._item = TaskItem.from_json(rollout.prompt.grader.options["item"])
        self._actions: list[str] = []
        self._step = Step()
        self._reward = 0.0
        self._lost = self._hung = self.ended = False
        self.pending: Callable[[], None] = self.begin
        """What its thread is to do, or does."""

    def begin(self) -> None:
        self._guarded(self._again)

    def act(self, action: str) -> None:
        self._actions.append(action)
        self._guarded(lambda: taken(self._environment, action))

    def _guarded(self, call: Callable[[], Step | None]) -> None:
        """Whatever an environment throws is data; a lost tool is replaced once, and the episode played again in it."""
        try:
            try:
                step = call()
            except ToolLost:
                if self._lost:
                    raise
                self._lost = True
                step = self._again()
            if self._hung:
                return
            if step is not None:
                self._step, self._reward = step, self._reward + step.reward
            if step is not None and step.done:
                self._environment.close()
        except (Exception, SystemExit) as error:
            if self._hung:
                return
            self._fail(plugins.trouble(error))

    def _again(self) -> Step | None:
        """From the start to where it was."""
        self._environment.close()
        self._environment.reset(self._item)
        return [taken(self._environment, action) for action in self._actions][-1] if self._actions else None

    def _fail(self, reason: str) -> None:
        detail = f"environment {self._environment.name}: turn {len(self._actions)}: {reason}"[:300]
        self._end(Status.GRADER_FAILURE, detail)

    def hang(self, reason: str) -> None:
        self._fail(reason)
        self._hung = True

    def _end(self, status: Status, detail: str) -> None:
        self._rollout, self.ended = replace(self._rollout, status=status, detail=detail), True

    # -- the caller's side ---------------------------------------------------------------------------------------------

    def asked(self, turn_tokens: int) -> Rollout:
        """The next turn as a rollout that the engine continues: its limit counts the prefix too."""
        span, sampling = self._rollout.span, self._rollout.sampling
        left = sampling.max_new_tokens - span.own_count
        limit = len(span) + (min(left, turn_tokens) if turn_tokens else left)
        return replace(self._rollout, sampling=replace(sampling, max_new_tokens=limit))

    def take(self, turn: Rollout, tokenizer: Any) -> str | None:
        """Keep what was sampled; the action, or None where there is none to act on."""
        new = turn.span.token_ids[len(self._rollout.span) :]
        self._rollout = replace(turn, sampling=self._rollout.sampling)
        if not turn.status.complete:
            self._end(turn.status, turn.detail)
            return None
        action = decode(new, turn.sampling.stop_token_ids, tokenizer)
        self.pending = lambda: self.act(action)
        return action

    def go_on(self, dialogue: Dialogue, engine: Engine) -> None:
        """After a step: the end, or the environment's text behind the turn."""
        if self.ended:
            return
        rollout, step = self._rollout, self._step
        if step.done:
            return self._end(rollout.status, step.detail)
        stopped = rollout.status is Status.FINISHED
        text = dialogue.between(step.text, int(rollout.span.token_ids[-1]) if stopped else None)
        total = len(rollout.prompt.token_ids) + len(rollout.span) + len(text)
        if rollout.span.own_count >= rollout.sampling.max_new_tokens or total >= engine.capabilities.max_length:
            return self._end(Status.LENGTH, f"no room for turn {len(self._actions) + 1}; {step.detail}")
        self._rollout = replace(rollout, span=rollout.span.given(text, engine.version), status=Status.PARKED)

    def close(self) -> None:
        """What hangs is left alone: closing it would hang as well."""
        if not self._hung:
            self._environment.close()

    def result(self, tokenizer: Any) -> Rollout:
        rollout = self._rollout
        reward = self._reward if rollout.status.complete else None
        text = decode(rollout.span.token_ids, rollout.sampling.stop_token_ids, tokenizer)
        return replace(rollout, reward=reward, text=text)


@final
class _Threads:
    """A few daemon threads: unlike those of an executor, one that hangs does not keep the program from ending."""

    def __init__(self, count: int) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._count = count
        for _ in range(count):
            threading.Thread(target=self._work, name="rollkeel-environment", daemon=True).start()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        for _ in range(self._count):
            self._calls.put(None)

    def _work(self) -> None:
        while (taken := self._calls.get()) is not None:
            future, call = taken
            if future.set_running_or_notify_cancel():
                call()
                future.set_result(None)
