"""`rollkeel simulate` from files to files: lengths of a run's rollouts in, a table, JSON and one page with charts out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import yaml
from matplotlib.axes import Axes

from rollkeel.errors import BadInput
from rollkeel.events import write_atomic
from rollkeel.record.rollout_store import read_step
from rollkeel.report.charts import MAX_POINTS, SERIES, Chart, drawing, log_axis
from rollkeel.report.standalone import document, figures_of, table_of
from rollkeel.rollout.ledger import Result
from rollkeel.rollout.scenario import Scenario
from rollkeel.rollout.simulate import compare, simulate
from rollkeel.types import Status

_COLUMNS = (
    ("rollout speed-up", "speedup_rollout", "{:.2f}x"),
    ("step speed-up", "speedup_step", "{:.2f}x"),
    ("rollout s", "rollout_s", "{:.4g}"),
    ("step s", "step_s", "{:.4g}"),
    ("slots", "slots", "{:.0f}"),
    ("idle", "idle_share", "{:.1%}"),
    ("lost", "lost_throughput", "{:.1%}"),
    ("length bias", "length_bias", "{:.3f}"),
    ("purged", "purge_rate", "{:.1%}"),
    ("staleness", "staleness_mean", "{:.2f}"),
    ("max", "staleness_max", "{:.0f}"),
)


def run(scenario: Scenario, out: Path | None = None) -> dict[str, Any]:
    """Simulate, and write `simulation.json`, `scenario.yaml` and `simulation.html` into the folder `out` if given.

    Returns what the JSON holds: `scenario`, and `policies` with their figures.
    """
    observed = None if scenario.lengths.rollouts is None else observed_lengths(Path(scenario.lengths.rollouts))
    results = simulate(scenario, observed)
    figures: list[dict[str, Any]] = [dict(row) for row in compare(results)]
    for row, result in zip(figures, results, strict=True):
        row["purge_rate_by_length"] = [list(pair) for pair in result.purge_rate_by_length()]
        row["staleness"] = {str(lag): tokens for lag, tokens in sorted(result.ledger.staleness.items())}
    found = {"scenario": scenario.model_dump(mode="json"), "policies": figures}
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"cannot write {out}: {error.strerror or error}; choose another --out") from None
        write_atomic(out / "simulation.json", json.dumps(found, indent=1).encode())
        write_atomic(out / "scenario.yaml", yaml.safe_dump(found["scenario"], sort_keys=False).encode())
        write_atomic(out / "simulation.html", page(found, results).encode())
    return found


def observed_lengths(path: Path) -> np.ndarray:
    """Lengths `[n]` of the complete, non-empty rollouts in a parquet file, a folder of them or a run folder."""
    files = [path] if path.is_file() else sorted(path.glob("*.parquet")) or sorted(path.glob("rollouts/*.parquet"))
    if not files:
        raise BadInput(f"lengths.rollouts {path}: no parquet files; name a file, a folder of them or a run folder")
    lengths: list[np.ndarray] = []
    for file in files:
        table = read_step(file, ["token_ids", "status"])
        complete = np.array([Status(s).complete for s in table["status"].to_pylist()], bool)
        sizes = pc.call_function("list_value_length", [table["token_ids"]]).to_numpy()
        lengths.append(sizes[complete & (sizes > 0)])
    if not sum(map(len, lengths)):
        raise BadInput(f"lengths.rollouts {path}: no complete rollout has a token")
    return np.concatenate(lengths)


def table(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    """Aligned lines, one per policy below a heading."""
    cells = [["policy", *(title for title, _, _ in _COLUMNS)]]
    cells += [[row["policy"], *(form.format(row[key]) for _, key, form in _COLUMNS)] for row in figures]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join([r[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(r[1:], widths[1:], strict=True))]) for r in cells
    ]


def page(found: Mapping[str, Any], results: Sequence[Result]) -> str:
    """One HTML file without scripts or outside references."""
    figures = found["policies"]
    rows = [(row["policy"], *(form.format(row[key]) for _, key, form in _COLUMNS)) for row in figures]
    head = ("policy", *(title for title, _, _ in _COLUMNS))
    config = escape(yaml.safe_dump(found["scenario"], sort_keys=False, default_flow_style=None, width=110))
    return document(
        "Rollout policies, simulated",
        f'{table_of(head, rows)}{figures_of(charts(figures, results))}<div class="panel"><pre>{config}</pre></div>',
    )


def charts(figures: Sequence[Mapping[str, Any]], results: Sequence[Result]) -> list[Chart]:
    """Speed-up, one iteration's occupancy, lengths, purges by length and staleness."""
    names = [row["policy"] for row in figures]

    def speedups(axes: Axes) -> None:
        at = np.arange(len(names))
        for shift, key, color in ((-0.2, "rollout", SERIES[0]), (0.2, "step", SERIES[1])):
            axes.bar(at + shift, [row[f"speedup_{key}"] for row in figures], 0.38, color=color, label=key)
        axes.set_xticks(at, names)
        axes.set_ylabel("speed-up")

    def occupancy(axes: Axes) -> None:
        for color, result in zip(SERIES, results, strict=False):
            trace = result.trace[:: max(1, len(result.trace) // MAX_POINTS)]
            axes.step([t for t, _ in trace], [n for _, n in trace], where="post", color=color, label=result.name)
        axes.set_xlabel("s since the iteration began")
        axes.set_ylabel("running rollouts")

    def lengths(axes: Axes) -> None:
        shares = np.linspace(0, 1, 101)
        axes.plot(np.quantile(results[0].ledger.issued_lengths or [0], shares), shares, color=SERIES[7], label="issued")
        for color, result in zip(SERIES, results, strict=False):
            axes.plot(np.quantile(result.ledger.trained_lengths or [0], shares), shares, color=color, label=result.name)
        log_axis(axes, "x")
        axes.set_xlabel("length up to (tokens)")
        axes.set_ylabel("share of rollouts")

    def purges(axes: Axes) -> None:
        for color, result in zip(SERIES, results, strict=False):
            pairs = result.purge_rate_by_length()
            axes.plot([e for e, _ in pairs], [100 * r for _, r in pairs], "o-", ms=3, color=color, label=result.name)
        log_axis(axes, "x")
        axes.set_xlabel("true length (tokens)")
        axes.set_ylabel("purged (%)")

    def staleness(axes: Axes) -> None:
        for color, result in zip(SERIES, results, strict=False):
            lag = sorted(result.ledger.staleness.items())
            total = max(1, sum(n for _, n in lag))
            axes.plot(
                [k for k, _ in lag], [100 * n / total for _, n in lag], "o-", ms=3, color=color, label=result.name
            )
        axes.set_xlabel("versions between sampling and training")
        axes.set_ylabel("trained tokens (%)")

    return [
        drawing("Speed-up over the barrier", "Trained tokens per second, rollout phase and whole step.", speedups),
        drawing("Occupancy", "Running rollouts over the last iteration.", occupancy),
        drawing("Length", "A curve left of 'issued' trains on answers that are too short.", lengths),
        drawing("Purges by length", "Purged or discarded, by the length they would have reached.", purges),
        drawing("Staleness", "How old trained tokens are.", staleness),
    ]
