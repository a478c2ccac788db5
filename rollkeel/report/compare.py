"""`rollkeel report A B …`: several runs on one page. Runs that differ in nothing but their seed are one setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from rollkeel.errors import BadInput
from rollkeel.events import write_atomic
from rollkeel.report.bands import band_charts, bands_of, dots
from rollkeel.report.charts import Rows, is_number, matching
from rollkeel.report.run_files import RunFiles, read_run
from rollkeel.report.standalone import Cell, document, figures_of, table_of
from rollkeel.report.verdict import Tone, changes

KEYS = (
    "reward/mean",
    "eval/*/avg@k",
    "mismatch/ratio_std",
    "mismatch/kl_k3",
    "mask/*/dropped",
    "policy/entropy",
    "optimizer/grad_norm",
    "rollout/length_mean",
    "staleness/mean",
    "time/step_s",
)
_PLACE = ("run.dir", "run.name", "run.seed", "report.", "checkpoint.", "eval.")
"""Settings that do not make a run another one."""
_LONG = 40
"""Characters of a setting that fit into a legend."""
_LAST = 10
"""Steps over which the table's numbers are means."""
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t for 95 % with 1 … 10 degrees of freedom; beyond, 2.2 is on the safe side."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One run on the page."""

    name: str
    arm: str
    """Its setting: what differs from the others, in words."""
    seed: int | None
    files: RunFiles
    score: float
    """Last evaluation, or mean training reward of the last steps; NaN without either."""
    error: float
    """Its standard error where it is an evaluation, else NaN."""


