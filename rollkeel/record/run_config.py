"""Which config a run folder's files belong to, and which settings may change when the run is resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollkeel import plugins
from rollkeel.config import Config
from rollkeel.errors import BadInput

CONFIG, EVENTS = "config.yaml", "events.jsonl"
OWNED = ("data", "sft", "experiment.label_noise", "run.seed", "rollout.samples")
"""Sections and leaves that say what the rows so far are about. Of `data`, the file may have moved."""
MOVED = ("data.path",)
FREE = (
    "run.dir", "run.name", "run.steps", "run.threads", "run.device",
    "eval.every", "checkpoint", "report", "alarms", "trace",
    "engine.processes", "engine.slots", "engine.kv_memory_gb", "engine.deadline_s", "engine.server",
    "train.processes", "train.micro_batch_tokens", "reward.graders", "rollout.failure_budget",
    "cluster.address", "cluster.placement", "cluster.restarts", "cluster.deadline_s",
)  # fmt: skip
"""Sections and leaves that say how long, where and how fast: nobody needs to be told that they changed."""


def digest(data: bytes) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(data).hexdigest()


def foreign_config(run: Path) -> str:
    """What is wrong if `config.yaml` is not a file that this run wrote, by its log and its checkpoints; empty if it is one, or if
    the run is of a version that kept no digests."""
    recorded = _recorded(run)
    if not recorded or digest((run / CONFIG).read_bytes()) in recorded:
        return ""
    return "damaged, or edited by hand: it is not the file this run wrote"


def _recorded(run: Path) -> set[str]:
    log = run / EVENTS
    lines = log.read_bytes().splitlines() if log.is_file() else []
    texts = [line for line in lines if b'"config"' in line]
    texts += [file.read_bytes() for file in run.glob("checkpoints/*/manifest.json")]
    recorded: set[str] = set()
    for text in texts:
        try:
            row = json.loads(text)
        except ValueError:
            continue
        if isinstance(row, dict):
            about = row.get("info", row)
            recorded |= {about["config"]} if isinstance(about, dict) and isinstance(about.get("config"), str) else set()
    return recorded


def changes(old: Config, new: Config, run: Path | None = None) -> dict[str, list[Any]]:
    """Old and new value of every leaf that differs, by its path; with `run`, somebody's own code of that run that only moved
    does not."""
    trees = old.model_dump(mode="json"), new.model_dump(mode="json")
    if run is not None:
        plugins.as_recorded(trees[1], run)
    before, after = map(leaves_of, trees)
    keys = dict.fromkeys([*before, *after])
    return {key: [before.get(key), after.get(key)] for key in keys if before.get(key) != after.get(key)}


def changes_on_resume(old: Config, new: Config, run: Path) -> list[str]:
    """What to tell of the run in folder `run` that goes on with `new` settings, one line a leaf.

    Raises `BadInput` for the first that would make its rows those of another run.
    """
    told = []
    for leaf, (before, after) in changes(old, new, run).items():
        if _under(leaf, OWNED) and leaf not in MOVED:
            own = isinstance(after, str) and plugins.is_own(after)
            same = f"the same {leaf.rsplit('.', 1)[-1]}{', its files unchanged' if own else ''}"
            raise BadInput(f"{leaf}: the run has {before!r}, got {after!r}; resume with {same}, or start a new run")
        if not _under(leaf, FREE):
            told.append(f"{leaf}: {before!r} until here, {after!r} from here on")
    return told


def _under(leaf: str, sections: tuple[str, ...]) -> bool:
    return any(leaf == section or leaf.startswith(f"{section}.") for section in sections)


def leaves_of(tree: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= leaves_of(value, f"{where}{key}.") if isinstance(value, Mapping) else {f"{where}{key}": value}
    return leaves


def nothing_to_do(step: int, steps: int) -> str:
    """What the resume of a run that has done its `steps` says."""
    return f"nothing to do: the checkpoint is at step {step} of {steps}; raise run.steps to go on"
