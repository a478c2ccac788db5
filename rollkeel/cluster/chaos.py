"""`rollkeel chaos`: real faults in a real run over Ray on this machine, and what became of them.

rollkeel train … (a process of its own) ── events.jsonl ──▶ who lives, in which step
         ▲                                                        │
         └── SIGKILL, SIGSTOP to an actor, or to itself ◀── drawn ┘

A killed controller is started again with `--resume`. `slow` stops an actor for four fifths of the time for a while: that nobody may notice.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollkeel.cluster.audit import audit
from rollkeel.config import Config
from rollkeel.errors import BadInput, nearest
from rollkeel.record.run_config import EVENTS, digest

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "slow": signal.SIGSTOP}
PARTS = {"rank": "trainer-", "engine": "engine-", "grader": "grader-"}
CONTROLLER = "controller"
NOTICED = ("engine_lost", "grader_lost", "restarted", "actor_lost", "resumed")
WELL = ("stage", "engine_renewed", "engine_joined", "grader_renewed", "ranks_restarted")
"""Events that say that the run goes on."""
LOOK_S = 0.02
SLOW_S, RUNS_S, STANDS_S = 5.0, 0.05, 0.2
"""How long an actor is slow, and how long it runs and stands in turn."""
PATIENCE_S = 300.0
"""Until a fault that nobody noticed is given up, and the next one comes."""


@dataclass
class Incident:
    """A fault that was injected."""

    fault: str
    actor: str
    step: int
    time: float
    noticed_s: float | None = None
    """Until the run's log says so; None if it never did."""
    goes_on_s: float | None = None
    """Until the next stage of a step begins."""


def parsed(faults: str) -> list[tuple[str, str]]:
    """`kill:rank,stop:engine` as pairs. Raises `BadInput`."""
    known = [*(f"{kind}:{part}" for kind in SIGNALS for part in PARTS), f"kill:{CONTROLLER}"]
    for text in faults.split(","):
        if text not in known:
            raise BadInput(f"--faults {text!r}: expected some of {', '.join(known)}{nearest(text, known)}")
    return [(kind, part) for kind, _, part in (text.partition(":") for text in faults.split(","))]


def events(run: Path) -> list[dict[str, Any]]:
    """Whole lines of the run's log so far."""
    return Log(run)()


class Log:
    """A run's log, asked again and again: only what is new is read, since who reads takes processor time from the run."""

    def __init__(self, run: Path) -> None:
        self._file, self._size = run / EVENTS, 0
        self._seen = list[dict[str, Any]]()

    def __call__(self) -> list[dict[str, Any]]:
        """Whole lines so far."""
        with suppress(OSError), self._file.open("rb") as file:
            file.seek(self._size)
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._seen += map(json.loads, whole.splitlines())
            self._size += len(whole)
        return self._seen


class Chaos:
    """Injects `count` faults into the run of `words`, at moments drawn by `seed`, `every_s` apart on average."""

    def __init__(self, words: Sequence[str], run: Path, faults: Sequence[tuple[str, str]], seed: int) -> None:
        self.run, self.incidents = run, list[Incident]()
        self._words = list(words)
        self._faults = list(faults)
        self._log = Log(run)
        self._draw = random.Random(seed)

    def __call__(self, count: int, every_s: float, say: Callable[[str], None]) -> int:
        """Exit code of the run."""
        process = self._begun(*self._words, f"run.dir={self.run}")
        try:
            while len(self.incidents) < count and self._one(process, every_s):
                if self.incidents[-1].actor == CONTROLLER:
                    process.wait()
                    process = self._begun("--resume", str(self.run))
                self._until(process, lambda seen: self._followed(seen, self.incidents[-1]), PATIENCE_S)
                say(line(self.incidents[-1]))
            return process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise

    def _begun(self, *words: str) -> subprocess.Popen[Any]:
        command = [sys.executable, "-m", "rollkeel", "train", *words]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)

    def _one(self, process: subprocess.Popen[Any], every_s: float) -> bool:
        """Inject a fault; False if the run ended before."""
        since, until = self.incidents[-1].time if self.incidents else 0.0, 0.0
        while self._until(process, lambda seen: self._ready(seen, since)):
            until = until or time.monotonic() + self._draw.uniform(0, 2 * every_s)
            while process.poll() is None and time.monotonic() < until:
                time.sleep(LOOK_S)
            if process.poll() is not None:
                return False
            seen = self._log()  # again: somebody may have died of the last fault only now
            if self._ready(seen, since) and self._struck(seen, process.pid):
                return True
            time.sleep(LOOK_S)
        return False

    def _struck(self, seen: Sequence[Mapping[str, Any]], controller: int) -> bool:
        """Harm one of those that live; False if there is none of the kind that was drawn."""
        kind, part = self._draw.choice(self._faults)
        told = {e["name"]: e["pid"] for e in seen if e["event"] == "actor"}
        pids = {name: pid for name, pid in told.items() if ours(pid)} | {CONTROLLER: controller}
        actors = sorted(name for name in pids if name.startswith(PARTS.get(part, part)))
        if not actors:
            return False
        actor = self._draw.choice(actors)
        incident = Incident(kind, actor, max(e["step"] for e in seen if e["event"] == "stage"), time.time())
        if harmed := _harm(pids[actor], kind):
            self.incidents.append(incident)
        return harmed

    def _ready(self, seen: Sequence[Mapping[str, Any]], since: float) -> bool:
        """A step is under way, with actors that the last fault did not strike."""
        begun = [i for i, e in enumerate(seen) if e["event"] == "stage" and e["stage"] != "sft" and e["time"] > since]
        return bool(begun) and not any(e["event"] in NOTICED for e in seen[begun[-1] :])

    def _followed(self, seen: Sequence[Mapping[str, Any]], incident: Incident) -> bool:
        after = [e for e in seen if e["time"] > incident.time]
        noticed = next((i for i, e in enumerate(after) if e["event"] in NOTICED), None)
        if noticed is None:
            return incident.fault == "slow" and any(
                e["event"] == "stage" and e["time"] > incident.time + SLOW_S for e in after
            )
        incident.noticed_s = after[noticed]["time"] - incident.time
        later = [e for e in after[noticed:] if e["event"] in WELL]
        if later:
            incident.goes_on_s = later[0]["time"] - incident.time
        return bool(later)

    def _until(
        self,
        process: subprocess.Popen[Any],
        wanted: Callable[[list[dict[str, Any]]], bool],
        patience_s: float = float("inf"),
    ) -> bool:
        """Wait for something in the log; False if the run ended without it, or so much time passed."""
        end = time.monotonic() + patience_s
        while process.poll() is None and time.monotonic() < end:
            if wanted(self._log()):
                return True
            time.sleep(LOOK_S)
        return wanted(self._log())


