"""A recorded run in a scratch folder, standing behind some step of it and able to do the next."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final

import pyarrow as pa
import torch

from rollkeel.config import Config
from rollkeel.diagnose.replay.record import Record
from rollkeel.diagnose.replayed import SAMPLED, TRAINED, MetricChange, first_difference, metric_changes
from rollkeel.engines.idle import IdleEngine
from rollkeel.errors import BadInput, Corrupt, Interrupted
from rollkeel.loop.assemble import assemble, policy_of
from rollkeel.loop.learn import learn
from rollkeel.loop.run import Run
from rollkeel.loop.steps import due
from rollkeel.loop.warm_start import warm_start
from rollkeel.loop.watch import describe, tell_graders
from rollkeel.record.live import LiveView
from rollkeel.record.rollout_store import read_step, write_step
from rollkeel.record.runfolder import RunFolder
from rollkeel.record.stopping import StopFlag
from rollkeel.train import checkpoint
from rollkeel.types import StepRollouts

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Where a step that was done again first left the record."""

    step: int
    place: str
    """One line."""
    changes: Sequence[MetricChange] = ()


@final
class Player:
    """The pieces of a recorded run in a scratch folder, standing behind some step of it."""

    def __init__(self, record: Record, config: Config, view: LiveView, stop: StopFlag, *, samples: bool) -> None:
        """`samples`: open the engine, and bring along what the loop carries from step to step."""
        self.record = record
        self.view = view
        self.stop = stop
        self.samples = samples
        self.lag = config.experiment.lag if samples else 0
        """Steps between sampling a batch and training it; who plays goes back as many instead of waiting."""
        self.config = config.model_copy(
            update={
                "experiment": config.experiment.model_copy(
                    update={"schedule": record.schedule() if samples else None, "lag": 0}
                ),
                "report": config.report.model_copy(update={"rollouts": True}),
                # A recorded batch is trained by whoever is asked, as often as that is.
                "alarms": config.alarms.model_copy(update={"on_impossible": "warn"}),
            }
        )
        self.carries = samples and config.run.loop != "sync"
        self.at = 0
        self.start = ""
        self.from_start = False
        self.parting: Parting | None = None
        self.notes: list[str] = []
        self._begun_at = 0
        self._stack = ExitStack()
        self.run: Run

    def __enter__(self) -> Player:
        self.scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rollkeel-replay-")))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End engine and helpers, and remove the scratch folder."""
        self._stack.close()

    @property
    def between(self) -> int:
        """Steps done so far."""
        return self.at - self._begun_at

    def begin(self, limit: int) -> None:
        """Stand behind the newest sound checkpoint of step ≤ `limit`, or else at the start model."""
        for step, path in self.record.checkpoints(limit):
            try:
                saved = checkpoint.verify(path)
                state = checkpoint.load_state(saved.state)
            except (Corrupt, BadInput, OSError) as error:  # damaged, or a running process has just dropped it
                self.notes.append(" ".join(str(error).split()))
                continue
            self._open()
            self._restore(saved, state)
            self.at, self.start = step, f"checkpoint of step {step}"
            now = checkpoint.versions()
            others = [f"{name} {v} (now {now.get(name)})" for name, v in saved.versions.items() if v != now.get(name)]
            if others:
                self.notes.append(f"the checkpoint was written with {', '.join(others)}: bits may differ")
            break
        else:
            self._open(warm=True)
            self.start, self.from_start = "the start model", True
        self._begun_at = self.at
        if self.carries:
            self.run.publish()

    def begin_from(self, state: Mapping[str, Any], at: int) -> list[str]:
        """Stand behind step `at` with the state of another player, whatever differs in the config; notes on what did not fit."""
        self._open()
        notes = self.load(state)
        self.at = self._begun_at = at
        if self.carries:
            self.run.publish()
        return notes

    def state(self) -> dict[str, Any]:
        """A copy of everything that the next step depends on."""
        return copy.deepcopy(self.run.state(feed=self.carries))

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Take `state` over. An objective of another kind begins afresh, which is noted."""
        run, notes = self.run, []
        run.machines.load(state["trainer"])
        run.feed.consumed = state["consumed"]
        if run.feed.name in state:
            run.feed.load_state_dict(state[run.feed.name], step=self.at, version=run.trainer.version)
        if "state" in run.objective.state_dict():
            try:
                run.objective.load_state_dict(state["objective"])
            except BadInput:
                notes.append(
                    f"objective {run.objective.name}: its thresholds begin anew, the record has none of that kind"
                )
        return notes

    def goto(self, step: int, *, strict: bool = True) -> None:
        """Do the recorded steps up to `step`. `strict`: stop behind the first that leaves the record; see `parting`."""
        while self.at < step and not (strict and self.parting):
            if self.stop():
                raise Interrupted("stopped between steps")
            number = self.at + 1
            if self.carries:
                drawn, metrics = self.sample(number)
            else:
                drawn, metrics = None, {}
            self.learn(number, drawn, metrics)

    def sample(self, step: int) -> tuple[StepRollouts, dict[str, float]]:
        """Sample and grade the rollouts of `step`; what that measured."""
        run = self.run
        if not self.carries:
            run.feed.consumed = sum(self.record.consumed(s) for s in range(1, step))
            run.publish()
        drawn = run.feed.draw(run.clock(step), run.trainer.version)
        graded = [r for r in drawn.rollouts if r.reward is not None]
        return drawn, {**drawn.metrics, **describe(graded), **tell_graders(run, step)}

    def learn(self, step: int, drawn: StepRollouts | None, measured: Mapping[str, float]) -> dict[str, float]:
        """Train on `drawn`, or on the recorded rollouts; all metrics. Moves on to `step` and compares with the record."""
        table, sampled = self.record.table(step), drawn is not None
        clock = self.run.clock(step)
        metrics = {**measured, **learn(self.run, drawn or self.record.drawn(step, table), clock)}
        if self.carries:
            self.run.publish()
            self.run.feed.published(clock, pause=any(due(self.config, step)))
        self.at = step
        self._compare(step, table, metrics, SAMPLED * sampled + TRAINED, whole=sampled)
        return metrics

    def check_sampled(self, step: int, drawn: StepRollouts, metrics: Mapping[str, float]) -> None:
        """Compare what `sample` made with the record, without training on it."""
        graded = [r for r in drawn.rollouts if r.reward is not None]
        write_step(self.file(step), graded, step=step)
        self._compare(step, self.record.table(step), metrics, SAMPLED, version=False)

    def file(self, step: int) -> Path:
        """The step's rollouts in the scratch folder."""
        return self.run.folder.rollouts(step)

    def weights(self) -> Weights:
        """A copy of the weights now."""
        return {name: value.cpu().clone() for name, value in self.run.trainer.state_dict()["weights"].items()}

    def _compare(
        self,
        step: int,
        table: pa.Table,
        metrics: Mapping[str, float],
        columns: Sequence[str],
        *,
        whole: bool = False,
        version: bool = True,
    ) -> None:
        if self.parting is not None:
            return
        row, place = self.record.rows[step], first_difference(table, read_step(self.file(step)), columns)
        changes = metric_changes(row, metrics, whole=whole)
        said = None if place is None else str(place)
        if said is None and changes:
            said = f"{changes[0].name}: recorded {changes[0].recorded}, replayed {changes[0].replayed}"
        if said is None and version and row.get("version") != self.run.trainer.version:
            said = f"version: recorded {row.get('version')}, replayed {self.run.trainer.version}"
        if said is not None:
            self.parting = Parting(step=step, place=said, changes=changes)

    def _open(self, *, warm: bool = False) -> None:
        config = self.config
        if config.clustered:
            raise BadInput(
                "replay: the run was made over a cluster, whose ranks keep their state in parts; it cannot be replayed yet"
            )
        policy = policy_of(config, config.train.lora)
        folder = RunFolder(self.scratch, config, None)
        if warm and config.sft.on:
            warm_start(policy, config, self.view, self.stop, folder.events)
        self.run = assemble(config, folder, policy, self.view, self.stop, None if self.samples else IdleEngine())
        self._stack.callback(self.run.close)

    def _restore(self, saved: checkpoint.Checkpoint, state: Mapping[str, Any]) -> None:
        if self.carries:
            self.run.restore(saved)
            return
        self.run.machines.load(state["trainer"])
        self.run.objective.load_state_dict(state["objective"])
