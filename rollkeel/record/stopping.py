"""Ctrl-C as a request that is asked for at safe points."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from rollkeel.record.live import LiveView


class StopFlag:
    """Turns the first Ctrl-C or SIGTERM into a request to stop at the next safe point; a second one stops at once.

    Outside of the main thread Python lets nobody handle signals: there it is never set, and the main thread's handlers stay.
    """

    def __init__(self, view: LiveView | None = None) -> None:
        self._view = view
        self._set = False
        self._previous: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self._set

    def __enter__(self) -> StopFlag:
        main = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM) if main else ():
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._set:
            raise KeyboardInterrupt
        self._set = True
        if self._view is not None:
            self._view.note("stopping at the next safe point (again to stop at once)")
