"""An event loop in a thread of its own, for engines whose public methods are synchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from rollkeel.errors import EngineFailure


class Background:
    """Runs coroutines. What goes wrong in one that nobody waits for is handed to `on_error` instead of vanishing."""

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._name, self._on_error = name, on_error
        self.loop = asyncio.new_event_loop()
        self._jobs: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self.loop.run_forever, name=f"rollkeel-{name}", daemon=True)
        self._thread.start()

    def job(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run beside everything else. On the loop's own thread only."""
        task = self.loop.create_task(work)
        self._jobs.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._jobs.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._on_error(error)

        task.add_done_callback(ended)
        return task

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Have the loop call `function` soon."""
        self.loop.call_soon_threadsafe(function, *args)

    def wait(self, work: Coroutine[Any, Any, Any], limit_s: float, what: str) -> Any:
        """Result of `work`. Raises `EngineFailure` when it takes longer than `limit_s`; then it is cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(limit_s)
        except TimeoutError:
            future.cancel()
            raise EngineFailure(f"engine {self._name}: waited {limit_s:g} s for it {what}") from None

    async def cancel_all(self) -> None:
        """Cancel every task but the one that asks, and wait for their ends."""
        tasks = asyncio.all_tasks(self.loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """End the thread."""
        self.call(self.loop.stop)
        self._thread.join(5.0)
