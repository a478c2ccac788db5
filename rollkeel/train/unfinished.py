"""A warm start that was interrupted or killed goes on where it was: its state in a folder of its own, until it is done."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from rollkeel.errors import BadInput, Corrupt
from rollkeel.train import checkpoint
from rollkeel.train.trained import Trained

EVERY_S = 60.0
"""Seconds between two savings: what a kill costs at most. When it is saved changes no bit."""


class Unfinished:
    """Implements `rollkeel.train.sft.Kept`. State of another warm start (`key`), or damaged, counts as none."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self._key = key
        self._saved = time.monotonic()
        self.step = 0
        """Of the state that was loaded or saved last."""

    def found(self) -> bool:
        """True if there is a state to go on from."""
        try:
            checkpoint.clean(self.folder)
            saved = checkpoint.latest(self.folder)
        except (BadInput, Corrupt):
            return False
        if saved is None or saved.info.get("key") != self._key:
            return False
        self.step = saved.step
        return True

    def load(self, trained: Trained) -> dict[str, Any] | None:
        if not self.found():
            return None
        state = checkpoint.load_state(self.folder / checkpoint.step_name(self.step) / "state")
        trained.load_state_dict(state)
        return state

    def due(self) -> bool:
        return time.monotonic() - self._saved >= EVERY_S

    def save(self, step: int, trained: Trained, about: dict[str, Any]) -> None:
        def write(path: Path) -> checkpoint.Written:
            return checkpoint.save_state_of(path, {**trained.state_dict(), **about})

        checkpoint.save(self.folder, step, write=write, info={"key": self._key}, keep=1)
        self.saved(step)

    def saved(self, step: int) -> None:
        """The state of `step` is on disk now."""
        self.step, self._saved = step, time.monotonic()

    def remove(self) -> None:
        """It is done."""
        shutil.rmtree(self.folder, ignore_errors=True)
