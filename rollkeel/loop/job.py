"""`rollkeel train` as a job: a new run, one that is resumed, and how either ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import torch

from rollkeel import plugins
from rollkeel.analyzer.record import check_layers
from rollkeel.config import Config
from rollkeel.errors import (
    BAD_INPUTS,
    REFUSALS,
    BadInput,
    Corrupt,
    Interrupted,
    OwnCodeBroke,
    RankLost,
    RollkeelError,
    RunStopped,
)
from rollkeel.events import EventLog
from rollkeel.loop.assemble import (
    assemble,
    eval_prompts,
    further_evaluations,
    policy_of,
    prompt_source,
    sampling_params,
)
from rollkeel.loop.check import validate
from rollkeel.loop.machines import Machines, Restarts
from rollkeel.loop.run import Run
from rollkeel.loop.steps import train as train_steps
from rollkeel.loop.warm_start import warm_start_key
from rollkeel.models.loading import quiet_transformers
from rollkeel.objectives.described import in_words
from rollkeel.record.check_table import REMEMBERED
from rollkeel.record.checks import tell, untold
from rollkeel.record.live import LiveView
from rollkeel.record.rollout_store import read_step
from rollkeel.record.run_config import changes_on_resume, nothing_to_do
from rollkeel.record.runfolder import RunFolder
from rollkeel.record.stopping import StopFlag
from rollkeel.rewards.trial import trial
from rollkeel.sync.shared import no_deltas
from rollkeel.tasks.source import problems_of
from rollkeel.train import checkpoint
from rollkeel.train.unfinished import Unfinished


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
            _until_done(config, folder, view, stop, fresh=resume is None)
    except BaseException as error:
        if not folder.announced:
            folder.close()
            raise
        if resume is None and isinstance(error, BAD_INPUTS) and not folder.metrics():
            folder.discard()
            raise
        status = "interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "failed"
        if isinstance(error, REFUSALS) and error.exit_code == 3:
            status = "stopped"
        finish(folder, status, " ".join(str(error).split()) or type(error).__name__)
        raise
    finish(folder, "done")
    return folder.path


def _until_done(config: Config, folder: RunFolder, view: LiveView, stop: StopFlag, *, fresh: bool) -> None:
    """Begin, or go on; and go on again from the newest checkpoint when ranks of the trainer were lost."""
    restarts = Restarts(config.cluster.restarts)
    held = _Held(config, folder, view, restarts)
    with closing(held):
        while True:
            try:
                (_begin if fresh else _resume)(config, folder, view, stop, held)
                return
            except RankLost as lost:
                if restarts.left <= 0 or stop():
                    raise
                why = str(lost).partition("; resume")[0]
            restarts.left -= 1
            fresh = False
            view.note(f"{why}; the run goes on from its newest checkpoint")
            folder.events.emit("restarted", reason=why)


class _Held:
    """The machines of a run, which outlive an attempt that lost ranks of the trainer."""

    def __init__(self, config: Config, folder: RunFolder, view: LiveView, restarts: Restarts) -> None:
        self._about, self._made = (config, folder, view, restarts), list[Machines]()

    @contextmanager
    def machines(self) -> Iterator[Machines]:
        if self._made:
            self._made[0].begin_again()
        else:
            self._made.append(_machines(*self._about))
        try:
            yield self._made[0]
        except RankLost:
            raise
        except BaseException:
            self.close()
            raise
        self.close()

    def close(self) -> None:
        while self._made:
            self._made.pop().close()


def finish(folder: RunFolder, status: str, detail: str = "") -> None:
    """Write the run's last event, the card of a finished model, and the report."""
    from rollkeel.report import render
    from rollkeel.report.card import write_card

    try:
        folder.end(status, detail)
        if status == "done":
            write_card(folder)
        render(folder.path)
    except BadInput as error:
        if status == "done":
            raise
        # The run already ends with an error of its own (a full disk, say); this one would hide it.
        print(f"rollkeel: {error}", flush=True)


def default_folder(config: Config) -> str:
    """`runs/<name>-<time>`, next to where the command was typed."""
    return f"runs/{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _begin(config: Config, folder: RunFolder, view: LiveView, stop: StopFlag, held: _Held) -> None:
    """A new run: refuse unusable data before anything is trained, warm-start, then RL."""
    view.note(f"run folder {folder.path}")
    problems = problems_of(config.data, config.run.seed, "train")
    warm = config.sft.on
    odd = ""
    for part in getattr(problems, "parts", [problems]):
        odd = trial(part, config.reward.graders, sampling_params(config, ()), warm_start=warm) or odd
    with held.machines() as machines:
        policy = machines.policy
        eval_prompts(config, policy)
        further_evaluations(config, policy)
        prompt_source(config, policy, "train", problems).prompts(range(config.rollout.prompts))
        if config.alarms.on_alarm != "off":
            tell([*untold(odd), *machines.findings()], folder.events, view.note)
        if warm:
            kept = Unfinished(folder.warm_start, warm_start_key(config))
            machines.warm_start(view, stop, folder.events, kept)
            kept.remove()
        with closing(assemble(config, folder, policy, view, stop, machines=machines)) as run:
            run.track(None)
            _reinforce(run, 0)


