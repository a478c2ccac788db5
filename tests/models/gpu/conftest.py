"""Kernels on both devices: in Triton's interpreter on a machine without a GPU, compiled on one with it (`pytest -m cuda`).

What kernels leave unwritten is NaN. Without Triton these tests fail on Linux: `make test` installs it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from rollkeel.models import gpu

collect_ignore_glob = [] if sys.platform == "linux" else ["test_*.py"]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the kernels of a test run."""
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("no CUDA device" if request.param == "cuda" else "Triton compiles here; run pytest -m cuda")
    monkeypatch.setenv(gpu.SWITCH, "1")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)  # with it, torch fills new memory with NaN
    yield request.param
    torch.use_deterministic_algorithms(False)
