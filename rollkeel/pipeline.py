"""The stages as jobs: warm start (cached), reinforcement learning, resume, and the files they leave."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers

import rollkeel
from rollkeel import plugins
from rollkeel.config import Config
from rollkeel.diagnostics.analyzer.record import check_layers
from rollkeel.diagnostics.checks import tell, too_small, unreached, untold
from rollkeel.diagnostics.live import LiveView
from rollkeel.diagnostics.run_config import changes_on_resume
from rollkeel.diagnostics.run_files import nothing_to_do
from rollkeel.diagnostics.runfolder import RunFolder
from rollkeel.diagnostics.stopping import StopFlag
from rollkeel.errors import BadInput, Corrupt, Interrupted, OwnCodeBroke, RollkeelError, RunStopped
from rollkeel.events import EventLog
from rollkeel.loop import train_async, train_budgeted, train_sync
from rollkeel.models.loading import PRESET_PREFIX, Policy, load_policy, quiet_transformers, resolve_device, save_policy
from rollkeel.objectives.described import in_words
from rollkeel.play import equipped
from rollkeel.rewards.trial import trial
from rollkeel.rollout.collect import collect, issue
from rollkeel.run import Run, assemble, eval_prompts, prompt_source, sampling_params, serve
from rollkeel.tasks.source import problems_of
from rollkeel.train import checkpoint
from rollkeel.train.sft import run_sft
from rollkeel.train.unfinished import Unfinished
from rollkeel.validate import validate


def train(config: Config, *, view: LiveView | None = None, resume: str | Path | None = None) -> Path:
    """Run the pipeline of `config` (warm start, then RL) and return the run folder.

    With `resume`, continue in that folder from its newest sound checkpoint. Raises `RollkeelError`s with their exit codes.
    Input that is refused leaves no new folder behind and an old one as it was; any other end is recorded and has a report.
    """
    quiet_transformers()
    validate(config)
    view = view or LiveView()
    if resume is None:
        folder = RunFolder.create(config.run.dir or default_folder(config), config)
    else:
        folder = RunFolder.open(resume, announce=False)
    try:
        with view, StopFlag(view) as stop:
            if resume is None:
                plugins.record(config.model_dump(), folder.path)
            (_begin if resume is None else _resume)(config, folder, view, stop)
    except BaseException as error:
        if not folder.announced:
            folder.close()
            raise
        if resume is None and isinstance(error, BadInput) and not folder.metrics():
            folder.discard()
            raise
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


def _begin(config: Config, folder: RunFolder, view: LiveView, stop: StopFlag) -> None:
    """A new run: refuse unusable data before anything is trained, warm-start, then RL."""
    view.note(f"run folder {folder.path}")
    problems = problems_of(config.data, config.run.seed, "train")
    warm = config.sft.enabled and config.sft.steps > 0
    odd = trial(problems, config.reward.graders, sampling_params(config, ()), warm_start=warm)
    policy = _policy(config)
    eval_prompts(config, policy)
    prompt_source(config, policy, "train", problems).prompts(range(config.rollout.prompts))
    if config.alarms.on_alarm != "off":
        found = too_small(list(policy.model.parameters()), config.train.lr)
        tell([*untold(odd), *found, *unreached(policy.model)], folder.events, view.note)
    if warm:
        kept = Unfinished(folder.warm_start, warm_start_key(config))
        warm_start(policy, config, view, stop, folder.events, kept)
        kept.remove()
    run = assemble(config, folder, policy, view, stop)
    try:
        run.track(None)
        _reinforce(run, 0)
    finally:
        run.close()


def _resume(config: Config, folder: RunFolder, view: LiveView, stop: StopFlag) -> None:
    """Go on from the newest sound checkpoint. Nothing in the folder changes before it has been loaded and fits."""
    checkpoint.clean(folder.checkpoints)
    seen = EventLog(None)
    saved = checkpoint.latest(folder.checkpoints, on_refused=view.error, events=seen)
    if saved is None:
        if (rows := folder.metrics()) and rows[-1]["step"] > 0:
            raise Corrupt(
                f"{folder.path}: metrics go up to step {rows[-1]['step']}, but there is no checkpoint to resume from; put"
                " checkpoints/ back, or start a new run in another folder"
            )
        folder.announce()
        folder.change_config(config)
        plugins.record(config.model_dump(), folder.path)
        folder.truncate_after(-1)
        _begin(config, folder, view, stop)
        return
    told = changes_on_resume(folder.config, config, folder.path)
    policy = _policy(config)
    run = assemble(config, folder, policy, view, stop)
    try:
        run.restore(saved)
        for line in [*told, *_rewind(folder, saved.step, config, seen)]:
            view.note(line)
        if saved.step >= config.run.steps:
            view.note(nothing_to_do(saved.step, config.run.steps))
            # It was killed after the last checkpoint, before the model was written.
            if not checkpoint.same_files(saved.model, folder.model):
                checkpoint.replace_folder(folder.model, lambda path: save_policy(policy, path))
            return
        view.note(f"run folder {folder.path}, resumed at step {saved.step}")
        run.track(saved.step)
        _reinforce(run, saved.step + 1)
    finally:
        run.close()


def _rewind(folder: RunFolder, step: int, config: Config, seen: EventLog) -> list[str]:
    """Make the folder what it was when the checkpoint of `step` was saved; `seen`: events of refused checkpoints.

    Returns a line for each file of somebody's own code that is another one now."""
    folder.announce()
    for row in seen.seen:
        folder.events.emit(row["event"], **{k: v for k, v in row.items() if k not in ("event", "time")})
    folder.truncate_after(step)
    checkpoint.drop_after(folder.checkpoints, step)
    checkpoint.clean(folder.path)
    folder.clean()
    folder.change_config(config)
    folder.events.emit("resumed", step=step)
    return plugins.record(config.model_dump(), folder.path)


