"""A run in this process, and in the engine's workers or server: no cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollkeel.analyzer.record import record_tensors
from rollkeel.config import Config
from rollkeel.events import EventLog
from rollkeel.loop.assemble import device_of, own_engine
from rollkeel.loop.machines import Publish, trainer_options
from rollkeel.loop.warm_start import warm_start
from rollkeel.models.loading import Policy, save_policy
from rollkeel.models.numerics import precision
from rollkeel.protocols import Engine
from rollkeel.record.checks import Finding, too_small, unreached
from rollkeel.record.live import LiveView
from rollkeel.record.runfolder import RunFolder
from rollkeel.record.stopping import StopFlag
from rollkeel.sync.proof import Probes
from rollkeel.sync.publish import DirectPublisher
from rollkeel.sync.shared import no_deltas
from rollkeel.train.checkpoint import TRAINER, Written
from rollkeel.train.soundness import Fresh
from rollkeel.train.trainer import LocalTrainer
from rollkeel.train.unfinished import Unfinished
from rollkeel.types import Rollout

if TYPE_CHECKING:
    from rollkeel.loop.resident import Resident


class OneProcess:
    """Everything in this process."""

    def __init__(self, config: Config, policy: Policy) -> None:
        if config.memory.offload != "none":
            from rollkeel.loop.resident import settled

            config = settled(config, policy.model.config, device_of(config))
        self.policy, self._config = policy, config
        self._trainer: LocalTrainer | None = None
        self._resident: Resident | None = None

    def begin_again(self) -> None:
        """Nothing: there are no ranks."""

    def findings(self) -> list[Finding]:
        model = self.policy.model
        found = too_small([p for p in model.parameters() if p.requires_grad], self._config.train.lr)
        return [*found, *unreached(model)]

    def warm_start(self, view: LiveView, stop: StopFlag, events: EventLog, kept: Unfinished) -> None:
        warm_start(self.policy, self._config, view, stop, events, kept)

    def trainer(self) -> LocalTrainer:
        self._trainer = LocalTrainer(
            self.policy, self._config.train, device=device_of(self._config), **trainer_options(self._config)
        )
        self._trainer.fresh = Fresh.of(self._config)
        return self._trainer

    def engine(self, folder: RunFolder) -> tuple[Engine, str]:
        made = own_engine(self._config, self.policy, folder, device_of(self._config))
        if self._config.memory.offload != "none":
            from rollkeel.loop.resident import Resident, tell

            self._resident = Resident(self._config, self._made(), folder.path)
            tell(self._config, self.policy.model.config, folder.events)
        return made

    def graders(self) -> None:
        return None

    def publisher(self, engine: Engine, probes: Probes | None, *, shared: bool) -> Publish:
        config, trainer = self._config, self._made()
        kind = "full" if no_deltas(config, "two copies") else config.sync.kind
        buffer_mb = config.sync.buffer_mb
        direct = DirectPublisher([engine], probes, shared=shared, kind=kind, buffer_mb=buffer_mb)
        return lambda: direct.publish(trainer.named_weights(), trainer.version, trainer.named_adapters())

    def precision(self) -> dict[str, Any]:
        return precision(self.policy.model)

    def enter(self, phase: str) -> dict[str, float]:
        return {} if self._resident is None else self._resident.enter(phase)

    def record(self, path: Path, rollouts: Sequence[Rollout], about: Mapping[str, Any]) -> None:
        trainer = self._made()
        with trainer.computing():
            record_tensors(path, trainer.model, rollouts, **about)

    def save_model(self, folder: Path) -> Written:
        return save_policy(self.policy, folder)

    def save(self, folder: Path) -> Written:
        return None

    def load(self, state: Mapping[str, Any] | None, folder: Path | None = None) -> list[str]:
        if folder is not None and (folder / TRAINER).is_dir():  # saved by ranks, each its part
            return self._made().load(folder / TRAINER)
        assert state is not None
        return self._made().load_state_dict(state)

    def close(self) -> None:
        if self._resident is not None:
            self._resident.close()

    def _made(self) -> LocalTrainer:
        assert self._trainer is not None  # assembled before anything is asked of it
        return self._trainer
