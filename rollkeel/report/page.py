"""Renders `report.html`: one file, no scripts, no outside references, from the run folder alone."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rollkeel.events import write_atomic
from rollkeel.record.glossary import meaning
from rollkeel.record.live import duration
from rollkeel.record.runfolder import rollout_files
from rollkeel.report.charts import Chart, matching, series
from rollkeel.report.dropped_tokens import dropped_tokens
from rollkeel.report.memory import memory
from rollkeel.report.panels import panels
from rollkeel.report.run_files import RunFiles, read_run
from rollkeel.report.samples import Sample, Step, browse
from rollkeel.report.standalone import STYLE
from rollkeel.report.token_charts import agreement, token_charts
from rollkeel.report.verdict import verdict
from rollkeel_doctor.errors import DoctorError
from rollkeel_doctor.traces.run import read_run_trace

MAX_BYTES = 1_400_000
_CHARTED_STEPS = 60
"""Steps whose tokens are drawn, evenly over the run."""
_MAX_EVENTS = 200
_MAX_METRICS = 400
_MAX_CONFIG = 100_000
_DEFAULT_SAMPLES = 4
_TOKEN_BUDGETS = (2400, 1200, 500, 100, 0)
_LOUD = ("refused", "fail", "alarm", "error", "dropped", "stopped", "corrupt", "non_finite", "nonfinite")
_SUMMARY = [
    "model.path",
    "engine.kind",
    "engine.dtype",
    "model.dtype",
    "data.task",
    "data.path",
    "sampling.temperature",
    "sampling.top_p",
    "sampling.max_new_tokens",
    "rollout.prompts",
    "rollout.samples",
    "train.lr",
    "train.updates_per_step",
    "run.seed",
    "run.device",
]


def render(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write `report.html` into the run folder, or to the file `out`, and return its path.

    Works on a running, killed, damaged or empty run: what is missing is left out, what is damaged is named on the
    page. The page stays under 1.5 MB. Raises `BadInput` if `run_dir` is no run folder or cannot be written.
    """
    run = read_run(run_dir)
    (drawn, quiet) = panels(run.rows)
    tokens = _token_charts(run)
    words = verdict(run)
    if isinstance(tokens, str):
        quiet.append(("Tokens", tokens))
        tokens = []
    dropped = dropped_tokens(run.path, _CHARTED_STEPS)
    # Where each stage of each step began matters after a kill only, and is in events.jsonl.
    events = [e for i, e in enumerate(run.events) if e.get("event") != "stage" or i == len(run.events) - 1]
    template = _environment().get_template("template.html.j2")
    html = ""
    for budget in _TOKEN_BUDGETS:
        problems = list(run.problems)
        steps = browse(run.path, min(_sample_count(run), 16), budget, problems)
        html = template.render(
            run=run,
            problems=problems[:50],
            style=Markup(STYLE),
            name=_name(run),
            words=words,
            setup=" · ".join(_setup(run)),
            objective=objective(run),
            summary=summary(run),
            progress=_progress(run),
            duration=duration(run.duration_s),
            cards=cards(run.rows),
            charts=[(chart, Markup(chart.markup)) for chart in drawn],
            quiet=quiet,
            token_charts=[(chart, Markup(chart.markup)) for chart in tokens],
            dropped=[(name, rows) for name, rows in zip(("A > 0", "A < 0"), dropped, strict=True) if rows],
            memory=memory(run.events, run.rows),
            steps=steps,
            step_facts=_step_facts,
            sample_facts=_sample_facts,
            metrics=metric_table(run.rows),
            events=event_table(events),
            events_hidden=max(len(events) - _MAX_EVENTS, 0),
            config_text=run.config_text[:_MAX_CONFIG],
            rendered=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        )
        if len(html.encode("utf-8", "replace")) <= MAX_BYTES:
            break
    path = Path(out or run.path / "report.html")
    write_atomic(path, html.encode("utf-8", "replace"))
    return path


def _token_charts(run: RunFiles) -> list[Chart] | str:
    """The charts, or one line where there is nothing to see."""
    if not rollout_files(run.path):
        return []
    try:
        trace = read_run_trace(run.path, spread=_CHARTED_STEPS)
    except DoctorError as error:
        run.problems.append(str(error))
        return []
    return agreement(trace) or token_charts(trace)


def objective(run: RunFiles) -> tuple[str, list[tuple[str, str]]]:
    """Name and parameters: as the run resolved them (event `objective`), else as configured plus the masks' metrics."""
    for event in reversed(run.events):
        if event.get("event") == "objective":
            rest = [(key, _short(value)) for key, value in event.items() if key not in ("event", "time", "name")]
            return str(event.get("name", "?")), rest
    section = run.config.get("objective")
    section = section if isinstance(section, dict) else {}
    shown = {key: _short(value) for key, value in section.items() if key != "name"}
    for key in matching(run.rows[-1:], ("mask/*/*",)):
        _, mask, parameter = key.split("/")
        if not parameter.startswith(("dropped", "floored", "kept")):
            shown.setdefault(
                parameter if mask == section.get("name") else f"{mask} {parameter}", _short(run.rows[-1][key])
            )
    return str(section.get("name", "?")), list(shown.items())


