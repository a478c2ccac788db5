"""Tasks, models and settings of the two splits, and one run of them: real rollkeel, a few seconds on one core."""

from __future__ import annotations

import gc
import io
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console

from rollkeel import loop
from rollkeel.config import Config
from rollkeel.diagnostics.live import LiveView
from rollkeel.diagnostics.runfolder import RunFolder
from rollkeel.errors import BadInput, RollkeelError
from rollkeel.models.loading import load_policy, quiet_transformers
from rollkeel.pipeline import warm_start
from rollkeel.recipe import load
from rollkeel.run import StopFlag, assemble
from rollkeel.tasks.addition import Addition
from rollkeel.tasks.base import TaskItem
from rollkeel.tasks.runsum import Runsum
from rollkeel.train import checkpoint
from rollkeel.validate import validate

SPLITS = ("dev", "test")
STEPS = 30
MODELS: dict[str, dict[str, list[str]]] = {
    "dev": {
        "moe": ["model.path=preset:tiny-qwen3-moe"],
        "dense": ["model.path=preset:tiny-qwen3"],
        "moe2": ["model.path=preset:tiny-qwen3-moe", 'model.overrides={"num_experts": 16, "num_hidden_layers": 3}'],
    },
    "test": {
        "moe": [
            "model.path=preset:tiny-qwen3-moe",
            'model.overrides={"hidden_size": 96, "num_hidden_layers": 3, "num_experts": 12, "num_experts_per_tok": 3}',
        ],
        "dense": ["model.path=preset:tiny-qwen3-tied", 'model.overrides={"hidden_size": 96, "num_hidden_layers": 3}'],
        "moe2": ["model.path=preset:tiny-qwen3-moe", 'model.overrides={"num_experts": 6, "moe_intermediate_size": 64}'],
    },
}
"""`moe2` stands in for `dense` where a fault needs experts."""
TASKS: dict[str, list[str]] = {
    "dev": ["data.task=runsum", "data.options.digits=12", "sft.steps=200", "sampling.max_new_tokens=16"],
    "test": [
        "data.task=addition",
        "data.options.digits=8",
        "sft.steps=450",
        "sft.label_noise=0.03",
        "sampling.max_new_tokens=14",
    ],
}
LENGTHS = {"dev": (4, 12), "test": (3, 8)}
"""Digits of a problem are drawn from this range, so that answers differ in length."""
COMMON = [
    f"run.steps={STEPS}",
    "rollout.prompts=16",
    "rollout.samples=8",
    "train.lr=3e-4",
    "train.warmup_steps=4",
    "eval.every=0",
    "eval.items=1",
    "eval.samples=1",
    "eval.greedy=false",
    "checkpoint.every=0",
    "report.samples=0",
]
Patch = Callable[[], AbstractContextManager[Any]]


def words_of(split: str, model: str, seed: int, extra: Sequence[str]) -> list[str]:
    """Overrides of a run; later ones win."""
    return [*COMMON, *TASKS[split], *MODELS[split][model], f"run.seed={seed}", *extra]


def _runsum(self: Runsum, rng: random.Random) -> TaskItem:
    digits = rng.choices(range(10), k=rng.randint(LENGTHS["dev"][0], self.options.digits))
    total, sums = 0, []
    for digit in digits:
        total = (total + digit) % 10
        sums.append(total)
    return TaskItem(text="".join(map(str, digits)) + "=", answer="".join(map(str, sums)))


def _addition(self: Addition, rng: random.Random) -> TaskItem:
    digits = rng.randint(LENGTHS["test"][0], self.options.digits)
    terms = [rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(self.options.terms)]
    return TaskItem(text="+".join(map(str, terms)) + "=", answer=str(sum(terms)))


@contextmanager
def mixed_lengths() -> Iterator[None]:
    """Problems of different lengths, up to what `data.options.digits` says."""
    with mock.patch.object(Runsum, "draw", _runsum), mock.patch.object(Addition, "draw", _addition):
        yield


def run_once(config: Config, path: Path, patches: Sequence[Patch] = (), *, killed_at: int = 0) -> str:
    """Warm start (from the cache, without regard to the seed) and RL into the run folder `path`. How it ended: `done`, or why not.

    `patches` are in force from before the model is built. `killed_at`: the run dies in that step and is resumed from its
    last checkpoint by rollkeel itself. A run that rollkeel stops by a rule is kept: its trace is what there is to diagnose.
    """
    quiet_transformers()
    validate(config)
    torch.set_num_threads(config.run.threads)
    view = LiveView(console=Console(file=io.StringIO()))
    start = config.model_copy(update={"run": config.run.model_copy(update={"seed": 0})})
    with ExitStack() as stack:
        for patch in (mixed_lengths, *patches):
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
    for part in ("checkpoints", "model"):
        shutil.rmtree(path / part, ignore_errors=True)
    return ended


class _Killed(Exception):
    pass


def _reinforce(
    config: Config, folder: RunFolder, policy: Any, view: LiveView, stop: StopFlag, killed_at: int, resume: bool = False
) -> str:
    run, first = assemble(config, folder, policy, view, stop), 0
    train = {"sync": loop.train_sync, "budgeted": loop.train_budgeted, "async": loop.train_async}[config.run.loop]
    learn = loop.learn

    def dying(run: Any, step: int, *rest: Any) -> bool:
        if step == killed_at:
            raise _Killed
        return learn(run, step, *rest)

    try:
        if resume:
            saved = checkpoint.latest(folder.checkpoints, on_refused=view.error, events=folder.events)
            if saved is None:
                raise BadInput(f"{folder.path}: expected a checkpoint to resume from, found none")
            run.restore(saved)
            folder.truncate_after(saved.step)
            first = saved.step + 1
        with mock.patch.object(loop, "learn", dying if killed_at else learn):
            train(run, first)
    except _Killed:
        return "killed"
    except RollkeelError as error:
        if len(folder.metrics()) < 6:
            raise
        return f"{type(error).__name__}: {error}"
    finally:
        run.close()
    return "done"


def make(
    path: Path, words: Sequence[str], patches: Sequence[Patch], cache: Path, about: dict[str, Any], killed_at: int = 0
) -> float:
    """The run of `words` at `path`, unless it is there already. Seconds it took; 0 if it was there."""
    label = path / "case.json"
    about = {**about, "words": list(words)}
    if label.is_file() and json.loads(label.read_text())["about"] == about:
        return 0.0
    shutil.rmtree(path, ignore_errors=True)
    began = time.perf_counter()
    ended = run_once(load(None, [*words, f"sft.cache_dir={cache}"]), path, patches, killed_at=killed_at)
    gc.collect()
    seconds = time.perf_counter() - began
    label.write_text(json.dumps({"about": about, "ended": ended, "seconds": round(seconds, 2)}, indent=1) + "\n")
    return seconds
