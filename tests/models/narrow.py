"""Tests of kernels as on a processor whose vectors hold eight floats, on one that has wider ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

NARROW = (
    "import sys, llvmlite.binding as b; found = b.get_host_cpu_features(); found['avx512f'] = False;"
    " b.get_host_cpu_features = lambda: found; import pytest; from rollkeel.models import tiles;"
    " assert tiles.LANES == 8; sys.exit(pytest.main(sys.argv[1:]))"
)


def passes(cache: Path, *words: str | Path) -> None:
    """Run what pytest makes of these `words`, but slow tests, and have it pass. `cache`: for kernels, empty."""
    command = [sys.executable, "-c", NARROW, "-q", "-p", "no:xdist", "-m", "not slow", *map(str, words)]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
