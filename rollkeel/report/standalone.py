"""A page of its own around tables and charts: one HTML file without scripts or outside references, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from rollkeel.report.charts import Chart

STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
"""Of every page that rollkeel writes."""


def document(title: str, body: str, *, style: str = "") -> str:
    """The page. `title` is plain text, `body` trusted markup, `style` further CSS."""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}{style}</style></head><body><main><h1>{escape(title)}</h1>{body}</main></body></html>\n"
    )


def figures_of(charts: Iterable[Chart]) -> str:
    """The charts as a section of the page."""
    drawn = "".join(
        f"<figure><h3>{escape(c.title)}</h3>{c.markup}<figcaption>{escape(c.caption)}</figcaption></figure>"
        for c in charts
    )
    return f'<section class="charts">{drawn}</section>'


Cell = str | tuple[str, str]
"""Plain text, or text with the class that colours it: `good`, `bad`, `warn`."""


def table_of(head: Sequence[str], rows: Iterable[Sequence[Cell]], *, words: bool = False) -> str:
    """A panel with a table of plain texts: the first column left, numbers right; with `words` all left, lines broken."""
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    kind = ' class="words"' if words else ""
    return f'<div class="panel"><table{kind}><tr>{first}</tr>{body}</table></div>'


def _cell(cell: Cell) -> str:
    return f"<td>{escape(cell)}</td>" if isinstance(cell, str) else f'<td class="{cell[1]}">{escape(cell[0])}</td>'
