"""One engine, two threads: calls take turns, and the one that comes again and again lets the other go first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from rollkeel.errors import EngineFailure


@final
class Turns:
    """A lock that is handed over: a `patient` caller is served when no other waits."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._state = threading.Condition()
        self._held = ""
        self._waiting = 0

    @contextmanager
    def turn(self, what: str, *, patient: bool = False) -> Iterator[None]:
        """Hold the engine to do `what`. Raises `EngineFailure` after `deadline_s` without a turn, naming who has it."""
        with self._state:
            self._waiting += not patient
            try:
                free = self._state.wait_for(
                    lambda: not self._held and not (patient and self._waiting), timeout=self._deadline_s
                )
                if not free:
                    raise EngineFailure(
                        f"engine: waited {self._deadline_s:g} s to {what} while another thread was to {self._held or 'wait'}"
                    )
                self._held = what
            finally:
                self._waiting -= not patient
        try:
            yield
        finally:
            with self._state:
                self._held = ""
                self._state.notify_all()
