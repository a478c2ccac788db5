"""Runs of an experiment: read from the store or made in parallel, so that nothing is computed twice.

A run's folder is named by a digest of its resolved config and of the code that computes it. Presets that ask for the same
run share it; an interrupted experiment makes the runs that are missing, and an interrupted run resumes from its checkpoint.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from types import FrameType

from rollkeel import plugins
from rollkeel.config import Config
from rollkeel.errors import BAD_INPUTS, REFUSALS, BadInput, Interrupted, RunStopped
from rollkeel.events import write_atomic
from rollkeel.host import collect_later, signals_blocked
from rollkeel.lab.preset import Arm, Preset, Rows
from rollkeel.recipe import load
from rollkeel.record.runfolder import CONFIG, METRICS, read_rows

_BASE = (
    "eval.every=0",
    "eval.items=16",
    "eval.samples=1",
    "eval.greedy=false",
    "checkpoint.every=50",
    "checkpoint.keep=1",
)
_NOT_COMPUTING = ("report", "lab", "record", "diagnose", "analyzer", "cli", "__main__")
DONE = "done"
"""File in a run's folder that is complete: `done`, or `stopped: <why>`."""
STOPPED = "stopped: "
POLL_S, GRACE_S = 1.0, 60.0
WAIT_S = 3600.0
"""Longest wait for a run that another process is making."""
_ENDING = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run that an experiment needs."""

    arm: str
    seed: int
    folder: Path
    config: Config | None = None
    """Of a training run, resolved, but for `run.dir`."""
    measure: functools.partial[Mapping[str, float]] | None = None
    """What makes the one row of a measurement."""

    @property
    def done(self) -> bool:
        return (self.folder / DONE).is_file()

    @property
    def stopped(self) -> str | None:
        """Why a rule ended the finished run; None if it came to its end."""
        said = (self.folder / DONE).read_text()
        return said.removeprefix(STOPPED) if said.startswith(STOPPED) else None

    @property
    def rows(self) -> Rows:
        return read_rows(self.folder / METRICS)[0]


def plan(preset: Preset, seeds: Sequence[int], store: Path) -> list[Planned]:
    """Every run of the experiment, arm after arm. Raises `BadInput` for a config that cannot be."""
    runs = []
    for arm in preset.arms:
        try:
            made = [_planned(preset, arm, seed, store) for seed in seeds]
            config = made[0].config
            if config is not None and not all(run.done for run in made):
                from rollkeel.loop.check import validate  # which imports torch

                validate(config)
        except BadInput as error:
            raise BadInput(f"lab arm {arm.name}: {error}") from None
        runs += made
    return runs


def _planned(preset: Preset, arm: Arm, seed: int, store: Path) -> Planned:
    if preset.measure is not None:
        words = (*preset.words, *arm.words)
        bound = functools.partial(preset.measure)  # of a partial it is that one
        own = plugins.code(sys.modules[bound.func.__module__])["files"]
        given = (bound.func.__qualname__, bound.args, bound.keywords)
        name = _digest(preset.name, repr(words), str(seed), code_digest("lab"), repr(own), repr(given))
        return Planned(
            arm=arm.name, seed=seed, folder=store / name, measure=functools.partial(preset.measure, words, seed)
        )
    config = load(None, [*_BASE, *preset.words, *arm.words, f"run.seed={seed}", "run.name=lab"])
    own = plugins.digests(config.model_dump())
    return Planned(arm=arm.name, seed=seed, folder=store / _digest(config.to_yaml(), repr(own)), config=config)


def _digest(*parts: str) -> str:
    """Name of a run: of what it is and of what computes it."""
    return hashlib.sha256("\0".join((*parts, code_digest())).encode()).hexdigest()[:16]


@functools.cache
def code_digest(place: str | None = None) -> str:
    """Of every module that a run's numbers can depend on, or of those in one place."""
    root, found = Path(__file__).resolve().parent.parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        where = file.relative_to(root).parts[0].removesuffix(".py")
        if where == place or (place is None and where not in _NOT_COMPUTING):
            found.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return found.hexdigest()


