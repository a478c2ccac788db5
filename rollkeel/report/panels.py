"""The panels of a run's metrics: what each shows, when it says something, and how fine its axis may get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from rollkeel.report.charts import (
    MAX_POINTS,
    SERIES,
    Chart,
    Rows,
    correlation,
    drawing,
    is_number,
    least_height,
    log_scale,
    matching,
    series,
    smooth,
)

_MAX_SERIES = 8


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a panel."""

    label: str
    steps: np.ndarray
    values: np.ndarray
    """`[n]`, in the panel's unit."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a panel shows. `keys` are metric names, `*` standing for any part; a panel without data is left out."""

    title: str
    unit: str
    keys: tuple[str, ...]
    caption: str = ""
    scale: float = 1.0
    log: bool = False
    least: float = 0.0
    """Least height of the axis, in `unit`: differences far below it are nothing to look at."""
    calm: float | None = None
    """The value at which there is nothing to see; a panel that never leaves it by more than `least` / 100 is one line of text."""
    needs: tuple[str, ...] = ()
    """Metrics without which there is no panel."""
    grows: bool = False
    """Say how fast the first curve grows."""
    pair: tuple[str, str] | None = None
    """Two metrics whose correlation over steps is told."""
    draw: Callable[[Axes, Rows, Spec], None] | None = None
    label: Callable[[str], str] | None = None

    def is_calm(self, values: np.ndarray) -> bool:
        """Whether `values` in `unit` never leave `calm`."""
        return self.calm is not None and bool(np.all(np.abs(values - self.calm) <= self.least / 100))


def panels(rows: Rows) -> tuple[list[Chart], list[tuple[str, str]]]:
    """The panels the rows have data for, in the order of the page; and `(title, why)` of those with nothing to see."""
    drawn: list[Chart] = []
    quiet: list[tuple[str, str]] = []
    for spec in SPECS:
        keys = matching(rows, spec.keys) if matching(rows, spec.needs or spec.keys) else []
        curves = [] if spec.draw else merged([_curve_of(rows, spec, key) for key in keys[:_MAX_SERIES]])
        calm = [curve for curve in curves if spec.is_calm(curve.values)]
        if spec.calm is not None and curves and len(calm) == len(curves):
            quiet.append((spec.title, _extent(spec.calm, np.concatenate([curve.values for curve in curves]))))
        elif keys:
            drawn.append(_panel(spec, rows, [c for c in curves if c not in calm], [c.label for c in calm]))
    return drawn, quiet


def merged(curves: list[Curve]) -> list[Curve]:
    """The curves, those that lie exactly on an earlier one as its second name: a hidden line is a riddle."""
    found: list[Curve] = []
    for curve in curves:
        at = next((i for i, c in enumerate(found) if _same(c, curve)), None)
        if at is None:
            found.append(curve)
        else:
            found[at] = Curve(label=f"{found[at].label} = {curve.label}", steps=curve.steps, values=curve.values)
    return found


def _same(one: Curve, other: Curve) -> bool:
    return np.array_equal(one.steps, other.steps) and np.allclose(one.values, other.values, rtol=1e-6, atol=1e-12)


def _extent(calm: float, values: np.ndarray) -> str:
    far = float(np.abs(values - calm).max())
    return f"within {far:.1g} of {calm:g}" if far else f"{calm:g} in every step"


def _curve_of(rows: Rows, spec: Spec, key: str) -> Curve:
    steps, values = series(rows, key)
    return Curve(label=(spec.label or _tail)(key), steps=steps, values=values * spec.scale)


def _panel(spec: Spec, rows: Rows, curves: list[Curve], calm: list[str]) -> Chart:
    def paint(axes: Axes) -> None:
        if spec.draw:
            spec.draw(axes, rows, spec)
        for color, curve in zip(SERIES, curves, strict=False):
            shown = curve.values > 0 if spec.log else np.full(len(curve.values), True)
            floor = spec.least / 100 if spec.log and spec.calm == 0 else -np.inf
            plot(axes, curve.steps[shown], np.maximum(curve.values[shown], floor), color, curve.label)
        if spec.grows and curves and (fit := growth(curves[0].steps, curves[0].values)):
            axes.set_title(f"{fit[0]:+.1%} ± {fit[1]:.1%} a step", loc="left", fontsize=9)
        if spec.pair and (told := _related(rows, *spec.pair)):
            axes.set_title(told, loc="left", fontsize=9)
        axes.set(xlabel="step", ylabel=spec.unit)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        axes.margins(x=0.02)
        if not (spec.log and log_scale(axes)):
            least_height(axes, spec.least)

    zero = f"At {spec.calm:g} in every step: {', '.join(calm)}." if calm else ""
    return drawing(spec.title, " ".join(filter(None, (spec.caption, zero))), paint, named=len(curves) + len(calm) > 1)


