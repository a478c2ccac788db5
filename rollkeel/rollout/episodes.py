"""Rollouts that are played turn by turn with an environment. One turn, drawn once:

    engine               threads                          rollout
    a turn is asked ──▶  step of the turn as it ends  ─▶  sampled ids as they are, then the environment's text
            ▲                                                   │
            └───────── when the loop lets it go on ◀────────────┘

When that is, is what loops differ in. `Episodes` called like `collect` plays in rounds: the next turns begin together, when all
turns and all steps are there. The budgeted loop waits for steps between two decode steps. The asynchronous one records when
each turn entered the engine. None of it depends on how long a step took but the latter, whose record is replayed.

A parked episode is its tokens. They tell its actions, and these are played again when its next turn ends: no environment
and no terminal outlives a step, is in a checkpoint, or is left behind by a purge.
The environment's text is tokenised once, alone; ids that were sampled are decoded to be read, and never encoded again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from math import inf
from typing import Any, Protocol, final

import numpy as np

from rollkeel import plugins
from rollkeel.errors import BadInput, Interrupted
from rollkeel.protocols import Engine, Grader
from rollkeel.rollout.collect import completed, decode
from rollkeel.tasks.base import TaskItem
from rollkeel.tasks.environment import Environment, Playable, Step, ToolLost, taken
from rollkeel.tasks.turns import Dialogue
from rollkeel.types import IntArray, Rollout, Status, TokenSpan

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


class Table(Protocol):
    """Rollouts whose turns are in the engine or answered. A loop hands it every turn, and asks what becomes of it."""

    patience_s: float
    """Longest time that an environment may take."""

    @property
    def busy(self) -> bool:
        """True while an environment owes an answer."""
        ...

    def asked(self, rollout: Rollout) -> Rollout:
        """What the engine is to continue: a rollout that is new, was parked, or was answered."""
        ...

    def take(self, turn: Rollout) -> Rollout | None:
        """A rollout that left the engine; None if its environment is to answer first, in a thread that begins now."""
        ...

    def ready(self, timeout_s: float) -> list[Rollout]:
        """What environments have answered, by id: ended with its reward, or `PARKED` and to be `asked` or parked; waits at most
        that long for the first."""
        ...

    def park(self, rollout: Rollout) -> Rollout:
        """The answered rollout as it is kept, with the environment's text."""
        ...

    def close(self) -> None:
        """Close every environment."""
        ...


@final
class OneTurn:
    """The `Table` of prompts that are answered in one turn."""

    busy = False
    patience_s = 0.0

    def asked(self, rollout: Rollout) -> Rollout:
        return rollout

    def take(self, turn: Rollout) -> Rollout | None:
        return turn

    def ready(self, timeout_s: float) -> list[Rollout]:
        return []

    def park(self, rollout: Rollout) -> Rollout:
        return rollout

    def close(self) -> None: ...


def table_of(gather: Gather, engine: Engine, tokenizer: Any) -> Table:
    """A table for what `gather` samples. Close it."""
    return gather.table(engine, tokenizer) if isinstance(gather, Episodes) else OneTurn()


