"""Runs the stages one after the other, each in a process that may raise, hang or die, and prints rows as they come."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import ROWS, Bench, append, rows
from benchmarks.gpu.table import line, markdown

LOG, TABLE = "log.txt", "table.md"
STAGES: dict[str, tuple[str, float]] = {
    "probe": ("benchmarks.gpu.probe", 20),
    "kernels": ("benchmarks.gpu.kernels", 50),
    "correctness": ("benchmarks.gpu.correctness", 60),
    "tests": ("benchmarks.gpu.tests", 90),
    "learns": ("benchmarks.gpu.learns", 50),
    "rollout": ("benchmarks.gpu.rollout", 100),
    "training": ("benchmarks.gpu.training", 100),
    "logprob": ("benchmarks.gpu.logprob", 30),
    "sync": ("benchmarks.gpu.sync", 20),
    "step": ("benchmarks.gpu.step", 40),
    "parity": ("benchmarks.gpu.parity", 30),
    "adapters": ("benchmarks.gpu.adapters", 40),
    "shared": ("benchmarks.gpu.shared", 20),
    "peer": ("benchmarks.gpu.peer", 60),
}
"""Name → module with `run(bench)`, and its seconds when the suite has nine minutes."""
MOST, LEAST, TABLE_S = 3.0, 0.3, 4.0
"""How much of its seconds a stage gets where few stages share much time; the share below which it does not start; for the table."""


def run(
    names: list[str],
    minutes: float,
    out: Path,
    device: str,
    toy: bool,
    start: str = "",
    *,
    add: bool = False,
    only: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Every row of the suite. `start`: how processes begin; forked on a CPU, where nothing of CUDA is initialised. `add`: behind the
    rows of an earlier call. `only`: these models, where a stage asks several."""
    out.mkdir(parents=True, exist_ok=True)
    for name in () if add else (ROWS, LOG, TABLE):
        (out / name).unlink(missing_ok=True)
    context: Any = multiprocessing.get_context(start or ("fork" if device == "cpu" else "forkserver"))
    if device != "cpu":
        context.set_forkserver_preload(["benchmarks.gpu.preload"])
    end = time.monotonic() + 60 * minutes - TABLE_S
    wished = sum(STAGES[name][1] for name in names)
    scale = max(1.0, min(MOST, (end - time.monotonic()) / wished))
    shown = len(list(rows(out)))
    for name in names:
        module, seconds = STAGES[name]
        left = end - time.monotonic()
        about = {"stage": name, "row": "stage", "device": device, "toy": toy}
        if left < LEAST * seconds:
            append(
                out,
                {**about, "failed": f"skipped: {max(0.0, left):.0f} s were left of the suite's {minutes:g} minutes"},
            )
            shown = show(out, shown)
            continue
        limit = min(seconds * scale, left)
        begun = time.monotonic()
        child = context.Process(target=enter, args=(name, module, out, device, toy, limit, only))
        child.start()
        while child.is_alive() and time.monotonic() - begun < limit:
            child.join(0.1)
            shown = show(out, shown)
        late = child.is_alive()
        end_group(child.pid)
        child.join()
        whole(out)
        took = time.monotonic() - begun
        failed = f"stage failed: over its {limit:.0f} s" if late else why(child.exitcode, out)
        append(out, {**about, "value": round(took, 2), "unit": "s", **({"failed": failed} if failed else {})})
        shown = show(out, shown)
    told = list(rows(out))
    (out / TABLE).write_text(markdown(told), encoding="utf-8")
    return told


def enter(name: str, module: str, out: Path, device: str, toy: bool, seconds: float, only: Sequence[str]) -> None:
    """In a process of its own: the stage, with everything it prints in the log."""
    os.setsid()
    log = os.open(out / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
    print(f"== {name}", flush=True)
    bare(device)
    import torch

    torch.set_num_threads(1 if device == "cpu" else 8)
    importlib.import_module(module).run(Bench(name, out, device, toy, seconds, only))


def bare(device: str) -> None:
    """Make what travelled importable, and keep kernels for a CPU, which take ten seconds to compile, off an accelerator's clock."""
    if device != "cpu":
        sys.modules["numba"] = None  # type: ignore[assignment]
    folder = Path(os.environ.get("ROLLKEEL_WHEELS", ".whl"))
    if importlib.util.find_spec("pydantic") is None and folder.is_dir():
        into = folder / "unpacked"
        for wheel in sorted(folder.glob("*.whl")):
            zipfile.ZipFile(wheel).extractall(into)
        sys.path.insert(0, str(into))
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def end_group(pid: int | None) -> None:
    """Kill the stage with everything it started."""
    if pid is None:
        return
    for kill in (os.killpg, os.kill):  # it may not have become a group's leader yet
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def why(code: int | None, out: Path) -> str:
    """How a stage ended that did not end well."""
    if code == 0:
        return ""
    if code is not None and code < 0:
        return f"stage failed: killed by {signal.Signals(-code).name}"
    last = [text for text in (out / LOG).read_text(errors="replace").splitlines() if text.strip()][-1:]
    return f"stage failed: {' '.join(last)[:300]}"


def whole(out: Path) -> None:
    """Cut half a line off the rows, which a killed stage may have left."""
    path = out / ROWS
    text = path.read_bytes() if path.exists() else b""
    if text and not text.endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])


def show(out: Path, shown: int) -> int:
    """Print the rows behind the first `shown`; returns how many there are."""
    told = list(rows(out))
    for row in told[shown:]:
        print(line(row), flush=True)
    return len(told)
