"""`rollkeel replay RUN --objective …` for people: tables on a terminal, one page with charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollkeel.diagnose.counterfactual import RECORDED, TOP, Counterfactual, Findings
from rollkeel.diagnose.counterfactual_tally import SIGNS
from rollkeel.errors import BadInput
from rollkeel.events import write_atomic
from rollkeel.report.charts import SERIES, Chart, drawing
from rollkeel.report.standalone import document, figures_of

COLUMNS = (
    ("dropped", "dropped", "share of tokens"),
    ("A > 0", "dropped_positive", "share of those with A > 0"),
    ("A < 0", "dropped_negative", "share of those with A < 0"),
    ("mass", "gradient_mass_dropped", "dropped share of Σ|A|(1 − p)"),
    ("left", "gradient_mass", "what is left of that mass under the weights; above 1 where weights raise it"),
    ("w mean", "weight_mean", "of what multiplies A·∇log p, over kept tokens with A ≠ 0"),
    ("w max", "weight_max", "the largest of them"),
    ("ESS", "ess", "their effective sample size, as a share"),
    ("q", "dropped_probability", "mean probability of dropped tokens when they were sampled"),
    ("H", "dropped_entropy", "mean entropy of the trainer at dropped tokens, nats"),
)
"""Heading, key of `Tally.summary`, what it is."""
SHARES = ("dropped", "dropped_positive", "dropped_negative", "gradient_mass_dropped", "gradient_mass")
_DRAWN = len(SERIES)
_WIDTH = 80


def show(found: Counterfactual, console: Console | None = None) -> None:
    """Print the tables; they fit 80 columns."""
    console = Console(highlight=False) if console is None else console
    for i, part in enumerate(tables(found)):
        if i and isinstance(part, Table | Group):
            console.print()
        console.print(part)


def tables(found: Counterfactual) -> Iterator[RenderableType]:
    """Overall, by probability, by entropy, where objectives part, most dropped tokens, what was refused."""
    steps = f"steps {found.steps[0]} to {found.steps[-1]}" if len(found.steps) > 1 else f"step {found.steps[0]}"
    yield Text(f"{found.path} ({found.source}): {found.tokens:,} trained tokens, {steps}")
    yield _table([heading for heading, _, _ in COLUMNS], [(f.label, _cells(f)) for f in found.findings])
    for what, title in (("probability", "by q, % dropped"), ("entropy", "by H, % dropped")):
        rows = [(f.label, f.whole.by(what)) for f in found.findings]
        if rows and rows[0][1]:
            heads = [_edge(row["low"]) for row in rows[0][1]]
            counts = ["".join(_count(row["tokens"])) for row in rows[0][1]]
            cells = [(label, [_percent(row.get("dropped")) for row in bins]) for label, bins in rows]
            yield _table([f"{head}-" for head in heads], [("tokens", counts), *cells], title)
    if 1 < len(found.findings) <= 8:
        numbers = [str(i + 1) for i in range(len(found.findings))]
        rows = [
            (f"{i + 1} {f.label}", [_percent(x) if i != j else "" for j, x in enumerate(found.differ[i])])
            for i, f in enumerate(found.findings)
        ]
        yield _table(numbers, rows, "% of tokens that one drops and the other keeps")
    yield from _words(found)
    for label, reason in found.refused.items():
        yield Text(f"not judged: {label} {reason}", style="yellow")
    for note in found.notes:
        yield Text(f"note: {note}", style="dim")


def _words(found: Counterfactual) -> Iterator[RenderableType]:
    lines = []
    for f in found.findings:
        for sign, mark in zip(SIGNS, ("A > 0", "A < 0"), strict=True):
            line = f"  {f.label}, {mark}:"
            for t in f.words.top(sign, TOP, found.pieces):
                item = f"  {_piece(t['piece'], t['id'])} {_count(t['dropped'])} ({t['share']:.0%})"
                if len(line) + len(item) > _WIDTH:
                    break
                line += item
            if not line.endswith(":"):
                lines.append(Text(line))
    if lines:
        yield Group(Text("most frequently dropped tokens, with the share of their occurrences", style="bold"), *lines)


def _table(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], title: str = "objective") -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    width = _WIDTH - sum(max(len(h), *(len(cells[i]) for _, cells in rows)) + 1 for i, h in enumerate(heads))
    table.add_column(title, overflow="fold", max_width=max(width, 14))
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for label, cells in rows:
        table.add_row(Text(label), *(Text(c) for c in cells))
    return table


def _cells(found: Findings) -> list[str]:
    summary = found.whole.summary()
    return [_number(key, summary.get(key)) for _, key, _ in COLUMNS]


def _number(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key in SHARES:
        return _percent(value)
    return f"{value:.3g}" if key == "weight_max" else f"{value:.2f}"


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    return "0%" if value == 0 else f"{100 * value:.2g}%" if value < 0.0995 else f"{100 * value:.0f}%"


def _edge(value: float) -> str:
    return f"{value:g}"


def _count(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.0f}{unit}"
    return f"{value:.0f}"


def _piece(piece: str | None, id: int) -> str:
    return f"#{id}" if piece is None else repr("".join(c if c.isprintable() or c in "\n\t" else "�" for c in piece))


def write_page(found: Counterfactual, out: Path) -> None:
    """Write the page to `out`. Raises `BadInput` if it cannot be written."""
    if not out.parent.is_dir():
        raise BadInput(f"--html {out}: no folder {out.parent}; make it or choose another file")
    write_atomic(out, page(found).encode("utf-8", "replace"))


_STYLE = (
    ".note{color:var(--muted);font-size:13px;margin:4px 0}.words td{white-space:normal}.words td:first-child{width:60px}"
    "code{background:var(--line);border-radius:4px;padding:0 3px;white-space:pre}"
)


def page(found: Counterfactual) -> str:
    """One HTML file without scripts or outside references."""
    steps = f"{found.steps[0]} to {found.steps[-1]}" if len(found.steps) > 1 else f"{found.steps[0]}"
    heads = "".join(f'<th title="{escape(about)}">{escape(head)}</th>' for head, _, about in COLUMNS)
    body = "".join(
        f"<tr><td>{escape(f.label)}</td>" + "".join(f"<td>{c}</td>" for c in _cells(f)) + "</tr>"
        for f in found.findings
    )
    legend = "; ".join(f"<b>{escape(head)}</b> {escape(about)}" for head, _, about in COLUMNS)
    said = [f"{label}: {reason}" for label, reason in found.refused.items()]
    notes = "".join(f"<p class='note'>{escape(x)}</p>" for x in [*found.notes, *said])
    return document(
        "Objectives on recorded tokens",
        f"<p class='note'>{escape(found.path)} ({escape(found.source)}): {found.tokens:,} trained tokens, steps {steps}.</p>{notes}"
        f'<div class="panel"><table><tr><th>objective</th>{heads}</tr>{body}</table><p class="note">{legend}.</p></div>'
        f"{figures_of(charts(found))}{_differ(found)}{_word_tables(found)}",
        style=_STYLE,
    )


def _differ(found: Counterfactual) -> str:
    if len(found.findings) < 2:
        return ""
    labels = [escape(f.label) for f in found.findings]
    top = float(found.differ.max()) or 1.0
    rows = ""
    for i, label in enumerate(labels):
        cells = "".join(
            "<td></td>"
            if i == j
            else f'<td style="background:color-mix(in srgb,var(--s2) {60 * x / top:.0f}%,transparent)">{_percent(x)}</td>'
            for j, x in enumerate(found.differ[i].tolist())
        )
        rows += f"<tr><td>{label}</td>{cells}</tr>"
    heads = "".join(f"<th>{label}</th>" for label in labels)
    return f'<div class="panel"><h3>Tokens that one drops and the other keeps</h3><table><tr><th></th>{heads}</tr>{rows}</table></div>'


def _word_tables(found: Counterfactual) -> str:
    out = ""
    for f in found.findings:
        rows = ""
        for sign, mark in zip(SIGNS, ("A &gt; 0", "A &lt; 0"), strict=True):
            words = " ".join(
                f'<code title="{t["dropped"]:,} dropped, {t["share"]:.1%} of its occurrences">{escape(_piece(t["piece"], t["id"]))}</code>'
                f"&nbsp;{_count(t['dropped'])}"
                for t in f.words.top(sign, TOP, found.pieces)
            )
            rows += f"<tr><td>{mark}</td><td style='text-align:left'>{words}</td></tr>" if words else ""
        if rows:
            out += f'<div class="panel words"><h3>{escape(f.label)}: most frequently dropped tokens</h3><table>{rows}</table></div>'
    return out


def charts(found: Counterfactual) -> list[Chart]:
    """Dropped share by step, by q and by entropy; weights by q; gradient mass."""
    shown = found.findings[:_DRAWN]
    left_out = f" The first {_DRAWN} objectives." if len(found.findings) > _DRAWN else ""

    def by_step(axes: Axes) -> None:
        for color, f in zip(SERIES, shown, strict=False):
            shares = [100 * f.steps[s].summary().get("dropped", 0.0) for s in found.steps if s in f.steps]
            steps = [s for s in found.steps if s in f.steps]
            axes.plot(steps, shares, "o-" if len(steps) < 25 else "-", ms=3, color=color, label=f.label)
        axes.set_xlabel("step")
        axes.set_ylabel("dropped (%)")

    def by(what: str, key: str, scale: float, label: str, unit: str) -> Chart | None:
        rows = {f.label: f.whole.by(what) for f in shown}
        if not any(key in row for bins in rows.values() for row in bins):
            return None

        def paint(axes: Axes) -> None:
            for color, (name, bins) in zip(SERIES, rows.items(), strict=False):
                values = [scale * row[key] if key in row else np.nan for row in bins]
                axes.plot(range(len(bins)), values, "o-", ms=3, color=color, label=name)
            bins = next(iter(rows.values()))
            axes.set_xticks(range(len(bins)), [f"{row['low']:g}–" for row in bins])
            axes.set_xlabel(unit)
            axes.set_ylabel(label)

        title = (
            f"{'Dropped' if key == 'dropped' else 'Weights'} by {'probability' if what == 'probability' else 'entropy'}"
        )
        return drawing(title, f"Bins begin at the number below.{left_out}", paint)

    def mass(axes: Axes) -> None:
        summaries = [(f.label, f.whole.summary()) for f in shown if f.label != RECORDED]
        at = np.arange(len(summaries))
        for shift, key, color, label in (
            (-0.2, "gradient_mass_dropped", SERIES[1], "dropped"),
            (0.2, "gradient_mass", SERIES[0], "left, weighted"),
        ):
            axes.bar(at + shift, [100 * s.get(key, 0.0) for _, s in summaries], 0.38, color=color, label=label)
        axes.set_xticks(at, [label[:14] for label, _ in summaries], rotation=20 if len(summaries) > 4 else 0)
        axes.set_ylabel("gradient mass (%)")

    drawn = [
        drawing("Dropped by step", f"Share of trained tokens.{left_out}", by_step),
        drawing(
            "Gradient mass", f"Of Σ|A|(1 − p): what is dropped, and what is left under the weights.{left_out}", mass
        ),
        by("probability", "dropped", 100, "dropped (%)", "q, when it was sampled"),
        by("entropy", "dropped", 100, "dropped (%)", "entropy of the trainer (nats)"),
        by("probability", "weight_mean", 1, "mean weight", "q, when it was sampled"),
    ]
    return [c for c in drawn if c is not None]
