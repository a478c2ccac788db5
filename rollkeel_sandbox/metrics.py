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
    parts: Mapping[str, Any] = figures["partitions"]
    for name, help_ in (("queued", "Jobs that wait."), ("running", "Jobs that run."), ("workers", "Workers.")):
        lines += _family(name, "gauge", help_, [({"partition": p}, row[name]) for p, row in parts.items()])
    for name, help_ in (
        ("accepted", "Jobs taken."),
        ("refused", "Jobs refused because the queue was full."),
        ("retried", "Jobs run once more because their worker was lost."),
        ("replaced", "Workers given up for another."),
    ):
        lines += _family(f"{name}_total", "counter", help_, [({"partition": p}, row[name]) for p, row in parts.items()])
    lines += _family(
        "ended_total",
        "counter",
        "Jobs that have left, by status or by why they have none.",
        [({"partition": p, "status": s}, n) for p, row in parts.items() for s, n in row["ended"].items()],
    )
    said = f"Seconds of the last {KEPT} jobs with a result: in the queue, running, both."
    lines += _latencies(parts, "latency_seconds", said)
    lines += _family("kept_results", "gauge", "Results that can still be asked for.", [({}, figures["kept_results"])])
    lines += _family("terminals", "gauge", "Open terminal sessions.", [({}, figures["terminals"])])
    lines += _family(
        "level", "gauge", "Isolation: 0 none, 1 restricted, 2 namespaces, 3 full.", [({}, figures["level"])]
    )
    lines += _family("start_time_seconds", "gauge", "Unix time of the start.", [({}, figures["started"])])
    return "\n".join(lines) + "\n"


def front_text(figures: Mapping[str, Any]) -> str:
    """`Front.report()` for Prometheus."""
    lines: list[str] = []
    parts, nodes = figures["partitions"], figures["nodes"]
    for name, kind, help_ in (
        ("outstanding", "gauge", "Jobs that nodes have."),
        ("taken", "counter", "Jobs taken."),
        ("refused", "counter", "Jobs refused as no node had room."),
    ):
        rows = [({"partition": p}, row[name]) for p, row in parts.items()]
        lines += _family(f"front_{name}{'_total' * (kind == 'counter')}", kind, help_, rows)
    latency = {p: {"latency": {"total": row["latency"]}} for p, row in parts.items()}
    lines += _latencies(latency, "front_latency_seconds", f"Seconds of the last {KEPT} requests with a result.")
    for name, kind, help_ in (
        ("up", "gauge", "1 for a node in use, 0 for one that is isolated."),
        ("outstanding", "gauge", "Jobs that this front has there."),
        ("foreign", "gauge", "Jobs of others there."),
        ("workers", "gauge", "Workers."),
        ("deadline_seconds", "gauge", "Deadline of the next check, by the measured times."),
        ("sent", "counter", "Jobs sent there."),
        ("failed", "counter", "Jobs that broke off or were late."),
        ("isolated", "counter", "Times that the node was isolated."),
    ):
        rows = [({"node": url}, row[name]) for url, row in nodes.items()]
        lines += _family(f"front_node_{name}{'_total' * (kind == 'counter')}", kind, help_, rows)
    answers = [({"status": str(status)}, count) for status, count in figures["answers"].items()]
    lines += _family("front_answers_total", "counter", "Answers by HTTP status.", answers)
    for name, help_ in (
        ("reissued", "Requests sent to a second node."),
        ("killed", "Jobs that lost two nodes."),
        ("lost_sessions", "Terminal sessions whose node was lost."),
    ):
        lines += _family(f"front_{name}_total", "counter", help_, [({}, figures[name])])
    lines += _family("front_terminals", "gauge", "Open terminal sessions.", [({}, figures["terminals"])])
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, help_: str, rows: Iterable[tuple[dict[str, str], float]]) -> list[str]:
    first = [f"# HELP {PREFIX}_{name} {help_}", f"# TYPE {PREFIX}_{name} {kind}"]
    return first + [_line(name, labels, value) for labels, value in rows]


def _latencies(parts: Mapping[str, Any], name: str, help_: str) -> Iterable[str]:
    yield from _family(name, "summary", help_, ())
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
