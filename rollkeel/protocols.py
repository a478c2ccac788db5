"""What stages ask of each other: the loop meets engines, graders and publishers through these protocols alone.

Imports no torch at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from rollkeel.types import Capabilities, FloatArray, IntArray, Proof, Request, Rollout, Segment, WeightUpdate


@runtime_checkable
class Engine(Protocol):
    """Anything that generates tokens. Requests batch and may cross processes."""

    @property
    def version(self) -> int:
        """Version of the weights that would sample the next token."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises `BadInput` for an empty prompt, an id outside the vocabulary or a prompt beyond the context."""
        ...

    def poll(self, timeout_s: float) -> list[Segment]:
        """Segments that ended since the last call; waits at most `timeout_s` for the first. Empty when nothing is in flight."""
        ...

    def interrupt(self, ids: Sequence[int] | None = None) -> None:
        """Stop these requests (all of them when None); `poll` then returns what they have with `Status.INTERRUPTED`."""
        ...

    def update_weights(self, update: WeightUpdate) -> Proof:
        """Serve `update.version` from the next decode step on, proven by recomputed checksums."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class SteppedEngine(Engine, Protocol):
    """An engine that is watched while it samples. The embedded one's clock is decode steps, so that a schedule does not depend
    on timing; a server's is what its streams bring."""

    def advance(self, steps: int) -> list[Segment]:
        """Run exactly `steps` decode steps, fewer once nothing is in flight; then what ended, ordered by request id. A server
        (`ProbedEngine`): wait for that many chunks of streams, for an end, or a moment."""
        ...

    def progress(self) -> dict[int, int]:
        """Response tokens that each request in flight has so far, its prefix included, by id. Of a server they may become fewer."""
        ...


@runtime_checkable
class CountedEngine(Engine, Protocol):
    """An engine of several parts that each count their decode steps, so that a schedule can be recorded and replayed."""

    shares: list[int]
    """Requests that each part got in the last call to `submit`."""

    @property
    def steps(self) -> list[int | None]:
        """Decode steps of each part when it last answered, exact for those that the last call reached; None of a dead one."""
        ...

    def submit(self, requests: Sequence[Request], shares: Sequence[int] | None = None) -> None:
        """See `Engine.submit`; `shares` says how many each part gets."""
        ...

    def advance_each(self, steps: Sequence[int]) -> list[Segment]:
        """As many decode steps in each part, fewer in one with nothing in flight; then what ended, ordered by request id."""
        ...


@runtime_checkable
class ProbedEngine(Engine, Protocol):
    """An engine in another program, whose memory cannot be read: what it serves is proven by what it computes."""

    def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """Log-probs `[n - 1]` of tokens 1 … n−1 of each sequence under the served weights, temperature 1."""
        ...


@runtime_checkable
class BoxedEngine(Engine, Protocol):
    """An engine in another program, into whose memory weights are written box by box where it shares some with this one."""

    boxes: Any
    """See `engines.boxes.Boxes`; what publishes gives it a `feed`."""


@runtime_checkable
class RestingEngine(Engine, Protocol):
    """An engine that can give what it holds of a device to the trainer."""

    def rest(self) -> None:
        """Hold as little as possible, and serve nothing, until the next weights. Nothing may be in flight."""
        ...


class Grader(Protocol):
    """Turns complete rollouts into rewards. A failure is `Status.GRADER_FAILURE` with reward None, never 0."""

    def grade(self, rollouts: Sequence[Rollout]) -> list[Rollout]: ...


@runtime_checkable
class OverlappedGrader(Grader, Protocol):
    """A grader that works while others are still sampled. What `grade` returns does not depend on what was begun before."""

    def begin(self, rollouts: Sequence[Rollout]) -> None:
        """Start on these complete rollouts and return at once. `grade` must be given the same objects later."""
        ...

    def ready(self, rollout: Rollout) -> bool:
        """True if `grade` would not wait for this rollout."""
        ...
