"""Do a recorded step again, from its files, in a scratch folder: unchanged it must come out bit for bit, or with one factor changed.

    newest checkpoint ≤ step − 1, or the start model ─▶ the steps between, on their recorded rollouts ─▶ sample ─▶ learn ─▶ compare

Updates are `learn` on what the rollouts file says the step trained on, so nothing is sampled to get anywhere, and what a run
carries in trainer, objective and optimizer comes out as it was. Pool and queue of the budgeted and the asynchronous loop are in
no file but the checkpoints: before one of their steps can be sampled, those between are sampled again too. The run folder is
only read, and never locked.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, final

import pyarrow as pa
import torch

from rollkeel.config import Config
from rollkeel.diagnostics.live import LiveView
from rollkeel.diagnostics.replayed import (
    SAMPLED,
    TRAINED,
    MetricChange,
    effects,
    first_difference,
    metric_changes,
)
from rollkeel.diagnostics.rollout_store import per_token, read_step, to_rollouts, write_step
from rollkeel.diagnostics.runfolder import SCHEDULE, RunFolder
from rollkeel.engines.idle import IdleEngine
from rollkeel.errors import BadInput, Corrupt, Interrupted
from rollkeel.learn import learn
from rollkeel.loop import describe, go_on, sample, sample_async, sample_budgeted
from rollkeel.models.loading import load_policy, quiet_transformers, resolve_device
from rollkeel.pipeline import warm_start
from rollkeel.recipe import from_tree, merge
from rollkeel.rollout.dynamic import Drawn
from rollkeel.run import Run, StopFlag, assemble
from rollkeel.train import checkpoint
from rollkeel.validate import validate

PARTS = ("both", "rollout", "update")
FIXED = ("run.loop", "run.schedule", "rollout.lag", "run.seed", "model", "data", "sft")
"""Settings that make another run of it, and not another step."""
Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Where a step that was done again first left the record."""

    step: int
    place: str
    """One line."""
    changes: Sequence[MetricChange] = ()


