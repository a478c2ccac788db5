"""When a group may enter the engine so that no token is too old when it is trained: a pure decision, without clock or engine.

Batches are first in, first out: step s (1-based) trains on groups (s−1)·P … s·P−1, in that order, whatever finished first. So
nothing is thrown away and long answers are trained like short ones; a straggler makes its step wait.

The bound. Let U be the updates per step, M the allowed staleness and K = M // U. Group g belongs to step b = g // P + 1. It is
admitted once d steps have been trained *and published*, for some d with b − 1 ≤ d + K. From then on the engine serves V(d) or
newer, where V(n) is the version after n steps, so every token of g carries a version v ≥ V(d). Step b begins at V(b−1), and
a step makes at most U updates, so V(b−1) − v ≤ V(b−1) − V(d) ≤ U·(b−1−d) ≤ U·K ≤ M. Interrupting a rollout and going on with
it later changes none of this: its tokens keep their versions, and new ones are newer. K = 0 samples a step only after the
one before it has been published, which is the synchronous loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from rollkeel.errors import BadInput


@final
class Gate:
    """Groups by number: which are admitted, which of their members have ended, which steps are done."""

    def __init__(self, *, prompts: int, samples: int, look_ahead: int, steps: int) -> None:
        """`prompts`: groups per step; `samples`: rollouts per group; `look_ahead`: K; `steps`: of the whole run."""
        self.prompts = prompts
        self.samples = samples
        self.look_ahead = look_ahead
        self.steps = steps
        self.done = 0
        """Steps trained and published."""
        self.admitted = 0
        """Groups admitted so far: all below this number."""
        self._ended: set[int] = set()

    def admit(self) -> range:
        """Groups that may enter the engine now and have not yet; they count as admitted."""
        first = self.admitted
        self.admitted = max(first, self.prompts * min(self.done + self.look_ahead + 1, self.steps))
        return range(first, self.admitted)

    def end(self, rollout: int) -> None:
        """Rollout `rollout` (its id: group · samples + member) will not grow any more, finished or failed.

        Raises `ValueError` for one that is not admitted, was trained already or ended before.
        """
        if not self.done * self._size <= rollout < self.admitted * self.samples:
            raise ValueError(
                f"rollout {rollout} is not in flight: steps done {self.done}, groups admitted {self.admitted}"
            )
        if rollout in self._ended:
            raise ValueError(f"rollout {rollout} ended twice")
        self._ended.add(rollout)

    def batch(self) -> range:
        """Ids of the rollouts that the next step trains on, in order."""
        return range(self.done * self._size, (self.done + 1) * self._size)

    def missing(self) -> int:
        """Rollouts of the next step's batch that have not ended; 0 means that it can be trained."""
        return sum(i not in self._ended for i in self.batch())

    def finish(self) -> None:
        """The next step has been trained and its weights published. Raises `ValueError` when its batch was not complete."""
        if self.missing():
            raise ValueError(f"step {self.done + 1}: {self.missing()} rollouts of its batch have not ended")
        self._ended.difference_update(self.batch())
        self.done += 1

    def open(self) -> range:
        """Ids of all rollouts that were admitted and not trained."""
        return range(self.done * self._size, max(self.admitted * self.samples, self.done * self._size))

    def state_dict(self) -> dict[str, Any]:
        """What was decided so far; the ended rollouts themselves are kept elsewhere."""
        return {"prompts": self.prompts, "samples": self.samples, "done": self.done, "admitted": self.admitted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, with every open rollout still to `end`.

        Raises `BadInput` when groups are cut in another way, or when more was admitted than this look-ahead allows.
        """
        for name in ("prompts", "samples"):
            if state[name] != getattr(self, name):
                raise BadInput(
                    f"rollout.{name}: the checkpoint has {state[name]}, got {getattr(self, name)}; resume with the same {name}"
                )
        ahead = -(-state["admitted"] // self.prompts) - state["done"] - 1
        if ahead > self.look_ahead:
            raise BadInput(
                f"rollout.overlap.max_staleness: the checkpoint has rollouts {ahead} steps ahead, expected at most"
                f" {self.look_ahead}; resume with at least {ahead} * train.updates_per_step"
            )
        self.done = state["done"]
        self.admitted = state["admitted"]
        self._ended = set()

    @property
    def _size(self) -> int:
        return self.prompts * self.samples
