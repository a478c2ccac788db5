"""Tasks, models and settings of the splits, and one run of them: real rollkeel, a few seconds on one core."""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console

from benchmarks.doctor.climbing import Climbing
from benchmarks.doctor.coins import Coins
from benchmarks.doctor.dropping import Dropping
from benchmarks.doctor.guessing import Guessing
from benchmarks.doctor.ledger import Ledger
from benchmarks.doctor.lookup import Lookup
from benchmarks.doctor.shifting import Shifting
from benchmarks.doctor.sorting import Sorting
from benchmarks.doctor.tallying import Tallying
from benchmarks.doctor.turning import Turning
from benchmarks.doctor.unpacking import Unpacking
from benchmarks.doctor.weaving import Weaving
from rollkeel.config import Config, parse_yaml
from rollkeel.errors import BadInput, Interrupted, RollkeelError
from rollkeel.loop import steps as loop
from rollkeel.loop.assemble import assemble
from rollkeel.loop.check import validate
from rollkeel.loop.warm_start import warm_start
from rollkeel.models.loading import load_policy, quiet_transformers
from rollkeel.recipe import load
from rollkeel.record import checks
from rollkeel.record.live import LiveView
from rollkeel.record.runfolder import RunFolder
from rollkeel.record.stopping import StopFlag
from rollkeel.renamed import renewed, text
from rollkeel.tasks import TASKS as KNOWN
from rollkeel.train import checkpoint

