"""How long the stages of a step take, and what the process holds at its end."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollkeel.events import EventLog


@dataclass
class Clock:
    """Seconds per stage of one step, and an event at the start of each so that a killed run shows where it was.

    The step's own time is that of the clock on the wall: in the asynchronous loop other stages go on beside these.
    """

    events: EventLog
    step: int
    seconds: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)
    begins: Callable[[str], None] = lambda name: None
    """Told the name of each stage when it begins, as a part of it."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.events.emit("stage", step=self.step, stage=name)
        start = time.perf_counter()
        try:
            self.begins(name)
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self, tokens: Mapping[str, int]) -> dict[str, float]:
        """`time/<stage>_s`, `time/step_s` of the whole step, `throughput/<stage>_tokens_s` for stages (and `step`) with a token
        count, and `memory/rss_mb`."""
        spans = {**self.seconds, "step": time.perf_counter() - self.began}
        out = {f"time/{name}_s": s for name, s in spans.items()}
        for name, count in tokens.items():
            if spans.get(name):
                out[f"throughput/{name}_tokens_s"] = count / spans[name]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        out["memory/rss_mb"] = peak / (2**20 if sys.platform == "darwin" else 2**10)
        return out
