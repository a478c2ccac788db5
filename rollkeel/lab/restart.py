"""Runs that begin where another was: from the weights of an earlier checkpoint, with other data."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollkeel.errors import RunStopped
from rollkeel.lab.claims import best, over_last
from rollkeel.loop.job import train
from rollkeel.recipe import load
from rollkeel.record.runfolder import METRICS, read_rows
from rollkeel.train.checkpoint import step_name

_WINDOW = 10


def restarts(
    words: Sequence[str], seed: int, *, collapse: str, cure: str, early: int, late: int
) -> Mapping[str, float]:
    """A run with objective `collapse`, and runs from its weights after steps `early` and `late`; one row of rewards.

    `words` say everything but objective and seed; `checkpoint.every` among them must divide both steps. A restart has a new
    seed, hence other prompts and draws, and a fresh optimizer and queue.
    """
    row: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="rollkeel-lab-") as scratch:

        def reward(name: str, objective: str, offset: int, *more: str) -> float:
            folder = Path(scratch) / name
            said = [*words, f"objective.name={objective}", f"run.seed={seed + offset}", f"run.dir={folder}", *more]
            with contextlib.suppress(RunStopped):  # collapse into numbers that are none is a result
                train(load(None, said))
            rows = read_rows(folder / METRICS)[0]
            row[f"{name}: best"] = best("reward/mean", _WINDOW)(rows)
            return over_last("reward/mean", _WINDOW)(rows)

        row["first run"] = reward("first run", collapse, 0)
        saved = Path(scratch) / "first run" / "checkpoints"
        for offset, (name, objective, step) in enumerate(
            (("early restart", collapse, early), ("late restart", collapse, late), ("cured restart", cure, late)), 1
        ):
            start = saved / step_name(step) / "model"
            if start.is_dir():  # a run that a rule ended may not have come so far
                row[name] = reward(name, objective, 1000 * offset, f"model.path={start}", "sft.steps=0")
    return row
