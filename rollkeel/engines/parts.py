"""An engine of several parts that decode in processes of their own, whatever carries their messages.

    caller ── submit, advance, run, interrupt, … ──▶ part: one engine, one decode step at a time
       ▲                                              │
       └────────── answers, segments, errors ─────────┘

A call to `submit` is cut into contiguous shares, one per part, which even out what is in flight. A part starts when it is
first polled and then decodes on its own until it is empty; under `advance` it decodes the steps it is told and waits. So what
runs beside what, and with it every bit of the result, depends on the order of messages and on decode steps, not on timing.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from rollkeel.engines.messages import requests_in, requests_out, segments_in, segments_out
from rollkeel.engines.requests import check_requests
from rollkeel.errors import BadInput, EngineFailure, RollkeelError
from rollkeel.models.checksum import MASK
from rollkeel.types import Capabilities, Proof, Request, Segment, Status, TokenSpan

START_S = 180.0


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

    @abstractmethod
    def send(self, message: tuple[Any, ...]) -> None:
        """Raises `OSError` if it is known to be gone."""

    @abstractmethod
    def ready(self, timeout_s: float) -> bool:
        """True as soon as `receive` would not wait."""

    @abstractmethod
    def receive(self) -> tuple[str, Any, int] | None:
        """Kind, value and decode steps of its next message; None for one that only says that it lives. Raises `EOFError` or
        `OSError` if it is gone."""

    def hung(self, deadline_s: float) -> bool:
        """True if it should have said something within `deadline_s`, and has not."""
        return False

    @abstractmethod
    def kill(self) -> None: ...

    @abstractmethod
    def fate(self) -> str:
        """How it ended, behind its name in a message."""


P = TypeVar("P", bound=Part)


class PartedEngine(ABC, Generic[P]):
    """The caller's side: `SteppedEngine` and `CountedEngine`. Requests of a dead part come back as `Status.ENGINE_FAILURE`."""

    noun = "part"

    def __init__(self, vocab_size: int, deadline_s: float) -> None:
        """`deadline_s`: longest wait for an answer. The parts are `self.parts`; they start while others wait for them."""
        self.parts: list[P] = []
        self.shares: list[int] = []
        """Requests that each part got in the last call to `submit`."""
        self._vocab_size, self._deadline_s = vocab_size, deadline_s
        self._version = -1
        self._ready: Capabilities | None = None
        self._done: list[Segment] = []

    @abstractmethod
    def _wait(self, parts: Sequence[P], timeout_s: float) -> Sequence[P]:
        """Those of `parts` that have sent something; waits at most `timeout_s` for the first."""

    @property
    def version(self) -> int:
        return self._version

    @property
    def capabilities(self) -> Capabilities:
        if self._ready is None:
            self._ready = self._answers(self.parts, START_S, "to start")[0]
        assert self._ready is not None
        return self._ready

    @property
    def steps(self) -> list[int | None]:
        """Decode steps of each part when it last sent anything, exact for those that the last call reached; None of a dead
        one."""
        return [None if p.dead else p.steps for p in self.parts]

    def submit(self, requests: Sequence[Request], shares: Sequence[int] | None = None) -> None:
        """See `Engine.submit`. `shares`: how many each part gets; by default as loads even out."""
        flying = [i for part in self.parts for i in part.flying]
        check_requests(requests, flying, self.capabilities, self._vocab_size)
        living = self._living()
        if shares is None:
            even = iter(even_shares([len(p.flying) for p in living], len(requests)))
            shares = [0 if p.dead else next(even) for p in self.parts]
        self.shares = list(shares)
        ends = np.cumsum(self.shares)
        asked = []
        for part, start, end in zip(self.parts, [0, *ends], ends, strict=False):
            if start == end:
                continue
            mine = list(requests[start:end])
            part.flying.update({r.id: r for r in mine})
            self._send(part, ("submit", requests_out(mine), part.free))
            asked.append(part)
        # Requests of a part that died come back as failures, so its silence is no error here.
        self._answers(asked, self._deadline_s, "to take requests", may_die=True)

    def poll(self, timeout_s: float) -> list[Segment]:
        deadline = time.monotonic() + timeout_s
        while not self._done:
            busy = self._busy()
            if not busy:
                break
            paused = [p for p in busy if not p.free]
            for part in paused:
                part.free = True
                self._send(part, ("run",))
            self._answers(paused, self._deadline_s, "to start decoding", may_die=True)
            left = max(0.0, deadline - time.monotonic())
            ready = self._wait(busy, min(left, self._deadline_s))
            for part in ready:
                self._receive(part)
            hung = [p for p in busy if not p.dead and p.hung(self._deadline_s)]
            for part in hung:
                part.kill()
                self._bury(part)
            if not ready and not hung and left <= self._deadline_s:
                break
        done, self._done = self._done, []
        return done

    def advance(self, steps: int) -> list[Segment]:
        """Exactly `steps` decode steps in every part, fewer in one that has nothing left; then what ended, by request id."""
        return self.advance_each([steps] * len(self.parts))

    def advance_each(self, steps: Sequence[int]) -> list[Segment]:
        """The same with a number of its own for each part."""
        asked = self._busy()
        for part in asked:
            part.free = False
            self._send(part, ("advance", steps[part.index]))
        what = f"to decode {max(steps)} steps"
        for told in self._answers(asked, self._deadline_s, what, may_die=True):
            segments = segments_in(told)
            self._done += segments
            ended = {segment.request_id for segment in segments}
            for part in asked:
                part.flying = {i: r for i, r in part.flying.items() if i not in ended}
        done, self._done = sorted(self._done, key=lambda segment: segment.request_id), []
        return done

    def progress(self) -> dict[int, int]:
        """Response tokens that each request in flight has so far, its prefix included, by id."""
        asked = self._busy()
        for part in asked:
            self._send(part, ("progress",))
        told = self._answers(asked, self._deadline_s, "to tell its progress", may_die=True)
        return {request: tokens for part in told for request, tokens in part.items()}

    def _busy(self) -> list[P]:
        """Living parts with something in flight. Raises `EngineFailure` when they have no weights to serve it with."""
        busy = [p for p in self.parts if p.flying and not p.dead]
        if busy and self._version < 0:
            raise EngineFailure("engine local: no proven weights to serve; publish weights before polling")
        return busy

    def interrupt(self, ids: Sequence[int] | None = None) -> None:
        asked = [p for p in self.parts if p.flying and not p.dead]
        for part in asked:
            self._send(part, ("interrupt", ids))
        self._answers(asked, self._deadline_s, "to interrupt", may_die=True)

    # -- one part ------------------------------------------------------------------------------------------------------

    def _living(self) -> list[P]:
        living = [p for p in self.parts if not p.dead]
        if not living:
            raise EngineFailure(f"engine local: no {self.noun} is left ({'; '.join(p.dead for p in self.parts)})")
        return living

    def _proven(self, parts: Sequence[P], version: int, what: str) -> Proof:
        """Wait for every part's proof of `version` and serve it from now on."""
        proofs: list[Proof] = self._answers(parts, self._deadline_s, what)
        if len({(p.version, p.checksum) for p in proofs}) != 1:
            raise EngineFailure(f"engine local: {self.noun}s disagree about the weights they serve: {proofs}")
        self._version = version
        return Proof(version=proofs[0].version, checksum=proofs[0].checksum & MASK)

    def _send(self, part: P, message: tuple[Any, ...]) -> None:
        try:
            part.send(message)
        except OSError:
            self._bury(part)

    def _answers(self, parts: Sequence[P], deadline_s: float, what: str, may_die: bool = False) -> list[Any]:
        """Every part's answer to the last message, all of them read before the first error is raised: an answer that is
        left unread would be taken for that to the next message."""
        answers, errors = [], []
        for part in parts:
            try:
                answers.append(self._answer(part, deadline_s, what))
            except RollkeelError as error:
                if not (may_die and part.dead):
                    errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def _answer(self, part: P, deadline_s: float, what: str) -> Any:
        """The part's answer to the last message; segments that arrive before it are kept."""
        end = time.monotonic() + deadline_s
        while not part.dead:
            if not part.ready(max(0.0, end - time.monotonic())):
                part.kill()
                self._bury(part)
                raise EngineFailure(f"engine {part.name}: waited {deadline_s:g} s for it {what}")
            answer = self._receive(part)
            if answer is not None:
                return answer[0]
        raise EngineFailure(f"engine {part.name}: {part.dead} while waiting for it {what}")

    def _receive(self, part: P) -> tuple[Any] | None:
        """Take one message: segments are filed, an answer is returned, an error raised here."""
        try:
            message = part.receive()
        except (EOFError, OSError):
            self._bury(part)
            return None
        if message is None:
            return None
        kind, value, part.steps = message
        if kind == "segments":
            segments = segments_in(value)
            for segment in segments:
                part.flying.pop(segment.request_id, None)
            part.free = part.free and bool(part.flying)
            self._done += segments
            return None
        if kind == "error":
            raise value
        return (value,)

    def _bury(self, part: P) -> None:
        part.dead = f"{part.name} {part.fate()}"
        for request in part.flying.values():
            self._done.append(
                Segment(request_id=request.id, span=TokenSpan.empty(), status=Status.ENGINE_FAILURE, detail=part.dead)
            )
        part.flying.clear()


def even_shares(loads: Sequence[int], count: int) -> list[int]:
    """How many of `count` new requests each part gets, so that loads end as even as they can; the first get the odd ones."""
    shares = [0] * len(loads)
    for _ in range(count):
        least = min(range(len(loads)), key=lambda i: (loads[i] + shares[i], i))
        shares[least] += 1
    return shares


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
