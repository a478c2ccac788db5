"""Where a run computes: what the loop asks of its trainer, and of the place that trainer and engine are in.

`one_process.py` is this process, and the engine's workers or server. `rollkeel.cluster` is ranks and engines on a Ray cluster: weights
then never come here, and tensors that do are a step's numbers per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rollkeel.batch.build import TrainingBatch
from rollkeel.config import Config
from rollkeel.events import EventLog
from rollkeel.loop.play import Players
from rollkeel.models.loading import Policy
from rollkeel.protocols import Engine
from rollkeel.record.checks import Finding
from rollkeel.record.live import LiveView
from rollkeel.record.runfolder import RunFolder
from rollkeel.record.stopping import StopFlag
from rollkeel.rewards.grading import Scorer
from rollkeel.rewards.here import Elsewhere
from rollkeel.sync.proof import Probes
from rollkeel.train.checkpoint import Written
from rollkeel.train.scores import Scores, UpdateOutput
from rollkeel.train.unfinished import Unfinished
from rollkeel.types import Rollout

if TYPE_CHECKING:
    from rollkeel.objectives import Objective

Publish = Callable[[], Mapping[str, float]]
"""Bring the trainer's weights to the engine, proven; what that measured."""


@dataclass
class Restarts:
    """How often a run may still go on with other ranks after some were lost, from memory and from a checkpoint together."""

    left: int


def trainer_options(config: Config) -> dict[str, Any]:
    """How `LocalTrainer` is to train a run of `config`, wherever it runs."""
    return {
        "temperature": config.sampling.temperature,
        "total_updates": config.run.steps * config.train.updates_per_step,
        "replay_routing": config.rollout.routing == "replay",
        "rounding": config.experiment.rounding,
        "parity": config.run.parity,
    }


class Trainer(Protocol):
    """What the loop asks of a trainer: see `LocalTrainer`."""

    device: torch.device
    """Where the tensors lie that it returns."""

    @property
    def version(self) -> int: ...
    @property
    def padded(self) -> str: ...
    def score(self, batch: TrainingBatch, *, experts: bool = False) -> Scores: ...
    def ref_logprobs(self, batch: TrainingBatch) -> torch.Tensor: ...
    def update(
        self,
        batch: TrainingBatch,
        objective: Objective,
        *,
        old_logprobs: torch.Tensor | None = None,
        old_topk_logprobs: torch.Tensor | None = None,
        ref_logprobs: torch.Tensor | None = None,
        old_is_current: bool = False,
        experts: bool = False,
    ) -> UpdateOutput: ...
    def state_dict(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Helpers(Elsewhere, Players, Protocol):
    """Processes that grade and play for this one."""

    def scorer(self, path: str) -> Scorer | None:
        """The reward model of that path in another process; None if it is none of theirs."""
        ...


class Machines(Protocol):
    """Makes trainer and engine, and moves weights: between them, to disk and back. `close` ends what it started."""

    policy: Policy
    """Tokenizer, config and vocabulary of the model; its weights where they lie in this process."""

    def findings(self) -> list[Finding]:
        """What is wrong with the start weights, before anything is trained."""
        ...

    def warm_start(self, view: LiveView, stop: StopFlag, events: EventLog, kept: Unfinished) -> None:
        """See `rollkeel.loop.warm_start`."""
        ...

    def trainer(self) -> Trainer: ...
    def engine(self, folder: RunFolder) -> tuple[Engine, str]:
        """The config's engine, and why it has weights of its own; empty if it computes with the trainer's."""
        ...

    def graders(self) -> Helpers | None:
        """Who grades and plays, if not this process."""
        ...

    def publisher(self, engine: Engine, probes: Probes | None, *, shared: bool) -> Publish: ...
    def precision(self) -> dict[str, Any]:
        """What decides how the trainer multiplies, for the record."""
        ...

    def enter(self, phase: str) -> dict[str, float]:
        """Begin a phase of `rollkeel.memory.residency`; see `Resident.enter`. Nothing, where nothing leaves the device."""
        ...

    def record(self, path: Path, rollouts: Sequence[Rollout], about: Mapping[str, Any]) -> None:
        """Write what the trainer computes for `rollouts`; `about`: as `record_tensors` takes it."""
        ...

    def save_model(self, folder: Path) -> Written:
        """Write an ordinary Hugging Face folder, or of adapters PEFT's. Returns what is known of its files, by name."""
        ...

    def save(self, folder: Path) -> Written:
        """Write to a checkpoint what `Trainer.state_dict` leaves out. Returns its files, as `checkpoint.save` takes them."""
        ...

    def load(self, state: Mapping[str, Any] | None, folder: Path | None = None) -> list[str]:
        """Continue from `Trainer.state_dict` and what `save` wrote to the checkpoint `folder`, if it came from one. Returns lines for people: what they lack."""
        ...

    def begin_again(self) -> None:
        """Behind `RankLost`: be as at the beginning, with other ranks; engines stay, and hold nothing."""
        ...

    def close(self) -> None: ...
