"""What the trainer of this process holds, on its device in the phases that need it and away in the others: `memory.offload`.

The loop says which phase begins. What leaves is on its way while the phase goes on; what it needs is here before it begins, but
moments and masters, which an update waits for only when it comes to them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rollkeel import host
from rollkeel.config import Config
from rollkeel.errors import BadInput
from rollkeel.events import EventLog
from rollkeel.memory.moves import Moves
from rollkeel.memory.plan import RESERVED
from rollkeel.memory.residency import Residency, chosen, place, residency, stays
from rollkeel.memory.shapes import shape_from
from rollkeel.train.mesh import Mesh
from rollkeel.train.trainer import LocalTrainer

MB = 1e6
LATE = "moments"
"""What an update waits for itself."""


def settled(config: Config, model: Any, device: torch.device) -> Config:
    """The config with what its `memory.offload` means for this model (transformers' config) on this device: no longer `auto`.

    Raises `BadInput` for `auto` with an architecture whose sizes are not known."""
    if config.memory.offload != "auto":
        return config
    level = "none"
    if not alone(config):
        try:
            shape = shape_from(model.get_text_config().to_dict(), config.model.path)
        except BadInput as error:
            raise BadInput(f"{error}; set memory.offload to none, optimizer or all") from None
        level = chosen(config, shape, _space(device))
    return config.model_copy(update={"memory": config.memory.model_copy(update={"offload": level})})


def alone(config: Config) -> str:
    """Why nothing leaves the trainer's device; empty if something may."""
    if config.clustered and config.cluster.placement == "disaggregated":
        return "cluster.placement=disaggregated: ranks share their devices with nobody; set colocated"
    if config.run.loop == "async":
        return "run.loop=async: it samples while it trains; use another loop"
    if config.train.processes > 1:
        return f"train.processes={config.train.processes}: helpers hold the trainer's memory; set it to 1"
    return ""


def planned(config: Config, model: Any) -> Residency | None:
    """What `memory.residency` says of a `settled` run; None for an architecture whose sizes are not known."""
    try:
        shape = shape_from(model.get_text_config().to_dict(), config.model.path)
    except BadInput:
        return None
    return residency(config, shape, config.memory.offload)


def tell(config: Config, model: Any, events: EventLog) -> None:
    """Note the plan of a `settled` run whose memory moves."""
    if config.memory.offload == "none":
        return
    if (found := planned(config, model)) is not None:
        events.emit("residency", offload=found.level, phases=found.table())
    else:
        events.emit("residency", offload=config.memory.offload)


class Resident:
    """Keeps a trainer as `memory.residency` says."""

    def __init__(self, config: Config, trainer: LocalTrainer, folder: Path) -> None:
        """`config`: `settled`; `folder`: of files for what leaves the memory of a CPU."""
        self._level, self._trainer = config.memory.offload, trainer
        self._movable = [name for name in ("weights", "reference model", "moments") if name not in stays(config)]
        self._moves, self._phase = Moves(folder), ""
        self._quiet = _suspendable(trainer.mesh, trainer.device) if self._level == "all" else []
        self._suspended = False
        trainer.settle = self._moves.settle

    def enter(self, phase: str, beside: Sequence[int] = ()) -> dict[str, float]:
        """Begin `phase`; again, wait until everything has left that is to leave. `beside`: processes of engines on this device, which
        are measured too. Returns what is known of the phase before: `memory/<phase>/…`."""
        self._moves.settle()
        if phase == self._phase:
            return {}
        told, held = self._measured(beside), self._trainer.held()
        away = {name: place(name, phase, self._level) == "host" for name in self._movable}
        for name in (name for name in away if away[name]):
            self._moves.out(name, held[name])
        coming = [name for name in away if not away[name] and self._moves.away(name)]
        if coming:
            self._moves.settle()  # first out, then in: both together may not fit
        for name in coming:
            self._moves.back(name)
        # Behind an update other work comes first, and publications say once more that they begin.
        if any(name != LATE for name in coming) or (phase == "publish" and self._phase != "update"):
            self._moves.settle()
        self._suspend(place("communicators", phase, self._level) != "device")
        self._phase = phase
        self._begin(beside)
        return told

    def close(self) -> None:
        """Move nothing any more; see `Moves.close`. Nobody trains behind a run."""
        self._suspend(False)
        self._moves.close()

    def _suspend(self, suspended: bool) -> None:
        if suspended != self._suspended:
            for backend in self._quiet:
                backend.suspend() if suspended else backend.resume()
        self._suspended = suspended

    def _begin(self, beside: Sequence[int]) -> None:
        """Give back what was freed, for others and for what is measured."""
        if self._trainer.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        elif self._phase != "update":
            host.give_back_freed_memory()
        for pid in (os.getpid(), *beside):
            host.forget_peak(pid)

    def _measured(self, beside: Sequence[int]) -> dict[str, float]:
        if not self._phase:
            return {}
        if self._trainer.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            now, peak = total - free, total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()
        else:
            now, peak = (sum(sizes) for sizes in zip(*map(host.resident, (os.getpid(), *beside)), strict=True))
        size, seconds, waited = self._moves.measured()
        told = {
            "held_mb": now / MB,
            "peak_mb": peak / MB,
            "moved_mb": size / MB,
            "moved_s": seconds,
            "waited_s": waited,
        }
        return {f"memory/{self._phase}/{name}": value for name, value in told.items()}


def _space(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * (1 - RESERVED))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _suspendable(mesh: Mesh, device: torch.device) -> list[Any]:
    """Communicators that can give their buffers away and take them again: NCCL's from 2.29 on, under a torch that offers it."""
    groups = [*mesh.groups.values(), *([mesh.shards.get_group()] if mesh.shards is not None else [])]
    found = {id(b): b for group in groups for b in [group._get_backend(device)]}
    return [backend for backend in found.values() if _can_rest(backend)]


def _can_rest(backend: Any) -> bool:
    if not hasattr(backend, "suspend"):
        return False
    try:
        backend.memory_stats()  # which comes with it
    except RuntimeError:
        return False
    return True
