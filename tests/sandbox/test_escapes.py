"""A sandbox is worth what it stops. Every program of the corpus is run twice: with all layers it must achieve nothing, and
with the layers that stop it switched off it must succeed, or it would prove nothing. As root and as an ordinary user.

Not covered: bugs of the kernel itself, side channels, and machines where some layer does not hold (the level says so there).
"""

from __future__ import annotations

import pytest
import sandbox_escapes
from sandbox_driver import Here, There
from sandbox_host import Host

from rollkeel_sandbox import Job, Level, Result, Status, probe
from rollkeel_sandbox.plan import NAMESPACES

BY_NAME = {e.name: e for e in sandbox_escapes.CORPUS}
GRACE_S = 0.5


def attempt(escape: sandbox_escapes.Escape, driver: Here | There, host: Host, without: tuple[str, ...]) -> Result:
    host.reset()
    job = Job(source=escape.program(host.words()), limits=escape.limits, files=escape.files)
    return driver.run(job, without)


@pytest.mark.skipif(probe().plan().level < Level.NAMESPACES, reason="namespaces do not hold on this machine")
@pytest.mark.parametrize("name", BY_NAME)
def test_nothing_gets_out(name: str, driver: Here | There, host: Host) -> None:
    escape = BY_NAME[name]
    result = attempt(escape, driver, host, ())
    assert result.level >= Level.NAMESPACES
    assert b"ESCAPED" not in result.stdout
    assert result.status is not Status.KILLED
    assert result.wall_s <= escape.limits.wall_s + GRACE_S
    assert not host.victim_dead(b"", wait_s=0.5 if escape.canary == "victim_dead" else 0)
    for check in ("secret_printed", "mark_written", "file_deleted", "mode_changed", "time_changed", "victim_slowed"):
        assert not getattr(host, check)(result.stdout + result.stderr), check
    for check in ("tcp_reached", "udp_reached", "unix_reached", "abstract_reached"):
        assert not getattr(host, check)(b""), check


@pytest.mark.skipif(probe().plan().level < Level.NAMESPACES, reason="namespaces do not hold on this machine")
@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_it_would_without_the_layers_that_stop_it(name: str, driver: Here | There, host: Host, user: str) -> None:
    escape = BY_NAME[name]
    if user == "ordinary" and not escape.ordinary:
        pytest.skip("nothing to gain for an ordinary user")
    result = attempt(escape, driver, host, escape.layers(user))
    assert b"ESCAPED" in result.stdout, (result.status, result.stderr[-400:])
    if escape.canary:
        assert getattr(host, escape.canary)(result.stdout), escape.canary
    assert result.level < Level.FULL


OPEN_WHERE_RESTRICTED = {
    "see-host-processes": "process numbers are the host's, though nothing about them can be read",
    "file-bomb": "the scratch folder is the host's, so only single files are limited",
    "many-files": "as above",
}


@pytest.mark.skipif(probe().plan(("user",)).level < Level.RESTRICTED, reason="Landlock does not hold on this machine")
@pytest.mark.skipif(probe().landlock_abi < 6, reason="this Landlock lets signals and abstract sockets out")
@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_where_namespaces_are_blocked(name: str, driver: Here | There, host: Host, user: str) -> None:
    # Without its user namespace an ordinary user has no others; root keeps the uid per job.
    if user == "root" and not probe().plan(NAMESPACES).readable:
        pytest.skip("jobs of root's have no way to this Python without a root of their own")
    result = attempt(BY_NAME[name], driver, host, NAMESPACES if user == "root" else ("user",))
    assert result.level is Level.RESTRICTED
    assert (b"ESCAPED" in result.stdout) == (name in OPEN_WHERE_RESTRICTED)


def test_names_are_unique_and_layers_known() -> None:
    assert len(BY_NAME) == len(sandbox_escapes.CORPUS)
    for escape in sandbox_escapes.CORPUS:
        assert escape.layers("root")
        assert escape.layers("ordinary")
        probe().plan((*escape.layers("root"), *escape.layers("ordinary")))  # an unknown layer raises
