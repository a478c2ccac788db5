"""A page of its own around tables and charts: one HTML file without scripts or outside references, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from rollkeel.report.charts import Chart

_STYLE = """:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b1f27;--muted:#5b6370;--line:#e1e4ea;--grid:#b9bec8;
--s1:#2f6fd0;--s2:#d96b22;--s3:#1f8a54;--s4:#9b46b0;--s5:#c63a58;--s6:#158a9f;--s7:#a98510;--s8:#7a5c49}
@media(prefers-color-scheme:dark){:root{--page:#12151b;--card:#1a1f28;--ink:#e6e9ef;--muted:#a3acba;--line:#2b323e;--grid:#4a5362;
--s1:#6ea6ff;--s2:#ff9d5c;--s3:#5fcf95;--s4:#d48be6;--s5:#ff7f98;--s6:#53c8dc;--s7:#e3c04a;--s8:#c3a28d}}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}main{max-width:1200px;margin:auto;padding:24px 20px}
h1{font-size:24px}h3{font-size:14px;margin:0}.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,460px),1fr));gap:14px}
figure,.panel{background:var(--card);border:1px solid var(--line);border-radius:10px;margin:0 0 14px;padding:12px 14px;overflow-x:auto}
figure svg,figure img{display:block;width:100%;height:auto}figcaption{color:var(--muted);font-size:13px}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:3px 10px 3px 0;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child,.words th,.words td{text-align:left}.words td{white-space:normal;vertical-align:top}th{color:var(--muted);font-weight:500}pre{font-size:13px;overflow-x:auto}"""


def document(title: str, body: str, *, style: str = "") -> str:
    """The page. `title` is plain text, `body` trusted markup, `style` further CSS."""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{_STYLE}{style}</style></head><body><main><h1>{escape(title)}</h1>{body}</main></body></html>\n"
    )


def figures_of(charts: Iterable[Chart]) -> str:
    """The charts as a section of the page."""
    drawn = "".join(
        f"<figure><h3>{escape(c.title)}</h3>{c.markup}<figcaption>{escape(c.caption)}</figcaption></figure>"
        for c in charts
    )
    return f'<section class="charts">{drawn}</section>'


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: bool = False) -> str:
    """A panel with a table of plain texts: the first column left, numbers right; with `words` all left, lines broken."""
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    kind = ' class="words"' if words else ""
    return f'<div class="panel"><table{kind}><tr>{first}</tr>{body}</table></div>'
