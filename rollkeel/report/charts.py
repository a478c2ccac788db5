"""Charts of a run's metrics as inline SVG whose colours follow the page's light or dark theme."""

from __future__ import annotations

import base64
import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

Rows = Sequence[Mapping[str, Any]]

MAX_POINTS = 500
"""Longer series are drawn as means of equal stretches."""
_MAX_SERIES = 8
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


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a chart shows. `keys` are metric names, `*` standing for any part; a chart without data is left out."""

    title: str
    unit: str
    keys: tuple[str, ...]
    caption: str = ""
    scale: float = 1.0
    log: bool = False
    draw: Callable[[Axes, Rows, Spec], None] | None = None
    label: Callable[[str], str] | None = None


def charts(rows: Rows) -> list[Chart]:
    """All charts the rows have data for, in the order of the page."""
    return [_chart(spec, rows) for spec in SPECS if matching(rows, spec.keys)]


def matching(rows: Rows, patterns: Sequence[str]) -> list[str]:
    """Metric names with at least one number that fit the patterns, by pattern and then by name."""
    names = sorted({key for row in rows for key, value in row.items() if _number(value)})
    found: dict[str, None] = {}
    for pattern in patterns:
        regex = re.compile("[^/]+".join(re.escape(part) for part in pattern.split("*")))
        found |= dict.fromkeys(name for name in names if regex.fullmatch(name))
    return list(found)


def series(rows: Rows, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values `[n]` of the rows that have a number under `key`; means of equal stretches when too many."""
    pairs = [(row["step"], row[key]) for row in rows if _number(row.get(key))]
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


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_LEGEND = 84
"""Characters that a chart is wide in its legend's type; an entry has seven beside its name."""


