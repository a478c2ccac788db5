"""Stages in a row, each from what the ones before it left: SFT, reasoning RL, a reward model, general RL (Ring-1T report, section 2).

A folder with `pipeline.yaml` names stages and their recipes. In a recipe, `stage:NAME/rest` is the path `rest` in the folder of the
earlier stage NAME. Every stage has a folder of its own and is done once it stands in `summary.json`; one that was interrupted
goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError
from rich.console import Console
from rich.table import Table

from rollkeel.config import Config, Node, parse_yaml
from rollkeel.errors import BadInput, Corrupt, fault
from rollkeel.events import write_atomic
from rollkeel.recipe import RECIPES, from_tree, merge

SUMMARY, PAIRS, PROMPTS = "summary.json", "pairs.jsonl", "prompts.jsonl"
PREFIX = "stage:"
Kind = Literal["train", "pairs", "reward_model"]


class StageSpec(Node):
    """One entry of `pipeline.yaml`."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    kind: Kind
    """`train`: a run (SFT, RL or both). `pairs`: preference pairs and prompts from the rollouts of an earlier run. `reward_model`: a
    reward model from an earlier stage's pairs."""
    recipe: str | None = None
    """Recipe of a run or a reward model, a file beside `pipeline.yaml`."""
    source: str | None = None
    """Stage whose rollouts or pairs are taken."""