def answers(table: Table, should_stop: Callable[[], bool]) -> list[Rollout]:
    """Wait for all environments of a table: see `Table.ready`."""
    out: list[Rollout] = []
    while table.busy:
        out += table.ready(CHECK_S)
        if should_stop():
            raise Interrupted("stopped while environments were at work; the step is repeated on resume")
    return sorted(out, key=lambda rollout: rollout.id)


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
        opened: Callable[[], Playable] | None = None,
    ) -> None:
        """`turn_tokens`: most of one turn, 0 is no limit; `threads`: steps at one time; `deadline_s`: longest time of a step; `opened`:
        an episode of this environment in another process."""
        if environment.uses_tool and environment.tools is None and opened is None:
            raise BadInput(f"task {environment.name}: expected a tool to play with, got none; hand one in")
        self.environment, self.dialogue = environment, dialogue
        self.opened = opened or environment.fresh
        self.turn_tokens, self.deadline_s = turn_tokens, deadline_s
        self._count = threads
        self.threads = _Threads(threads)

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
        """Play every issued rollout to its end, in rounds; returned in the order given, with their rewards.

        `sampling.max_new_tokens` counts the tokens that the policy samples in a whole episode. One that a limit ends has
        `Status.LENGTH` and the reward so far; a broken environment is `Status.GRADER_FAILURE` and no reward: it is the
        grader, and `grader` has nothing to begin on. Raises as `collect` does.
        """
        table = self.table(engine, tokenizer)
        live = list(issued)
        done = dict[int, Rollout]()
        try:
            while live:
                asked = [table.asked(r) for r in live]
                for turn in completed(engine, asked, tokenizer, deadline_s=deadline_s, should_stop=should_stop):
                    if (failed := table.take(turn)) is not None:
                        done[turn.id] = failed
                answered = answers(table, should_stop)
                live = [r for r in answered if r.status is Status.PARKED]
                done |= {r.id: r for r in answered if r.status is not Status.PARKED}
        finally:
            table.close()
        return [done[r.id] for r in issued]

    def table(self, engine: Engine, tokenizer: Any) -> Table:
        """See `table_of`."""
        return _Table(self, engine, tokenizer)

    def renew(self) -> None:
        """Leave threads that hang to themselves: others run what is submitted next."""
        self.threads.close()
        self.threads = _Threads(self._count)

    def close(self) -> None:
        """End the threads and the tools."""
        self.threads.close()
        if self.environment.tools is not None:
            self.environment.tools.close()


@final
class _Table:
    """Episodes by id of their rollout. An environment is open from the end of the first turn to the end of the episode, or until
    its rollout is parked."""

    def __init__(self, of: Episodes, engine: Engine, tokenizer: Any) -> None:
        self._of, self._engine, self._tokenizer = of, engine, tokenizer
        self.patience_s = of.deadline_s
        self._open: dict[int, _Episode] = {}
        self._steps: dict[Future[None], _Episode] = {}

    @property
    def busy(self) -> bool:
        return bool(self._steps)

    def asked(self, rollout: Rollout) -> Rollout:
        """Its limit is that of the turn, and counts the prefix too."""
        limit, stops = self._of.turn_tokens, rollout.sampling.stop_token_ids
        episode = self._open.get(rollout.id)
        if episode is None:
            *before, begun = turns_of(rollout.span, stops, limit)
            actions = [decode(np.array(turn), stops, self._tokenizer) for turn in before]
            episode = self._open[rollout.id] = _Episode(rollout, self._of.opened(), actions)
        else:
            rollout, begun = self._given(episode), []
        span, sampling = rollout.span, rollout.sampling
        episode.start = len(span) - len(begun)
        left = sampling.max_new_tokens - span.own_count
        limit = len(span) + (min(left, limit - len(begun)) if limit else left)
        return replace(rollout, sampling=replace(sampling, max_new_tokens=limit))

    def take(self, turn: Rollout) -> Rollout | None:
        episode = self._open[turn.id]
        episode.rollout = replace(turn, sampling=episode.rollout.sampling)
        if not turn.status.complete:
            return self._closed(episode)
        ids = turn.span.token_ids[episode.start :]
        episode.actions.append(decode(ids, turn.sampling.stop_token_ids, self._tokenizer))
        self._steps[self._of.threads.submit(episode.act)] = episode
        return None

    def ready(self, timeout_s: float) -> list[Rollout]:
        if not self._steps:
            return []
        done, left = wait(self._steps, timeout_s, FIRST_COMPLETED)
        late = {f for f in left if f.running() and self._steps[f].hangs(self.patience_s)}
        out = [self._answer(self._steps.pop(future)) for future in (*done, *late)]
        if late:
            behind = [self._steps.pop(future) for future in left - late if future.cancel()]
            self._of.renew()
            self._steps |= {self._of.threads.submit(episode.act): episode for episode in behind}
        return sorted(out, key=lambda rollout: rollout.id)

    def park(self, rollout: Rollout) -> Rollout:
        self._given(self._open[rollout.id])
        return self._closed(self._open[rollout.id])

    def close(self) -> None:
        for episode in list(self._open.values()):
            self._closed(episode)
        self._steps.clear()

    def _answer(self, episode: _Episode) -> Rollout:
        """After a step: the end, or the environment's text to come behind the turn."""
        rollout, step = episode.rollout, episode.step
        if not rollout.status.complete:
            return self._closed(episode)
        status, detail, span = rollout.status, step.detail, rollout.span
        if not step.done:
            last = int(span.token_ids[-1]) if status is Status.FINISHED else None
            episode.text = self._of.dialogue.between([step.text, *step.more], last)
            total = len(rollout.prompt.token_ids) + len(span) + len(episode.text)
            if span.own_count < rollout.sampling.max_new_tokens and total < self._engine.capabilities.max_length:
                return replace(rollout, status=Status.PARKED)
            status, detail = Status.LENGTH, f"no room for turn {len(episode.actions) + 1}; {detail}"
        episode.rollout = replace(rollout, status=status, detail=detail, reward=episode.reward)
        return self._closed(episode)

    def _given(self, episode: _Episode) -> Rollout:
        """With the environment's text behind the turn, said under the weights of now."""
        span = episode.rollout.span.given(episode.text, self._engine.version)
        episode.rollout = replace(episode.rollout, span=span, status=Status.PARKED)
        return episode.rollout

    def _closed(self, episode: _Episode) -> Rollout:
        rollout = self._open.pop(episode.rollout.id).rollout
        episode.close()
        if rollout.status is Status.PARKED:
            return rollout
        return replace(rollout, text=decode(rollout.span.token_ids, rollout.sampling.stop_token_ids, self._tokenizer))


