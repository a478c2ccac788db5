"""Who runs the jobs in these tests: root and an ordinary user where both can be had, else the present user."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import sandbox_host as hosts
from sandbox_driver import Here, There

ORDINARY = 65534
ORDINARY_QUICK = {
    "read-host-file", "symlink-to-host-file", "mode-of-host-file", "server-environment", "see-host-processes",
    "signal-host-process", "memory-of-init", "tcp-to-host", "unix-socket-of-host", "abstract-socket-of-host",
    "set-uid-program", "nested-user-namespace", "mount", "chroot", "kernel-settings", "core-limit", "fork-bomb",
    "memory-bomb-of-many", "memory-that-stays-when-unmapped", "memory-of-a-process-without-head", "file-bomb", "many-files",
    "huge-file", "cpu-of-children-that-nobody-waits-for",
}  # fmt: skip
"""Programs of the corpus whose layers an ordinary user gets in another way than root; the rest of them runs among the slow."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        ordinary = "test_nothing_gets_out[" in item.name and parameters.get("user") == "ordinary"
        if ordinary and parameters["name"] not in ORDINARY_QUICK:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", params=["root", "ordinary"])
def user(request: pytest.FixtureRequest) -> str:
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("needs root")
    if request.param == "ordinary" and os.geteuid() == 0 and not hosts.python_for(ORDINARY):
        pytest.skip("no Python that an ordinary user may run")
    return request.param


@pytest.fixture(scope="session")
def uid(user: str) -> int | None:
    """Whom to become; None to stay."""
    return ORDINARY if user == "ordinary" and os.geteuid() == 0 else None


@pytest.fixture(scope="session")
def driver(uid: int | None) -> Iterator[Here | There]:
    made: Here | There
    made = Here() if uid is None else There(hosts.python_for(uid), uid, {"PATH": os.environ["PATH"]})
    yield made
    made.close()


@pytest.fixture(scope="session")
def host(uid: int | None) -> Iterator[hosts.Host]:
    made = hosts.Host(uid)
    yield made
    made.close()
