"""Who runs the jobs in these tests: root and an ordinary user where both can be had, else the present user."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import sandbox_host as hosts
from sandbox_driver import Here, There

ORDINARY = 65534


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