def ours(pid: int) -> bool:
    """Whether it is an actor that lives."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        return False


def _harm(pid: int, kind: str) -> bool:
    """False if it has just died by itself."""
    end = time.monotonic() + SLOW_S
    try:
        os.kill(pid, SIGNALS[kind])
        while kind == "slow" and time.monotonic() < end:
            time.sleep(STANDS_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(RUNS_S)
            os.kill(pid, SIGNALS[kind])
        if kind == "slow":
            os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return False
    return True


def line(incident: Incident) -> str:
    """An incident for people."""
    never = "nobody was taken for dead" if incident.fault == "slow" else "never noticed"
    noticed = never if incident.noticed_s is None else f"noticed after {incident.noticed_s:6.2f} s"
    on = "" if incident.goes_on_s is None else f", went on after {incident.goes_on_s:6.2f} s"
    return f"step {incident.step:4}  {incident.fault} {incident.actor:10} {noticed}{on}"


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of the model's files, but for its card, which names the run."""
    files = sorted(file for file in (run / "model").iterdir() if file.suffix != ".md")
    return {file.name: digest(file.read_bytes()) for file in files}


def chaos(
    config: Config,
    words: Sequence[str],
    faults: str,
    count: int,
    every_s: float,
    seed: int,
    compare: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Do it. `compare`: run the recipe once more without faults, and say whether it comes to the same model.

    Raises `BadInput` for a run that is no cluster's, and for one that ended before a fault was injected."""
    wanted = parsed(faults)
    if not config.clustered or config.cluster.address is not None:
        raise BadInput(
            "chaos: expected a run over a Ray of its own; add cluster.trainers=2 cluster.engines=1 and no cluster.address"
        )
    if compare and config.run.loop == "async":
        raise BadInput("chaos --compare: two runs of run.loop=async never have the same bits; compare sync or budgeted")
    if any(part == "grader" for _, part in wanted) and not config.cluster.graders:
        raise BadInput("chaos --faults: the run has no actors that grade; set cluster.graders, or leave the grader out")
    if config.run.dir is None:
        raise BadInput("chaos: expected run.dir=FOLDER, which says where the run is written")
    run = Path(config.run.dir)
    kept = [word for word in words if not word.startswith("run.dir=")]
    made, start = Chaos(kept, run, wanted, seed), time.monotonic()
    code = made(count, every_s, say)
    found: dict[str, Any] = {
        "incidents": [vars(i) for i in made.incidents],
        "exit_code": code,
        "seconds": time.monotonic() - start,
    }
    last = events(run)[-1:] or [{}]
    found["status"] = last[0].get("status", "died")
    found["noticed"] = sum((i.noticed_s is None) == (i.fault == "slow") for i in made.incidents)
    if not made.incidents:
        raise BadInput(f"chaos: the run ended ({found['status']}, exit code {code}) before the first fault; see {run}")
    if compare and code == 0:
        whole, start = run.with_name(run.name + "-undisturbed"), time.monotonic()
        Chaos(kept, whole, wanted, seed)(0, every_s, say)
        found |= {"undisturbed_seconds": time.monotonic() - start, "same_model": digests(run) == digests(whole)}
    if config.report.rollouts:
        found["audit"] = {**vars(told := audit(run, config)), "fits": told.fits, "line": str(told)}
    return found


def summary(found: Mapping[str, Any]) -> str:
    """The last line for people."""
    told = f"{len(found['incidents'])} faults, {found['noticed']} noticed; the run is {found['status']}, {found['seconds']:.0f} s"
    if "same_model" in found:
        same = "the same model" if found["same_model"] else "another model"
        told += f"; without faults {found['undisturbed_seconds']:.0f} s and {same}"
    return told + (f"; {found['audit']['line']}" if "audit" in found else "")
