"""How long an engine may be silent is learnt while it is well, or a stopped one is waited for twice as long as it has to be.

Time and Ray are stand-ins here; actors that are really stopped are in test_elastic.py and test_cluster_faults.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollkeel.cluster import engines, pulse
from rollkeel.cluster.engines import _Actor
from rollkeel.cluster.patience import ENOUGH, SLACK_S
from rollkeel.cluster.pulse import SILENT_S, Pulse, awaited


class World:
    """A clock, an actor that answers a ping `delay_s` after it was sent, and whether it is stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, delay_s: float) -> None:
        self.now, self.delay_s, self.stopped, self.pings = 1000.0, delay_s, False, 0
        fake = SimpleNamespace(wait=self.wait, ObjectRef=object)
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in (engines, pulse):
            monkeypatch.setattr(module, "ray", fake)
            monkeypatch.setattr(module, "time", clock)
        lives = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.ping))
        handle = SimpleNamespace(lives=lives, take=SimpleNamespace(remote=lambda: "take"))
        self.actor = _Actor(0, "actor 0", handle=handle, place=("host", 7))

    def ping(self) -> float:
        self.pings += 1
        return float("inf") if self.stopped else self.now + self.delay_s

    def wait(self, calls: list[Any], *, num_returns: int = 1, timeout: float = 0.0) -> tuple[list[Any], list[Any]]:
        self.now += timeout
        done = [c for c in calls if c != "take" and c <= self.now]
        return done[:num_returns], [c for c in calls if c not in done[:num_returns]]

    def used(self, seconds: float, every_s: float) -> None:
        """Asked for messages again and again, without ever waiting."""
        for _ in range(int(seconds / every_s)):
            self.actor.ready(0.0)
            self.now += every_s

    def stop(self) -> float:
        """Seconds of a wait until it is known that the actor is stopped."""
        self.stopped, began = True, self.now
        assert not self.actor.ready(100.0)
        return self.now - began


def test_short_waits_teach_how_long_an_answer_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, delay_s=0.01)
    world.used(30.0, every_s=0.3)
    assert world.actor.pulse.patience.limit_s < SLACK_S + 3
    assert SLACK_S - 1 < world.stop() < SLACK_S + 4


def test_nobody_is_judged_by_fewer_answers_than_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, delay_s=0.01)
    world.used(ENOUGH / 2, every_s=0.3)
    assert world.actor.pulse.patience.limit_s == SILENT_S
    assert SILENT_S - 1 < world.stop() < SILENT_S + 2


def test_an_answer_that_came_while_nobody_looked_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, delay_s=0.01)
    world.used(30.0, every_s=0.3)
    for _ in range(5):
        world.now += 60.0  # an update of the trainer
        world.used(2.0, every_s=0.3)
    assert world.actor.pulse.patience.limit_s < SLACK_S + 3


def test_slow_answers_are_given_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, delay_s=3.0)
    world.used(60.0, every_s=0.3)
    assert 2 * 3.0 + SLACK_S <= world.actor.pulse.patience.limit_s <= 2 * (3.0 + 1.3) + SLACK_S  # seen at the next beat


def test_pings_are_sent_once_a_second_and_not_with_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, delay_s=0.001)
    world.used(20.0, every_s=0.01)
    assert 8 <= world.pings <= 21


NEVER = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: float("inf")))
"""A method of an actor that is stopped."""


def test_who_takes_weights_is_waited_for_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, delay_s=0.01)
    slow, never = world.now + 300.0, float("inf")
    assert awaited({slow: ("a", world.actor.pulse)}, 600.0) == ""
    assert awaited({never: ("a", world.actor.pulse)}, 600.0) == "waited 600 s for engine a to take weights"


def test_who_is_stopped_while_it_takes_weights_is_noticed_long_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, delay_s=0.01)
    well, ill = Pulse(world.actor.handle), Pulse(SimpleNamespace(lives=NEVER))
    began = world.now
    late = awaited({world.now + 5.0: ("a", well), float("inf"): ("b", ill)}, 600.0)
    assert late == f"engine b has said nothing for {SILENT_S:g} s while it was to take weights"
    assert SILENT_S <= world.now - began < SILENT_S + 3


def test_who_is_stopped_before_its_first_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows yet how long its tokens take: what is known is that it does not answer."""
    world = World(monkeypatch, delay_s=0.01)
    actor = world.actor
    actor.free, actor.flying, actor.heard = True, {1: object()}, world.now
    for _ in range(100):
        assert actor.hung(600.0) == 0
        world.now += 0.3
    world.stopped, began = True, world.now
    while not (silent_s := actor.hung(600.0)):
        world.now += 0.3
    assert silent_s == actor.pulse.patience.limit_s
    assert SLACK_S <= world.now - began < SILENT_S + 3
    actor.flying = {}
    assert actor.hung(600.0) == 0
