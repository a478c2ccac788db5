"""One local Ray for all tests of `cluster/`: it takes seconds to start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read when Ray is imported. Without the first it looks for the host's own address, and on a host without one waits for ever.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Ray on the loopback alone, with room for eight actors and a small object store."""
    import ray

    from rollkeel.cluster.stream import STORE

    ray.init(
        address="local",  # without it, whatever cluster left its address in the temporary folder
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=256 << 20,
        _node_ip_address="127.0.0.1",
        _system_config=STORE,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def whole(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run over two ranks and an engine."""
    from cluster_kit import TWO, run_of

    return run_of(tmp_path_factory.mktemp("whole") / "run", *TWO)
