"""Progress of work that counts what it has done."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any


class Bars:
    """Context manager: `(stage, done, total)` draws a bar per stage on a terminal, and else writes a line every ten seconds.
    `total` None is unknown. Not thread-safe."""

    def __enter__(self) -> Callable[[str, int, int | None], None]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._progress.start()
        stages: dict[str, Any] = {}
        said = time.monotonic()

        def update(stage: str, done: int, total: int | None) -> None:
            nonlocal said
            if not console.is_terminal and time.monotonic() - said >= 10:
                said = time.monotonic()
                print(f"{stage}: {done:,}" + (f" of {total:,}" if total else ""), file=sys.stderr, flush=True)
            if stage not in stages:
                stages[stage] = self._progress.add_task(stage, total=total)
            self._progress.update(stages[stage], completed=done, total=total)

        return update

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
