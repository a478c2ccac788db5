"""The trainer's state where it lies: each rank writes its own part of a checkpoint and reads it again, on the same mesh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rollkeel.errors import BadInput
from rollkeel.loop.machines import RANKS
from rollkeel.train.checkpoint import load_state, save_state
from rollkeel.train.mesh import Mesh, local
from rollkeel.train.optimizer import moments_of
from rollkeel.train.trainer import LocalTrainer

MESH = "mesh"


def share(model: torch.nn.Module) -> None:
    """Give the first rank's weights to all. Collective."""
    import torch.distributed as dist

    with torch.no_grad():
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)


def save(trainer: LocalTrainer, mesh: Mesh, folder: Path) -> None:
    """Write this rank's part to the checkpoint `folder`; of copies of the model the first alone does."""
    _parted(trainer)
    if mesh.replica == 0:
        sizes = {name: getattr(mesh, name) for name in mesh.place}
        save_state(folder / RANKS / str(mesh.rank), {MESH: sizes, **_parts(trainer.state_dict())})


def load(trainer: LocalTrainer, mesh: Mesh, folder: Path) -> list[str]:
    """Continue from what `save` wrote; a mesh of one also from the state that one process wrote.

    Returns lines for people. Raises `BadInput` for a checkpoint of another mesh."""
    sizes = {name: getattr(mesh, name) for name in mesh.place}
    asked = " × ".join(f"{name}={size}" for name, size in sizes.items())
    if not (folder / RANKS).is_dir():
        if mesh.size > 1:
            raise BadInput(f"checkpoint {folder}: was written by one process, train.mesh is {asked}; resume without it")
        return trainer.load_state_dict(load_state(folder / "state")["trainer"])
    first = mesh.rank - mesh.replica * mesh.over(*(name for name in mesh.place if name != "replicate"))
    path = folder / RANKS / str(first)
    told = load_state(path) if path.is_dir() else {MESH: {}}
    if told[MESH] != sizes:
        there = " × ".join(f"{name}={size}" for name, size in told[MESH].items()) or "a smaller one"
        raise BadInput(f"checkpoint {folder}: its mesh is {there}, train.mesh is {asked}; resume with the same mesh")
    if mesh.size == 1:
        return trainer.load_state_dict({key: value for key, value in told.items() if key != MESH})
    return _load(trainer, told)


def _parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """A trainer's state with what lies here of each tensor."""
    return {
        key: {name: local(tensor) for name, tensor in value.items()} if key in ("weights", "reference") else value
        for key, value in state.items()
    }


def _parted(trainer: LocalTrainer) -> None:
    """Give up what a pass without a backward left whole."""
    from torch.distributed.fsdp import FSDPModule

    for forward in filter(None, (trainer._forward, trainer._reference)):
        root: Any = forward.score
        for module in root.modules() if isinstance(root, torch.nn.Module) else ():
            if isinstance(module, FSDPModule):
                module.reshard()


@torch.no_grad()
def _load(trainer: LocalTrainer, told: Mapping[str, Any]) -> list[str]:
    _parted(trainer)
    live, stepper = trainer.state_dict(), trainer._stepper
    if ("reference" in live) != ("reference" in told):
        raise BadInput(
            "checkpoint: train.kl_coefficient and train.kl_every are other ones; resume with those of the run"
        )
    for key in ("weights", "reference"):
        for name, tensor in live.get(key, {}).items():
            local(tensor).copy_(told[key][name])
    stepper.adamw.state.clear()
    parameters = dict(stepper.named)
    for name, moments in told["optimizer"]["moments"].items():
        p = parameters[name]
        stepper.adamw.state[p] = moments_of(moments, p.device, stepper.adamw.eight_bit)
    stepper.updates, stepper._sound = int(told["optimizer"]["updates"]), int(told["optimizer"]["sound"])
    return []
