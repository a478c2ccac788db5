"""Supervised warm start of a policy: cached by everything its weights depend on, and resumable."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

import rollkeel
from rollkeel import plugins
from rollkeel.config import Config
from rollkeel.errors import BadInput, Corrupt, Interrupted
from rollkeel.events import EventLog
from rollkeel.loop.assemble import answers, device_of, opened, prompt_source, sampling_params
from rollkeel.loop.play import equipped
from rollkeel.models.adapters import load_trained, trained_state
from rollkeel.models.loading import PRESET_PREFIX, Policy
from rollkeel.record.live import LiveView
from rollkeel.record.stopping import StopFlag
from rollkeel.train import checkpoint
from rollkeel.train.optimizer import PACK_TOKENS
from rollkeel.train.sft import Example, cuts, run_sft
from rollkeel.train.together import UnfinishedTogether, load_start, save_start
from rollkeel.train.trainer import LocalTrainer
from rollkeel.train.unfinished import Unfinished

Kept = Unfinished | UnfinishedTogether


def warm_start(
    policy: Policy,
    config: Config,
    view: LiveView,
    stop: StopFlag,
    events: EventLog,
    kept: Kept | None = None,
    trainer: LocalTrainer | None = None,
) -> bool:
    """Supervised warm start of `policy` in place, or the same weights from the cache. True if the cache had them.

    `kept`: where one that is interrupted leaves its state, and goes on from. `trainer`: of `policy`, on whose ranks it is
    trained; every rank makes the same call, and none holds the whole model.
    """
    folder = cache_folder(config)
    if _load_cached(folder, policy) if trainer is None else load_start(folder, trainer.start):
        if trainer is not None:
            trainer.start_here()
        events.emit("sft_cached", folder=str(folder))
        view.note(f"warm start from cache {folder}")
        return True
    if trainer is None:
        _rehearse(policy, config)
    events.emit("stage", step=0, stage="sft")
    done = sft(policy, config, view, stop, kept, trainer)["sft/steps"]
    _store_cached(folder, policy, view, trainer)
    events.emit("sft_done", steps=int(done))
    if stop():
        raise Interrupted("stopped behind the warm start, which is kept")
    return False


def _rehearse(policy: Policy, config: Config) -> None:
    """Sample two tokens with the start weights: an architecture that the embedded engine refuses is refused now, and not behind
    the warm start."""
    if config.engine.kind != "local":
        return
    small = config.engine.model_copy(update={"processes": 0, "slots": 1})
    sampling = replace(sampling_params(config, policy.stop_token_ids), max_new_tokens=2)
    with opened(config.model_copy(update={"engine": small}), policy) as engine:
        answers(config, policy, engine, sampling, 1, 1)


def sft(
    policy: Policy,
    config: Config,
    view: LiveView,
    stop: StopFlag,
    kept: Kept | None = None,
    trainer: LocalTrainer | None = None,
) -> dict[str, float]:
    """Supervised fine-tuning of `policy` in place on the task's demonstrations, on the ranks of `trainer` if there is one. Raises
    `Interrupted` where `stop` ends it."""
    source = prompt_source(config, policy, "sft")

    def examples(indices: Sequence[int]) -> Sequence[Example]:
        return source.demonstrations(indices, config.experiment.label_noise)

    with equipped(source.environment):
        batches = cuts(config.sft, source.size, examples)
        steps = len(batches) - 1
        view.phase("sft", steps)
        if kept is not None and kept.found():
            view.note(f"warm start goes on at step {kept.step} of {steps}")
        metrics = run_sft(
            policy,
            examples,
            config.sft,
            batches=batches,
            weight_decay=config.train.weight_decay,
            pack_tokens=max(PACK_TOKENS, config.train.micro_batch_tokens),
            recompute=config.train.recompute,
            seed=config.run.seed,
            progress=lambda step, metrics: view.step(step + 1, metrics),
            should_stop=stop,
            kept=kept,
            trainer=trainer,
        )
    if (done := metrics["sft/steps"]) < steps:
        where = "starts over" if kept is None else f"goes on at step {done:.0f} of {steps}"
        raise Interrupted(f"stopped during the warm start; it {where} on resume")
    return metrics


def cache_folder(config: Config) -> Path:
    """Where the warm start of this config is kept: a folder named by everything its weights depend on."""
    root = os.environ.get("ROLLKEEL_CACHE") or Path.home() / ".cache" / "rollkeel"
    return Path(root).expanduser() / "sft" / warm_start_key(config)


def warm_start_key(config: Config) -> str:
    """Content hash (16 hex digits) of config, data files, start weights, code and library versions of a warm start."""
    parts: dict[str, object] = {
        "model": config.model.model_dump(),
        "data": config.data.model_dump(),
        "sft": config.sft.model_dump(),
        "optimizer": [config.train.weight_decay, max(PACK_TOKENS, config.train.micro_batch_tokens)],
        "lora": config.train.lora.model_dump(),
        "label_noise": config.experiment.label_noise,
        "seed": config.run.seed,
        "threads": config.run.threads,
        "device": device_of(config).type + (" tf32" if config.run.tf32 else ""),
        "own": plugins.digests({"data": {"task": config.data.task, "sources": config.data.model_dump()["sources"]}}),
        "versions": [rollkeel.__version__, torch.__version__, version("transformers")],
        "code": _digest_files(
            sorted(
                p
                for d in ("tasks", "batch", "models", "train")
                for p in (Path(rollkeel.__file__).parent / d).rglob("*.py")
            )
        ),
    }
    if config.train.mesh.size > 1:  # where gradients are added in another order
        parts["mesh"] = [config.train.mesh.model_dump(), config.train.reduce]
    if not config.model.path.startswith(PRESET_PREFIX) and Path(config.model.path).is_dir():
        parts["weights"] = _digest_files(sorted(Path(config.model.path).glob("*.safetensors")))
    if paths := [Path(part.path) for part in (config.data, *config.data.parts) if part.path is not None]:
        files = [[path] if path.is_file() else sorted(path.glob("*.parquet")) for path in paths]
        parts["rows"] = _digest_files([file for each in files for file in each])
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _digest_files(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(file.name.encode() + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _load_cached(folder: Path, policy: Policy) -> bool:
    saved = folder / checkpoint.step_name(0)
    if not saved.exists():
        return False
    try:
        weights = checkpoint.load_state(checkpoint.verify(saved).state)
        load_trained(policy.model, weights)
    except (BadInput, Corrupt, OSError, RuntimeError):
        shutil.rmtree(folder, ignore_errors=True)
        return False
    return True


def _store_cached(folder: Path, policy: Policy, view: LiveView, trainer: LocalTrainer | None) -> None:
    """Best effort: a warm start that cannot be cached is still a warm start."""
    try:
        if trainer is not None:
            save_start(folder, trainer.start)
            return
        folder.mkdir(parents=True, exist_ok=True)
        weights = trained_state(policy.model)
        checkpoint.save(folder, 0, write=lambda path: checkpoint.save_state_of(path, weights), info={})
    except (BadInput, OSError) as error:
        view.note(f"the warm start was not cached: {error}")