def _reinforce(run: Run, first: int) -> None:
    """RL from step `first`, then the model."""
    about = run.engine.capabilities
    run.folder.events.emit("engine", name=about.name, dtype=about.dtype, forward=about.forward)
    run.view.note(f"engine {about.name} {about.dtype}{about.forward and f', forward {about.forward}'}")
    described = run.objective.describe()
    run.folder.events.emit("objective", **described)
    run.view.note(f"objective {in_words(described)}")
    for row in run.folder.metrics():  # of a run that goes on: what it has warned of is not said again
        run.alarms.observe(row)
        run.checks.observe(row)
    run.view.phase("rl", run.config.run.steps)
    try:
        {"sync": train_sync, "budgeted": train_budgeted, "async": train_async}[run.config.run.loop](run, first)
    except OwnCodeBroke as error:
        if not run.folder.metrics():
            raise
        raise RunStopped(str(error)) from error  # what was done before is kept, and the run can go on from it
    checkpoint.replace_folder(run.folder.model, lambda path: save_policy(run.policy, path))
    _last_word(run)


def _policy(config: Config) -> Policy:
    torch.set_num_threads(config.run.threads)
    policy = load_policy(config.model, resolve_device(config.run.device))
    check_layers(config.trace.layers, policy.model.config)
    return policy


def _last_word(run: Run) -> None:
    from rollkeel.report.verdict import changes

    for change in changes(run.folder.metrics()):
        run.view.note(f"{change.word}: {change.line}")
    run.view.note(f"model {run.folder.model}, report {run.folder.report}")


# -- warm start --------------------------------------------------------------------------------------------------------


def warm_start(
    policy: Policy, config: Config, view: LiveView, stop: StopFlag, events: EventLog, kept: Unfinished | None = None
) -> bool:
    """Supervised warm start of `policy` in place, or the same weights from the cache. True if the cache had them.

    `kept`: where one that is interrupted leaves its state, and goes on from.
    """
    folder = cache_folder(config)
    if _load_cached(folder, policy):
        events.emit("sft_cached", folder=str(folder))
        view.note(f"warm start from cache {folder}")
        return True
    _rehearse(policy, config)
    events.emit("stage", step=0, stage="sft")
    view.phase("sft", config.sft.steps)
    done = sft(policy, config, view, stop, kept)["sft/steps"]
    if done < config.sft.steps:
        where = "starts over" if kept is None else f"goes on at step {done:.0f} of {config.sft.steps}"
        raise Interrupted(f"stopped during the warm start; it {where} on resume")
    _store_cached(folder, policy, view)
    events.emit("sft_done", steps=config.sft.steps)
    if stop():
        raise Interrupted("stopped behind the warm start, which is kept")
    return False


def _rehearse(policy: Policy, config: Config) -> None:
    """Sample two tokens with the start weights: an architecture that the embedded engine refuses is refused now, and not behind
    the warm start."""
    if config.engine.kind != "local":
        return
    small = config.engine.model_copy(update={"processes": 0, "slots": 1})
    engine = serve(config.model_copy(update={"engine": small}), policy)
    try:
        prompts = prompt_source(config, policy, "train").prompts([0])
        sampling = replace(sampling_params(config, policy.stop_token_ids), max_new_tokens=2)
        collect(engine, issue(prompts, 1, sampling, 0, engine), policy.tokenizer, deadline_s=config.engine.deadline_s)
    finally:
        engine.close()


def sft(
    policy: Policy, config: Config, view: LiveView, stop: StopFlag, kept: Unfinished | None = None
) -> dict[str, float]:
    """Supervised fine-tuning of `policy` in place on the task's demonstrations."""
    if kept is not None and kept.found():
        view.note(f"warm start goes on at step {kept.step} of {config.sft.steps}")
    source = prompt_source(config, policy, "sft")
    noise = config.sft.label_noise
    with equipped(source.environment):
        return run_sft(
            policy,
            lambda indices: source.demonstrations(indices, noise),
            config.sft,
            seed=config.run.seed,
            chunk=config.train.logprob_chunk,
            progress=lambda step, metrics: view.step(step + 1, metrics),
            should_stop=stop,
            kept=kept,
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
        "own": plugins.digests({"data": {"task": config.data.task}}),
        "versions": [rollkeel.__version__, torch.__version__, transformers.__version__],
        "code": _digest_files(
            sorted(p for d in ("tasks", "batch", "models", "train") for p in (Path(__file__).parent / d).rglob("*.py"))
        ),
    }
    if not config.model.path.startswith(PRESET_PREFIX) and Path(config.model.path).is_dir():
        parts["weights"] = _digest_files(sorted(Path(config.model.path).glob("*.safetensors")))
    if config.data.path is not None:
        path = Path(config.data.path)
        parts["rows"] = _digest_files([path] if path.is_file() else sorted(path.glob("*.parquet")))
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
    except (BadInput, Corrupt, OSError, RuntimeError):
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


__all__ = ["cache_folder", "default_folder", "eval_prompts", "sft", "train", "warm_start"]
