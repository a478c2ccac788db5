"""rollkeel from Python, for scripts and notebooks. Each function does what the command of its name does.

    import rollkeel

    run = rollkeel.train("default", run={"steps": 20})
    run.metrics().to_pandas()
    rollkeel.doctor(run).causes

Settings are keyword arguments, by section (`train={"lr": 1e-4}`) or by whole name (`**{"train.lr": 1e-4}`); they mean what they
mean on the command line. Refused input raises `rollkeel.errors.BadInput` with the line that the command would print.
"""

from __future__ import annotations

import html
import io
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollkeel.config import Config
from rollkeel.errors import BadInput
from rollkeel.recipe import from_tree, load, merge

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.figure import Figure

    from rollkeel.types import Rollout
    from rollkeel_doctor import Diagnosis

Recipe = str | Path | Mapping[str, Any] | Config
"""Name or path of a recipe, a tree of settings, or a config."""
CURVES = ("reward/mean", "eval/*/avg@k", "mismatch/ratio_std", "policy/entropy", "optimizer/grad_norm")
"""What `Run.plot` draws unless told otherwise."""


def config(recipe: Recipe | None = None, **settings: Any) -> Config:
    """The config that `recipe` and `settings` make; every default for None. Raises `BadInput` for a setting that cannot be."""
    if isinstance(recipe, str | Path):
        return load(recipe, _words(settings))
    if isinstance(recipe, Config):
        recipe = recipe.model_dump(mode="json")
    return from_tree(merge(_plain(recipe or {}), _words(settings)))


def train(recipe: Recipe | None = None, *, resume: str | Path | Run | None = None, **settings: Any) -> Run:
    """Warm start, reinforcement learning, final model and report; returns the finished run.

    `resume`: the run, or its folder, to go on with; it has its recipe already, and `settings` may change what a resume can change
    (`run={"steps": 200}`). Ctrl-C saves a checkpoint and raises `Interrupted`.
    """
    from rollkeel.loop.job import train as run

    if resume is None:
        return Run(run(config(recipe, **settings)))
    if recipe is not None:
        raise BadInput("train: resume names a run, which has its recipe; leave the recipe out")
    old = Run(resume)
    return Run(run(config(old.config, **settings), resume=old.path))


def evaluate(
    model: str | Path | Run, recipe: Recipe | None = None, *, out: str | Path | None = None, **settings: Any
) -> dict[str, float]:
    """Accuracy on the held-out items, by metric: `eval/<task>/avg@k`, its standard error, pass@k, majority@k.

    `model`: a folder, an id, `preset:NAME`, or a run, whose final model and whose recipe it is then. `out`: file for the answers.
    """
    from rollkeel.loop.stages import eval_stage

    return eval_stage(_of_model(model, recipe, settings), None if out is None else Path(out))


def rollout(
    model: str | Path | Run,
    recipe: Recipe | None = None,
    *,
    step: int = 1,
    out: str | Path | None = None,
    **settings: Any,
) -> list[Rollout]:
    """Sample the prompts of training step `step` (from 1) with `model`, as `evaluate` takes it; nothing is graded.

    `out`: file to write them to, as parquet, for `rollkeel score`.
    """
    from rollkeel.loop.stages import rollout_stage

    if step < 1:
        raise BadInput(f"rollout: expected a step of 1 or more, got {step}")
    chosen = _of_model(model, recipe, settings)
    with tempfile.TemporaryDirectory() as folder:
        return rollout_stage(chosen, Path(out or f"{folder}/rollouts.parquet"), step)


def doctor(trace: str | Path | Run, *, last: int | None = None, format: str = "auto") -> Diagnosis:
    """Why a run went bad, from its recorded tokens: `healthy`, `verdict`, `causes` with evidence and positions.

    `trace`: a run, its folder, one of its rollout files, or the dump of another trainer (`format` where it is not clear whose).
    `last`: only so many steps. Nothing is recomputed with a model, unlike `rollkeel doctor --recompute`.
    """
    from rollkeel_doctor import diagnose, read_trace
    from rollkeel_doctor.errors import DoctorError

    try:
        return diagnose(read_trace(trace.path if isinstance(trace, Run) else Path(trace), last=last, format=format))
    except DoctorError as error:
        raise BadInput(str(error)) from None


