"""The output of an actor in the folder of its run: `actors/NAME.log`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rollkeel.record.runfolder import ACTORS

VARIABLE = "ROLLKEEL_ACTOR_LOG"
"""In an actor's environment: the file that its output goes to."""


def variables(run: Path, name: str) -> dict[str, str]:
    """Environment of the actor `name` of a run."""
    return {VARIABLE: str(run.resolve() / ACTORS / f"{name}.log")}


def write_there() -> None:
    """From now on this process writes its output where `variables` said, behind what is there; nowhere else if nobody said it."""
    if not (path := os.environ.get(VARIABLE)):
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
