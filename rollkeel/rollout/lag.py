"""Fixed staleness for experiments: batches wait in a queue, sampled and graded, until they are as old as asked.

With lag k the batch of step s was sampled by the weights as they were after step max(0, s − 1 − k): the batches of steps
1 … k + 1 come from the start weights, and step s > 1 samples that of step s + k before it trains. Rollouts are kept and not
weights, so k = 256 costs little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, final

from rollkeel.errors import BadInput
from rollkeel.rollout.state import pack_rollouts, unpack_rollouts
from rollkeel.types import Prompt, StepRollouts


@final
class LaggedBatches:
    """The queue: what was sampled and not trained, first in, first out."""

    def __init__(self, lag: int, steps: int, prompt: Callable[[int], Prompt]) -> None:
        """`lag` ≥ 1 steps; `steps` of the whole run; `prompt(index)` looks a prompt up in the data source."""
        self.lag, self.steps = lag, steps
        self._prompt = lru_cache(maxsize=4096)(prompt)
        self._queue: deque[StepRollouts] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def wanted(self, step: int) -> int:
        """Batches to sample now, at the start of `step`, so that it and the `lag` after it have one."""
        return min(self.lag + 1, self.steps - step + 1) - len(self._queue)

    def push(self, drawn: StepRollouts) -> None:
        """Queue a batch."""
        self._queue.append(drawn)

    def pop(self) -> StepRollouts:
        """The batch that is due."""
        return self._queue.popleft()

    def state_dict(self) -> dict[str, Any]:
        """The queue, for `train.state.save_state`. Between steps only."""
        batches = [
            {
                "rollouts": pack_rollouts(drawn.rollouts),
                "batch": [r.id for r in drawn.batch],
                "consumed": drawn.consumed,
                "generated": drawn.generated,
                "metrics": dict(drawn.metrics),
            }
            for drawn in self._queue
        ]
        return {"lag": self.lag, "batches": batches}

    def load_state_dict(self, state: Mapping[str, Any], done: int) -> None:
        """Continue from `state_dict()` after step `done`. Raises `BadInput` for another lag, other data, or more steps than
        the queue was filled for: their batches should have been sampled by weights that are gone."""
        held = len(state["batches"])
        if state["lag"] != self.lag:
            raise BadInput(
                f"experiment.lag: the checkpoint has {state['lag']}, got {self.lag}; resume with the same lag"
            )
        if done and held < min(self.lag, self.steps - done):
            raise BadInput(
                f"run.steps: with experiment.lag={self.lag} the checkpoint has batches up to step {done + held}, got {self.steps};"
                " resume with no more steps or start a new run"
            )
        self._queue.clear()
        for batch in state["batches"]:
            rollouts = unpack_rollouts(batch["rollouts"], self._prompt)
            chosen = set(batch["batch"])
            drawn = StepRollouts(
                rollouts=rollouts,
                batch=[r for r in rollouts if r.id in chosen],
                consumed=batch["consumed"],
                metrics=dict(batch["metrics"]),
                generated=batch.get("generated", sum(r.span.own_count for r in rollouts)),
            )
            self._queue.append(drawn)
