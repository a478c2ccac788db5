"""An engine of several parts that decode in processes of their own, whatever carries their messages.

    caller ── submit, advance, run, interrupt, … ──▶ part: one engine, one decode step at a time
       ▲                                              │
       └────────── answers, segments, errors ─────────┘

A call to `submit` is cut into contiguous shares, one per part, which even out what is in flight. A part starts when it is
first polled and then decodes on its own until it is empty; under `advance` it decodes the steps it is told and waits. So what
runs beside what, and with it every bit of the result, depends on the order of messages and on decode steps, not on timing.

That is also how a part which died comes to the same bits again: another one is told, from its last empty moment on, what it was told.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np

from rollkeel.engines.messages import Segments, requests_out, segments_in
from rollkeel.engines.part import Part
from rollkeel.engines.requests import check_requests
from rollkeel.errors import EngineFailure, RollkeelError
from rollkeel.models.checksum import MASK
from rollkeel.types import Capabilities, Proof, Request, Segment, Status, TokenSpan

START_S = 180.0


P = TypeVar("P", bound=Part)


class PartedEngine(ABC, Generic[P]):
    """The caller's side: `SteppedEngine` and `CountedEngine`. Requests of a dead part come back as `Status.ENGINE_FAILURE`."""

    kind, noun = "local", "part"

    def __init__(self, vocab_size: int, deadline_s: float) -> None:
        """`deadline_s`: longest wait for an answer. The parts are `self.parts`; they start while others wait for them."""
        self.parts: list[P] = []
        self.shares: list[int] = []
        """Requests that each part got in the last call to `submit`."""
        self._vocab_size, self._deadline_s = vocab_size, deadline_s
        self._version = -1
        self._ready: Capabilities | None = None
        self._done: list[Segment] = []
        self._hands_over, self._orphans = False, list[Request]()
        """Whether others take over what a part had that nobody replaces; what they have not taken yet."""
        self._carried: dict[int, TokenSpan] = {}
        """What other parts have sampled of requests in flight, by id."""

    @abstractmethod
    def _wait(self, parts: Sequence[P], timeout_s: float) -> Sequence[P]:
        """Those of `parts` that have sent something; waits at most `timeout_s` for the first."""

    @property
    def version(self) -> int:
        return self._version

    @property
    def capabilities(self) -> Capabilities:
        if self._ready is None:
            self._ready = self._answers(self._living(), START_S, "to start")[0]
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
        self._deal(requests, self.parts, self.shares)

    def _deal(self, requests: Sequence[Request], parts: Sequence[P], shares: Sequence[int]) -> None:
        """Contiguous shares of the requests to these parts."""
        ends = np.cumsum(shares)
        asked = []
        for part, start, end in zip(parts, [0, *ends], ends, strict=False):
            if start == end:
                continue
            mine = list(requests[start:end])
            if not part.flying:
                part.begin()
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
            ready = self._wait(busy, min(left, self._deadline_s, *(p.patience_s for p in busy)))
            for part in ready:
                self._receive(part)
            hung = [(p, s) for p in busy if not p.dead and (s := p.hung(self._deadline_s))]
            for part, silent_s in hung:
                part.give_up(silent_s)
                self._bury(part)
            if not ready and not hung and time.monotonic() >= deadline:
                break
        done, self._done = self._done, []
        return self._whole(done)

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
        for segments in self._answers(asked, self._deadline_s, what, may_die=True):
            self._done += segments
            ended = {segment.request_id for segment in segments}
            for part in asked:
                part.flying = {i: r for i, r in part.flying.items() if i not in ended}
        done, self._done = sorted(self._done, key=lambda segment: segment.request_id), []
        return self._whole(done)

    def progress(self) -> dict[int, int]:
        """Response tokens that each request in flight has so far, its prefix included, by id."""
        asked = self._busy()
        for part in asked:
            self._send(part, ("progress",))
        told = self._answers(asked, self._deadline_s, "to tell its progress", may_die=True)
        return {request: tokens for part in told for request, tokens in part.items()}

    def _busy(self) -> list[P]:
        """Living parts with something in flight. Raises `EngineFailure` when they have no weights to serve it with."""
        while self._orphans:
            self._place_orphans()
        busy = [p for p in self.parts if p.flying and not p.dead]
        if busy and self._version < 0:
            raise EngineFailure(f"engine {self.kind}: no proven weights to serve; publish weights before polling")
        return busy

    def interrupt(self, ids: Sequence[int] | None = None) -> None:
        while self._orphans:
            self._place_orphans()
        asked = [p for p in self.parts if p.flying and not p.dead]
        for part in asked:
            self._send(part, ("interrupt", ids))
        self._answers(asked, self._deadline_s, "to interrupt", may_die=True)

    # -- one part ------------------------------------------------------------------------------------------------------

    def _living(self) -> list[P]:
        living = [p for p in self.parts if not p.dead]
        if not living:
            raise EngineFailure(f"engine {self.kind}: no {self.noun} is left ({'; '.join(p.dead for p in self.parts)})")
        return living

    def _proven(self, parts: Sequence[P], version: int, what: str) -> Proof:
        """Wait for every part's proof of `version` and serve it from now on."""
        proofs: list[Proof] = self._answers(parts, self._deadline_s, what)
        if len({(p.version, p.checksum) for p in proofs}) != 1:
            raise EngineFailure(f"engine {self.kind}: {self.noun}s disagree about the weights they serve: {proofs}")
        self._version = version
        return Proof(version=proofs[0].version, checksum=proofs[0].checksum & MASK)

    def _send(self, part: P, message: tuple[Any, ...]) -> None:
        if message[0] in _REPEATED:
            part.told.append(message)
            part.owes += 1
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
                name, waited_s = part.name, min(deadline_s, deadline_s - end + time.monotonic())
                part.give_up(waited_s)
                self._bury(part)
                if part.dead:
                    raise EngineFailure(f"engine {name}: waited {waited_s:.3g} s for it {what}")
                end = time.monotonic() + deadline_s
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
        kind, said, steps = message
        part.steps = steps + part.before
        value: Any = part.wanted(segments_in(said)) if isinstance(said, Segments) else said
        if kind == "segments":
            for segment in value:
                part.flying.pop(segment.request_id, None)
            part.free = part.free and bool(part.flying)
            self._done += value
            return None
        part.owes = max(0, part.owes - 1)
        if kind == "error":
            raise value
        return (value,)

    def _may_renew(self, part: P) -> bool:
        """Whether another one may take the place of this part, which died."""
        return False

    def _renew(self, part: P) -> None:
        """Put another one there, which serves the same weights. Raises `EngineFailure` if it died, too."""
        raise NotImplementedError

    def _tell_again(self, part: P, owes: int) -> None:
        """Have the one that took its place do what it was told since it last had nothing. The answer to the last message is left
        to whoever waits for it, if anybody does."""
        part.before, part.repeats = part.begun, part.given.copy()
        for number, message in enumerate(part.told, 1 - len(part.told)):
            part.send(message)
            if number < 0 or not owes:
                try:
                    self._answer(part, self._deadline_s, "to begin again")
                except RollkeelError:
                    if part.dead:
                        raise
        part.owes = owes

    def _bury(self, part: P) -> None:
        part.dead = f"{part.name} {part.fate()}"
        if part.renewing:
            return
        if not part.flying:
            part.told = part.told[-1:] if part.owes else []
        part.renewing, owes = True, part.owes
        try:
            while part.dead and self._may_renew(part):
                try:
                    self._renew(part)
                    self._tell_again(part, owes)
                except (
                    EngineFailure,
                    OSError,
                ):  # it is tried again as often as it may be; of other parts the caller must know
                    part.dead = part.dead or f"{part.name} {part.fate()}"
        finally:
            part.renewing = False
        if not part.dead:
            return
        if self._hands_over and any(not p.dead for p in self.parts):
            self._orphans += part.flying.values()
        else:
            self._fail(part.flying.values(), part.dead)
        part.flying.clear()

    def _fail(self, requests: Iterable[Request], why: str) -> None:
        for request in requests:
            self._done.append(
                Segment(request_id=request.id, span=TokenSpan.empty(), status=Status.ENGINE_FAILURE, detail=why)
            )

    def _hand_over(self, part: P) -> None:
        """Stop what this part has in flight, and have the others go on with it, behind its tokens."""
        mine = dict(part.flying)
        if not mine:
            return
        for message, what in ((("interrupt", None), "to interrupt"), (("advance", 0), "to give its requests back")):
            part.free = False
            self._send(part, message)
            for said in self._answers([part], self._deadline_s, what, may_die=True):
                self._done += said if message[0] == "advance" else []
        if not part.dead:
            part.flying.clear()
        done, self._done = self._done, []
        for segment in done:
            if segment.request_id not in mine or segment.status is not Status.INTERRUPTED:
                self._done.append(segment)
                continue
            request, before = mine[segment.request_id], self._carried.get(segment.request_id, TokenSpan.empty())
            self._carried[request.id] = before.append(segment.span)
            self._orphans.append(replace(request, prefix=request.prefix.append(segment.span), kv=segment.kv))

    def _whole(self, segments: Sequence[Segment]) -> list[Segment]:
        """With what other parts had sampled before."""
        return [
            replace(s, span=before.append(s.span)) if (before := self._carried.pop(s.request_id, None)) else s
            for s in segments
        ]

    def _place_orphans(self) -> None:
        """Give what a part that is not replaced had in flight to the others, from where it stood when it was submitted."""
        orphans, self._orphans = self._orphans, []
        living = [p for p in self.parts if not p.dead]
        if not living:
            self._fail(orphans, "; ".join(p.dead for p in self.parts))
            return
        self._deal(orphans, living, even_shares([len(p.flying) for p in living], len(orphans)))


_REPEATED = ("submit", "advance", "run", "interrupt", "progress", "rest")


def even_shares(loads: Sequence[int], count: int) -> list[int]:
    """How many of `count` new requests each part gets, so that loads end as even as they can; the first get the odd ones."""
    shares = [0] * len(loads)
    for _ in range(count):
        least = min(range(len(loads)), key=lambda i: (loads[i] + shares[i], i))
        shares[least] += 1
    return shares