OWN_TASKS = {
    task.name: task
    for task in (
        *(Sorting, Lookup, Shifting, Dropping, Weaving, Ledger, Unpacking, Coins, Turning),
        *(Climbing, Guessing, Tallying),
    )
}
"""They have their names while a run of the corpus goes on; rollkeel's own stay what they are outside."""
SPLITS = ("dev", "dev2", "dev3", "dev4", "dev5", "test")
BRIEF = ("dev3", "dev4", "dev5", "test")
"""Splits with half as many steps where a fault shows from the first."""
MODELS: dict[str, dict[str, list[str]]] = {
    "dev": {
        "moe": ["model.path=preset:tiny-qwen3-moe"],
        "dense": ["model.path=preset:tiny-qwen3"],
        "moe2": ["model.path=preset:tiny-qwen3-moe", 'model.overrides={"num_experts": 16, "num_hidden_layers": 3}'],
    },
    "dev2": {
        "moe": [
            "model.path=preset:tiny-qwen3-moe",
            'model.overrides={"hidden_size": 96, "num_hidden_layers": 3, "num_experts": 12, "num_experts_per_tok": 3}',
        ],
        "dense": ["model.path=preset:tiny-qwen3-tied", 'model.overrides={"hidden_size": 96, "num_hidden_layers": 3}'],
        "moe2": ["model.path=preset:tiny-qwen3-moe", 'model.overrides={"num_experts": 6, "moe_intermediate_size": 64}'],
    },
    "dev3": {
        "moe": [
            "model.path=preset:tiny-qwen3-moe",
            'model.overrides={"hidden_size": 96, "num_attention_heads": 2, "num_experts": 10, "num_experts_per_tok": 4}',
        ],
        "dense": [
            "model.path=preset:tiny-qwen3",
            'model.overrides={"hidden_size": 128, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 160}',
        ],
        "moe2": [
            "model.path=preset:tiny-qwen3-moe",
            'model.overrides={"num_experts": 20, "num_experts_per_tok": 5, "moe_intermediate_size": 16}',
        ],
    },
    "dev4": {
        "moe": [
            "model.path=preset:tiny-qwen3-moe",
            'model.overrides={"num_experts": 14, "num_experts_per_tok": 3, "num_key_value_heads": 4}',
        ],
        "dense": [
            "model.path=preset:tiny-qwen3-tied",
            'model.overrides={"hidden_size": 128, "num_key_value_heads": 4, "intermediate_size": 128}',
        ],
        "moe2": [
            "model.path=preset:tiny-qwen3-moe",
            'model.overrides={"hidden_size": 128, "num_experts": 5, "moe_intermediate_size": 48}',
        ],
    },
    "dev5": {
        "moe": [
            "model.path=preset:tiny-qwen3-moe",
            'model.overrides={"num_hidden_layers": 3, "num_experts": 18, "num_experts_per_tok": 4}',
        ],
        "dense": [
            "model.path=preset:tiny-qwen3",
            'model.overrides={"hidden_size": 96, "num_hidden_layers": 3, "intermediate_size": 192}',
        ],
        "moe2": [
            "model.path=preset:tiny-qwen3-moe",
            'model.overrides={"hidden_size": 96, "num_experts": 9, "moe_intermediate_size": 32}',
        ],
    },
    "test": {
        "moe": [
            "model.path=preset:tiny-qwen3-moe",
            'model.overrides={"num_hidden_layers": 3, "num_experts": 7, "moe_intermediate_size": 48}',
        ],
        "dense": [
            "model.path=preset:tiny-qwen3-tied",
            'model.overrides={"hidden_size": 112, "num_hidden_layers": 3, "intermediate_size": 144}',
        ],
        "moe2": [
            "model.path=preset:tiny-qwen3-moe",
            'model.overrides={"hidden_size": 80, "num_experts": 24, "num_experts_per_tok": 4}',
        ],
    },
}
"""`moe2` stands in for `dense` where a fault needs experts."""
ADDITION = ["data.task=addition", 'data.options={"digits": 2, "terms": 2}', "sft.label_noise=0.0", "sft.steps=450"]
"""Answers of two lengths, where a fault needs that: those of runsum all have twelve digits."""
UNSURE = ['data.options={"letters": 20, "shortest": 6, "longest": 9}', "sft.steps=70", "sft.label_noise=0.0"]
"""Words that the warm start has hardly begun to sort, where a fault needs a policy that is neither sure nor good."""
BEGINNING = ["sft.steps=25", "sft.label_noise=0.0"]
"""The same for look-ups."""
HALFWAY = ["sft.steps=200", "sft.label_noise=0.0"]
"""The same for shifts."""
PARTWAY = ["sft.steps=190", "sft.label_noise=0.0"]
"""The same for dropped letters."""
LONGER = ['data.options={"numbers": 3, "max_number": 20, "target_max": 100}']
"""Answers of 5 to 10 characters; nearly all of the others have 5."""
TASKS: dict[str, list[str]] = {
    "dev": [
        "data.task=runsum",
        "data.options.digits=12",
        "sft.steps=160",
        "sampling.max_new_tokens=16",
        "run.steps=16",
    ],
    "dev2": [
        "data.task=countdown",
        'data.options={"numbers": 3, "max_number": 9, "target_max": 50}',
        "sft.steps=300",
        "sampling.max_new_tokens=12",
        "run.steps=24",
    ],
    "dev3": [
        f"data.task={Sorting.name}",
        'data.options={"letters": 10, "shortest": 5, "longest": 8}',
        "sft.steps=200",
        "sft.label_noise=0.06",
        "sampling.max_new_tokens=12",
        "run.steps=16",
    ],
    "dev4": [
        f"data.task={Lookup.name}",
        "sft.steps=80",
        "sft.label_noise=0.06",
        "sampling.max_new_tokens=16",
        "run.steps=16",
    ],
    "dev5": [
        f"data.task={Shifting.name}",
        "sft.steps=270",
        "sft.label_noise=0.05",
        "sampling.max_new_tokens=14",
        "run.steps=16",
    ],
    "test": [
        f"data.task={Dropping.name}",
        "sft.steps=320",
        "sft.label_noise=0.04",
        "sampling.max_new_tokens=13",
        "run.steps=16",
    ],
}
"""15,000 to 25,000 response tokens a run: 13 tokens an answer in `dev`, 6 to 8 in `dev2`, 6 to 9 in `dev3`, 5 to 11 in `dev4`, 5 to 10 in `dev5`, 6 to 10 in `test`."""
COMMON = [
    "rollout.prompts=16",
    "rollout.samples=8",
    "train.lr=3e-4",
    "train.warmup_steps=4",
    "eval.every=0",
    "eval.items=1",
    "eval.samples=1",
    "eval.greedy=false",
    "checkpoint.every=6",
    "checkpoint.keep=9",
    "report.samples=0",
]
Patch = Callable[[], AbstractContextManager[Any]]


def words_of(split: str, model: str, seed: int, extra: Sequence[str]) -> list[str]:
    """Overrides of a run; later ones win."""
    return [*COMMON, *TASKS[split], *MODELS[split][model], f"run.seed={seed}", *extra]


