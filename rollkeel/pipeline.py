"""The stages as jobs: warm start (cached), reinforcement learning, resume, and the files they leave."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
import yaml

import rollkeel
from rollkeel.config import Config, from_tree, merge
from rollkeel.diagnostics.live import LiveView
from rollkeel.diagnostics.runfolder import RunFolder
from rollkeel.errors import BadInput, Corrupt, Interrupted, RollkeelError
from rollkeel.events import EventLog
from rollkeel.loop import train_sync
from rollkeel.models.loading import PRESET_PREFIX, Policy, load_policy, quiet_transformers, resolve_device, save_policy
from rollkeel.run import Run, StopFlag, assemble, eval_prompts, prompt_source, validate
from rollkeel.train import checkpoint
from rollkeel.train.sft import run_sft


def train(config: Config, *, view: LiveView | None = None, resume: str | Path | None = None) -> Path:
    """Run the pipeline of `config` (warm start, then RL) and return the run folder.

    With `resume`, continue in that folder from its newest sound checkpoint. Raises `RollkeelError`s with their exit codes;
    however it ends, the folder says so and has a report.
    """
    quiet_transformers()
    validate(config)
    view = view or LiveView()
    if resume is None:
        folder = RunFolder.create(config.run.dir or default_folder(config), config)
    else:
        folder = RunFolder.open(resume)
    try:
        with view, StopFlag(view) as stop:
            _train(config, folder, view, stop, resumed=resume is not None)
    except BaseException as error:
        status = "interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "failed"
        if isinstance(error, RollkeelError) and error.exit_code == 3:
            status = "stopped"
        finish(folder, status, " ".join(str(error).split()) or type(error).__name__)
        raise
    finish(folder, "done")
    return folder.path


def finish(folder: RunFolder, status: str, detail: str = "") -> None:
    """Write the run's last event and its report."""
    from rollkeel.report import render

    try:
        folder.end(status, detail)
        render(folder.path)
    except BadInput as error:
        if status == "done":
            raise
        # The run already ends with an error of its own (a full disk, say); this one would hide it.
        print(f"rollkeel: {error}", flush=True)


def default_folder(config: Config) -> str:
    """`runs/<name>-<time>`, next to where the command was typed."""
    return f"runs/{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def resumed_config(folder: str | Path, overrides: Sequence[str]) -> Config:
    """The config of a run folder with overrides (more steps, say) applied."""
    saved = RunFolder.open(folder, lock=False).config
    return from_tree(merge(yaml.safe_load(saved.to_yaml()), overrides))


def _train(config: Config, folder: RunFolder, view: LiveView, stop: StopFlag, *, resumed: bool) -> None:
    view.note(f"run folder {folder.path}")
    saved = None
    if resumed:
        checkpoint.clean(folder.checkpoints)
        saved = checkpoint.latest(folder.checkpoints, on_refused=view.error, events=folder.events)
        checkpoint.drop_after(folder.checkpoints, saved.step if saved else -1)
        folder.truncate_after(saved.step if saved else -1)
    if saved is not None and saved.step >= config.run.steps:
        view.note(
            f"nothing to do: the checkpoint is at step {saved.step} of {config.run.steps}; raise run.steps to go on"
        )
        return
    device = resolve_device(config.run.device)
    torch.set_num_threads(config.run.threads)
    policy = load_policy(config.model, device)
    if saved is None and config.sft.enabled and config.sft.steps > 0:
        warm_start(policy, config, view, stop, folder.events)
    run = assemble(config, folder, policy, view, stop, saved.step if saved else None)
    try:
        folder.events.emit("objective", **run.objective.describe())
        view.note(f"objective {run.objective.describe()}")
        view.phase("rl", config.run.steps)
        if saved is not None:
            run.restore(saved)
            folder.events.emit("resumed", step=saved.step)
            view.note(f"resumed at step {saved.step}")
        train_sync(run, saved.step + 1 if saved else 0)
        checkpoint.replace_folder(folder.model, lambda path: save_policy(policy, path))
        _last_word(run)
    finally:
        run.engine.close()
        for tracker in run.trackers:
            tracker.close()