def compare(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Write the comparison of two or more run folders to `out` and return it. Raises `BadInput` for a folder that is no run."""
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise BadInput("report: the same run folder twice; name each once")
    runs = compared([read_run(folder) for folder in folders])
    arms: dict[str, list[Compared]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    keys = matching(list(chain.from_iterable(run.files.rows for run in runs)), KEYS)
    charts = band_charts(bands_of({arm: [run.files.rows for run in of] for arm, of in arms.items()}, keys))
    several = len(arms) > 1 and any(len(of) > 1 for of in arms.values())
    if several:
        charts.insert(0, dots(score_name(runs), {arm: np.array([r.score for r in of]) for arm, of in arms.items()}))
    problems = [f"{run.name}: {problem}" for run in runs for problem in run.files.problems]
    body = [
        '<div class="verdict">',
        *(f'<div class="{tone}"><b>{escape(arm)}</b>{escape(text)}</div>' for arm, tone, text in differences(arms)),
        "</div>",
        _grid(arms) if several else "",
        "<h2>Runs</h2>",
        table_of(("run", *_COLUMNS), [_row(run) for run in runs]),
        figures_of(charts),
        "<h2>Settings that differ</h2>",
        table_of(("setting", *arms), _settings(arms)),
        *(f'<p class="bad">{escape(problem)}</p>' for problem in problems[:50]),
    ]
    path = Path(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, document(f"{len(runs)} runs compared", "".join(body)))
    except OSError as error:
        raise BadInput(f"report --out {path}: {error.strerror or error}; choose another file") from None
    return path


def compared(found: Sequence[RunFiles]) -> list[Compared]:
    """The runs with the names of their settings: the values of whatever differs among them but for seed and place."""
    flat = [_flat(run.config) for run in found]
    names = [run.path.resolve().name for run in found]
    arms = _arms(flat)
    if len({(arm, config.get("run.seed")) for arm, config in zip(arms, flat, strict=True)}) < len(arms):
        arms = names  # nothing tells them apart but their folders
    runs = []
    for run, config, name, arm in zip(found, flat, names, arms, strict=True):
        seed, (score, error) = config.get("run.seed"), _score(run.rows)
        seed = seed if isinstance(seed, int) else None
        runs.append(Compared(name=name, arm=arm, seed=seed, files=run, score=score, error=error))
    return runs


def _arms(flat: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for the setting of each run: what differs; where that is long, `run.name` if it tells settings apart."""
    keys = _differing(flat)
    settings = [tuple(repr(config.get(key)) for key in keys) for config in flat]
    long = []
    for config in flat:
        stated = [key for key in keys if config.get(key) is not None or not key.startswith("objective.")]
        long.append(", ".join(f"{_short(key)}{_told(config.get(key))}" for key in stated) or "all runs")
    names = [str(config.get("run.name", "")) for config in flat]
    pairs = len(set(zip(settings, names, strict=True)))
    if max(map(len, long)) > _LONG and pairs == len(set(settings)) == len(set(names)):
        return names
    return long


def differences(arms: Mapping[str, Sequence[Compared]]) -> list[tuple[str, Tone, str]]:
    """Every setting against the first: `(setting, tone, sentence)`."""
    (first, base), *others = arms.items()
    name = score_name(list(chain.from_iterable(arms.values())))
    told: list[tuple[str, Tone, str]] = [
        (first, "plain", f"{name} {_mean(base):.3f}; the others are compared with it.")
    ]
    for arm, runs in others:
        change, half, how = _apart(base, runs)
        head = f"{name} {_mean(runs):.3f}, {change:+.3f}"
        if not np.isfinite(half):
            told.append((arm, "plain", f"{head}; too few common seeds for an interval."))
            continue
        tone: Tone = "good" if change > half else "bad" if change < -half else "plain"
        word = {"good": "better", "bad": "worse", "plain": "no difference shown"}[tone]
        told.append((arm, tone, f"{word}: {head} (95 % interval {change - half:+.3f} to {change + half:+.3f}; {how})."))
    return told


def _apart(base: Sequence[Compared], runs: Sequence[Compared]) -> tuple[float, float, str]:
    """Difference of the scores, half-width of its 95 % interval (NaN where there is none), and what it is over."""
    mine, theirs = ({run.seed: run.score for run in of if np.isfinite(run.score)} for of in (runs, base))
    common = sorted(seed for seed in mine.keys() & theirs.keys() if seed is not None)
    if len(common) > 1:
        gaps = np.array([mine[seed] - theirs[seed] for seed in common])
        half = _T[min(len(gaps) - 2, len(_T) - 1)] * float(gaps.std(ddof=1)) / len(gaps) ** 0.5
        return float(gaps.mean()), half, f"{len(common)} seeds, paired"
    change = _mean(runs) - _mean(base)
    if len(runs) == len(base) == 1:
        half = 1.96 * float(np.hypot(runs[0].error, base[0].error))
        return change, half, "of the evaluation alone: one run each says nothing about other seeds"
    return change, float("nan"), ""


def score_name(runs: Sequence[Compared]) -> str:
    """What `Compared.score` is."""
    keys = matching([row for run in runs for row in run.files.rows], ("eval/*/avg@k",))
    return f"{keys[0].split('/')[1]} avg@k at the end" if keys else f"reward of the last {_LAST} steps"


def _score(rows: Rows) -> tuple[float, float]:
    for key in matching(rows, ("eval/*/avg@k",))[:1]:
        row = [row for row in rows if is_number(row.get(key))][-1]
        error = row.get(f"{key}_se")
        return float(row[key]), float(error) if is_number(error) else float("nan")
    return _late(rows, "reward/mean"), float("nan")


def _late(rows: Rows, key: str) -> float:
    values = [float(row[name]) for name in matching(rows, (key,))[:1] for row in rows if is_number(row.get(name))]
    return float(np.mean(values[-_LAST:])) if values else float("nan")


def _mean(runs: Sequence[Compared]) -> float:
    scores = [run.score for run in runs if np.isfinite(run.score)]
    return float(np.mean(scores)) if scores else float("nan")


_COLUMNS = {
    "setting": "",
    "seed": "",
    "status": "",
    "steps": "",
    "start to end": "",
    "reward": "reward/mean",
    "ratio std": "mismatch/ratio_std",
    "masked": "mask/*/dropped",
    "entropy": "policy/entropy",
    "s/step": "time/step_s",
}
_TONES = {"learned": "good", "got worse": "bad", "did not learn": "warn"}


def _row(run: Compared) -> list[Cell]:
    rows = run.files.rows
    found = changes(rows)
    word: Cell = (
        (f"{found[0].word}: {found[0].first:.3f} → {found[0].last:.3f}", _TONES[found[0].word]) if found else ""
    )
    steps = str(max((row["step"] for row in rows), default=0))
    status: Cell = (run.files.status, {"done": "good", "running": ""}.get(run.files.status, "bad"))
    late = (_late(rows, key) for key in _COLUMNS.values() if key)
    numbers = ["" if np.isnan(value) else f"{value:.3g}" for value in late]
    return [run.name, run.arm, "" if run.seed is None else str(run.seed), status, steps, word, *numbers]


def _grid(arms: Mapping[str, Sequence[Compared]]) -> str:
    """Scores of settings × seeds, the mean with its standard error behind them."""
    seeds = sorted({run.seed for run in chain.from_iterable(arms.values()) if run.seed is not None})
    rows = []
    for arm, runs in arms.items():
        by_seed = {run.seed: run.score for run in runs}
        scores = np.array([x for x in by_seed.values() if np.isfinite(x)])
        error = f" ± {scores.std(ddof=1) / len(scores) ** 0.5:.3f}" if len(scores) > 1 else ""
        each = [f"{by_seed[seed]:.3f}" if seed in by_seed else "" for seed in seeds]
        rows.append((arm, *each, f"{_mean(runs):.3f}{error}"))
    name = score_name(list(chain.from_iterable(arms.values())))
    return f"<h2>{escape(name)}</h2>" + table_of(("setting", *(f"seed {seed}" for seed in seeds), "mean"), rows)


def _settings(arms: Mapping[str, Sequence[Compared]]) -> list[tuple[str, ...]]:
    flat = {arm: _flat(runs[0].files.config) for arm, runs in arms.items()}
    keys = _differing(list(flat.values()), all_options=True)
    return [(key, *(_told(config.get(key)) for config in flat.values())) for key in keys]


def _differing(flat: Sequence[Mapping[str, Any]], *, all_options: bool = False) -> list[str]:
    """Keys with more than one value; of objectives with different names only those options that differ under one name."""
    keys = [
        key
        for key in dict.fromkeys(chain.from_iterable(flat))
        if not key.startswith(_PLACE) and len({repr(config.get(key)) for config in flat}) > 1
    ]
    if all_options or "objective.name" not in keys:
        return keys
    by_name: dict[Any, list[Mapping[str, Any]]] = {}
    for config in flat:
        by_name.setdefault(config.get("objective.name"), []).append(config)
    same = set(chain.from_iterable(_differing(of, all_options=True) for of in by_name.values()))
    return [key for key in keys if not key.startswith("objective.") or key == "objective.name" or key in same]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def _short(key: str) -> str:
    return "" if key == "objective.name" else f"{key.split('.')[-1] if key.startswith('objective.') else key}="


def _told(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)[:60]