class ChainSpec(Node):
    """`pipeline.yaml`."""

    evaluate: str
    """Recipe by which the model of every run is evaluated: the same items for all."""
    stages: tuple[StageSpec, ...] = Field(min_length=1)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage with its config resolved."""

    name: str
    kind: Kind
    config: Config | None
    source: Path | None
    folder: Path
    digest: str
    """Of the configs of this stage and of all before it."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """What `load_chain` read."""

    out: Path
    evaluate: Config
    stages: tuple[Stage, ...]


def load_chain(folder: Path, out: Path) -> Chain:
    """Read and check `pipeline.yaml` and all its recipes, in `folder` or a folder of that name under `recipes/`.

    Raises `BadInput` (one line) for the first fault."""
    if not folder.exists() and (RECIPES / folder).is_dir():
        folder = RECIPES / folder
    try:
        spec = ChainSpec.model_validate(_tupled(_yaml(folder / "pipeline.yaml")))
    except ValidationError as error:
        where, said = fault(error)
        raise BadInput(f"{folder / 'pipeline.yaml'} {'.'.join(where)}: {said}") from None
    stages: dict[str, Stage] = {}
    digest = hashlib.sha256()
    for each in spec.stages:
        if each.name in stages:
            raise BadInput(f"{folder / 'pipeline.yaml'}: stage {each.name} appears twice")
        wants = {"train": (True, False), "pairs": (False, True), "reward_model": (True, True)}[each.kind]
        if ((each.recipe is not None), (each.source is not None)) != wants:
            needs = " and ".join(n for n, w in zip(("recipe", "source"), wants, strict=True) if w)
            raise BadInput(f"{folder / 'pipeline.yaml'} stage {each.name}: a {each.kind} stage takes {needs}")
        source = _resolved(f"{PREFIX}{each.source}", stages, each.name) if each.source else None
        tree = _yaml(folder / each.recipe) if each.recipe is not None else {}
        digest.update(json.dumps([each.model_dump(), tree], sort_keys=True).encode())
        config = None
        if each.recipe is not None:
            tree = _resolved(tree, stages, each.name)
            config = from_tree(merge(tree, [f"run.dir={out / each.name}", f"run.name={each.name}"]))
        path = Path(source) if source else None
        stages[each.name] = Stage(
            name=each.name,
            kind=each.kind,
            config=config,
            source=path,
            folder=out / each.name,
            digest=digest.hexdigest(),
        )
    evaluate = from_tree(_yaml(folder / spec.evaluate))
    return Chain(out=out, evaluate=evaluate, stages=tuple(stages.values()))


def run_chain(chain: Chain) -> dict[str, Any]:
    """Run the stages that are not done yet, in order; returns what is in `summary.json`.

    Raises `BadInput` before anything is trained for a config that cannot run, and for a done stage whose recipe (or that of one
    before it) has changed since.
    """
    from rollkeel.validate import validate

    for stage in chain.stages:
        if stage.kind == "train" and stage.config is not None:
            validate(stage.config)
    summary = _summary(chain.out)
    for stage in chain.stages:
        done = summary["stages"].get(stage.name)
        if done is not None:
            if done["digest"] != stage.digest:
                raise BadInput(f"{chain.out}: stage {stage.name} was done with other recipes; choose another --out")
            continue
        began = time.perf_counter()
        metrics = _run(stage, chain.evaluate)
        seconds = round(time.perf_counter() - began, 1)
        summary["stages"][stage.name] = {
            "kind": stage.kind, "digest": stage.digest, "seconds": seconds, "metrics": metrics,
        }  # fmt: skip
        chain.out.mkdir(parents=True, exist_ok=True)
        write_atomic(chain.out / SUMMARY, json.dumps(summary, indent=1) + "\n")
    return summary


def _run(stage: Stage, evaluate: Config) -> dict[str, float]:
    from rollkeel import stages
    from rollkeel.pipeline import train

    if stage.kind == "pairs":
        assert stage.source is not None
        return pairs_of_run(stage.source, stage.folder)
    assert stage.config is not None
    if stage.kind == "reward_model":
        assert stage.source is not None
        return stages.reward_model_stage(stage.config, stage.source / PAIRS, stage.folder)
    train(stage.config, resume=stage.folder if (stage.folder / "config.yaml").is_file() else None)
    model = evaluate.model.model_copy(update={"path": str(stage.folder / "model"), "overrides": {}})
    return stages.eval_stage(evaluate.model_copy(update={"model": model}), None)


def pairs_of_run(run: Path, out: Path) -> dict[str, float]:
    """Preference pairs of a run's rollouts: in every group the best answer against the worst, the second best against the second
    worst, and so on, where rewards differ.

    Writes `pairs.jsonl` (prompt, chosen, rejected) and `prompts.jsonl` (prompt, answer), each prompt once, for a run that follows.
    """
    from rollkeel.diagnostics.rollout_store import read_step, to_rollouts

    files = sorted((run / "rollouts").glob("step_*.parquet"))
    if not files:
        raise BadInput(f"{run}: expected rollouts of a run, found none; set report.rollouts=true in its recipe")
    groups: dict[tuple[str, int], list[Any]] = {}
    for file in files:
        for rollout in to_rollouts(read_step(file)):
            if rollout.reward is not None:
                groups.setdefault((file.name, rollout.group), []).append(rollout)
    pairs, prompts = {}, {}
    for members in groups.values():
        members.sort(key=lambda r: r.reward)
        prompt = members[0].prompt
        prompts[prompt.text] = {"prompt": prompt.text, "answer": prompt.answer}
        for worse, better in zip(members, reversed(members), strict=True):
            if better.reward > worse.reward and better.text.strip() and better.text != worse.text:
                row = {"prompt": prompt.text, "chosen": better.text, "rejected": worse.text}
                pairs[tuple(row.values())] = row
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in ((PAIRS, pairs), (PROMPTS, prompts)):
        write_atomic(out / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values()))
    return {"pairs": float(len(pairs)), "prompts": float(len(prompts))}


def _yaml(path: Path) -> dict[str, Any]:
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError:
        raise BadInput(f"{path}: no such file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise BadInput(f"{path}: expected a mapping, got {type(tree).__name__}")
    return tree


def _tupled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _tupled(v) for k, v in value.items()}
    return tuple(_tupled(v) for v in value) if isinstance(value, list) else value


def _resolved(value: Any, stages: Mapping[str, Stage], name: str) -> Any:
    """`value` with every text `stage:NAME/rest` replaced by a path."""
    if isinstance(value, Mapping):
        return {k: _resolved(v, stages, name) for k, v in value.items()}
    if isinstance(value, list):
        return [_resolved(v, stages, name) for v in value]
    if not (isinstance(value, str) and value.startswith(PREFIX)):
        return value
    earlier, _, rest = value.removeprefix(PREFIX).partition("/")
    if earlier not in stages:
        raise BadInput(f"stage {name}: {value} names no earlier stage; earlier are {', '.join(stages) or 'none'}")
    return str(stages[earlier].folder / rest) if rest else str(stages[earlier].folder)


def _summary(out: Path) -> dict[str, Any]:
    file = out / SUMMARY
    if not file.is_file():
        return {"stages": {}}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise Corrupt(f"{file}: not valid JSON; remove it, and finished stages are found done again") from None


def show_summary(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """One row per stage."""
    table = Table()
    for column in ("stage", "kind", "seconds", "result"):
        table.add_column(column, justify="right" if column == "seconds" else "left")
    shown = ("/avg@k", "/avg@k_se", "/greedy", "eval/accuracy", "eval/accuracy_se", "pairs", "prompts")
    for name, stage in summary["stages"].items():
        result = "  ".join(
            f"{k.removeprefix('eval/')} {v:.4g}" for k, v in stage["metrics"].items() if k.endswith(shown)
        )
        table.add_row(name, stage["kind"], f"{stage['seconds']:.1f}", result)
    (console or Console(highlight=False)).print(table)
