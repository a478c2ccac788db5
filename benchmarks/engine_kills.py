"""What it costs that an engine is killed again and again: trained steps per second with and without, in one run.

    python -m benchmarks.engine_kills                                    # 20 minutes of kills, one every 30 s, and as long without
    python -m benchmarks.engine_kills --minutes 1 --every 15 run.loop=sync    # does it run; words change the run

One run over Ray on this machine, two engines by default. Windows of `--window` seconds take turns: in every other one an engine is killed with
SIGKILL every `--every` seconds. The lost share of steps is compared with what the log accounts for: from the beginning of the
stage that was struck (lost work) to the moment at which another engine serves. In `run.loop=async` the other engine goes on meanwhile, so that a
lost engine accounts for its share of the engines only; if none is left, the run goes back to its newest checkpoint, and all of that time counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollkeel.cluster.chaos import events, ours

TINY = [
    "data.options.digits=2", "sft.steps=60", "sft.lr=1e-2", "sampling.max_new_tokens=8", "rollout.prompts=16", "rollout.samples=8",
    "eval.every=0", "eval.items=8", "eval.samples=2", "checkpoint.every=50", "report.rollouts=false", "run.steps=1000000",
    "cluster.trainers=1", "cluster.engines=2", "cluster.restarts=1000", "run.loop=async",
]  # fmt: skip


TICK_S = 0.1


def until(process: subprocess.Popen[Any], run: Path, begun: int) -> None:
    """Wait for so many steps."""
    while sum(e.get("stage") == "update" for e in events(run)) < begun:
        if process.poll() is not None:
            raise SystemExit(f"the run ended with exit code {process.returncode}")
        time.sleep(0.2)


class Kill(NamedTuple):
    at: float
    name: str


def kill(run: Path, draw: random.Random) -> Kill | None:
    """SIGKILL to an engine that lives; None if all of them are away."""
    engines = {e["name"]: e["pid"] for e in events(run) if e["event"] == "actor" and e["name"].startswith("engine-")}
    living = [name for name, pid in sorted(engines.items()) if ours(pid)]
    if not living:
        return None
    name = draw.choice(living)
    os.kill(engines[name], signal.SIGKILL)
    return Kill(time.time(), name)


def measured(run: Path, process: subprocess.Popen[Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Windows in turn, without and with kills."""
    draw, windows, end = random.Random(0), list[dict[str, Any]](), time.time() + 2 * 60 * args.minutes
    while time.time() < end:
        window: dict[str, Any] = {"begin": time.time(), "kills": []}
        kills = len(windows) % 2 == 1
        while time.time() < window["begin"] + args.window:
            due = kills and time.time() >= window["begin"] + args.every * len(window["kills"])
            if due and (struck := kill(run, draw)):
                window["kills"].append(struck)
            if process.poll() is not None:
                raise SystemExit(f"the run ended with exit code {process.returncode}")
            time.sleep(0.1)
        windows.append({**window, "end": time.time(), "disturbed": kills})
    return windows


def accounted(
    seen: Sequence[Mapping[str, Any]], windows: Sequence[Mapping[str, Any]], share: float
) -> tuple[float, list[float]]:
    """Seconds of these windows that their kills account for, and how long each engine was away."""
    end, lost = seen[-1]["time"], list[tuple[float, float, float]]()
    away = list[float]()
    for at, name in (one for w in windows for one in w["kills"]):
        served = [e["time"] for e in seen if e["event"] in ("engine_renewed", "engine_joined") and e["name"] == name]
        back = min((time for time in served if time > at), default=end)
        began = [e["time"] for e in seen if e["event"] == "stage" and e["stage"] == "rollout" and e["time"] <= at]
        away.append(back - at)
        lost.append((max(began, default=at), back, share))
    for gone in (e["time"] for e in seen if e["event"] == "restarted"):  # behind the last engine: nothing goes on
        stages = [e["time"] for e in seen if e["event"] == "stage" and e["time"] > gone]
        lost.append((gone, min(stages, default=end), 1.0))
    grid = np.concatenate([np.arange(w["begin"], w["end"], TICK_S) for w in windows])
    total = sum(part * ((grid >= first) & (grid < last)) for first, last, part in lost)
    return TICK_S * float(np.minimum(total, 1.0).sum()), away


def trained(seen: Sequence[Mapping[str, Any]]) -> list[float]:
    """When each step was trained; one that a restart repeats, for the first time."""
    highest, out = 0, list[float]()
    for e in seen:
        if e["event"] == "stage" and e["stage"] == "update" and e["step"] > highest:
            highest = e["step"]
            out.append(e["time"])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="with kills; as many without")
    parser.add_argument("--every", type=float, default=30.0)
    parser.add_argument("--window", type=float, default=120.0)
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    words = [*TINY, *args.words]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "rollkeel", "train", *words, f"run.dir={run}"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
            try:
                until(process, run, 5)
                windows = measured(run, process, args)
                seen = events(run)
            finally:
                process.send_signal(signal.SIGINT)
    steps = trained(seen)
    rates, spans = dict[bool, float](), dict[bool, float]()
    for disturbed in (False, True):
        some = [w for w in windows if w["disturbed"] == disturbed]
        spans[disturbed] = sum(w["end"] - w["begin"] for w in some)
        rates[disturbed] = sum(w["begin"] <= t < w["end"] for w in some for t in steps) / spans[disturbed]
    engines = next(int(w.split("=")[1]) for w in reversed(words) if w.startswith("cluster.engines="))
    alone = any(w == "run.loop=async" for w in [w for w in words if w.startswith("run.loop=")][-1:])
    total, away = accounted(seen, [w for w in windows if w["disturbed"]], 1 / engines if alone else 1.0)
    lost = 1 - rates[True] / rates[False]
    print(
        f"{len(away)} kills in {spans[True]:.0f} s; {rates[False]:.3f} steps/s without, {rates[True]:.3f} with: {lost:.1%} lost, the log"
        f" accounts for {total / spans[True]:.1%}; an engine was away for {sum(away) / max(1, len(away)):.1f} s (mean), {max(away, default=0):.1f} s"
        " at most"
    )
    print(
        json.dumps(
            {"lost": lost, "accounted": total / spans[True], "away_s": away, "steps_s": [rates[False], rates[True]]}
        )
    )


if __name__ == "__main__":
    main()
