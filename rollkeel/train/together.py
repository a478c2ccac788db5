"""Checkpoints that ranks write together: the first makes the folder and puts it in its place, all write their parts into it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollkeel.errors import BadInput, Corrupt
from rollkeel.train import checkpoint
from rollkeel.train.mesh import Mesh
from rollkeel.train.trained import Trained, load_trained, opened, save_trained, take
from rollkeel.train.unfinished import Unfinished


def save(
    folder: Path, step: int, mesh: Mesh, write: Callable[[Path], checkpoint.Written], info: Mapping[str, Any], keep: int
) -> None:
    """`checkpoint.save` of all ranks, whose `write` is called on each with the same empty folder. Collective."""
    _filled(mesh, lambda fill: checkpoint.save(folder, step, write=fill, info=info, keep=keep), write)


def replace_folder(target: Path, mesh: Mesh, write: Callable[[Path], None]) -> None:
    """`checkpoint.replace_folder` in the same way."""
    _filled(mesh, lambda fill: checkpoint.replace_folder(target, fill), write)


def _filled(mesh: Mesh, make: Callable[[Callable[[Path], Any]], Any], write: Callable[[Path], Any]) -> None:
    """`make` a folder on the first rank, and `write` into it on all."""
    failed: Exception | None = None
    told = False

    def fill(path: Path) -> Any:
        nonlocal told
        told = True
        mesh.everyone(path)
        return write(path)

    try:
        if mesh.rank == 0:
            make(fill)
        elif (path := mesh.everyone(None)[0]) is not None:
            write(path)
    except Exception as error:
        failed = error
    if mesh.rank == 0 and not told:
        mesh.everyone(None)
    mesh.agree(failed)


def write_trained(path: Path, trained: Trained) -> checkpoint.Written:
    """Write `trained` into the checkpoint at `path`. Collective."""
    files = save_trained(path / checkpoint.TRAINER, trained)
    return checkpoint.beneath(checkpoint.TRAINER, files)


def save_start(folder: Path, trained: Trained) -> None:
    """Keep the weights of a trainer that has made no update. Collective."""
    save(folder, 0, trained.layout.mesh, lambda path: write_trained(path, trained), {}, keep=1)


def load_start(folder: Path, trained: Trained) -> bool:
    """Take the weights that `save_start` kept. False, and nothing changes, if there are none or they are damaged: then the folder goes.
    Collective; the first rank's folder counts."""
    mesh, parts = trained.layout.mesh, folder / checkpoint.step_name(0) / checkpoint.TRAINER
    if not mesh.everyone(parts.is_dir())[0]:
        return False
    try:
        saved = opened(parts, trained)
    except (BadInput, Corrupt):
        if mesh.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return False
    take(saved, trained)
    return True


class UnfinishedTogether:
    """Implements `rollkeel.train.sft.Kept` on several ranks; the first one's clock and files count."""

    def __init__(self, folder: Path, key: str, mesh: Mesh) -> None:
        self._folder = folder
        self._key = key
        self._mesh = mesh
        self._first = Unfinished(folder, key)

    @property
    def step(self) -> int:
        """Of the state that was found or saved last."""
        return self._first.step

    def found(self) -> bool:
        """True if there is a state to go on from. Collective."""
        step = self._mesh.everyone(self._first.step if self._mesh.rank == 0 and self._first.found() else None)[0]
        self._first.step = step or 0
        return step is not None

    def load(self, trained: Trained) -> dict[str, Any] | None:
        if not self.found():
            return None
        path = self._folder / checkpoint.step_name(self.step)
        load_trained(path / checkpoint.TRAINER, trained)
        return self._mesh.attempt(lambda: checkpoint.load_state(path / "state"))

    def due(self) -> bool:
        return self._mesh.rank == 0 and self._first.due()

    def save(self, step: int, trained: Trained, about: dict[str, Any]) -> None:
        def write(path: Path) -> checkpoint.Written:
            first = self._mesh.rank == 0
            self._mesh.attempt(
                lambda: checkpoint.save_state(path / "state", about) if first else None, f"cannot write {path}"
            )
            return write_trained(path, trained)

        save(self._folder, step, self._mesh, write, {"key": self._key}, keep=1)
        self._first.saved(step)
