"""Where a step's rollouts come from. The loop asks a `Feed` and nothing else about scheduling.

Whole        samples and grades the step's prompts, then hands them over.
Lagged       the same, `experiment.lag` steps before they are trained.
Budgeted     C3PO++: what finished by the end of the step's token budget; the rest waits in a pool.
Overlapped   samples and grades the rollouts of the next steps while this step is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, final

from rollkeel.protocols import Engine
from rollkeel.record.clock import Clock
from rollkeel.rewards import FailureBudget, Graders
from rollkeel.rollout.budgeted import BudgetedRollouts, stepped
from rollkeel.rollout.collect import issue
from rollkeel.rollout.dynamic import draw_once, draw_varied, varied_groups
from rollkeel.rollout.episodes import Gather
from rollkeel.rollout.feeder import OverlappedRollouts, check_staleness
from rollkeel.rollout.lag import LaggedBatches
from rollkeel.types import Prompt, Rollout, SamplingParams, StepRollouts

if TYPE_CHECKING:
    from rollkeel.tasks.mixed import MixedProblems


class Feed(Protocol):
    """Makes the rollouts of each step, in order. One step is `draw`, updates, a publication, `published`."""

    name: str
    """Key of `state_dict()` in a checkpoint."""
    consumed: int
    """Prompts taken from the data source so far; the next draw begins behind them. A resumed run sets it."""

    def draw(self, clock: Clock, version: int) -> StepRollouts:
        """The rollouts of step `clock.step`, graded. `version`: of the weights that will be trained on them.

        Raises `Interrupted` when asked to stop; the step can then be drawn again, here or from a checkpoint.
        """
        ...

    def publishing(self) -> AbstractContextManager[None]:
        """Hold the engine while it takes new weights. What is in flight keeps its tokens and goes on under them."""
        ...

    def published(self, clock: Clock, *, pause: bool) -> None:
        """Step `clock.step` was trained and its weights are published. `pause`: take everything out of the engine until the
        next `draw`, because an evaluation or a checkpoint comes first."""
        ...

    def park(self, step: int | None) -> None:
        """Take everything out of the engine, so that `state_dict` can be asked. `step`: a checkpoint of it is saved next. None:
        none is saved; the run resumes from an earlier one, so a recorded schedule forgets what was done since."""
        ...

    def replays(self) -> bool:
        """True if the feed follows a recorded schedule. An interrupted replay saves no checkpoint."""
        ...

    def state_dict(self) -> dict[str, Any] | None:
        """What one step hands to the next beside `consumed` and the weights, for `train.state.save_state`."""
        ...

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int, version: int) -> None:
        """Continue from `state_dict()` of the end of `step`, under weights `version`. Raises `BadInput` for other settings."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """What rollouts are made with."""

    prompts: Callable[[Sequence[int]], list[Prompt]]
    """Prompts of the data source by index."""
    engine: Engine
    sampling: SamplingParams
    tokenizer: Any
    grader: Graders
    gather: Gather
    """Plays the prompts in one turn or several."""
    budget: FailureBudget
    deadline_s: float
    should_stop: Callable[[], bool]
    mixed: MixedProblems | None = None
    """The sources of the prompts, where there are several."""


class Idle:
    """A feed with nothing in the engine between two draws: the engine is free for evaluations and checkpoints at any time."""

    name = "sync"

    def __init__(self) -> None:
        self.consumed = 0

    def publishing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def published(self, clock: Clock, *, pause: bool) -> None:
        pass

    def park(self, step: int | None) -> None:
        pass

    def replays(self) -> bool:
        return False

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None, *, step: int, version: int) -> None:
        pass

    def close(self) -> None:
        pass


class Whole(Idle):
    """Whole batches of prompts, sampled by the weights they train."""

    def __init__(
        self, sampler: Sampler, prompts: int, samples: int, *, rounds: int = 0, varied_only: bool = False
    ) -> None:
        """`prompts` per step with `samples` each; `rounds`: most rounds of dynamic sampling (`rollout/dynamic.py`), 0 for none;
        `varied_only`: train only groups whose rewards differ."""
        super().__init__()
        self._sampler = sampler
        self._prompts = prompts
        self._samples = samples
        self._rounds, self._varied_only = rounds, varied_only

    def draw(self, clock: Clock, version: int) -> StepRollouts:
        seen: list[Rollout] = []
        failures: dict[str, float] = {}

        def draw(first: int, count: int) -> Sequence[Rollout]:
            s = self._sampler
            with clock.stage("rollout"):
                prompts = s.prompts(range(first, first + count))
                issued = issue(prompts, self._samples, s.sampling, first, s.engine)
                sampled = s.gather(
                    s.engine,
                    issued,
                    s.tokenizer,
                    deadline_s=s.deadline_s,
                    should_stop=s.should_stop,
                    grader=s.grader,  # one that can work beside sampling begins on each rollout as it ends
                )
            with clock.stage("reward"):
                graded = iter(s.grader.grade([r for r in sampled if r.status.complete]))
                seen.extend(out := [next(graded) if r.status.complete else r for r in sampled])
                failures.update(s.budget.check(seen))
            return out

        if self._rounds:
            drawn = draw_varied(draw, self.consumed, self._prompts, self._rounds, self._sampler.mixed)
        else:
            drawn = draw_once(draw, self.consumed, self._prompts, varied_only=self._varied_only)
        self.consumed += drawn.consumed  # only now: an interrupted step is repeated from its first prompt
        return replace(drawn, metrics={**failures, **drawn.metrics})


@final
class Lagged(Idle):
    """Batches that wait `lag` steps before they are trained: fixed staleness for experiments, see `rollout/lag.py`. Step 1
    samples `lag` + 1 batches from the start weights, each later step one, the last `lag` steps none."""

    name = "lag"

    def __init__(self, whole: Whole, waiting: LaggedBatches, note: Callable[[str], None]) -> None:
        super().__init__()
        self._whole = whole
        self._waiting = waiting
        self._note = note

    def draw(self, clock: Clock, version: int) -> StepRollouts:
        self._whole.consumed = self.consumed
        count, generated = self._waiting.wanted(clock.step), 0
        for number in range(1, count + 1):
            drawn = self._whole.draw(clock, version)
            self._waiting.push(drawn)
            self.consumed = self._whole.consumed  # now: an interrupted step is repeated behind the batches in the queue
            generated += drawn.generated or 0
            if count > 1 and (number % 10 == 0 or number == count):
                self._note(
                    f"experiment.lag={self._waiting.lag}: {number} of {count} batches sampled from the start weights"
                )
        return replace(self._waiting.pop(), generated=generated)

    def state_dict(self) -> dict[str, Any] | None:
        return self._waiting.state_dict()

    def load_state_dict(self, state: Any, *, step: int, version: int) -> None:
        self._waiting.load_state_dict(state, step)


@final
class Budgeted(Idle):
    """The groups that a step's token budget completed (Ring-1T report §2.3.3). Unfinished rollouts stay in the pool, which
    checkpoints hold; `rollout/pool.py` decides what is resumed, purged and trained."""

    name = "budgeted"

    def __init__(
        self, sampler: Sampler, pooled: BudgetedRollouts, *, rounds: int = 0, varied_only: bool = False
    ) -> None:
        """`rounds`, `varied_only`: as of `Whole`."""
        super().__init__()
        self._sampler, self._pooled = sampler, pooled
        self._rounds, self._varied_only = rounds, varied_only or rounds > 0

    def draw(self, clock: Clock, version: int) -> StepRollouts:
        s, pooled = self._sampler, self._pooled
        mixed = s.mixed if self._rounds else None
        if mixed:
            mixed.begin(self.consumed)
        with clock.stage("rollout"):
            partition = pooled.sample(
                stepped(s.engine),
                s.sampling,
                s.tokenizer,
                deadline_s=s.deadline_s,
                should_stop=s.should_stop,
                check=s.budget.check,
                grader=s.grader,
                gather=s.gather,
                rounds=self._rounds or 1,
            )
        with clock.stage("reward"):
            rest = [r for r in partition.ended if r.id not in partition.graded]
            graded = [r for r in partition.ended if r.id in partition.graded]
            graded += s.grader.grade([r for r in rest if r.status.complete])
            failed = [r for r in rest if not r.status.complete]
            metrics = s.budget.check([*graded, *failed])
            chosen = pooled.settle(graded)
        metrics |= pooled.metrics(partition)
        before, self.consumed = self.consumed, pooled.pool.counts["prompts_consumed"]
        useful = set(varied_groups(chosen))
        batch = [r for r in chosen if r.group in useful or not self._varied_only]
        seen = [*partition.discarded, *chosen]
        if mixed:
            mixed.useless([r for r in chosen if r.group not in useful])
            mixed.end(len(useful))
        if self._rounds:
            metrics["rollout/dynamic_rounds"] = float(partition.rounds)
            metrics["rollout/dynamic_discarded"] = float(len({r.group for r in seen} - {r.group for r in batch}))
        return StepRollouts(
            rollouts=seen,
            batch=batch,
            consumed=self.consumed - before,
            metrics=metrics,
            generated=int(metrics["rollout/generated_tokens"]),
        )

    def state_dict(self) -> dict[str, Any] | None:
        return self._pooled.state_dict()

    def load_state_dict(self, state: Any, *, step: int, version: int) -> None:
        self._pooled.load_state_dict(state)


@final
class Overlapped:
    """Whole batches in order, sampled and graded while earlier ones are trained (`rollout/feeder.py`). When a step begins, no
    token of its batch is more than `max_staleness` versions old (`rollout/overlap.py`)."""

    name = "async"

    def __init__(
        self,
        opened: Callable[[int], OverlappedRollouts],
        prompts: int,
        budget: FailureBudget,
        should_stop: Callable[[], bool],
        *,
        max_staleness: int,
        updates: int,
        varied_only: bool = False,
    ) -> None:
        """`opened(step)`: the rollouts of a run behind `step`, before the first is submitted; `updates` per step."""
        self.consumed = 0
        self._opened = opened
        self._inner = opened(0)
        self._prompts = prompts
        self._budget, self._should_stop = budget, should_stop
        self._max_staleness = max_staleness
        self._updates = updates
        self._varied_only = varied_only

    def draw(self, clock: Clock, version: int) -> StepRollouts:
        inner = self._inner
        with clock.stage("rollout"):
            if not inner.running:
                inner.begin()
            while (batch := inner.batch(self._should_stop)) is None:
                # The run whose schedule is replayed was interrupted here, and resumed.
                inner.park()
                inner.begin()
        check_staleness(batch, version, self._max_staleness)
        metrics = {**self._budget.check(batch), **inner.metrics(), "async/wait_s": clock.seconds["rollout"]}
        drawn = draw_once(lambda first, count: batch, self.consumed, self._prompts, varied_only=self._varied_only)
        self.consumed += drawn.consumed
        return replace(drawn, metrics=metrics, generated=None)

    def publishing(self) -> AbstractContextManager[None]:
        return self._inner.publishing()

    def published(self, clock: Clock, *, pause: bool) -> None:
        with clock.stage("park" if pause else "submit"):
            self._inner.finish()  # the batch makes room: new groups may enter the engine
            self._inner.park() if pause else self._inner.send()
        self._inner.commit(clock.step)

    def park(self, step: int | None) -> None:
        self._inner.park()
        self._inner.discard() if step is None else self._inner.commit(step)

    def replays(self) -> bool:
        return self._inner.replayed

    def state_dict(self) -> dict[str, Any] | None:
        return self._inner.state_dict()

    def load_state_dict(self, state: Any, *, step: int, version: int) -> None:
        self._inner = self._opened(step)
        self._inner.load_state_dict(state, version=version, updates=self._updates, limit=self._max_staleness)

    def close(self) -> None:
        self._inner.close()