def _related(rows: Rows, one: str, other: str) -> str:
    r, ranked = correlation(rows, one, other), correlation(rows, one, other, ranks=True)
    if r is None or ranked is None:
        return ""
    return f"{one} with {other}: correlation {r:.2f}, of ranks {ranked:.2f}"


def growth(steps: np.ndarray, values: np.ndarray) -> tuple[float, float] | None:
    """Rate g of δ' = (1 + g)·δ and its standard error, by least squares on log δ; None under ten positive values.

    The Ring-1T report's Theorem 1 says δ' ≥ (1 + ημ/2)·δ of a gap that feeds on itself: then g is an estimate of at least ημ/2.
    """
    positive = values > 0
    steps = steps[positive]
    logs = np.log(values[positive])
    if len(logs) < 10:
        return None
    (slope, _), covariance = np.polyfit(steps, logs, 1, cov=True)
    return float(np.expm1(slope)), float(np.exp(slope) * covariance[0, 0] ** 0.5)


def plot(axes: Axes, steps: np.ndarray, values: np.ndarray, color: str, label: str) -> None:
    """A line with dots where there are few points; its running mean over a thin line where there are many."""
    marker = "o" if len(steps) < 3 else None
    if len(steps) < 25:
        axes.plot(steps, values, color=color, linewidth=1.5, label=label, marker=marker, markersize=4)
    else:
        axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.35)
        axes.plot(steps, smooth(values), color=color, linewidth=1.7, label=label)


def _reward(axes: Axes, rows: Rows, spec: Spec) -> None:
    if matching(rows, ("reward/mean",)):
        plot(axes, *series(rows, "reward/mean"), color=SERIES[0], label="training reward")
    colors = iter(SERIES[1:])
    for key in matching(rows, ("eval/*/avg@k",))[:3]:
        color, task = next(colors), key.split("/")[1]
        found = [row for row in rows if is_number(row.get(key))][-MAX_POINTS:]
        errors = [row[f"{key}_se"] if is_number(row.get(f"{key}_se")) else 0.0 for row in found]
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
    totals = {key: sum(row[key] for row in rows if is_number(row.get(key))) for key in keys}
    keys = sorted(keys, key=lambda key: -totals[key])[:_MAX_SERIES]
    filled = [{"step": row["step"], **{k: row[k] if is_number(row.get(k)) else 0.0 for k in keys}} for row in rows]
    curves = [series(filled, key) for key in keys]
    steps = curves[0][0]
    labels = [key[5:-2] for key in keys]
    heights = [np.maximum(values, 0) for _, values in curves]
    axes.stackplot(steps, heights, colors=SERIES[: len(keys)], labels=labels, alpha=0.8, linewidth=0)
    axes.set_ylim(bottom=0)


def _bias(axes: Axes, rows: Rows, spec: Spec) -> None:
    """A dot per step, with Pearson's correlations (stability study, Fig. 6)."""
    rows = [row for row in rows if is_number(row.get("bias/j"))]
    axes.plot(*series(rows, "bias/j"), ".", color=SERIES[2], markersize=4)
    found = {"step": correlation(rows, "bias/j", "step"), "reward": correlation(rows, "bias/j", "reward/mean")}
    text = ", ".join(f"{value:.2f} with {name}" for name, value in found.items() if value is not None)
    axes.set_title(f"correlation {text}" if text else "", loc="left", fontsize=9)


def _tail(key: str) -> str:
    return key.split("/", 1)[-1]


def _middle(key: str) -> str:
    return key.split("/", 1)[-1].removesuffix("/dropped").removesuffix("_tokens_s")


def _clip(key: str) -> str:
    return f"{_middle(key)} mask" if key.startswith("mask/") else f"PPO clip {_tail(key)}"