@dataclass(kw_only=True)
class Verdict:
    """What a replay found."""

    step: int
    part: str
    start: str
    """What it began from."""
    between: int
    """Steps that were done again before the one asked for."""
    overrides: Sequence[str] = ()
    parting: Parting | None = None
    """Where the unchanged replay left the record; None if every bit was the same."""
    changes: Sequence[MetricChange] = ()
    """With overrides: metrics of the record and of the changed step."""
    metrics: int = 0
    rollouts: int = 0
    tokens: int = 0
    """Compared, and all of them equal where there is no `parting`."""
    version: int = 0
    saved: str = ""
    """Checkpoint behind the step whose weights were compared too."""
    effects: Mapping[str, Any] = field(default_factory=dict)
    distance: Mapping[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        changes = [*self.changes, *(self.parting.changes if self.parting else ())]
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        found |= {
            "identical": self.parting is None,
            "overrides": list(self.overrides),
            "parting": None if self.parting is None else {"step": self.parting.step, "place": self.parting.place},
            "changes": [{**dataclasses.asdict(c), "difference": c.difference} for c in changes],
        }
        return found


@final
class Record:
    """A run folder, read only."""

    def __init__(self, path: Path) -> None:
        """Raises `BadInput` if there is no run, `Corrupt` if its config or metrics are damaged."""
        self.folder = RunFolder.open(path, lock=False)
        self.config = self.folder.config
        self.rows = {int(row["step"]): row for row in self.folder.metrics()}
        self._files = dict(self.folder.rollout_files())

    def table(self, step: int) -> pa.Table:
        """The step's rollouts file. Raises `BadInput` where there is none."""
        if step not in self.rows or step < 1:
            known = [s for s in self.rows if s > 0]
            have = f"{min(known)} to {max(known)}" if known else "none yet"
            raise BadInput(f"{self.folder.path}: step {step} is not recorded; its steps are {have}")
        if step not in self._files:
            raise BadInput(
                f"{self.folder.path}: step {step} has no recorded rollouts; run with report.rollouts=true to replay steps"
            )
        return read_step(self._files[step])

    def drawn(self, step: int, table: pa.Table) -> Drawn:
        """What `learn` was given, of its rollouts with a reward: those without were in no batch."""
        rollouts, trained = to_rollouts(table), per_token(table, "advantages")
        batch = [r for r in rollouts if r.id in trained]
        return Drawn(rollouts, batch, self.consumed(step), int(self.rows[step].get("rollout/dynamic_rounds", 1)))

    def consumed(self, step: int) -> int:
        """Prompts that a synchronous step took from the data source."""
        discarded = self.rows[step].get("rollout/dynamic_discarded")
        if discarded is None:
            return self.config.rollout.prompts
        table = self.table(step)
        trained = per_token(table, "advantages")
        groups = {g for i, g in zip(table["id"].to_pylist(), table["group"].to_pylist(), strict=True) if i in trained}
        return int(discarded) + len(groups)

    def checkpoints(self, limit: int) -> list[tuple[int, Path]]:
        """Up to step `limit`, newest first; unchecked."""
        return [entry for entry in reversed(checkpoint.listing(self.folder.checkpoints)) if entry[0] <= limit]


@final
class Player:
    """The pieces of a recorded run in a scratch folder, standing behind some step of it."""

    def __init__(self, record: Record, config: Config, view: LiveView, stop: StopFlag, *, samples: bool) -> None:
        """`samples`: open the engine, and bring along what the loop carries from step to step."""
        self.record, self.view, self.stop, self.samples = record, view, stop, samples
        self.config = config.model_copy(
            update={
                "run": config.run.model_copy(update={"schedule": self._schedule(config) if samples else None}),
                "report": config.report.model_copy(update={"rollouts": True}),
            }
        )
        self.carries = samples and config.run.loop != "sync"
        self.at, self.start, self.parting = 0, "", None
        self._begun_at = 0
        self._stack = ExitStack()
        self.run: Run

    def __enter__(self) -> Player:
        self.scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rollkeel-replay-")))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
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
            except (Corrupt, BadInput) as error:  # damaged, or a running process has just dropped it
                self.view.note(str(error))
                continue
            self._open()
            self._restore(saved)
            self.at, self.start = step, f"checkpoint of step {step}"
            break
        else:
            self._open(warm=True)
            self.start = "the start model"
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
        run = self.run
        pooled = run.budgeted.state_dict() if run.budgeted is not None and self.carries else None
        parts = {"trainer": run.trainer.state_dict(), "objective": run.objective.state_dict(), "budgeted": pooled}
        return copy.deepcopy({**parts, "consumed": run.consumed})

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Take `state` over. An objective of another kind begins afresh, which is noted."""
        run, notes = self.run, []
        run.trainer.load_state_dict(state["trainer"])
        run.consumed = state["consumed"]
        if state["budgeted"] is not None and run.budgeted is not None:
            run.budgeted.load_state_dict(state["budgeted"])
        try:
            run.objective.load_state_dict(state["objective"])
        except BadInput:
            notes.append(
                f"objective {run.objective.name} begins with its first thresholds: the record holds those of {state['objective']['name']}"
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

    def sample(self, step: int) -> tuple[Drawn, dict[str, float]]:
        """Sample and grade the rollouts of `step`; what that measured."""
        run, metrics, clock = self.run, {}, self.run.clock(step)
        if self.carries:
            draw = sample_budgeted if run.config.run.loop == "budgeted" else sample_async
        else:
            draw = sample
            run.consumed = sum(self.record.consumed(s) for s in range(1, step))
            run.publish()
        drawn = draw(run, metrics, clock)
        return drawn, metrics | describe([r for r in drawn.rollouts if r.reward is not None])

    def learn(self, step: int, drawn: Drawn | None, measured: Mapping[str, float]) -> dict[str, float]:
        """Train on `drawn`, or on the recorded rollouts; all metrics. Moves on to `step` and compares with the record."""
        table, metrics = self.record.table(step), dict(measured)
        sampled = drawn is not None
        clock = self.run.clock(step)
        learn(self.run, step, drawn or self.record.drawn(step, table), metrics, clock)
        if self.carries:
            self.run.publish()
            if self.run.overlap is not None:
                every = (self.config.eval.every, self.config.checkpoint.every)
                pause = step == self.config.run.steps or any(n > 0 and step % n == 0 for n in every)
                go_on(self.run, step, clock, pause=pause)
        self.at = step
        self._compare(step, table, metrics, SAMPLED * sampled + TRAINED, whole=sampled)
        return metrics

    def check_sampled(self, step: int, drawn: Drawn, metrics: Mapping[str, float]) -> None:
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
        torch.set_num_threads(config.run.threads)
        policy = load_policy(config.model, resolve_device(config.run.device))
        folder = RunFolder(self.scratch, config, None)
        if warm and config.sft.enabled and config.sft.steps > 0:
            warm_start(policy, config, self.view, self.stop, folder.events)
        self.run = assemble(config, folder, policy, self.view, self.stop, None if self.samples else IdleEngine())
        self._stack.callback(self.run.close)

    def _restore(self, saved: checkpoint.Checkpoint) -> None:
        if self.carries:
            self.run.restore(saved)
            return
        state = checkpoint.load_state(saved.state)
        self.run.trainer.load_state_dict(state["trainer"])
        self.run.objective.load_state_dict(state["objective"])

    def _schedule(self, config: Config) -> str | None:
        if config.run.loop != "async":
            return None
        own = self.record.folder.path / SCHEDULE
        file = str(own) if own.is_file() else config.run.schedule
        if file is None:
            raise BadInput(
                f"{own}: no such file, so the sampling of this asynchronous run cannot be repeated; use --only update"
            )
        return file


def replay_step(
    path: str | Path, step: int, part: str = "both", overrides: Sequence[str] = (), view: LiveView | None = None
) -> Verdict:
    """Do step `step` of the run at `path` again, and compare; with `overrides`, once more with those settings.

    `part`: `both`, `rollout` or `update` alone. Raises `BadInput` for a step, setting or loop that cannot be replayed,
    `Corrupt` for damaged files.
    """
    quiet_transformers()
    record = Record(Path(path))
    record.table(step)
    changed = changed_config(record.config, part, overrides) if overrides else None
    view = view or LiveView()
    with view, StopFlag(view) as stop, Player(record, record.config, view, stop, samples=part != "update") as base:
        played = _Played(base, step, part)
        verdict = played.go(strict=changed is None)
        if changed is None or verdict.parting is not None and verdict.parting.step < step:
            return verdict
        if verdict.parting is not None:
            verdict.notes.append(f"the unchanged step leaves the record too ({verdict.parting.place})")
        verdict.overrides = list(overrides)
        base._stack.close()  # two engines at a time may be more than a machine holds
        with Player(record, changed, view, stop, samples=part != "update") as other:
            played.change(other, verdict)
    return verdict


def changed_config(config: Config, part: str, overrides: Sequence[str]) -> Config:
    """The recorded config with one factor changed. Raises `BadInput` for what would make it another run."""
    for text in overrides:
        key = text.partition("=")[0].strip()
        fixed = next((name for name in FIXED if key == name or key.startswith(f"{name}.")), None)
        if fixed is not None:
            raise BadInput(f"override {text!r}: a replay keeps {fixed}; start another run to change it")
    if config.run.loop == "async" and part != "update":
        raise BadInput(
            f"override {overrides[0]!r}: run.loop=async samples a step's rollouts while others are trained, so a change has no"
            " step to begin with; use --only update"
        )
    changed = from_tree(merge(config.model_dump(mode="json"), overrides))
    validate(changed)
    return changed


@final
class _Played:
    """One step: the state it is sampled from, the state it is trained from, and what came of it."""

    def __init__(self, player: Player, step: int, part: str) -> None:
        self.player, self.step, self.part = player, step, part
        lag = player.config.rollout.lag if part != "update" else 0
        self.first = max(0, step - 1 - lag)
        self.states: list[dict[str, Any]] = []
        self.before: Weights = {}
        self.after: Weights = {}

    def go(self, *, strict: bool) -> Verdict:
        """The unchanged step."""
        player = self.player
        player.begin(self.first)
        player.goto(self.first, strict=True)
        drawn, metrics = None, {}
        if player.parting is None and self.part != "update":
            self.states.append({} if strict else player.state())
            drawn, metrics = player.sample(self.step)
        if self.part == "rollout" and drawn is not None:
            player.check_sampled(self.step, drawn, metrics)
        elif player.parting is None:
            player.goto(self.step - 1, strict=True)
            if player.parting is None:
                self.states.append({} if strict else player.state())
                self.before = player.weights()
                metrics = player.learn(self.step, drawn, metrics)
                self.after = player.weights()
        between = max(player.between - (self.part != "rollout"), 0)
        verdict = Verdict(
            step=self.step, part=self.part, start=player.start, between=between, parting=player.parting
        )
        if player.at >= self.step or self.part == "rollout":
            table = read_step(player.file(self.step))
            verdict.metrics, verdict.rollouts = len(metrics), table.num_rows
            verdict.tokens = sum(len(x) for x in table["token_ids"])
            verdict.version = player.run.trainer.version
        self._check_saved(verdict)
        return verdict

    def _check_saved(self, verdict: Verdict) -> None:
        """Compare the weights with those of the checkpoint behind the step, where it was kept."""
        folder = self.player.record.folder.checkpoints / checkpoint.step_name(self.step)
        if not self.after or verdict.parting is not None or not folder.is_dir():
            return
        try:
            weights = checkpoint.load_state(checkpoint.verify(folder).state)["trainer"]["weights"]
        except (BadInput, Corrupt) as error:
            verdict.notes.append(str(error))
            return
        other = [name for name, value in self.after.items() if not torch.equal(value, weights[name])]
        verdict.saved = folder.name
        if other:
            place = f"weights {other[0]} and {len(other) - 1} more are not those of {folder}"
            verdict.parting = Parting(step=self.step, place=place)

    def change(self, other: Player, verdict: Verdict) -> None:
        """The same step by a player with another config, from the same states."""
        row, recorded = self.player.record.rows[self.step], self.player.record.table(self.step)
        drawn, metrics = None, {}
        states = list(self.states)
        if self.part != "update":
            verdict.notes += other.begin_from(states.pop(0), self.step - 1)
            drawn, metrics = other.sample(self.step)
        if self.part == "rollout":
            assert drawn is not None  # sampled above
            other.check_sampled(self.step, drawn, metrics)
        else:
            verdict.notes += other.load(states[0]) if drawn is not None else other.begin_from(states[0], self.step - 1)
            metrics = other.learn(self.step, drawn, metrics)
            verdict.distance = distance(self.before, self.after, other.weights())
        verdict.notes = list(dict.fromkeys(verdict.notes))
        verdict.changes = metric_changes(row, metrics, whole=self.part == "both")
        verdict.effects = effects(recorded, read_step(other.file(self.step)))


def distance(before: Weights, unchanged: Weights, changed: Weights) -> dict[str, float]:
    """How far apart two updates from the same weights end: 2-norms over all weights, and the cosine between the updates.

    `update`: of the unchanged one; `changed_update`; `apart`: between their ends; `relative`: `apart` over `update`.
    """
    sums = torch.zeros(4, dtype=torch.float64)
    for name, start in before.items():
        one, two = ((w[name].double() - start.double()).flatten() for w in (unchanged, changed))
        sums += torch.stack([one @ one, two @ two, (one - two).square().sum(), one @ two])
    one, two, apart, dot = sums.tolist()
    found = {"update": one**0.5, "changed_update": two**0.5, "apart": apart**0.5}
    if one and two:
        found |= {"relative": (apart / one) ** 0.5, "cosine": dot / (one * two) ** 0.5}
    return found
