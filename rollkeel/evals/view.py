"""Results and differences as tables of percentages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def show_results(results: Mapping[str, Any], console: Console | None = None) -> None:
    """One row per benchmark: percentages, with the error of avg@k; `cut` is the share at the length limit."""
    columns = ("benchmark", "items", "k", "avg@k", "95 %", "pass@k", "maj@k", "greedy", "cut", "failed")
    console, table = _open(console, columns, left=1)
    for name, result in results["benchmarks"].items():
        metrics = result["metrics"]
        counts = result["counts"]
        k = result["k"]
        mean = metrics.get("avg@k")
        table.add_row(
            f"{name} (judged)" if result.get("judged") else name,
            str(counts["items"]),
            str(k),
            f"{_percent(mean['value'])} {_spread(mean)}" if mean else "–",
            f"{_percent(mean['low'])}–{_percent(mean['high'])}" if mean and mean["items"] > 1 else "–",
            *(_percent(metrics[m]["value"]) if m in metrics else "–" for m in (f"pass@{k}", f"majority@{k}", "greedy")),
            _percent(counts["length_limited"]),
            str(counts["engine_failures"] + counts["grader_failures"]),
        )
    console.print(f"{results['model']} (weights {results['weights']}), percent")
    console.print(table)
    for name, result in results["benchmarks"].items():
        if result.get("judged"):
            console.print(f"{name}: judged by {result['judged']}")
        for metric in (m for m in result["metrics"] if m.endswith(" mean")):
            value = result["metrics"][metric]
            console.print(f"{name}: {metric} {_percent(value['value'])} {_spread(value)}")


def show_comparison(found: Mapping[str, Any], console: Console | None = None) -> None:
    """One row per benchmark and metric; `*` where the interval leaves 0 out."""
    columns = ("benchmark", "metric", "items", "first", "second", "difference", "95 %")
    console, table = _open(console, columns, left=2)
    for name, metrics in found.items():
        for metric, value in ((m, v) for m, v in metrics.items() if m != "k"):
            d = value["difference"]
            several = d["items"] > 1
            clear = "*" if several and (d["low"] > 0 or d["high"] < 0) else ""
            table.add_row(
                name,
                metric,
                str(d["items"]),
                _percent(value["a"]),
                _percent(value["b"]),
                f"{100 * d['value']:+.1f}{clear} {_spread(d)}",
                _bounds(d),
            )
    console.print("second − first, paired by item, percent")
    console.print(table)


def show_retained(found: Mapping[str, Any], console: Console | None = None) -> None:
    """One row per domain; `lost` where too little is left of the best earlier score."""
    columns = ("domain", "best before", "items", "before", "now", "difference", "95 %", "")
    console, table = _open(console, columns, left=2)
    for name, row in found.items():
        d = row["difference"]
        numbers = (_percent(row["best"]), _percent(row["value"]), f"{100 * d['value']:+.1f}", _bounds(d))
        table.add_row(name, Path(row["stage"]).stem, str(d["items"]), *numbers, "kept" if row["kept"] else "lost")
    console.print(table)


def show_win_rate(found: Mapping[str, Any], console: Console | None = None) -> None:
    """One row per domain, and one for all."""
    console, table = _open(console, ("domain", "items", "second wins", "95 %"), left=1)
    for name, row in [*found["domains"].items(), ("all", found["all"])]:
        table.add_row(
            name, str(row["items"]), _percent(row["value"]), f"{_percent(row['low'])}–{_percent(row['high'])}"
        )
    console.print(table)
    told = (
        f"{found['pairs']} pairs, {found['failed']} failed, {_percent(found['swayed'])} % of verdicts hang on the order"
    )
    console.print(told)


def _bounds(difference: Mapping[str, Any]) -> str:
    several = difference["items"] > 1
    return f"{100 * difference['low']:+.1f} … {100 * difference['high']:+.1f}" if several else "–"


def _open(console: Console | None, columns: tuple[str, ...], left: int) -> tuple[Console, Table]:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < left else "right", no_wrap=True)
    return console or Console(highlight=False), table


def _spread(estimate: Mapping[str, Any]) -> str:
    """A single item has no standard error; ±0 would be wrong."""
    return f"±{_percent(estimate['se'])}" if estimate["items"] > 1 else "±n/a"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
