"""One recorded step again: unchanged, and with one factor changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch

from rollkeel.config import Config
from rollkeel.diagnose.replay.player import Parting, Player, Weights
from rollkeel.diagnose.replay.record import Record
from rollkeel.diagnose.replayed import MetricChange, effects, metric_changes
from rollkeel.errors import BadInput, Corrupt
from rollkeel.loop.check import validate
from rollkeel.recipe import from_tree, merge
from rollkeel.record.live import LiveView
from rollkeel.record.rollout_store import read_step
from rollkeel.record.stopping import StopFlag
from rollkeel.train import checkpoint

FIXED = (
    "run.loop",
    "run.seed",
    "experiment.schedule",
    "experiment.lag",
    "experiment.label_noise",
    "model",
    "data",
    "sft",
)
"""Settings that make another run of it, and not another step."""


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


def replay_step(
    path: str | Path, step: int, part: str = "both", overrides: Sequence[str] = (), view: LiveView | None = None
) -> Verdict:
    """Do step `step` of the run at `path` again, and compare; with `overrides`, once more with those settings.

    `part`: `both`, `rollout` or `update` alone. Raises `BadInput` for a step, setting or loop that cannot be replayed,
    `Corrupt` for damaged files.
    """
    record = Record(Path(path))
    record.table(step)
    changed = changed_config(record.config, part, overrides) if overrides else None
    view = view or LiveView()
    with view, StopFlag(view) as stop, Player(record, record.config, view, stop, samples=part != "update") as base:
        played = _Played(base, step, part)
        verdict = played.go(strict=changed is None)
        if changed is None or (verdict.parting is not None and verdict.parting.step < step):
            return verdict
        if verdict.parting is not None:
            verdict.notes.append(f"the unchanged step leaves the record too ({verdict.parting.place})")
        verdict.overrides = list(overrides)
        base.close()  # two engines at a time may be more than a machine holds
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
        self.player = player
        self.step = step
        self.part = part
        self.first = max(0, step - 1 - player.lag)
        self.states: list[dict[str, Any]] = []
        self.before: Weights = {}
        self.after: Weights = {}
        self.metrics: dict[str, float] = {}

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
        self.metrics = metrics
        between = max(player.between - (self.part != "rollout"), 0)
        verdict = Verdict(
            step=self.step,
            part=self.part,
            start=player.start,
            between=between,
            parting=player.parting,
            notes=list(player.notes),
        )
        if player.at >= self.step or self.part == "rollout":
            table = read_step(player.file(self.step))
            verdict.metrics, verdict.rollouts = len(metrics), table.num_rows
            verdict.tokens = sum(len(x) for x in table["token_ids"])
            verdict.version = player.run.trainer.version
        self._check_saved(verdict)
        if verdict.parting is not None and player.from_start:
            verdict.notes.append(
                "no checkpoint before it is left; the start model made here may not be that of the run"
            )
        return verdict

    def _check_saved(self, verdict: Verdict) -> None:
        """Compare the weights with those of the checkpoint behind the step, where it was kept."""
        folder = self.player.record.folder.checkpoints / checkpoint.step_name(self.step)
        if not self.after or verdict.parting is not None or not folder.is_dir():
            return
        try:
            weights = checkpoint.load_state(checkpoint.verify(folder).state)["trainer"]["weights"]
        except (BadInput, Corrupt, OSError) as error:  # damaged, or a running process has just dropped it
            verdict.notes.append(" ".join(str(error).split()))
            return
        other = [name for name, value in self.after.items() if not torch.equal(value, weights[name])]
        verdict.saved = folder.name
        if other:
            place = f"weights {other[0]} and {len(other) - 1} more are not those of {folder}"
            verdict.parting = Parting(step=self.step, place=place)

    def change(self, other: Player, verdict: Verdict) -> None:
        """The same step by a player with another config, from the same states."""
        recorded = self.player.record.table(self.step)
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
        verdict.changes = metric_changes(self.metrics, metrics, whole=True)
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