def execute(runs: Sequence[Planned], jobs: int, tell: Callable[[Planned, str], None]) -> None:
    """Make the runs that are missing, `jobs` at once, each in a process of its own; `tell(run, what)` after each: `found`,
    `done` or `stopped: <why>`.

    A run that a rule stopped (collapse into non-finite numbers, nothing left to learn) counts as done: its rows are its
    result. Raises `Interrupted` on Ctrl-C once every run has written its checkpoint, and `RunStopped` naming a run that broke.
    """
    todo = list({run.folder: run for run in runs if not run.done}.values())
    missing = {run.folder for run in todo}
    for run in runs:
        if run.folder not in missing:
            tell(run, "found")
    running: list[_Worker] = []
    signals = _Signals()
    with signals.taken():
        try:
            while todo or running:
                while todo and len(running) < jobs:
                    with signals.held():
                        running.append(_Worker(todo.pop(0)))
                connection.wait([worker.process.sentinel for worker in running], timeout=POLL_S)
                for worker in [w for w in running if not w.process.is_alive()]:
                    running.remove(worker)
                    tell(worker.run, worker.said())
        except KeyboardInterrupt:
            count = len(todo) + len(running)
            raise Interrupted(f"stopped; {count} runs are missing, start the command again to resume") from None
        finally:
            for worker in running:
                worker.process.terminate()  # a run takes it as Ctrl-C: it saves and ends
            for worker in running:
                worker.end()


class _Signals:
    """SIGTERM ends the runs as Ctrl-C does, or they would run on alone; and both do where a shell in the background had
    them ignored, as `rollkeel train` takes them too."""

    def __init__(self) -> None:
        self._holding = self._came = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Both raise `KeyboardInterrupt` in here."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only there may handlers be set
            return
        before = [signal.signal(number, self._handle) for number in _ENDING]
        try:
            yield
        finally:
            for number, handler in zip(_ENDING, before, strict=True):
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """They wait while a worker is started: cut short, it would end with a traceback, or run on unknown to this
        process. The worker starts with them blocked, too (see `_work`); here the block is not enough, as another thread may
        take a signal."""
        with signals_blocked(*_ENDING):
            self._holding = True
            try:
                yield
            finally:
                self._holding = False
        if self._came:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._holding:
            raise KeyboardInterrupt
        self._came = True


class _Worker:
    """A process that makes one run; to be started under `_Signals.held`."""

    def __init__(self, run: Planned) -> None:
        context = multiprocessing.get_context("spawn")
        self.run = run
        self._receive, send = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(run, send), daemon=False)
        self.process.start()
        send.close()

    def said(self) -> str:
        """What the run came to. Raises `RunStopped` if it broke, `BadInput` if it was refused."""
        try:
            kind, text = self._receive.recv() if self._receive.poll() else ("broke", "")
        except EOFError:
            kind, text = "broke", ""
        if kind != "done":
            reason = text or f"its process ended with code {self.process.exitcode}"
            raised = BadInput if kind == "refused" else RunStopped
            raise raised(f"lab run {self.run.arm}, seed {self.run.seed} ({self.run.folder}): {reason}")
        return text

    def end(self) -> None:
        self.process.join(GRACE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _work(run: Planned, send: connection.Connection) -> None:
    """In the worker: no output, one thread, and no signal from the terminal, whose Ctrl-C is for the parent."""
    collect_later()
    os.setsid()
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    try:
        send.send(("done", _make(run)))
    except REFUSALS as error:
        send.send(("refused" if isinstance(error, BAD_INPUTS) else "broke", str(error)))
    except Exception as error:  # the parent says it: nothing here has a terminal
        send.send(("broke", f"{type(error).__name__}: {' '.join(str(error).split())}"))


def _make(run: Planned) -> str:
    """Train, resume or measure the run; returns the text of its `DONE`."""
    with _only_here(run.folder):
        if run.done:
            return (run.folder / DONE).read_text()
        said = "done"
        if run.measure is not None:
            run.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(run.folder / METRICS, json.dumps({"step": 0, **run.measure()}) + "\n")
        elif run.config is not None:
            said = _train(run.config, run.folder)
        write_atomic(run.folder / DONE, said)
        return said


@contextmanager
def _only_here(folder: Path) -> Iterator[None]:
    """No two processes make one run: the second waits for the first. Raises `RunStopped` after an hour."""
    with folder.with_suffix(".lock").open("w") as file:
        end = time.monotonic() + WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise RunStopped(f"another process has been making it for {WAIT_S:g} s; end that first") from None
                time.sleep(POLL_S)
        yield


def _train(config: Config, folder: Path) -> str:
    from rollkeel.loop.job import train

    saved = folder / "checkpoints"
    try:
        if (folder / CONFIG).is_file() and saved.is_dir() and any(saved.glob("step_*")):
            train(load(folder / CONFIG), resume=folder)
        else:  # an attempt that was killed before its first checkpoint left nothing to resume from
            if folder.exists():
                shutil.rmtree(folder)
            train(config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folder)})}))
    except RunStopped as error:
        return f"{STOPPED}{error}"
    return "done"
