"""Shared test set-up: one CPU thread, decided before torch is imported anywhere, one cache of warm starts, and property tests
whose examples depend on nothing but the code; `make test-explore` draws new ones."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where warm starts of all tests are kept, those of other workers too; never the user's own cache."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "rollkeel-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLKEEL_CACHE", str(root))
        yield root
