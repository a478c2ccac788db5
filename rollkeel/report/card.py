"""The model card beside a trained model: `README.md`, with the front matter that the Hugging Face Hub reads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rollkeel.config import Config
from rollkeel.events import write_atomic
from rollkeel.host import versions
from rollkeel.objectives.described import in_words
from rollkeel.record.glossary import meaning
from rollkeel.record.run_config import changes
from rollkeel.record.runfolder import CHECKPOINTS, RunFolder
from rollkeel.report.charts import Rows, is_number, matching, series
from rollkeel.report.run_files import RunFiles, read_run
from rollkeel.report.verdict import verdict
from rollkeel.train import checkpoint

_MISMATCH = (
    "mismatch/ratio_std",
    "mismatch/kl",
    "mismatch/prob_abs_diff_max",
    "mask/dropped_share",
    "routing/flip_rate",
    "staleness/max",
)
_OF_THIS_MACHINE = ("run.dir", "run.name", "run.threads", "report.", "checkpoint.", "cluster.", "engine.server")
"""Settings that say nothing about the model."""


def write_card(folder: RunFolder) -> None:
    """Write the card of a run's final model into its folder, unless it has one. Raises `BadInput` where it cannot be written."""
    if not (path := folder.model / checkpoint.CARD).is_file():
        write_atomic(path, card(folder))


def card(folder: RunFolder) -> str:
    """The card's text: recipe, data, results, mismatch, versions, and what was not measured. Folders of this machine are left out."""
    config, run = folder.config, read_run(folder.path)
    name = config.run.name if config.run.name != "run" else folder.path.resolve().name
    base = next(iter(_hub_ids(config.model.path)), None)
    adapters = (folder.model / "adapter_config.json").is_file()
    data = ModelCardData(
        model_name=name,
        library_name="peft" if adapters else "transformers",
        pipeline_tag="text-generation",
        base_model=base,
        datasets=_hub_ids(*[part.path for part in config.data.parts or [config.data] if part.path]) or None,
        tags=["rollkeel", "reinforcement-learning"],
        eval_results=_results(run.rows) or None,
    )
    described = next((e for e in reversed(run.events) if e.get("event") == "objective"), None)
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).get_template("card.md.j2")
    return template.render(
        front=data.to_yaml(),
        name=name,
        base=base or _plain(config.model.path),
        adapters=adapters,
        steps=max((row["step"] for row in run.rows), default=0),
        words=verdict(run),
        results=_results_table(run.rows),
        objective=in_words({k: v for k, v in described.items() if k not in ("event", "time")}) if described else "",
        warm=(f"{config.sft.epochs} epochs" if config.sft.epochs else f"{config.sft.steps} steps")
        if config.sft.on
        else "",
        settings=_settings(config),
        data=[_data(part) for part in config.data.parts or [config.data]],
        counts=[int(sum(r.get(key, 0) for r in run.rows)) for key in ("rollout/count", "rollout/tokens")],
        mismatch=_mismatch_table(run.rows),
        versions=_versions(folder.path),
        lacks=_lacks(run, config),
    )


def _hub_ids(*names: str) -> list[str]:
    """Those that are ids on the Hub, and no folder or file of this machine."""
    return [n for n in names if re.fullmatch(r"[\w.-]+/[\w.-]+", n) and not Path(n).exists()]


def _plain(value: Any) -> Any:
    """A setting without the folders of this machine."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, str) and (os.path.isabs(value) or value.startswith(("~", "."))):
        return Path(value).name
    return value


def _settings(config: Config) -> str:
    """YAML of what differs from the defaults, by dotted name."""
    changed = {key: _plain(new) for key, (_, new) in changes(Config(), config).items()}
    kept = {key: value for key, value in changed.items() if not key.startswith(_OF_THIS_MACHINE)}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=100) if kept else ""


def _data(part: Any) -> str:
    if part.task is not None:
        options = json.dumps(_plain(part.options)) if part.options else "no options"
        return f"task `{_plain(part.task)}` ({options})"
    return f"`{_plain(part.path)}`, columns `{part.prompt_column}` and `{part.answer_column}`, grader `{_plain(part.grader)}`"


def _evaluations(rows: Rows) -> list[tuple[str, list[Mapping[str, Any]]]]:
    return [(key, [row for row in rows if is_number(row.get(key))]) for key in matching(rows, ("eval/*/avg@k",))]


def _final(rows: Rows) -> list[tuple[str, Mapping[str, Any]]]:
    """Evaluations of the final model: those of the last step."""
    return [(key, held[-1]) for key, held in _evaluations(rows) if held[-1]["step"] == rows[-1]["step"]]


def _results(rows: Rows) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=(task := key.split("/")[1]),
            dataset_name=task,
            dataset_split="held out",
            metric_type="mean_reward",
            metric_name=f"avg@{row.get(f'eval/{task}/k', 1):.0f}",
            metric_value=round(row[key], 6),
        )
        for key, row in _final(rows)
    ]


def _results_table(rows: Rows) -> list[tuple[str, str, str]]:
    """Name, first and last value with their steps, of the training reward and of every evaluation."""
    kept = [("training reward, mean of a step", "reward/mean")]
    kept += [(f"{key.split('/')[1]}, held out, avg@k", key) for key, _ in _evaluations(rows)]
    table = []
    for name, key in kept:
        held = [row for row in rows if is_number(row.get(key))]
        cells = []
        for row in (held[:1] + held[-1:]) if held else ():
            error = row.get(f"{key}_se")
            spread = f" ± {error:.3f}" if is_number(error) else ""
            cells.append(f"{row[key]:.3f}{spread} (step {row['step']})")
        if cells:
            table.append((name, cells[0], cells[1]))
    return table


def _mismatch_table(rows: Rows) -> list[tuple[str, str, str, str, str]]:
    """Metric, first, last and largest value, meaning."""
    table = []
    for key in matching(rows, _MISMATCH):
        _, values = series(rows, key)
        table.append(
            (
                key,
                *(f"{value:.3g}" for value in (values[0], values[-1], max(values))),
                meaning(key).removesuffix(" (1)"),
            )
        )
    return table


def _versions(path: Path) -> Mapping[str, str]:
    """Packages of the newest checkpoint, which wrote the model; those installed here where there is none."""
    for _, saved in reversed(checkpoint.listing(path / CHECKPOINTS)):
        try:
            return json.loads((saved / checkpoint.MANIFEST).read_text(encoding="utf-8"))["versions"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return versions()


def _lacks(run: RunFiles, config: Config) -> list[str]:
    """What nobody may read into the numbers above."""
    rows, found = run.rows, []
    if not _evaluations(rows):
        found.append("The reward on held-out problems: nothing was evaluated (`eval.every` or `eval.items` is 0).")
    elif not _final(rows):
        found.append("The final model on held-out problems: the last evaluation is of an earlier step.")
    if not matching(rows, ("mismatch/ratio_std",)):
        found.append("The mismatch of the two engines: no step recorded it.")
    if not config.report.rollouts:
        found.append("What the doctor reads: rollouts were not kept (`report.rollouts=false`).")
    return [
        *found,
        f"Other seeds: this is one run, of seed {config.run.seed}.",
        "Other benchmarks than the ones above, other languages, and what the model lost elsewhere.",
        "Safety and bias of the answers.",
        "Whether the base model had seen these problems before.",
    ]