def drawing(title: str, caption: str, paint: Callable[[Axes], None]) -> Chart:
    """A chart in the page's style of whatever `paint` draws, with a legend if it labels more than one thing."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 2.7), layout="constrained")
        axes = figure.add_subplot()
        paint(axes)
        axes.tick_params(length=0)
        handles, labels = axes.get_legend_handles_labels()
        labels = ["".join(c for c in label if c.isprintable())[:40] for label in labels]
        if len(labels) > 1:
            columns = min(len(labels), 4, max(_LEGEND // (max(map(len, labels)) + 7), 1))
            figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=1.2)
        return Chart(title=title, caption=caption, markup=_markup(figure, title))


def _chart(spec: Spec, rows: Rows) -> Chart:
    def paint(axes: Axes) -> None:
        (spec.draw or _lines)(axes, rows, spec)
        axes.set_xlabel("step")
        axes.set_ylabel(spec.unit)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        axes.margins(x=0.02)
        if spec.log:
            log_scale(axes)

    return drawing(spec.title, spec.caption, paint)


def log_scale(axes: Axes) -> None:
    """Logarithmic where the values span more than a factor of 20; below that, plain numbers read better."""
    values = np.concatenate([line.get_ydata() for line in axes.get_lines()] or [np.ones(1)])
    positive = np.asarray(values, float)[np.asarray(values, float) > 0]
    if positive.size and positive.max() / positive.min() > 20:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="both", length=0)


def _lines(axes: Axes, rows: Rows, spec: Spec) -> None:
    for color, key in zip(SERIES, matching(rows, spec.keys)[:_MAX_SERIES], strict=False):
        steps, values = series(rows, key)
        values = values * spec.scale
        if spec.log:
            steps, values = steps[values > 0], values[values > 0]
        _curve(axes, steps, values, color, (spec.label or _tail)(key))


def _curve(axes: Axes, steps: np.ndarray, values: np.ndarray, color: str, label: str) -> None:
    marker = "o" if len(steps) < 3 else None
    if len(steps) < 25:
        axes.plot(steps, values, color=color, linewidth=1.5, label=label, marker=marker, markersize=4)
    else:
        axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.35)
        axes.plot(steps, smooth(values), color=color, linewidth=1.7, label=label)


def _reward(axes: Axes, rows: Rows, spec: Spec) -> None:
    if matching(rows, ("reward/mean",)):
        _curve(axes, *series(rows, "reward/mean"), color=SERIES[0], label="training reward")
    colors = iter(SERIES[1:])
    for key in matching(rows, ("eval/*/avg@k",))[:3]:
        color, task = next(colors), key.split("/")[1]
        found = [row for row in rows if _number(row.get(key))][-MAX_POINTS:]
        errors = [row[f"{key}_se"] if _number(row.get(f"{key}_se")) else 0.0 for row in found]
        axes.errorbar(
            [row["step"] for row in found],
            [row[key] for row in found],
            yerr=errors,
            color=color,
            marker="o",
            markersize=4,
            capsize=3,
            linewidth=1.3,
            label=f"{task} avg@k ± SE",
        )
    for key in matching(rows, ("eval/*/greedy",))[:3]:
        steps, values = series(rows, key)
        color, task = next(colors), key.split("/")[1]
        axes.plot(steps, values, color=color, marker="D", markersize=4, linestyle=":", label=f"{task} greedy")


def _stages(axes: Axes, rows: Rows, spec: Spec) -> None:
    """Stacked time per stage: the height is what a step costs. A stage that a row lacks took no time in it."""
    keys = matching(rows, spec.keys)
    keys = [key for key in keys if key not in ("time/step_s", "time/total_s")] or keys
    totals = {key: sum(row[key] for row in rows if _number(row.get(key))) for key in keys}
    keys = sorted(keys, key=lambda key: -totals[key])[:_MAX_SERIES]
    filled = [{"step": row["step"], **{k: row[k] if _number(row.get(k)) else 0.0 for k in keys}} for row in rows]
    curves = [series(filled, key) for key in keys]
    steps = curves[0][0]
    labels = [key[5:-2] for key in keys]
    heights = [np.maximum(values, 0) for _, values in curves]
    axes.stackplot(steps, heights, colors=SERIES[: len(keys)], labels=labels, alpha=0.8, linewidth=0)
    axes.set_ylim(bottom=0)


def _tail(key: str) -> str:
    return key.split("/", 1)[-1]


def _middle(key: str) -> str:
    return key.split("/", 1)[-1].removesuffix("/dropped").removesuffix("_tokens_s")


def _clip(key: str) -> str:
    return f"{_middle(key)} mask" if key.startswith("mask/") else f"PPO clip {_tail(key)}"


def _mismatch(key: str) -> str:
    return "same version only" if "equal_version" in key else "all tokens"


def _gap(metric: str) -> tuple[str, ...]:
    return (f"mismatch/{metric}", f"mismatch/equal_version/{metric}")


SPECS = (
    Spec(
        title="Reward and accuracy",
        unit="reward, accuracy",
        keys=("reward/mean", "eval/*/avg@k", "eval/*/greedy"),
        caption="Reward is the batch mean; bars are one standard error.",
        draw=_reward,
    ),
    Spec(
        title="Mismatch: spread of the ratio",
        unit="std of ρ = o/q",
        keys=_gap("ratio_std"),
        caption="Trainer against sampler, per response token. 0 means both engines agree.",
        label=_mismatch,
    ),
    Spec(
        title="Mismatch: divergence",
        unit="KL(q‖o), k3 (nats/token)",
        keys=_gap("kl_k3"),
        caption="Unbiased estimate of KL(q‖o) from the sampled tokens.",
        log=True,
        label=_mismatch,
    ),
    Spec(
        title="Mismatch: correlation",
        unit="Pearson r of (o, q)",
        keys=_gap("pearson"),
        caption="1 means the two engines give every token the same probability.",
        label=_mismatch,
    ),
    Spec(
        title="Masked and clipped tokens",
        unit="tokens (%)",
        keys=("mask/*/dropped", "clip/high", "clip/low"),
        caption="Share of response tokens that each mask dropped or PPO's clip cut.",
        scale=100,
        label=_clip,
    ),
    Spec(title="Entropy", unit="entropy (nats/token)", keys=("policy/entropy",), caption="Of the training policy."),
    Spec(title="Gradient norm", unit="L2 norm before clipping", keys=("optimizer/grad_norm",), caption="", log=True),
    Spec(
        title="Response length",
        unit="tokens",
        keys=("rollout/length_mean", "rollout/length_max", "rollout/length_min"),
        label=lambda key: key.rsplit("_", 1)[-1],
    ),
    Spec(
        title="Staleness",
        unit="versions",
        keys=("staleness/mean", "staleness/max", "staleness/span"),
        caption="Trainer version minus the version that sampled the token.",
    ),
    Spec(
        title="Controlled acceptance",
        unit="share of tokens or rollouts",
        keys=("controller/acceptance", "controller/target"),
        caption="What a drop rate aims at, and its running estimate.",
    ),
    Spec(
        title="Rollout pool",
        unit="rollouts",
        keys=("pool/parked", "pool/held", "pool/ready", "pool/waiting", "pool/purged"),
        caption="Unfinished and parked; finished and waiting for their group; of those ready to train; not begun; given up in the step.",
    ),
    Spec(
        title="Lengths under a budget",
        unit="tokens",
        keys=("rollout/finished_length_mean", "rollout/issued_length_mean"),
        caption="What finished in a step against all that was in the engine: short answers finish first.",
        label=lambda key: _tail(key).removesuffix("_length_mean"),
    ),
    Spec(
        title="Routing flips",
        unit="tokens (%)",
        keys=("routing/flipped_tokens",),
        caption="Tokens that engine and trainer send to different experts in some layer.",
        scale=100,
    ),
    Spec(title="KL to the start", unit="KL (nats/token)", keys=("policy/kl_base", "policy/kl_ref")),
    Spec(
        title="Time per stage",
        unit="time (s/step)",
        keys=("time/*_s",),
        caption="Stacked, largest at the bottom.",
        draw=_stages,
    ),
    Spec(title="Throughput", unit="tokens/s", keys=("throughput/*_tokens_s",), label=_middle),
    Spec(title="Memory", unit="memory (MB)", keys=("memory/*_mb",), label=lambda key: _tail(key)[:-3]),
)


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
