"""An analysis for a terminal of 80 columns: each operation at its worst layer, flips, gap, one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollkeel.analyzer.compare import Analysis, Row, place

LISTED = 6
"""Parted operations named below the table, and flipped tokens."""


def render(analysis: Analysis, *, every: bool = False) -> RenderableType:
    """Table, flips, gap and verdict; `every`: a row for each layer's operations instead of the worst layer alone."""
    parts: list[RenderableType] = [Text(f"A {analysis.names[0]}   B {analysis.names[1]}", style="bold")]
    if analysis.rows:
        shown = analysis.rows if every else worst_layers(analysis.rows, analysis.opens)
        parts.append(_table(shown, analysis.opens))
    parted = [row for row in analysis.rows if row.parted]
    if len(parted) > 1:
        named = ", ".join(place(row.key) for row in parted[:LISTED])
        parts.append(Text(f"parted  {len(parted)} of {len(analysis.rows)}: {named}{' …' * (len(parted) > LISTED)}"))
    parts += [Text(line) for line in _lines(analysis)]
    parts.append(Text(analysis.verdict, style="green" if analysis.healthy else "bold red"))
    return Group(*parts)


def worst_layers(rows: Sequence[Row], opens: Row | None) -> list[Row]:
    """One row per operation: the first layer that parts, else the one where the sides begin to differ, or with the largest ratio."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.key[1], []).append(row)

    def shown(group: list[Row]) -> Row:
        marked = [r for r in group if r.parted] or [r for r in group if r is opens]
        return marked[0] if marked else max(group, key=lambda r: r.ratio)

    return [shown(group) for group in groups.values()]


def _table(rows: Sequence[Row], opens: Row | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for title in ("operation", "layer", "error A", "error B", "dtype", "times", "A–B"):
        table.add_column(title, justify="left" if title == "operation" else "right", no_wrap=True)
    for row in rows:
        sides = [s for s in row.sides if s is not None]
        expected = max((s.expected for s in sides), default=math.nan)
        layer = "" if row.key[0] is None else str(row.key[0])
        errors = ["" if s is None else _short(s.error) for s in row.sides]
        times = f"{row.ratio:.1f}" if row.ratio < 1e4 else _short(row.ratio)
        name = f"{row.key[1]}{' ←' if row is opens else ''}"
        style = "red" if row.parted else "yellow" if row is opens else ""
        table.add_row(name, layer, *errors, _short(expected), times, _short(row.gap), style=style)
    return table


def _lines(analysis: Analysis) -> list[str]:
    gap, flips = analysis.gap, analysis.flips
    lines = [f"gap     {gap.tokens} tokens: k3 {_short(gap.k3)}, rms {_short(gap.rms)}, max {_short(gap.max)} nats"]
    if flips is not None:
        lines.append(
            f"flips   {flips.count} ({flips.rate:.2%} of token × layer), {flips.explained} within the routers' error"
        )
        lines.append(
            f"        {flips.tokens} tokens ({flips.token_rate:.2%}): rms {_short(gap.rms_flipped)} flipped,"
            f" {_short(gap.rms_unflipped)} others; {gap.share or 0:.0%} of k3"
        )
        if flips.places:
            shown = ", ".join(f"{s}:{p}" for s, p, _ in flips.places[:LISTED])
            lines.append(f"        sequence:position {shown}{' …' * (flips.tokens > LISTED)}")
    for path in analysis.paths:
        lines.append(
            f"path    {analysis.names[path.side]}: compiled against plain, median {_short(path.median)},"
            f" mean {_short(path.mean)} nats"
        )
    return lines


def _short(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return "0" if value == 0 else f"{value:.2g}"