def _last_word(run: Run) -> None:
    rows = run.folder.metrics()
    for key in sorted({k for k in rows[-1] if k.endswith("/avg@k")}):
        first = next((row for row in rows if key in row), rows[-1])
        error = rows[-1].get(f"{key}_se", 0.0)
        run.view.note(
            f"{key}: {first[key]:.3f} at step {first['step']} → {rows[-1][key]:.3f} ± {error:.3f} at step {rows[-1]['step']}"
        )
    run.view.note(f"model {run.folder.model}, report {run.folder.report}")


# -- warm start --------------------------------------------------------------------------------------------------------


def warm_start(policy: Policy, config: Config, view: LiveView, stop: StopFlag, events: EventLog) -> bool:
    """Supervised warm start of `policy` in place, or the same weights from the cache. True if the cache had them."""
    folder = cache_folder(config)
    if _load_cached(folder, policy):
        events.emit("sft_cached", folder=str(folder))
        view.note(f"warm start from cache {folder}")
        return True
    events.emit("stage", step=0, stage="sft")
    view.phase("sft", config.sft.steps)
    sft(policy, config, view, stop)
    if stop():
        raise Interrupted("stopped during the warm start; it starts over on resume")
    _store_cached(folder, policy, view)
    events.emit("sft_done", steps=config.sft.steps)
    return False


def sft(policy: Policy, config: Config, view: LiveView, stop: StopFlag) -> dict[str, float]:
    """Supervised fine-tuning of `policy` in place on the task's demonstrations."""
    source = prompt_source(config, policy, "sft")
    noise = config.sft.label_noise
    return run_sft(
        policy,
        lambda indices: source.demonstrations(indices, noise),
        config.sft,
        seed=config.run.seed,
        chunk=config.train.logprob_chunk,
        progress=lambda step, metrics: view.step(step + 1, metrics),
        should_stop=stop,
    )


def cache_folder(config: Config) -> Path:
    """Where the warm start of this config is kept: a folder named by everything its weights depend on."""
    root = config.sft.cache_dir or os.environ.get("ROLLKEEL_CACHE") or Path.home() / ".cache" / "rollkeel"
    return Path(root).expanduser() / "sft" / warm_start_key(config)


def warm_start_key(config: Config) -> str:
    """Content hash (16 hex digits) of config, data files, start weights, code and library versions of a warm start."""
    parts: dict[str, object] = {
        "model": config.model.model_dump(),
        "data": config.data.model_dump(),
        "sft": {k: v for k, v in config.sft.model_dump().items() if k not in ("cache_dir", "enabled")},
        "seed": config.run.seed,
        "chunk": config.train.logprob_chunk,
        "threads": config.run.threads,
        "device": resolve_device(config.run.device).type,
        "versions": [rollkeel.__version__, torch.__version__, transformers.__version__],
        "code": _digest_files(
            sorted(p for d in ("tasks", "batch", "models", "train") for p in (Path(__file__).parent / d).glob("*.py"))
        ),
    }
    if not config.model.path.startswith(PRESET_PREFIX) and Path(config.model.path).is_dir():
        parts["weights"] = _digest_files(sorted(Path(config.model.path).glob("*.safetensors")))
    if config.data.path is not None and Path(config.data.path).is_file():
        parts["rows"] = _digest_files([Path(config.data.path)])
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
        policy.model.load_state_dict(weights)
    except (Corrupt, RuntimeError):
        shutil.rmtree(folder, ignore_errors=True)
        return False
    return True


def _store_cached(folder: Path, policy: Policy, view: LiveView) -> None:
    """Best effort: a warm start that cannot be cached is still a warm start."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        weights = {k: v.detach() for k, v in policy.model.state_dict().items()}
        checkpoint.save(folder, 0, write=lambda path: checkpoint.save_state(path / "state", weights), info={})
    except (BadInput, OSError) as error:
        view.note(f"the warm start was not cached: {error}")


__all__ = ["cache_folder", "default_folder", "eval_prompts", "resumed_config", "sft", "train", "warm_start"]
