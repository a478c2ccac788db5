"""The output of an actor in the folder of its run: `actors/NAME.log`, with the stacks of its threads when it is asked for them."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rollkeel.cluster import ACTOR_LOG
from rollkeel.record.runfolder import ACTORS

ASK = signal.SIGUSR1
DUMP_S = 0.5
"""For processes to write their stacks, before they are killed."""


def variables(run: Path, name: str) -> dict[str, str]:
    """Environment of the actor `name` of a run."""
    return {ACTOR_LOG: str(run.resolve() / ACTORS / f"{name}.log")}


def beside(name: str) -> Path | None:
    """Where a program that this actor starts writes its output; None if nobody said it."""
    path = os.environ.get(ACTOR_LOG)
    return Path(path).with_suffix(f".{name}.log") if path else None


def write_there() -> None:
    """From now on this process writes its output where `variables` said, behind what is there; nowhere else if nobody said it."""
    if not (path := os.environ.get(ACTOR_LOG)):
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.register(ASK, all_threads=True)


def write_error() -> None:
    """Print the exception that is being handled. Where the disk is full nothing is printed, and the exception is told as it is."""
    with suppress(OSError):
        traceback.print_exc()


def ask_for_stacks(pids: Iterable[int]) -> str:
    """Have these actors, as far as they are on this machine, write where they stand into their logs, stopped ones too. Says of those
    that are stopped that they are, for a message."""
    asked, stopped = list[int](), list[int]()
    for pid in pids:
        with suppress(OSError, IndexError):
            if not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
                continue
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            stopped += [pid] * (state == "T")
            caught = Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1].split()[0]
            if not int(caught, 16) >> (ASK - 1) & 1:  # it would die of it: another one's, which has that number here
                continue
            os.kill(pid, ASK)
            asked.append(pid)
            if state == "T":
                os.kill(pid, signal.SIGCONT)  # else it writes nothing; it is about to be killed
    if asked:
        time.sleep(DUMP_S)
    return f"; process {', '.join(map(str, stopped))} was stopped by a signal" if stopped else ""
