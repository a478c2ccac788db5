"""How long somebody may be silent: by what was measured of him, so that slow is not taken for hung."""

from __future__ import annotations

ENOUGH = 10
"""Silences that must have ended before they say anything."""
SLACK_S = 10.0


class Patience:
    """Twice the longest silence that ended, and 10 s; before there are enough of them, and at most, `most_s`."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._longest_s = 0.0
        self._seen = 0

    def heard(self, after_s: float) -> None:
        """A silence has ended after so long."""
        self._longest_s, self._seen = max(self._longest_s, after_s), self._seen + 1

    @property
    def limit_s(self) -> float:
        measured = 2 * self._longest_s + SLACK_S if self._seen >= ENOUGH else self._most_s
        return min(measured, self._most_s)
