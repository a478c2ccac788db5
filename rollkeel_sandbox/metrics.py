"""Figures of a running service: as a dictionary, and as text in the exposition format 0.0.4 that Prometheus reads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

QUANTILES = (0.5, 0.9, 0.99)
KEPT = 2048
STAGES = ("queue", "run", "total")
PREFIX = "rollkeel_sandbox"


class Latencies:
    """Seconds of the last `KEPT` jobs, and sum and number of all."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=KEPT)
        self.count, self.sum = 0, 0.0

    def add(self, seconds: float) -> None:
        self._last.append(seconds)
        self.count += 1
        self.sum += seconds

    def summary(self) -> dict[str, float]:
        """`count`, `sum`, and `p50`, `p90`, `p99` by nearest rank; the latter absent before the first job."""
        out: dict[str, float] = {"count": self.count, "sum": round(self.sum, 6)}
        ordered = sorted(self._last)
        for q in QUANTILES if ordered else ():
            out[f"p{round(100 * q)}"] = round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 6)
        return out


class Timings:
    """Latencies by partition and stage."""

    def __init__(self, partitions: Iterable[str]) -> None:
        self._by = {name: {stage: Latencies() for stage in STAGES} for name in partitions}
        self.statuses: dict[str, dict[str, int]] = {name: {} for name in self._by}
        self.started = time.time()

    def add(self, partition: str, status: str, waited_s: float, ran_s: float) -> None:
        stages = self._by[partition]
        stages["queue"].add(waited_s)
        stages["run"].add(ran_s)
        stages["total"].add(waited_s + ran_s)
        self.statuses[partition][status] = self.statuses[partition].get(status, 0) + 1

    def summary(self, partition: str) -> dict[str, dict[str, float]]:
        return {stage: kept.summary() for stage, kept in self._by[partition].items()}


def text(figures: Mapping[str, Any]) -> str:
    """`Service.metrics()` for Prometheus."""
    lines: list[str] = []

    def family(name: str, kind: str, help_: str, rows: Iterable[tuple[dict[str, str], float]]) -> None:
        lines.extend((f"# HELP {PREFIX}_{name} {help_}", f"# TYPE {PREFIX}_{name} {kind}"))
        lines.extend(_line(name, labels, value) for labels, value in rows)

    parts: Mapping[str, Any] = figures["partitions"]
    for name, help_ in (("queued", "Jobs that wait."), ("running", "Jobs that run."), ("workers", "Workers.")):
        family(name, "gauge", help_, [({"partition": p}, row[name]) for p, row in parts.items()])
    for name, help_ in (
        ("accepted", "Jobs taken."),
        ("refused", "Jobs refused because the queue was full."),
        ("retried", "Jobs run once more because their worker was lost."),
        ("replaced", "Workers given up for another."),
    ):
        family(f"{name}_total", "counter", help_, [({"partition": p}, row[name]) for p, row in parts.items()])
    family(
        "ended_total",
        "counter",
        "Jobs that have left, by status or by why they have none.",
        [({"partition": p, "status": s}, n) for p, row in parts.items() for s, n in row["ended"].items()],
    )
    lines.extend(_latencies(parts))
    family("kept_results", "gauge", "Results that can still be asked for.", [({}, figures["kept_results"])])
    family("terminals", "gauge", "Open terminal sessions.", [({}, figures["terminals"])])
    family("level", "gauge", "Isolation: 0 none, 1 restricted, 2 namespaces, 3 full.", [({}, figures["level"])])
    family("start_time_seconds", "gauge", "Unix time of the start.", [({}, figures["started"])])
    return "\n".join(lines) + "\n"


def _latencies(parts: Mapping[str, Any]) -> Iterable[str]:
    name = "latency_seconds"
    yield f"# HELP {PREFIX}_{name} Seconds of the last {KEPT} jobs with a result: in the queue, running, both."
    yield f"# TYPE {PREFIX}_{name} summary"
    for partition, row in parts.items():
        for stage, summary in row["latency"].items():
            labels = {"partition": partition, "stage": stage}
            for q in QUANTILES:
                if (key := f"p{round(100 * q)}") in summary:
                    yield _line(name, labels | {"quantile": f"{q:g}"}, summary[key])
            yield _line(f"{name}_sum", labels, summary["sum"])
            yield _line(f"{name}_count", labels, summary["count"])


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{key}="{label}"' for key, label in labels.items())
    return f"{PREFIX}_{name}{{{shown}}} {value}" if shown else f"{PREFIX}_{name} {value}"