def _resume(config: Config, folder: RunFolder, view: LiveView, stop: StopFlag, held: _Held) -> None:
    """Go on from the newest sound checkpoint. Nothing in the folder changes before it has been loaded and fits."""
    checkpoint.clean(folder.checkpoints)
    seen = EventLog(None)
    saved = checkpoint.latest(folder.checkpoints, on_refused=view.error, events=seen)
    if saved is None:
        if config.checkpoint.every and (rows := folder.metrics()) and rows[-1]["step"] > 0:
            raise Corrupt(
                f"{folder.path}: metrics go up to step {rows[-1]['step']}, but there is no checkpoint to resume from; put"
                " checkpoints/ back, or start a new run in another folder"
            )
        folder.announce()
        folder.change_config(config)
        plugins.record(config.model_dump(), folder.path)
        folder.truncate_after(-1)
        _begin(config, folder, view, stop, held)
        return
    told = changes_on_resume(folder.config, config, folder.path)
    with (
        held.machines() as machines,
        closing(assemble(config, folder, machines.policy, view, stop, machines=machines)) as run,
    ):
        lacking = run.restore(saved)
        for line in [*told, *lacking, *_rewind(folder, saved.step, config, seen)]:
            view.note(line)
        if saved.step >= config.run.steps:
            view.note(nothing_to_do(saved.step, config.run.steps))
            # It was killed after the last checkpoint, before the model was written.
            if not (saved.model.is_dir() and checkpoint.same_files(saved.model, folder.model)):
                checkpoint.replace_folder(folder.model, machines.save_model)
            return
        view.note(f"run folder {folder.path}, resumed at step {saved.step}")
        run.track(saved.step)
        _reinforce(run, saved.step + 1)


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
    events, about = run.folder.events, run.engine.capabilities
    events.emit("precision", **run.machines.precision())
    events.emit("engine", name=about.name, dtype=about.dtype, forward=about.forward)
    if run.config.run.parity:
        run.view.note("parity: on, every ratio of fresh tokens must be exactly 1")
    run.view.note(f"engine {about.name} {about.dtype}{about.forward and f', forward {about.forward}'}")
    if run.config.run.device == "auto" and run.trainer.device.type == "cpu" and torch.cuda.is_available():
        run.view.note("device cpu, where a model this small is faster; run.device=cuda takes the GPU")
    events.emit("weights", copies=1 + bool(run.apart), reason=run.apart)
    where = f"twice: {run.apart}" if run.apart else "once: trainer and engine compute with the same memory"
    run.view.note(f"weights {where}")
    if (kind := run.config.sync.kind) != "full" and (why := no_deltas(run.config, run.apart)):
        run.view.note(f"sync.kind={kind} sends no deltas: {why}")
    if about.max_length < (run.config.engine.max_length or run.policy.context):
        run.view.note(
            f"sequences end at {about.max_length} tokens, what engine.kv_memory_gb holds of the model's context"
        )
    if run.trainer.padded:
        run.view.note(f"packed attention: padded because {run.trainer.padded}")
    described = run.objective.describe()
    events.emit("objective", **described)
    run.view.note(f"objective {in_words(described)}")
    for row in run.folder.metrics():  # of a run that goes on: what it has warned of is not said again
        run.alarms.observe(row)
        run.checks.observe(row)
    for step, file in run.folder.rollout_files()[-REMEMBERED:]:  # nor are its batches trained again
        with suppress(RollkeelError):
            seen = read_step(file, ["id", "train_version"])
            if "train_version" in seen.column_names:  # null where a rollout was graded and not trained
                run.checks.trained(step, seen.drop_null().column("id").to_pylist())
    run.view.phase("rl", run.config.run.steps)
    try:
        plugins.tried(lambda: train_steps(run, first), "own code", between=True)
    except OwnCodeBroke as error:
        if not run.folder.metrics():
            raise
        raise RunStopped(str(error)) from error  # what was done before is kept, and the run can go on from it
    run.enter("checkpoint")
    checkpoint.replace_folder(run.folder.model, run.machines.save_model)
    _last_word(run)


def _machines(config: Config, folder: RunFolder, view: LiveView, restarts: Restarts) -> Machines:
    if config.clustered:
        from rollkeel.cluster.machines import RayMachines

        made: Machines = RayMachines(config, folder, view, restarts=restarts)
    else:
        from rollkeel.loop.one_process import OneProcess

        made = OneProcess(config, policy_of(config, config.train.lora))
    try:
        check_layers(config.trace.layers, made.policy.model.config)
    except BaseException:
        made.close()
        raise
    return made


def _last_word(run: Run) -> None:
    from rollkeel.report.verdict import changes

    for change in changes(run.folder.metrics()):
        run.view.note(f"{change.word}: {change.line}")
    run.view.note(f"model {run.folder.model}, report {run.folder.report}")
