"""From a YAML recipe plus `a.b=c` overrides to the config tree.

An unknown key is an error that names the nearest valid one. Importing this module, and refusing a bad config, costs no
torch import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from rollkeel import plugins
from rollkeel.config import Config, DataConfig, ObjectiveConfig, parse_yaml
from rollkeel.config_data import SourceConfig
from rollkeel.errors import BadInput, fault, nearest

RESERVED = ("mean", "std", "shaped_mean", "undecided", "kl_penalty", "overlong_penalty", "overlong_share")
"""Names of metrics `reward/…` that no source can have."""
RECIPES = Path(__file__).resolve().parent / "recipes"


def load(recipe: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe (path, or name of a file in `recipes/`; None is all defaults) and apply `a.b=c` overrides.

    Raises `BadInput` for a missing file, broken YAML, an unknown key (naming the nearest), or a wrong type or range.
    """
    return from_tree(merge(_read(recipe) if recipe is not None else {}, overrides))


def merge(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`tree` with `a.b=c` overrides written into it. Raises `BadInput` for an override that is not of that form."""
    given: set[str] = set()
    for text in overrides:
        _apply(tree, text, given)
    return tree


def from_tree(tree: Mapping[str, Any]) -> Config:
    """Validate a nested mapping. Raises `BadInput` on the first fault."""
    _check_keys(tree, Config, "")
    _check_values(tree, "")
    try:
        plugins.resolve(tree := _tuples(tree))
        config = Config.model_validate(tree)
    except ValidationError as error:
        where, said = fault(error)
        raise BadInput(f"config {'.'.join(where)}: {said}") from None
    _check_sources(config.data)
    _check_sets(config)
    if "/" in config.run.name:
        raise BadInput(f"config run.name: {config.run.name!r} is a path, expected a name; run.dir takes a path")
    if config.run.parity and config.engine.forward == "auto":
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"forward": "parity"})})
    return config


def _check_sources(data: DataConfig) -> None:
    given = [f"data.{name}" for name in ("task", "path", "sources") if getattr(data, name) not in (None, ())]
    if len(given) != 1:
        raise BadInput(
            "config data: expected exactly one of data.task and data.path, or data.sources alone, got"
            f" {' and '.join(given) or 'none'}; set {'one' if not given else 'the others to null'}"
        )
    seen = set[str]()
    for number, (source, part) in enumerate(zip(data.sources, data.parts, strict=True)):
        where = f"config data.sources.{number}"
        if (source.task is None) == (source.path is None):
            raise BadInput(f"{where}: expected exactly one of task and path; set one")
        if part.chat_template != data.chat_template:
            raise BadInput(f"{where}.chat_template: one model has one template; set data.chat_template instead")
        if part.name in RESERVED:
            raise BadInput(f"{where}.name: reward/{part.name} is a metric of all sources; set another name")
        if part.name in seen:
            raise BadInput(f"{where}: two sources are called {part.name!r}; set a name of its own")
        for key, unset in (("grader_column", None), ("draw_by", "row")):
            no_columns = part.grader == "code" or (key == "grader_column" and source.task is not None)
            if getattr(source, key) != unset and no_columns:
                raise BadInput(f"{where}.{key}: expected a file whose grader is not code; leave it out")
        seen.add(part.name)


def _check_sets(config: Config) -> None:
    data = config.data
    seen = {part.name for part in data.parts} or {data.whole(SourceConfig(task=data.task, path=data.path)).name}
    for number, one in enumerate(config.eval.sets):
        where = f"config eval.sets.{number}"
        kinds = [one.benchmark, one.source, one.task, None if one.benchmark else one.path]
        if sum(kind is not None for kind in kinds) != 1:
            raise BadInput(f"{where}: expected exactly one of benchmark, source, task and path; set one")
        names = [part.name for part in data.parts]
        if one.source is not None and one.source not in names:
            raise BadInput(f"{where}.source: no data.sources is called {one.source!r}{nearest(one.source, names)}")
        if one.called in seen:
            raise BadInput(f"{where}: eval/{one.called} is there already; set a name of its own")
        seen.add(one.called)


def find_recipe(name: str | Path) -> Path:
    """Path of a recipe given as a file or as a name under `recipes/`. Raises `BadInput` naming the nearest."""
    for candidate in (Path(name), RECIPES / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    known = sorted(str(p.relative_to(RECIPES).with_suffix("")) for p in RECIPES.rglob("*.yaml"))
    raise BadInput(f"recipe {str(name)!r}: no such file and no recipe of that name{nearest(str(name), known)}")


def _read(recipe: str | Path) -> dict[str, Any]:
    path = find_recipe(recipe)
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"recipe {path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        got = "an empty file" if tree is None else type(tree).__name__
        raise BadInput(f"recipe {path}: expected a mapping of sections, got {got}")
    if path.name == "config.yaml" and "experiment" not in tree:  # of a run older than that section
        from rollkeel.renamed import upgraded

        return upgraded(tree)
    return tree


def _apply(tree: dict[str, Any], text: str, given: set[str]) -> None:
    """Write one override into `tree` and its key into `given`."""
    key, sep, raw = text.partition("=")
    if not sep or not key.strip():
        raise BadInput(f"override {text!r}: expected key=value, for example train.lr=1e-4")
    try:
        value = parse_yaml(raw) if raw.strip() else None
    except yaml.YAMLError:
        raise BadInput(f"override {text!r}: the value is not valid YAML") from None
    parts = key.strip().split(".")
    node = tree
    for part in parts[:-1]:
        if node.get(part) is None:  # absent, or a section left empty in the YAML
            node[part] = {}
        child = node[part]
        if not isinstance(child, dict):
            whole = len(parts) == 3 and parts[0] == "objective"  # a threshold that becomes a drop rate
            hint = f"; write 'objective.{part}={{{parts[-1]}: {raw.strip()}}}'" if whole else ""
            raise BadInput(f"override {text!r}: {part!r} is a value, not a section{hint}")
        node = child
    task = plugins.short(str(node.get("task", Config().data.task)))  # a file that moved is the same task
    if key.strip() == "data.task" and plugins.short(str(value)) != task and "data.options" not in given:
        options = node.get("options") or {}  # of the recipe's task; those typed before are of this one
        node["options"] = {k: v for k, v in options.items() if f"data.options.{k}" in given}
    if parts == ["objective", "name"] and value != node.get("name", ObjectiveConfig().name):
        # The recipe's options of another objective mean nothing to this one; those typed before the name do.
        for option in [k for k in node if f"objective.{k}" not in given]:
            del node[option]
    node[parts[-1]] = value
    given.add(".".join(parts))


def _check_keys(tree: Any, model: type[BaseModel], where: str) -> None:
    if not isinstance(tree, Mapping):
        hint = f"; write {where}.name={tree}" if "name" in model.model_fields and isinstance(tree, str) else ""
        raise BadInput(f"config {where or 'top level'}: expected a section of keys, got {tree!r}{hint}")
    for key, value in tree.items():
        path = f"{where}.{key}" if where else str(key)
        info = model.model_fields.get(str(key))
        if info is None:
            if model.model_config.get("extra") == "allow":
                continue
            unknown = f"config {path}: unknown key{nearest(str(key), list(model.model_fields), where)}"
            from rollkeel.renamed import refusal  # what is not old does without

            raise BadInput(refusal(path, value) or unknown)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            _check_keys({} if value is None else value, info.annotation, path)
        inner = get_args(info.annotation)[:1]
        if inner and isinstance(inner[0], type) and issubclass(inner[0], BaseModel) and isinstance(value, list):
            for number, entry in enumerate(value):
                _check_keys(entry, inner[0], f"{path}.{number}")


def _check_values(value: Any, where: str) -> None:
    """Refuse what no setting can mean: numbers that are not finite, text that is not Unicode or that ends paths early."""
    for key, child in value.items() if isinstance(value, Mapping) else ():
        _check_values(child, f"{where}.{key}" if where else str(key))
    for child in value if isinstance(value, list) else ():
        _check_values(child, where)
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInput(f"config {where}: expected a finite number, got {value}")
    if isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
        raise BadInput(f"config {where}: expected Unicode text without null characters, got {value!r}")


def _tuples(value: Any) -> Any:
    """YAML has lists only; strict fields are tuples."""
    if isinstance(value, Mapping):
        return {k: ({} if v is None and k in Config.model_fields else _tuples(v)) for k, v in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(v) for v in value)
    return value
