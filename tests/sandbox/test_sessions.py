"""Forgotten terminal sessions would hold their cages for ever: how many are open, who may use them, when they end.

With sessions that only remember what they were told. Not covered: real shells (test_terminal.py, test_service_http.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping

import pytest

from rollkeel_sandbox import Result, Status
from rollkeel_sandbox.errors import BadInput
from rollkeel_sandbox.partition import Full
from rollkeel_sandbox.records import Conflict, Unknown
from rollkeel_sandbox.sessions import Sessions


class Parrot:
    """A session that repeats its commands; `exit` ends it, `hang` lasts until `go` is set."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.limits, self.closed, self.go = dict(limits), False, threading.Event()
        self.alive = True

    def run(self, command: str, timeout: float) -> Result:
        assert not self.closed
        if command == "hang":
            self.go.wait(timeout)
        self.alive = command != "exit"
        return Result(status=Status.OK, stdout=command.encode())

    def close(self) -> None:
        self.closed = True


class Cage:
    """Opens parrots and keeps them in view."""

    def __init__(self) -> None:
        self.opened: list[Parrot] = []

    def __call__(self, limits: Mapping[str, int]) -> Parrot:
        if limits.get("memory_mb") == 13:
            raise BadInput("no such memory")
        self.opened.append(Parrot(limits))
        return self.opened[-1]


@pytest.fixture
def cage() -> Cage:
    return Cage()


@pytest.fixture
def sessions(cage: Cage) -> Iterator[Sessions]:
    made = Sessions(cage, most=2, idle_s=60.0)
    yield made
    made.close_all()


def test_a_session_lasts_from_command_to_command(sessions: Sessions, cage: Cage) -> None:
    one, two = sessions.open({"memory_mb": 64}), sessions.open({})
    assert sessions.exec(one, "ls", 1.0)[0].stdout == b"ls"
    assert cage.opened[0].limits == {"memory_mb": 64}
    sessions.close(one)
    assert [parrot.closed for parrot in cage.opened] == [True, False]
    with pytest.raises(Unknown):
        sessions.exec(one, "ls", 1.0)
    with pytest.raises(Unknown):
        sessions.close(one)
    assert sessions.exec(two, "ls", 1.0)[1]
    with pytest.raises(BadInput, match="timeout_s"):
        sessions.exec(two, "ls", 601.0)


def test_no_more_than_so_many_are_open_and_failed_ones_do_not_count(sessions: Sessions) -> None:
    for _ in range(5):
        with pytest.raises(BadInput, match="no such memory"):
            sessions.open({"memory_mb": 13})
    first = sessions.open({})
    sessions.open({})
    with pytest.raises(Full, match="2 terminal sessions are open; close one") as caught:
        sessions.open({})
    assert caught.value.retry_after_s > 0
    sessions.close(first)
    assert sessions.open({})
    assert sessions.count() == 2


def test_a_session_does_one_command_at_a_time(sessions: Sessions, cage: Cage) -> None:
    name = sessions.open({})
    thread = threading.Thread(target=sessions.exec, args=(name, "hang", 10.0))
    thread.start()
    while not sessions._open[name].busy:
        time.sleep(0.001)
    for use in (lambda: sessions.exec(name, "ls", 1.0), lambda: sessions.close(name)):
        with pytest.raises(Conflict, match="another command"):
            use()
    cage.opened[0].go.set()
    thread.join()
    assert sessions.exec(name, "ls", 1.0)[0].stdout == b"ls"


def test_a_session_that_ends_itself_makes_room(sessions: Sessions, cage: Cage) -> None:
    name = sessions.open({})
    assert not sessions.exec(name, "exit", 1.0)[1]
    assert cage.opened[0].closed
    assert sessions.count() == 0
    with pytest.raises(Unknown):
        sessions.exec(name, "ls", 1.0)


def test_unused_sessions_are_closed_and_used_ones_are_not(cage: Cage) -> None:
    sessions = Sessions(cage, most=2, idle_s=0.2)
    idle, busy = sessions.open({}), sessions.open({})
    thread = threading.Thread(target=sessions.exec, args=(busy, "hang", 10.0))
    thread.start()
    until = time.monotonic() + 5
    while sessions.count() == 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert [parrot.closed for parrot in cage.opened] == [True, False]
    with pytest.raises(Unknown):
        sessions.exec(idle, "ls", 1.0)
    cage.opened[1].go.set()
    thread.join()
    sessions.close_all()
    assert all(parrot.closed for parrot in cage.opened)
    with pytest.raises(Full, match="shutting down"):
        sessions.open({})


def test_a_service_without_sessions_says_so() -> None:
    for none in (Sessions(None), Sessions(Cage(), most=0)):
        assert not none.available
        with pytest.raises(Unknown, match="has no terminal sessions"):
            none.open({})
