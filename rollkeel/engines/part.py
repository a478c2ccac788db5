"""One part of an engine of several: what its caller keeps of it and how messages reach it, and the loop that answers them there."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollkeel.engines.messages import requests_in, segments_out
from rollkeel.errors import BadInput, RollkeelError
from rollkeel.types import Request, Segment


@dataclass
class Part(ABC):
    """One part as its caller sees it, and the way to it and back. Messages arrive in the order in which they are sent."""

    index: int
    name: str
    """As messages name it, for example `worker 0`."""
    flying: dict[int, Request] = field(default_factory=dict)
    free: bool = False
    """Decodes on its own: from a poll until nothing is left in flight. Otherwise it waits for `advance`."""
    steps: int = 0
    """Its decode steps when it last sent anything."""
    dead: str = ""
    """Why it is gone; empty while it lives."""
    told: list[tuple[Any, ...]] = field(default_factory=list)
    """Messages since it last had nothing in flight, but those about weights."""
    owes: int = 0
    """Messages of these that it has not answered."""
    given: Counter[int] = field(default_factory=Counter)
    """Segments that it sent since then, by request."""
    repeats: Counter[int] = field(default_factory=Counter)
    """Segments that it will send once more, and that nobody wants again."""
    begun: int = 0
    """Its steps then."""
    before: int = 0
    """Steps of those whose place it took."""
    renewing: bool = False
    """Another one is about to take its place."""

    def begin(self) -> None:
        """It has nothing in flight, and is about to get something."""
        self.told = []
        self.owes = 0
        self.begun = self.steps
        self.given.clear()
        self.repeats.clear()

    def wanted(self, segments: Sequence[Segment]) -> list[Segment]:
        """Those that it did not send before it died."""
        fresh = []
        for segment in segments:
            if self.repeats[segment.request_id]:
                self.repeats[segment.request_id] -= 1
            else:
                self.given[segment.request_id] += 1
                fresh.append(segment)
        return fresh

    @abstractmethod
    def send(self, message: tuple[Any, ...]) -> None:
        """Raises `OSError` if it is known to be gone."""

    @abstractmethod
    def ready(self, timeout_s: float) -> bool:
        """True as soon as `receive` would not wait. False after `timeout_s`, or earlier if its process does not even say that it
        lives."""

    @abstractmethod
    def receive(self) -> tuple[str, Any, int] | None:
        """Kind, value and decode steps of its next message; None for one that only says that it lives. Raises `EOFError` or
        `OSError` if it is gone."""

    @property
    def patience_s(self) -> float:
        """How long to wait for it until `hung` is asked."""
        return math.inf

    def hung(self, deadline_s: float) -> float:
        """For how many seconds it has been silent, if it should have said something within `deadline_s` or earlier; else 0."""
        return 0.0

    @abstractmethod
    def kill(self) -> None: ...

    def give_up(self, after_s: float) -> None:
        """Kill it: it was silent for so long."""
        self.kill()

    @abstractmethod
    def fate(self) -> str:
        """How it ended, behind its name in a message."""


# -- the part's own side -----------------------------------------------------------------------------------------------


class Channel(Protocol):
    """What a part reads and writes, in order."""

    def poll(self, timeout: float, /) -> bool:
        """True if there is a message."""
        ...

    def recv(self) -> Any:
        """The next message; None if what arrived was none for the engine. Raises `EOFError` or `ConnectionError` when the
        caller is gone."""
        ...

    def send(self, message: Any, /) -> None: ...


def serve(engine: Any, channel: Channel, act: Callable[[Any, tuple[Any, ...]], Any]) -> None:
    """A part's life: answer messages, and decode one step whenever there is none. `act` answers the messages about weights."""
    channel.send(("answer", engine.capabilities, 0))
    free = False
    while True:
        # Without weights nothing can be sampled; the caller's poll says so.
        if not (free and engine.busy and engine.version >= 0) or channel.poll(0):
            message = channel.recv()
            if message is None:
                continue
            if message[0] == "close":
                return
            free = _stays_free(message, free)
            try:
                channel.send(("answer", _answer(engine, message, act), engine.steps))
            except RollkeelError as error:
                channel.send(("error", error, engine.steps))  # the message was refused; the engine lives on
            continue
        segments = engine.poll(0)
        free = engine.busy
        if segments:
            channel.send(("segments", segments_out(segments), engine.steps))


def _stays_free(message: tuple[Any, ...], free: bool) -> bool:
    """Whether the part decodes on its own after `message`. The caller decides: it may not know yet that all has ended."""
    return {"run": True, "advance": False}.get(message[0], message[2] if message[0] == "submit" else free)


def _answer(engine: Any, message: tuple[Any, ...], act: Callable[[Any, tuple[Any, ...]], Any]) -> Any:
    if message[0] == "submit":
        engine.submit(requests_in(message[1]))
    elif message[0] == "advance":
        return segments_out(engine.advance(message[1]))
    elif message[0] == "progress":
        return engine.progress()
    elif message[0] == "interrupt":
        engine.interrupt(message[1])
    elif message[0] != "run":
        return act(engine, message)
    return True


def unknown(message: tuple[Any, ...]) -> BadInput:
    """What a part that gets a message of no known kind raises."""
    return BadInput(f"engine: unknown message {message[0]!r}")
