"""Charts as inline SVG whose colours follow the page's light or dark theme."""

from __future__ import annotations

import base64
import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

Rows = Sequence[Mapping[str, Any]]

MAX_POINTS = 500
"""Longer series are drawn as means of equal stretches."""
_MAX_SVG = 64_000
# Stand-ins that become CSS variables in the SVG; in a PNG they are the colours themselves, legible on both themes.
INK, GRID = "#80848b", "#80848c"
SERIES = ("#3b7dd8", "#e0762f", "#2f9e63", "#b455c4", "#d64561", "#26a0b5", "#c9a227", "#8a6d5a")
_CSS = {INK: "var(--muted)", GRID: "var(--grid)"} | {color: f"var(--s{i + 1})" for i, color in enumerate(SERIES)}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rollkeel",
    "text.parse_math": False,  # A metric name may contain a dollar sign.
    "axes.formatter.use_mathtext": False,
    "axes.formatter.useoffset": False,  # "1e−10+9.99999999e−1" is no number a person reads.
    "axes.unicode_minus": True,
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.labelcolor": INK,
    "axes.formatter.limits": (-3, 5),
}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawn chart, ready to be put into a page."""

    title: str
    caption: str
    markup: str
    """Inline `<svg>` or `<img>` without any outside reference."""


class Curves(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self.savefig(image, format="png", dpi=100)
        return image.getvalue()


def matching(rows: Rows, patterns: Sequence[str]) -> list[str]:
    """Metric names with at least one number that fit the patterns, by pattern and then by name."""
    names = sorted(set[str]().union(*rows))
    found: dict[str, None] = {}
    for pattern in patterns:
        regex = re.compile("[^/]+".join(re.escape(part) for part in pattern.split("*")))
        found |= dict.fromkeys(name for name in names if regex.fullmatch(name))
    return [name for name in found if any(is_number(row.get(name)) for row in rows)]


def series(rows: Rows, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values `[n]` of the rows that have a number under `key`; means of equal stretches when too many."""
    pairs = [(row["step"], row[key]) for row in rows if is_number(row.get(key))]
    steps, values = np.array([p[0] for p in pairs], float), np.array([p[1] for p in pairs], float)
    if len(pairs) > MAX_POINTS:
        width = math.ceil(len(pairs) / MAX_POINTS)
        starts = np.arange(0, len(pairs), width)
        counts = np.diff(np.append(starts, len(pairs)))
        steps, values = np.add.reduceat(steps, starts) / counts, np.add.reduceat(values, starts) / counts
    return steps, values


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred mean over about a tenth of the series `[n]`; the window shrinks evenly towards both ends.

    Centred and even, so that it neither lags behind a trend nor bends it: a straight line stays as it is.
    """
    n = len(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(n)
    half = np.minimum(max(n // 20, 1), np.minimum(at, n - 1 - at))
    return (sums[at + half + 1] - sums[at - half]) / (2 * half + 1)


def is_number(value: Any) -> TypeGuard[int | float]:
    """A finite number, no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def correlation(rows: Rows, one: str, other: str, *, ranks: bool = False) -> float | None:
    """Pearson's, or with `ranks` Spearman's, over the rows that have both numbers; None where there are under three or one does not vary."""
    pairs = np.array([(row[one], row[other]) for row in rows if is_number(row.get(one)) and is_number(row.get(other))])
    if len(pairs) < 3 or not np.ptp(pairs, axis=0).all():
        return None
    columns = [_ranks(column) if ranks else column for column in pairs.T]
    return float(np.corrcoef(columns)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Place of each value in their order; equal ones share the mean of theirs."""
    _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[at]


_LEGEND = 84
"""Width of a chart in characters of its legend's type; an entry takes seven more than its name."""


def drawing(title: str, caption: str, paint: Callable[[Axes], None], *, named: bool = False) -> Chart:
    """A chart in the page's style of whatever `paint` draws, with a legend if it labels more than one thing or is `named`."""
    return Chart(title=title, caption=caption, markup=_drawn(title, paint, named))


def _drawn(title: str, paint: Callable[[Axes], None], named: bool) -> str:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 2.7), layout="constrained")
        axes = figure.add_subplot()
        paint(axes)
        axes.tick_params(length=0)
        handles, labels = axes.get_legend_handles_labels()
        labels = ["".join(c for c in label if c.isprintable())[:40] for label in labels]
        if len(labels) > 1 or (labels and named):
            columns = min(len(labels), 4, max(_LEGEND // (max(map(len, labels)) + 7), 1))
            figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=1.2)
        return _markup(figure, title)


def log_scale(axes: Axes) -> bool:
    """Logarithmic where the values span more than a factor of 20; below that, plain numbers read better."""
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.get_lines()] or [np.ones(1)])
    positive = values[values > 0]
    if not positive.size or positive.max() / positive.min() <= 20:
        return False
    log_axis(axes, "y")
    return True


def log_axis(axes: Axes, which: Literal["x", "y"]) -> None:
    """A logarithmic axis with plain numbers: matplotlib's own are TeX, which the pages do not typeset."""
    axes.set(**{f"{which}scale": "log"})
    axis, limits = (axes.xaxis, axes.get_xlim()) if which == "x" else (axes.yaxis, axes.get_ylim())
    if limits[1] < 100 * limits[0]:  # a tick or two per decade would leave one number on the axis
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}" if value < 1e5 else f"{value:.0e}"))
    axis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="both", length=0)


def least_height(axes: Axes, least: float) -> None:
    """Widen the y axis to `least` where the values span less; one of nothing below 0 stays so."""
    low, high = axes.dataLim.intervaly
    if not np.isfinite([low, high]).all() or high - low >= least or least < 1e-9 * abs(high):
        return
    bottom = (low + high - least) / 2
    bottom = 0.0 if low >= 0 > bottom else bottom
    axes.set_ylim(bottom - 0.04 * least, bottom + 1.04 * least)


def _markup(figure: Figure, title: str) -> str:
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # The browser's font draws the text, so what matplotlib's font lacks does not matter.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = _inline(buffer.getvalue(), title)
    if len(svg) <= _MAX_SVG:
        return svg
    png = io.BytesIO()
    figure.savefig(png, format="png", transparent=True, dpi=110)
    image = base64.b64encode(png.getvalue()).decode()
    if len(svg) <= len(image):
        return svg
    return f'<img alt="{title}" src="data:image/png;base64,{image}">'


def _inline(svg: str, title: str) -> str:
    """matplotlib's file as an HTML fragment: no prolog, metadata or name spaces, short numbers, theme colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.S)  # Inside HTML it would rule the whole page.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)
    view = re.search(r'viewBox="[^"]*"', svg)
    head = f'<svg role="img" aria-label="{title}" {view[0] if view else ""}>'
    svg = re.sub(r"<svg[^>]*>", lambda _: head, svg, count=1)
    svg = re.sub(r"""(font(?:-family)?): ([\d.]+px )?[^;"]*""", r"\1: \2inherit", svg)
    svg = re.sub(r'(?<= d=")[^"]*|(?<=transform=")[^"]*|(?<= points=")[^"]*|(?<= [xy]=")[^"]*', _short, svg)
    for color, variable in _CSS.items():
        svg = svg.replace(color, variable)
    return re.sub(r">\s+<", "><", svg)


def _short(match: re.Match[str]) -> str:
    numbers = re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), match[0])
    return re.sub(r"\s+", " ", numbers)