def run_once(
    config: Config, path: Path, patches: Sequence[Patch] = (), *, killed_at: int = 0, own_start: bool = False
) -> str:
    """Warm start (from the cache, without regard to the seed unless `own_start`) and RL into the run folder `path`.

    How it ended: `done`, or why not.

    `patches` are in force from before the model is built. `killed_at`: the run dies in that step and is resumed from its
    last checkpoint by rollkeel itself. What checks while running would say, or stop, passes. A run that rollkeel stops by a rule is kept: its trace is what there is to diagnose.
    """
    quiet_transformers()
    torch.set_num_threads(config.run.threads)
    view = LiveView(console=Console(file=io.StringIO()))
    config = config.model_copy(update={"alarms": config.alarms.model_copy(update={"on_impossible": "warn"})})
    start = config if own_start else config.model_copy(update={"run": config.run.model_copy(update={"seed": 0})})
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(KNOWN, OWN_TASKS))
        stack.enter_context(mock.patch.object(checks, "tell"))
        # Faults are written into the engine's weights, which must not be the trainer's.
        stack.enter_context(mock.patch("rollkeel.loop.assemble.two_copies", return_value="faults"))
        validate(config)
        for patch in patches:
            stack.enter_context(patch())
        stack.enter_context(view)
        stop = stack.enter_context(StopFlag(view))
        folder = RunFolder.create(path, config)
        try:
            policy = load_policy(config.model, "cpu")
            warm_start(policy, start, view, stop, folder.events)
            ended = _reinforce(config, folder, policy, view, stop, killed_at)
            if ended == "killed":
                policy = load_policy(config.model, "cpu")
                ended = _reinforce(config, folder, policy, view, stop, 0, resume=True)
        finally:
            folder.close()
    shutil.rmtree(path / "model", ignore_errors=True)
    return ended


class _Killed(Exception):
    pass


def _reinforce(
    config: Config, folder: RunFolder, policy: Any, view: LiveView, stop: StopFlag, killed_at: int, resume: bool = False
) -> str:
    run, first = assemble(config, folder, policy, view, stop), 0
    learn = loop.learn

    def dying(run: Any, drawn: Any, clock: Any) -> dict[str, float]:
        if clock.step == killed_at:
            raise _Killed
        return learn(run, drawn, clock)

    try:
        if resume:
            saved = checkpoint.latest(folder.checkpoints, on_refused=view.error, events=folder.events)
            if saved is None:
                raise BadInput(f"{folder.path}: expected a checkpoint to resume from, found none")
            run.restore(saved)
            folder.truncate_after(saved.step)
            first = saved.step + 1
        with mock.patch.object(loop, "learn", dying if killed_at else learn):
            loop.train(run, first)
    except _Killed:
        return "killed"
    except Interrupted:
        raise  # by whoever builds the corpus
    except RollkeelError as error:
        if len(folder.metrics()) < 6:
            raise
        return f"{type(error).__name__}: {error}"
    finally:
        run.close()
    return "done"


def make(
    path: Path,
    words: Sequence[str],
    patches: Sequence[Patch],
    cache: Path,
    about: dict[str, Any],
    killed_at: int = 0,
    recipe: str | None = None,
    own_start: bool = False,
) -> float:
    """The run of `words` at `path`, unless it is there already. Seconds it took; 0 if it was there."""
    label = path / "case.json"
    about = {**about, "words": list(words)}
    if label.is_file() and json.loads(label.read_text())["about"] == about:
        return 0.0
    shutil.rmtree(path, ignore_errors=True)
    began = time.perf_counter()
    config = load(recipe, today(words))
    with mock.patch.dict(os.environ, ROLLKEEL_CACHE=str(cache)):
        ended = run_once(config, path, patches, killed_at=killed_at, own_start=own_start)
    gc.collect()
    seconds = time.perf_counter() - began
    label.write_text(json.dumps({"about": about, "ended": ended, "seconds": round(seconds, 2)}, indent=1) + "\n")
    return seconds


def today(words: Sequence[str]) -> list[str]:
    """Overrides in today's names; labels keep the names that a case was made with, so that it need not be made again."""
    out: list[str] = []
    for word in words:
        key, _, raw = word.partition("=")
        now = renewed(key, parse_yaml(raw))
        out += [word] if key in now else [f"{new}={text(value)}" for new, value in now.items()]
    return out