def summary(run: RunFiles) -> list[tuple[str, str]]:
    """The config values people ask for first, with their dotted names; those that are null are left out."""
    found = []
    for dotted in _SUMMARY:
        value: Any = run.config
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found.append((dotted, _short(value)))
    return found


def cards(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """`(label, value, note)` of the headline numbers the rows have: at most six, so that they fill one row."""
    found: list[tuple[str, str, str]] = []
    for key in matching(rows, ("eval/*/avg@k",))[:2]:
        held = [row for row in rows if isinstance(row.get(key), int | float)]
        error = held[-1].get(f"{key}_se")
        spread = f" ± {error:.3f}" if isinstance(error, int | float) else " ± n/a"
        start = f"from {held[0][key]:.3f} at step {held[0]['step']}" if len(held) > 1 else f"step {held[-1]['step']}"
        found.append((f"{key.split('/')[1]} avg@k", f"{held[-1][key]:.3f}{spread}", start))
    for key, label, form in (
        ("reward/mean", "Training reward", "{:.3f}"),
        ("mismatch/ratio_std", "Ratio std", "{:.2g}"),
        ("policy/entropy", "Entropy", "{:.3f}"),
        ("mask/*/dropped", "Masked", "{:.2%}"),
        ("time/step_s", "Seconds per step", "{:.2f}"),
        ("memory/rss_mb", "Memory", "{:,.0f} MB"),
    ):
        for name in matching(rows, (key,))[:1]:
            _, values = series(rows, name)
            found.append((label, form.format(values[-1]), f"from {form.format(values[0])}"))
    return found[:6]


@dataclass(frozen=True)
class Metric:
    """A row of the table of all metrics."""

    name: str
    meaning: str
    """Unit and sentence of the glossary; empty for a name it does not have."""
    numbers: tuple[str, ...]
    """First, last, smallest, largest."""


def metric_table(rows: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """Every numeric metric."""
    table = []
    names = sorted({key for row in rows for key in row if key != "step"})
    for key in names[:_MAX_METRICS]:
        values = [row[key] for row in rows if isinstance(row.get(key), int | float)]
        if values:
            numbers = tuple(_short(value) for value in (values[0], values[-1], min(values), max(values)))
            table.append(Metric(key[:120], meaning(key), numbers))
    return table


def event_table(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, bool]]:
    """`(time since start, kind, fields, loud)` of the last events; loud ones are kept however old they are."""
    start = next((e["time"] for e in events if isinstance(e.get("time"), int | float)), 0.0)
    table = []
    for at, event in enumerate(events):
        kind = str(event.get("event", "?"))
        loud = any(word in kind for word in _LOUD) or event.get("status") in ("failed", "stopped")
        if at < len(events) - _MAX_EVENTS and not (loud and len(table) < _MAX_EVENTS):
            continue
        moment = event.get("time")
        since = f"+{duration(max(moment - start, 0))}" if isinstance(moment, int | float) else ""
        fields = {key: value for key, value in event.items() if key not in ("time", "event")}
        text = "  ".join(
            f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in fields.items()
        )
        table.append((since, kind[:80], text[:600], loud))
    return table


def _environment() -> Environment:
    # Prompts, answers and events are untrusted text: everything is escaped unless it is this program's own markup.
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _name(run: RunFiles) -> str:
    section = run.config.get("run")
    name = section.get("name") if isinstance(section, dict) else None
    folder = run.path.resolve().name
    return folder if name in (None, "run", folder) else f"{name} · {folder}"


def _progress(run: RunFiles) -> str:
    done = max((row["step"] for row in run.rows), default=0)
    section = run.config.get("run")
    planned = section.get("steps") if isinstance(section, dict) else None
    return f"{done} of {planned} steps" if isinstance(planned, int) else f"{done} steps"


def _setup(run: RunFiles) -> list[str]:
    """Objective, model, task and engine in a few words."""
    wanted = ("model.path", "data.task", "data.path", "engine.kind", "engine.dtype")
    told = dict(summary(run))
    return [objective(run)[0], *(told[key] for key in wanted if key in told)]


def _sample_count(run: RunFiles) -> int:
    section = run.config.get("report")
    count = section.get("samples") if isinstance(section, dict) else None
    return count if isinstance(count, int) else _DEFAULT_SAMPLES


def _step_facts(step: Step) -> str:
    reward = "" if step.reward is None else f"reward {step.reward:.3f} · "
    return f"{reward}{len(step.samples)} of {step.rollouts} rollouts"


def _sample_facts(sample: Sample) -> str:
    row = sample.row
    reward = "not graded" if row["reward"] is None else f"reward {row['reward']:g}"
    return f"step {row['step']} · group {row['group']}, member {row['member']} · {reward} · {row['status']} · {len(row['token_ids'])} tokens · {row['engine']} {row['dtype']}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list | tuple):
        return ", ".join(_short(item) for item in value) or "none"
    return "none" if value is None else str(value)[:200]