def _cut(key: str) -> str:
    if key.startswith("policy/"):
        return "all tokens"
    return "PPO clip" if key.startswith("clip/") else f"{key.split('/')[1]} mask"


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
        least=0.2,
        draw=_reward,
    ),
    Spec(
        title="Mismatch: spread of the ratio",
        unit="std of ρ = o/q",
        keys=_gap("ratio_std"),
        caption="Trainer against sampler, per response token. 0 means both engines agree.",
        least=0.02,
        calm=0,
        label=_mismatch,
    ),
    Spec(
        title="Mismatch: divergence",
        unit="KL(q‖o), k3 (nats/token)",
        keys=_gap("kl_k3"),
        caption="Unbiased estimate of KL(q‖o) from the sampled tokens, and an exponential's rate through it with its standard error.",
        log=True,
        grows=True,
        least=1e-4,
        calm=0,
        label=_mismatch,
    ),
    Spec(
        title="Mismatch: log-probabilities",
        unit="abs(log o − log q) (nats)",
        keys=_gap("logprob_abs_diff"),
        caption="Mean over the step's new tokens.",
        least=1e-3,
        calm=0,
        label=_mismatch,
    ),
    Spec(
        title="Probability of new tokens",
        unit="mean p",
        keys=("policy/prob_mean",),
        caption="The trainer's, of the tokens the sampler drew.",
        least=0.05,
    ),
    Spec(
        title="Mismatch: correlation",
        unit="Pearson r of (o, q)",
        keys=_gap("pearson"),
        caption="1 means the two engines give every token the same probability.",
        least=0.02,
        calm=1,
        label=_mismatch,
    ),
    Spec(
        title="Masked and clipped tokens",
        unit="tokens (%)",
        keys=("mask/*/dropped", "clip/high", "clip/low"),
        caption="Share of response tokens that each mask dropped or PPO's clip cut.",
        scale=100,
        least=0.2,
        calm=0,
        label=_clip,
    ),
    Spec(
        title="Probability of masked and clipped tokens",
        unit="mean q",
        keys=("mask/*/dropped_rollout_probability", "clip/cut_rollout_probability"),
        caption="Under the policy that sampled them.",
        least=0.1,
        label=_cut,
    ),
    Spec(
        title="Entropy of masked and clipped tokens",
        unit="entropy (nats/token)",
        keys=("policy/entropy", "mask/*/dropped_entropy", "clip/cut_entropy"),
        needs=("mask/*/dropped_entropy", "clip/cut_entropy"),
        caption="Of the trainer's distribution there.",
        least=0.05,
        label=_cut,
    ),
    Spec(
        title="Objective bias J",
        unit="Σ A·(φ − 1)",
        keys=("bias/j",),
        caption="What weights of φ = 2 on tokens with o < 0.1 add to the objective, or the distortion the run applies.",
        draw=_bias,
    ),
    Spec(
        title="Entropy",
        unit="entropy (nats/token)",
        keys=("policy/entropy",),
        caption="Of the training policy.",
        least=0.05,
    ),
    Spec(title="Gradient norm", unit="L2 norm before clipping", keys=("optimizer/grad_norm",), log=True, least=0.1),
    Spec(
        title="Response length",
        unit="tokens",
        keys=("rollout/length_mean", "rollout/length_max", "rollout/length_min"),
        least=4,
        label=lambda key: key.rsplit("_", 1)[-1],
    ),
    Spec(
        title="Staleness",
        unit="versions",
        keys=("staleness/mean", "staleness/max", "staleness/span"),
        caption="Trainer version minus the version that sampled the token.",
        least=2,
        calm=0,
    ),
    Spec(
        title="Controlled acceptance",
        unit="share of tokens or rollouts",
        keys=("controller/acceptance", "controller/target"),
        caption="What a drop rate aims at, and its running estimate.",
        pair=("objective/kept", "mismatch/second_moment"),
        least=0.02,
    ),
    Spec(
        title="Rollout pool",
        unit="rollouts",
        keys=("pool/parked", "pool/held", "pool/ready", "pool/waiting", "pool/purged"),
        caption="Unfinished and parked; finished and waiting for their group; of those ready to train; not begun; given up in the step.",
        least=4,
        calm=0,
    ),
    Spec(
        title="Lengths under a budget",
        unit="tokens",
        keys=("rollout/finished_length_mean", "rollout/issued_length_mean"),
        caption="What finished in a step against all that was in the engine: short answers finish first.",
        least=4,
        label=lambda key: _tail(key).removesuffix("_length_mean"),
    ),
    Spec(
        title="Routing flips",
        unit="tokens (%)",
        keys=("routing/flipped_tokens",),
        caption="Tokens that engine and trainer send to different experts in some layer.",
        scale=100,
        least=1,
        calm=0,
    ),
    Spec(title="KL to the start", unit="KL (nats/token)", keys=("policy/kl_base",), least=1e-3),
    Spec(
        title="Time per stage",
        unit="time (s/step)",
        keys=("time/*_s",),
        caption="Stacked, largest at the bottom.",
        draw=_stages,
    ),
    Spec(title="Throughput", unit="tokens/s", keys=("throughput/*_tokens_s",), label=_middle),
    Spec(title="Memory", unit="memory (MB)", keys=("memory/*_mb",), least=200, label=lambda key: _tail(key)[:-3]),
)