class Run:
    """A run folder, finished or not: read again at every question, so that it may be asked while the run goes on."""

    def __init__(self, path: str | Path | Run) -> None:
        """Raises `BadInput` unless `path` is a run folder."""
        self.path = Path(path.path if isinstance(path, Run) else path)
        if not (self.path / "config.yaml").is_file():
            raise BadInput(f"run folder {self.path}: expected a folder with config.yaml, found none")

    @property
    def config(self) -> Config:
        """As it was resolved."""
        from rollkeel.record.runfolder import RunFolder

        return RunFolder.open(self.path, lock=False).config

    @property
    def status(self) -> str:
        """`running`, `killed`, `unknown`, `done`, `interrupted`, `stopped` or `failed`."""
        from rollkeel.report.run_files import read_run

        return read_run(self.path).status

    @property
    def model(self) -> Path:
        """Folder of the final model, which transformers loads. Raises `BadInput` before it is there."""
        path = self.path / "model"
        if not path.is_dir():
            raise BadInput(f"{path}: no model yet; the run is {self.status}")
        return path

    @property
    def report(self) -> Path:
        """The HTML page, written anew from what is there."""
        from rollkeel.report import render

        return render(self.path)

    def metrics(self) -> pa.Table:
        """A row per step, a column per metric, null where a step has none. `.to_pandas()` where pandas is installed."""
        import pyarrow as pa

        rows = self._rows()
        names = dict.fromkeys(name for row in rows for name in row)
        return pa.table({name: [row.get(name) for row in rows] for name in names})

    def rollouts(self, steps: int | Sequence[int] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """A row per rollout of `steps` (of all for None), a list per token column; docs/trace.md names the columns.

        Raises `BadInput` for a step without rollouts and for a column that is not there.
        """
        import pyarrow as pa

        from rollkeel.record.rollout_store import read_step
        from rollkeel.record.runfolder import rollout_files

        files = dict(rollout_files(self.path))
        wanted = list(files) if steps is None else [steps] if isinstance(steps, int) else list(steps)
        if missing := [step for step in wanted if step not in files]:
            there = f"it has steps {min(files)} to {max(files)}" if files else "it has none"
            raise BadInput(f"{self.path}: no rollouts of step {missing[0]}; {there}")
        if not wanted:
            raise BadInput(f"{self.path}: no rollouts yet; the run is {self.status}")
        tables = [read_step(files[step], columns) for step in wanted]
        return pa.concat_tables(tables, promote_options="default")

    def doctor(self, last: int | None = None) -> Diagnosis:
        """`rollkeel.doctor` of this run."""
        return doctor(self, last=last)

    def push_to_hub(self, repo: str, *, public: bool = False) -> str:
        """Upload the final model and its card to a repository of the Hugging Face Hub, and return its address; docs/hub.md."""
        from rollkeel.integrations.hub import push

        return push(self.path, repo, public=public)

    def plot(self, *metrics: str) -> Figure:
        """Curves over steps, one below the other: metrics, or patterns with `*`. Raises `BadInput` for one that is nowhere."""
        from rollkeel.report.charts import Curves, matching, series, smooth

        rows = self._rows()
        shown = {pattern: matching(rows, [pattern]) for pattern in metrics or CURVES}
        if metrics and (nowhere := [pattern for pattern, names in shown.items() if not names]):
            raise BadInput(f"{self.path}: no metric {nowhere[0]!r}; see Run.metrics().column_names")
        panels = [names for names in shown.values() if names]
        figure = Curves(figsize=(6.4, 0.3 + 1.7 * max(len(panels), 1)), layout="constrained")
        for number, names in enumerate(panels, 1):
            axes = figure.add_subplot(len(panels), 1, number)
            for name in names:
                steps, values = series(rows, name)
                (line,) = axes.plot(steps, values, alpha=0.35, linewidth=1)
                axes.plot(steps, smooth(values), color=line.get_color(), label=name)
            axes.legend(frameon=False, fontsize="small")
        return figure

    def _rows(self) -> Sequence[Mapping[str, Any]]:
        from rollkeel.report.run_files import read_run

        return read_run(self.path).rows

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.status})"

    def _repr_html_(self) -> str:
        """What a notebook shows: status, verdict, curves."""
        from rollkeel.report.run_files import read_run
        from rollkeel.report.verdict import verdict

        run = read_run(self.path)
        lines = [f"<b>{html.escape(str(self.path))}</b>: {html.escape(f'{run.status} {run.detail}'.strip())}"]
        lines += [f"<b>{html.escape(word.about)}</b> {html.escape(word.text)}" for word in verdict(run)]
        image = io.StringIO()
        if run.rows:
            self.plot().savefig(image, format="svg", metadata={"Date": None})
        svg = image.getvalue()
        return "<br>".join(lines) + svg[max(svg.find("<svg"), 0) :]


def _words(settings: Mapping[str, Any]) -> list[str]:
    """As they would be typed."""
    given: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and "." not in name:
            given |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            given[name] = value
    return [f"{name}={json.dumps(_plain(value))}" for name, value in given.items()]


def _plain(value: Any) -> Any:
    """The same as lists, mappings, text and numbers, none of them the caller's. Raises `BadInput` for what YAML cannot say."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInput(f"settings: expected a finite number, got {value}")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    hint = "; code of your own is named as module:name or file.py:name" if callable(value) else ""
    raise BadInput(f"settings: expected text, a number, a list or a mapping, got {type(value).__name__}{hint}")


def _of_model(model: str | Path | Run, recipe: Recipe | None, settings: Mapping[str, Any]) -> Config:
    if isinstance(model, Run):
        recipe, model = recipe or model.config, model.model
    return config(config(recipe, **settings), **{"model.path": str(model)})
