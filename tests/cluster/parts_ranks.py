"""What every rank of tests/cluster/test_ranks_in_parts.py runs: the calls of a controller, without Ray and without engines."""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from rollkeel.cluster.check import ranked
from rollkeel.cluster.ranks import Rank
from rollkeel.models import part_files
from rollkeel.recipe import load
from rollkeel.train.mesh import Mesh
from rollkeel.types import Rollout
from tests.train.mesh_io_ranks import BUFFER, Watcher


class Stopping(Rank):
    """Told to stop before the second step of the warm start."""

    _asked = 0

    @property
    def _stop(self) -> bool:
        self._asked += 1
        return self._asked == 2

    @_stop.setter
    def _stop(self, value: bool) -> None: ...


class Begun:
    """A rank whose model is loaded."""

    def __init__(self, made: Rank, mesh: Mesh | int) -> None:
        """`mesh`: the one of an earlier rank of this process, or the port to meet at."""
        self.made, self.findings = made, []
        if isinstance(mesh, int):
            self("join", "127.0.0.1", mesh, 60.0)
        else:
            made._mesh = mesh
        self.findings = self("load")

    def __call__(self, what: str, *args: Any) -> Any:
        answer = self.made.run(what, *args)
        if answer.error is not None:
            raise answer.error
        return answer.value

    def said(self) -> list[Any]:
        """Methods of view and log, and their arguments."""
        return [said[1:3] for said in self.made.status()]


def serve(rank: int, world: int, folder: str, port: int, words: list[str], rollouts: list[Rollout]) -> None:
    """Leaves `rank-N.pt`: most bytes alive in each phase, and what there was to say."""
    os.environ["ROLLKEEL_CACHE"] = f"{folder}/cache"
    about: Any = (ranked(load(None, words)), rank, world, folder)
    peaks = dict[str, int]()
    out: dict[str, Any] = {"peaks": peaks}
    with Watcher() as watcher, patch.object(part_files, "CHUNK", BUFFER):
        with watcher.phase(peaks, "load"):
            call = Begun(Stopping(*about), port)
        out["findings"], mesh = call.findings, call.made._mesh
        try:
            call("warm_start")
        except Exception as error:
            out["stopped"] = str(error)
        del call
        gc.collect()  # a killed rank's memory is not there any more
        call = Begun(Rank(*about), mesh)
        acts: dict[str, Callable[[], object]] = {
            "warm_start": lambda: call("warm_start"),
            "begin": lambda: call("begin"),
            "publish": lambda: deque(call.made._made.named_weights(), maxlen=0),
            "save": lambda: call("save", f"{folder}/saved"),
            "save_model": lambda: call("save_model", f"{folder}/model"),
            "record": lambda: call("record", f"{folder}/tensors", rollouts, {"step": 1, "version": 0}),
        }
        for name, act in acts.items():
            with watcher.phase(peaks, name):
                act()
        out["said"] = call.said()
        call = Begun(Rank(*about), mesh)
        call("warm_start")
        out["cached"] = call.said()
    out["weights"] = {name: w.clone() for name, w in call.made._made.named_weights()}
    torch.save(out, Path(folder) / f"rank-{rank}.pt")
