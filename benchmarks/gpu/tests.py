"""Stage 3: the repository's own tests of a card."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.bench import Bench

ROOT = Path(__file__).resolve().parents[2]
WORKERS = 12


def run(bench: Bench) -> None:
    bench.attempt("pytest -m cuda", tests, least=20.0)


def marked() -> list[str]:
    """Files with such tests: others import what a bare machine lacks."""
    folder = ROOT / "tests"
    return [str(f.relative_to(ROOT)) for f in sorted(folder.rglob("test_*.py")) if "mark.cuda" in f.read_text()]


def tests(bench: Bench) -> None:
    if not bench.cuda or importlib.util.find_spec("pytest") is None:
        bench.absent("pytest -m cuda", "no pytest" if bench.cuda else "no card")
        return
    files = [*marked(), "tests/models/gpu"]
    workers = ["-n", str(WORKERS)] if importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", *workers, *files]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    log = bench.out / "tests.txt"
    with log.open("w") as told:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=told, stderr=told, timeout=max(5.0, bench.left - 3)
        )
    last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing was said"]
    bench.check("pytest -m cuda, exit code", float(done.returncode), 0, note=last[0][:200])
