"""Whether a node is used: a decision without sockets; `nodes.py` asks the questions.

A node is `open` (isolated) until it has answered a check, then `half_open` until it has run a job for the front itself, then `closed`:
in use. Deadlines of checks follow the measured times as TCP's do (mean plus four deviations), and double after each miss.
"""

from __future__ import annotations

import enum

MISSES = 2
"""Checks missed in a row that isolate a node; one that cannot be reached at all is isolated at once."""
LONGEST_DEADLINE_S, LONGEST_PAUSE_S = 20.0, 15.0


class State(enum.StrEnum):
    OPEN = "open"
    HALF_OPEN = "half_open"
    CLOSED = "closed"


class Circuit:
    """Of one node. `every_s`: seconds between checks, and the shortest deadline of one."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.state = State.OPEN
        self.misses = 0
        self.isolated = 0
        self._mean, self._deviation = every_s / 4, every_s / 8

    @property
    def deadline_s(self) -> float:
        """Of the next check."""
        expected = max(self._every_s, self._mean + 4 * self._deviation)
        return min(expected * 2 ** min(self.misses, MISSES), LONGEST_DEADLINE_S)

    @property
    def pause_s(self) -> float:
        """Until the next check: at once after a miss that decides nothing, longer and longer for a node that is gone."""
        if self.state is State.CLOSED:
            return 0.0 if self.misses else self._every_s
        return min(self._every_s * 2 ** min(self.misses, 10), LONGEST_PAUSE_S)

    def answered(self, took_s: float) -> None:
        """A check was answered."""
        self._deviation += (abs(took_s - self._mean) - self._deviation) / 4
        self._mean += (took_s - self._mean) / 8
        self.misses = 0
        if self.state is State.OPEN:
            self.state = State.HALF_OPEN

    def proved(self) -> None:
        """It ran the front's own job."""
        self.state = State.CLOSED

    def missed(self, *, gone: bool = False) -> bool:
        """A check was not answered, or refused (`gone`); True if that isolates the node."""
        self.misses += 1
        if self.state is State.CLOSED and self.misses < MISSES and not gone:
            return False
        was, self.state = self.state, State.OPEN
        self.isolated += was is State.CLOSED
        return was is State.CLOSED