def turns_of(span: TokenSpan, stops: Collection[int], limit: int) -> list[list[int]]:
    """Ids of the turns that the policy sampled; the last one is open, perhaps empty. A turn ends with a stop token, at `limit`
    tokens (0: none), or where the environment speaks."""
    turns: list[list[int]] = [[]]
    mine = [True] * len(span) if span.sampled is None else span.sampled.tolist()
    for token, own in zip(span.token_ids.tolist(), mine, strict=True):
        if own:
            turns[-1].append(token)
        if turns[-1] and (not own or token in stops or len(turns[-1]) == limit):
            turns.append([])
    return turns


class _Episode:
    """One episode: its actions and their steps. Its thread and the caller's never touch it at the same time."""

    def __init__(self, rollout: Rollout, environment: Playable, actions: list[str]) -> None:
        """`actions`: those of the turns that `rollout` has already, which are to be played first."""
        self.rollout, self.actions = rollout, actions
        self.start = 0
        """Where the present turn begins."""
        self.step, self.reward = Step(), 0.0
        self.text: IntArray = np.zeros(0, np.int64)
        """What the environment said and the rollout does not have yet."""
        self._environment = environment
        self._item = TaskItem.from_json(rollout.prompt.grader.options["item"])
        self._begun = self._lost = self._hung = False
        self._since = inf

    def act(self) -> None:
        """Take the last action. Whatever an environment throws is data; a lost tool is replaced once, and the episode played
        again in it."""
        self._since = time.monotonic()
        try:
            try:
                step = taken(self._environment, self.actions[-1]) if self._begun else self._again()
            except ToolLost:
                if self._lost:
                    raise
                self._lost = True
                step = self._again()
            if self._hung:
                return
            self.step, self.reward = step, self.reward + step.reward
            if step.done:
                self._environment.close()
        except (Exception, SystemExit) as error:
            if not self._hung:
                self._fail(plugins.trouble(error))

    def _again(self) -> Step:
        """From the start to where it is."""
        self._environment.close()
        self._environment.reset(self._item)
        self._begun, steps = True, list[Step]()
        for action in self.actions:
            if steps and steps[-1].done:
                raise BadInput(
                    f"task {self._environment.name}: played again, it ended after {len(steps)} of {len(self.actions)}"
                    " actions; an episode must be a function of item and actions"
                )
            steps.append(taken(self._environment, action))
        self.reward = sum(step.reward for step in steps[:-1])
        return steps[-1]

    def _fail(self, reason: str) -> None:
        detail = f"environment {self._environment.name}: turn {len(self.actions)}: {reason}"[:300]
        self.rollout = replace(self.rollout, status=Status.GRADER_FAILURE, detail=detail)

    def hangs(self, deadline_s: float) -> bool:
        """True, and it has failed, if its step has taken longer than that."""
        if time.monotonic() - self._since < deadline_s:
            return False
        self._fail(f"no answer for {deadline_s:g} s (6 times reward.graders.deadline_s)")
        self._hung = True
        return True

    def close(self) -> None:
        """What hangs is left alone: closing it would hang as well."""
        if not self._hung:
            self._environment.close()


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
