"""Whether the process of an engine actor answers: asked by whoever waits for it, so that nobody waits for one that was stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from rollkeel.cluster.patience import Patience

T = TypeVar("T")
SILENT_S = 20.0
"""Longest silence of a process that somebody waits for, whatever it does; less once it is known how long it takes."""
BEAT_S = 1.0
"""How often one who waits asks."""
CONTROL = "control"
"""Group of an actor's methods that answer whatever else it does."""


class Pulse:
    """Asks one actor, whose method `lives` answers in a thread of `CONTROL`."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.patience = Patience(SILENT_S)
        self._ping: ray.ObjectRef | None = None
        self._pinged = 0.0
        self._looked = 0.0
        """When it was last seen whether the ping is answered."""

    def renew(self, handle: Any) -> None:
        """Another actor in its place, which takes as long as that one did."""
        self.handle, self._ping = handle, None

    @property
    def due(self) -> bool:
        return time.monotonic() - self._looked >= BEAT_S

    def beats(self) -> bool:
        """Whether its process has answered for as long as it may take for that."""
        now = time.monotonic()
        if self._ping is not None and ray.wait([self._ping], timeout=0)[0]:
            self._ping = None
            if now - self._looked <= 2 * BEAT_S:  # else it answered long ago
                self.patience.heard(now - self._pinged)
        self._looked = now
        if self._ping is None:
            self._ping, self._pinged = self._asked(), now
        return now - self._pinged <= self.patience.limit_s

    def answers(self, within_s: float) -> bool:
        """Whether it answers one question, which is waited for."""
        try:
            ray.get(self._asked(), timeout=within_s)
        except RayError:
            return False
        return True

    def _asked(self) -> ray.ObjectRef:
        return self.handle.lives.options(concurrency_group=CONTROL).remote()


def _open(calls: list[ray.ObjectRef], timeout_s: float) -> list[ray.ObjectRef]:
    return ray.wait(calls, num_returns=len(calls), timeout=timeout_s)[1]


def awaited(
    calls: Mapping[T, tuple[str, Pulse]],
    deadline_s: float,
    open_of: Callable[[list[T], float], list[T]] = _open,
    since: float | None = None,
) -> str:
    """Waits until each of these calls, by which the engine of that name takes weights, has ended, well or not. Returns who is not waited
    for any longer and why, or nothing. `open_of`: those that have not ended, perhaps sooner than after so many seconds. `since`: begin of the
    wait, if not now."""
    end, late = (time.monotonic() if since is None else since) + deadline_s, list(calls)
    while late:
        left_s = end - time.monotonic()
        late = open_of(late, max(0.0, min(left_s, BEAT_S)))
        if late and left_s <= 0:
            return f"waited {deadline_s:g} s for engine {calls[late[0]][0]} to take weights"
        for name, pulse in map(calls.__getitem__, late):
            if not pulse.beats():
                return f"engine {name} has said nothing for {pulse.patience.limit_s:.3g} s while it was to take weights"
    return ""
