"""What the C3PO++ pool (`rollkeel.rollout.pool`) is told and what it answers: rules, members, batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from rollkeel.errors import BadInput

MemberStatus = Literal["waiting", "running", "parked", "finished", "purged", "failed", "trained"]
STATUSES: tuple[MemberStatus, ...] = get_args(MemberStatus)
UNFINISHED: tuple[MemberStatus, ...] = ("waiting", "running", "parked")
LOST: tuple[MemberStatus, ...] = ("purged", "failed")
TOTALS = (
    "issued", "started", "resumed", "finished", "trained", "purged", "failed", "reissued", "returned", "prompts_consumed",
    "groups", "groups_trained", "tokens_generated", "tokens_finished", "tokens_trained", "tokens_purged", "tokens_failed",
    "discarded", "tokens_discarded",
)  # fmt: skip
GAUGES = (
    "waiting", "running", "parked", "held", "ready", "queued_prompts", "tokens_running", "tokens_parked", "tokens_held",
    "age_max", "held_age_max",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PoolRules:
    """Sizes and readings of C3PO++. `BadInput` for values under which the pool could never train."""

    budget: int
    """Φ > 0, tokens per iteration."""
    capacity: int
    """Ω_infer > 0: rollouts in the engine at once. Parked, waiting and finished members take no room."""
    train_capacity: int = 0
    """Ω_train: rollouts a batch may hold, 0 = no limit; otherwise ≥ `samples`, for groups are never cut to fit."""
    retention: int
    """σ ≥ 0: an unfinished rollout that was parked more than σ times is purged; it runs in at most σ + 1 iterations."""
    samples: int
    """Rollouts of a group ≥ 1; ≥ 2 for `group="wait"`, which trains a group only with two finished members."""
    count: str = "finished"
    """`"finished"` (Algorithm 1, line 14): a rollout counts its whole length, earlier iterations included, when it
    finishes. `"generated"` (the report's prose): each token counts in the iteration that generates it."""
    group: str = "wait"
    """`"wait"`: whole groups are trained, see `Pool.begin`. `"partial"` (Algorithm 1 to the letter): whatever finished
    is trained; what is purged or failed is gone, nothing is issued again and no prompt returns."""

    def __post_init__(self) -> None:
        for name, least in (("budget", 1), ("capacity", 1), ("train_capacity", 0), ("retention", 0), ("samples", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise BadInput(f"pool: {name} must be an integer ≥ {least}, got {value!r}")
        for name, known in (("count", ("finished", "generated")), ("group", ("wait", "partial"))):
            if getattr(self, name) not in known:
                raise BadInput(f"pool: {name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.group == "wait" and self.samples < 2:
            raise BadInput(
                f"pool: group=wait needs samples ≥ 2, got {self.samples}; use group=partial for single rollouts"
            )
        if 0 < self.train_capacity < self.samples:
            raise BadInput(
                f"pool: train_capacity must be 0 (no limit) or ≥ samples={self.samples}, got {self.train_capacity}; "
                "a whole group would never fit"
            )


@dataclass(kw_only=True)
class Member:
    """One rollout. Only the pool writes to it; callers may keep and read it."""

    id: int
    group: int
    member: int
    """Place in the group, 0 … samples − 1; a re-issued member keeps it."""
    prompt: int
    tokens: int = 0
    """Response tokens so far."""
    age: int = 0
    """Iterations that ended since it was first sent: its retention period while unfinished, and at any time how many
    iterations ago its first token was sampled. Waiting members do not age, finished ones that wait do."""
    status: MemberStatus = "waiting"
    issue: int = 0
    """0 first, +1 each time the place in the group is issued again (under a new id, hence with new randomness)."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What an iteration leaves behind. May be empty: a budget can end before any group is complete."""

    groups: Mapping[int, tuple[int, ...]]
    """Group id → ids of its members to train now, in order of their places; oldest group first."""
    waiting: tuple[int, ...]
    """Finished members that stay in the pool: their group is incomplete, or Ω_train was reached."""
    parked: tuple[int, ...]
    """Unfinished members to resume; keep their tokens, log-probs and versions."""
    tokens: int
    """Response tokens in `groups`."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of all members to train, in order."""
        return tuple(i for members in self.groups.values() for i in members)
