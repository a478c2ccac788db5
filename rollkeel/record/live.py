"""What a person sees while a run goes on: a live view on a terminal, one plain line per step anywhere else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_WINDOW = 20
_NOTES = 6
_BARS = "▁▂▃▄▅▆▇█"
# Label, keys (the first that a row has is shown), format. A trailing * matches the first key that fits.
_SHOWN: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("loss", ("sft/loss",), "{:.4f}"),
    ("reward", ("reward/mean",), "{:.3f}"),
    ("accuracy", ("eval/*/avg@k",), "{:.3f}"),
    ("greedy", ("eval/*/greedy",), "{:.3f}"),
    ("ratio std", ("mismatch/ratio_std",), "{:.3g}"),
    ("masked", ("mask/*/dropped",), "{:.2%}"),
    ("entropy", ("policy/entropy",), "{:.3f}"),
    ("length", ("rollout/length_mean",), "{:.1f}"),
    ("grad norm", ("optimizer/grad_norm",), "{:.3f}"),
)


class LiveView:
    """Context manager. `phase` starts a stage (`sft`, `rl`, `eval`), `step` reports progress in it.

    On a terminal the view redraws in place; elsewhere every step is one flushed line, fit for a log file.
    The view only reads: it never changes a metric, and steps may come from a resumed run (rate and ETA count only
    the steps seen).
    """

    def __init__(self, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`console` defaults to standard output; `clock` returns seconds."""
        self.console = console or Console(highlight=False)
        self._clock = clock
        self._live: Live | None = None
        self._phase = ""
        self._total = 0
        self._step = 0
        self._metrics: dict[str, Any] = {}
        self._times: deque[tuple[int, float]] = deque(maxlen=_WINDOW + 1)
        self._notes: deque[Text] = deque(maxlen=_NOTES)
        self._rewards: list[float] = []
        self.actors: Callable[[], Mapping[str, str]] = dict
        """What each actor of a run over a cluster does now, by name; shown where the view redraws."""

    def __enter__(self) -> LiveView:
        if self.console.is_terminal:
            self._live = Live(self, console=self.console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, name: str, total: int) -> None:
        """Start stage `name` of `total` steps."""
        self._phase = name
        self._total = total
        self._step = 0
        self._metrics, self._rewards = {}, []
        self._times.clear()
        self._times.append((-1, self._clock()))  # -1: the first step is not known yet
        self._plain(f"{name}: {total} steps")

    def step(self, i: int, metrics: Mapping[str, Any]) -> None:
        """Step `i` (1-based) of the phase is done. Metrics last seen stay visible until replaced (evaluations)."""
        if self._times and self._times[0][0] < 0:
            self._times[0] = (i - 1, self._times[0][1])
        self._step = i
        self._times.append((i, self._clock()))
        self._metrics.update(metrics)
        if isinstance(reward := metrics.get("reward/mean"), int | float):
            self._rewards.append(reward)
        self._plain(self._line(metrics))

    def note(self, text: str) -> None:
        """Show one line, verbatim."""
        self._say(Text(_clean(text)))

    def error(self, text: str) -> None:
        """Show one line as an error."""
        self._say(Text("error: " + _clean(text), style="bold red"))

    @property
    def seconds_per_step(self) -> float | None:
        """Over the last 20 steps; None before the first."""
        if len(self._times) < 2:
            return None
        (first, start), (last, end) = self._times[0], self._times[-1]
        return (end - start) / (last - first) if last > first else None

    @property
    def eta_s(self) -> float | None:
        """Seconds until the phase is done at the current rate; None before the first step."""
        pace = self.seconds_per_step
        return None if pace is None else pace * max(self._total - self._step, 0)

    def __rich__(self) -> Group:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(self._phase or "starting", style="bold cyan"),
            ProgressBar(total=max(self._total, 1), completed=self._step, width=32),
            Text(f"{self._step}/{self._total}"),
            Text(self._pace(), style="dim"),
        )
        parts: list[Any] = [head]
        shown = select(self._metrics)
        if shown:
            table = Table.grid(padding=(0, 3))
            table.add_row(*(Text(label, style="dim") for label, _ in shown))
            table.add_row(*(Text(value, style="bold") for _, value in shown))
            parts.append(table)
        if len(self._rewards) > 1:
            first, last = self._rewards[0], self._rewards[-1]
            parts.append(Text(f"reward  {sparkline(self._rewards)}  {first:.3f} → {last:.3f}"))
        stages = stage_times(self._metrics)
        if stages:
            parts.append(Text("time  " + "  ".join(f"{name} {duration(s)}" for name, s in stages), style="dim"))
        if actors := self.actors():
            parts.append(Text("  ".join(f"{name} {state}" for name, state in actors.items()), style="dim"))
        return Group(*parts, *self._notes)

    def _line(self, metrics: Mapping[str, Any]) -> str:
        parts = [f"{self._phase} {self._step}/{self._total}"]
        parts += [f"{label} {value}" for label, value in select(metrics)]
        return "  ".join([*parts, self._pace()])

    def _pace(self) -> str:
        pace, eta = self.seconds_per_step, self.eta_s
        if pace is None or eta is None:
            return ""
        return f"{duration(pace)}/step" + (f"  ETA {duration(eta)}" if self._step < self._total else "")

    def _say(self, text: Text) -> None:
        if self._live is not None:
            self._notes.append(text)
        else:
            self._plain(text.plain)

    def _plain(self, text: str) -> None:
        if self._live is None:
            # Not console.print: it wraps at 80 columns when there is no terminal.
            self.console.file.write(text.rstrip() + "\n")
            self.console.file.flush()


def select(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """`(label, formatted value)` of the metrics worth a place on the screen, in a fixed order."""
    shown = []
    for label, keys, form in _SHOWN:
        for key in keys:
            value = _lookup(metrics, key)
            if isinstance(value, int | float):
                shown.append((label, form.format(value)))
                break
    return shown


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Bars of equal stretches' means, at most `width`, from the least (▁) to the largest (█)."""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(_BARS[round((x - low) / (high - low) * 7) if high > low else 0] for x in means)


def stage_times(metrics: Mapping[str, Any]) -> list[tuple[str, float]]:
    """`(stage, seconds)` of the `time/<stage>_s` metrics, in the row's order."""
    return [
        (key[5:-2], value)
        for key, value in metrics.items()
        if key.startswith("time/") and key.endswith("_s") and isinstance(value, int | float)
    ]


def duration(seconds: float) -> str:
    """`0.14 s`, `12 s`, `3m05s`, `2h07m`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def _lookup(metrics: Mapping[str, Any], pattern: str) -> Any:
    if "*" not in pattern:
        return metrics.get(pattern)
    head, tail = pattern.split("*")
    return next((value for key, value in metrics.items() if key.startswith(head) and key.endswith(tail)), None)


def _clean(text: str) -> str:
    """One printable line: model output must not steer the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)
