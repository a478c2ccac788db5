"""A run: everything the loop works with, its record, and the one state that checkpoints and replays keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollkeel.config import Config
from rollkeel.diagnose.alarmed import AlarmDoctor
from rollkeel.errors import BadInput
from rollkeel.loop.feeds import Feed
from rollkeel.loop.machines import Machines, Publish, Trainer
from rollkeel.models.loading import Policy
from rollkeel.objectives import Objective
from rollkeel.protocols import Engine, RestingEngine
from rollkeel.record.alarms import Alarms
from rollkeel.record.checks import Checks
from rollkeel.record.clock import Clock
from rollkeel.record.live import LiveView
from rollkeel.record.runfolder import RunFolder
from rollkeel.record.stopping import StopFlag
from rollkeel.record.trackers import Tracker, open_trackers, text_rows
from rollkeel.rewards import Graders
from rollkeel.rollout.episodes import Episodes, Gather
from rollkeel.tasks.source import PromptSource
from rollkeel.train import checkpoint
from rollkeel.types import Prompt, Rollout, SamplingParams

SHARED = ("step", "consumed", "prompts", "trainer", "objective")
"""What a checkpoint holds whatever the feed."""
PHASES = {
    "rollout": "rollout",
    "trace": "score",
    "logprob": "score",
    "monitor": "score",
    "update": "update",
    "eval": "evaluate",
}
"""Of memory, by the stages that begin them; publications and checkpoints say so themselves."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """One evaluation of a run."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    samples: int
    every: int


@dataclass
class Run:
    """The pieces a loop needs. Made by `assemble`."""

    config: Config
    folder: RunFolder
    policy: Policy
    source: PromptSource
    eval_prompts: Sequence[Prompt]
    engine: Engine
    apart: str
    """Why the engine has weights of its own; empty if it computes with the trainer's."""
    machines: Machines
    """Where trainer and engine are."""
    publisher: Publish
    trainer: Trainer
    objective: Objective
    grader: Graders
    view: LiveView
    stop: StopFlag
    gather: Gather
    """How its prompts are sampled: in one turn, or played with their environment."""
    sampling: SamplingParams
    """Of training rollouts, with the facts per token that the objective and the metrics need."""
    eval_sampling: SamplingParams
    """The same distribution, other random numbers."""
    eval_sets: Sequence[HeldOut]
    """Further evaluations."""
    feed: Feed
    """Where a step's rollouts come from."""
    trackers: Sequence[Tracker] = ()
    alarms: Alarms = field(default_factory=Alarms)
    """What the rows so far say about those to come."""
    checks: Checks = field(default_factory=Checks)
    """What no healthy step does."""
    held: dict[str, float] = field(default_factory=dict)
    """What phases since the last row held in memory (`memory.offload`)."""

    def __post_init__(self) -> None:
        self.doctor = AlarmDoctor(self.folder.path if self.config.report.rollouts else None)
        """Is asked when an alarm rises."""

    def clock(self, step: int) -> Clock:
        """A stopwatch for one step."""
        return Clock(self.folder.events, step, begins=lambda stage: self.enter(PHASES.get(stage, "")))

    def enter(self, phase: str) -> None:
        """Have what `phase` needs on the device, and the rest away. Nothing for no phase."""
        for name, value in (self.machines.enter(phase) if phase else {}).items():
            most = name.endswith(("held_mb", "peak_mb"))
            self.held[name] = max(self.held.get(name, 0.0), value) if most else self.held.get(name, 0.0) + value

    def phases(self) -> dict[str, float]:
        """What was measured of phases of memory since the last call."""
        found, self.held = self.held, {}
        return found

    def rest_engine(self, clock: Clock) -> None:
        """Let the engine free the device for the trainer until the next publication, unless sampling goes on meanwhile."""
        if self.config.run.loop != "async" and isinstance(self.engine, RestingEngine):
            with clock.stage("sync"):
                self.engine.rest()

    def publish(self) -> dict[str, float]:
        """Bring the trainer's weights to the engine, proven. What the proof measured: `sync/…`, empty for engines without."""
        self.enter("publish")
        with self.feed.publishing():
            told = self.publisher()
        return {key: value for key, value in told.items() if key.startswith("sync/")}

    def state(self, *, feed: bool = True) -> dict[str, Any]:
        """Everything the next step depends on besides config and data. Without `feed`, what unfinished sampling holds is left
        out; with it, nothing may be in the engine (`Feed.park`)."""
        out = {
            "consumed": self.feed.consumed,
            "prompts": self.source.problems.state_dict(),
            "trainer": self.trainer.state_dict(),
            "objective": self.objective.state_dict(),
        }
        return out | ({self.feed.name: self.feed.state_dict()} if feed else {})

    def save(self, step: int) -> None:
        """Checkpoint the state after `step`; its metrics row is on disk already."""

        self.enter("checkpoint")

        def write(path: Path) -> checkpoint.Written:
            written = checkpoint.save_state_of(path, {"step": step, **self.state()})
            if self.config.checkpoint.every:
                written |= checkpoint.beneath("model", self.machines.save_model(path / "model"))
            return written | dict(self.machines.save(path) or {})

        self.folder.sync_rollouts()
        info = {
            "objective": self.objective.describe(),
            "version": self.trainer.version,
            "config": self.folder.digest,
        }
        checkpoint.save(self.folder.checkpoints, step, write=write, info=info, keep=self.config.checkpoint.keep)

    def restore(self, saved: checkpoint.Checkpoint) -> list[str]:
        """Continue from a checkpoint. Raises `BadInput` when the model, the objective or the loop is another one.

        Returns lines for people: what the checkpoint lacks."""
        state = checkpoint.load_state(saved.state)
        feeds = [name for name in state if name not in SHARED]
        kept = self.feed.name if feeds == [self.feed.name] else next((n for n in feeds if state[n] is not None), "sync")
        if kept != self.feed.name:
            wanted, got = ("sync with experiment.lag" if n == "lag" else n for n in (self.feed.name, kept))
            raise BadInput(f"checkpoint: expected one of run.loop={wanted}, got one of {got}; resume with it")
        lacking = self.machines.load(state.get("trainer"), saved.path)
        self.objective.load_state_dict(state["objective"])
        self.feed.consumed = state["consumed"]
        if (order := state.get("prompts")) is not None:
            self.source.problems.load_state_dict(order)
        self.feed.load_state_dict(state.get(kept), step=saved.step, version=self.trainer.version)
        return lacking

    def track(self, resume_step: int | None) -> None:
        """Open the optional trackers; steps after `resume_step` are dropped from them."""
        self.trackers = open_trackers(
            self.config.report.trackers,
            self.folder.path,
            self.config.model_dump(mode="json"),
            resume_step=resume_step,
            on_failure=self.view.error,
        )

    def close(self) -> None:
        """End what has threads, processes or files of its own: feed, graders, engine, trainer, environments, trackers."""
        self.feed.close()
        self.grader.close()
        self.engine.close()
        self.trainer.close()
        if isinstance(self.gather, Episodes):
            self.gather.close()
        for tracker in self.trackers:
            tracker.close()

    def record(self, row: Mapping[str, Any], texts_of: Sequence[Rollout] = ()) -> None:
        """Append a metrics row and show it. Trackers also get the texts of the first `report.samples` rollouts of `texts_of`."""
        self.folder.append_metrics(row)
        for tracker in self.trackers:
            tracker.log(int(row["step"]), row)
            if texts_of and self.config.report.samples:
                tracker.texts(int(row["step"]), text_rows(texts_of, self.config.report.samples))
        self.view.step(int(row["step"]), row)
