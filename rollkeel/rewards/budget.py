"""How many rollouts of a step may fail before the run stops with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from rollkeel.errors import BadInput, EngineFailure, GraderFailure
from rollkeel.types import Rollout, Status


@final
class FailureBudget:
    """Share of a step's rollouts that may fail, in engine and grader together."""

    def __init__(self, fraction: float) -> None:
        """`fraction` in [0, 1]; 0 stops at the first failure, 1 never stops. Raises `BadInput` outside."""
        if not 0 <= fraction <= 1:
            raise BadInput(f"rollout.failure_budget: expected a share in [0, 1], got {fraction}")
        self.fraction = fraction

    def check(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Counts `failures/grader` and `failures/engine` of one step, all of whose rollouts are given.

        Raises `EngineFailure` or `GraderFailure`, whichever had more failures (the engine on a tie, it comes first),
        when the share is above the budget; a share equal to the budget passes.
        """
        grader = [r for r in rollouts if r.status is Status.GRADER_FAILURE]
        engine = [r for r in rollouts if r.status is Status.ENGINE_FAILURE]
        failed = len(grader) + len(engine)
        # The slack keeps 29 of 100 inside a budget of 0.29, whose product is 28.999999999999996.
        if failed > self.fraction * len(rollouts) + 1e-9:
            kind, worst = (EngineFailure, engine) if len(engine) >= len(grader) else (GraderFailure, grader)
            raise kind(
                f"{failed} of {len(rollouts)} rollouts failed ({len(engine)} in the engine, {len(grader)} in the grader), "
                f"budget {self.fraction:g} of a step; first: rollout {worst[0].id}: {worst[0].detail or 'no reason given'}"
            )
        return {"failures/grader": float(len(grader)), "failures/engine": float(len(engine))}
