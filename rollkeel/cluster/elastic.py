"""Engines that join and leave a run while it goes on, between two publications and behind proven weights.

    wanted ─▶ too many: the last ones hand over what they have in flight, and end
              too few:  others start where there are places, and nobody waits; once started, they join at a publication

What was sampled does not depend on who sampled it: in the loop `sync` the number of engines changes no token. Log-probs differ in their last
bits, which depend on the size of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rollkeel.cluster.engine_actor import BEAT_S
from rollkeel.cluster.engines import UNPLACED, ActorEngine, _Actor
from rollkeel.cluster.pulse import SILENT_S
from rollkeel.cluster.stream import Feed
from rollkeel.config import EngineConfig
from rollkeel.engines.parts import START_S
from rollkeel.errors import EngineFailure, RankLost, RollkeelError
from rollkeel.types import Proof, Segment, WeightUpdate


@dataclass(frozen=True)
class Seats:
    """Places for engines, by number."""

    take: Callable[[int], Mapping[str, Any]]
    """Ray's options for an engine there. The place is asked for, and may come later."""
    there: Callable[[int], bool]
    """Whether it has come, and its node lives."""
    leave: Callable[[int], None]
    """Give it back."""


class ElasticEngine(ActorEngine):
    """An `ActorEngine` with as many actors as are wanted now.

    An actor that dies is replaced, `renewals` times in all, as long as there is a place for another one or no other engine lives.
    Else the others take over what it had in flight, and it joins again once there is a place."""

    def __init__(
        self,
        hf_config: Any,
        config: EngineConfig,
        seats: Seats,
        count: int,
        *,
        wanted: Callable[[], int],
        least: int = 1,
        **options: Any,
    ) -> None:
        """Start `count` actors, which are waited for, and the others that are wanted, which are not. `wanted`: asked at every
        publication; `least`: a publication to fewer raises `EngineFailure`."""
        self._seats = seats
        self._wanted = wanted
        self._least = least
        super().__init__(hf_config, config, [seats.take(index) for index in range(count)], **options)
        self._hands_over = True
        if count:
            self._fit(max(least, wanted()))

    def close(self) -> None:
        """Nothing: actors outlive the run that polls them, see `end`."""

    def empty(self) -> None:
        """Drop everything in flight; weights of any version may come next."""
        with suppress(RollkeelError):
            self._version = 0  # what they decode is dropped, whatever it is
            self.interrupt()
            self.advance(0)
        self._done = []
        self._orphans = []
        self._version = -1
        self._carried.clear()
        asked = self._here()
        for part in asked:
            part.flying.clear()
            self._send(part, ("rewind",))
        self._answers(asked, self._deadline_s, "to forget its weights", may_die=True)

    def end(self) -> None:
        """End all actors."""
        self.tell = lambda what, part: None  # nothing is lost any more
        for part in self.parts:
            if part.starting:
                part.kill()
        super().close()

    # -- between publications ------------------------------------------------------------------------------------------

    def _goes_on(self) -> bool:
        return True  # `_join` raises if there are too few

    def _here(self) -> list[_Actor]:
        return [p for p in self.parts if not p.dead]

    def _join(self) -> None:
        """As many engines as are wanted, as far as there are places. Those are waited for without which there are too few, and in
        loops whose clock is decode steps those that take the place of lost ones."""
        wanted, end = max(self._least, self._wanted()), time.monotonic() + START_S
        lost = [p.index for p in self.parts if p.dead and not (p.left or p.starting)] if self.again else []
        self._fit(wanted)
        while late := [p for p in self.parts if p.starting and (p.index in lost or len(self._here()) < self._least)]:
            if not any(map(self._seats.there, [p.index for p in late])) and len(self._here()) >= self._least:
                break
            if time.monotonic() > end:
                raise EngineFailure(
                    f"engine {self.kind}: waited {START_S:g} s for engines to start; {len(self._here())} are here, at least"
                    f" {self._least} are needed ({'; '.join(p.dead for p in self.parts if p.dead)})"
                )
            self._started(late[0], BEAT_S)
            self._fit(wanted)
        if len(self._here()) < self._least:
            raise EngineFailure(
                f"engine {self.kind}: {len(self._here())} {self.noun}s are left, at least {self._least} are needed"
                f" ({'; '.join(p.dead for p in self.parts if p.dead)})"
            )

    def _fit(self, wanted: int) -> None:
        """Let those join that have started, those leave that are too many, and others start."""
        for part in self.parts:
            if part.starting:
                self._started(part, 0)
        here = [p for p in self.parts if not p.dead or p.starting]
        for part in sorted(here, key=lambda p: p.starting)[wanted:]:
            self._leave(part)
        vacant = [p for p in self.parts if p.dead and not p.starting]
        lost = [p for p in vacant if not p.left]
        again = lost[: self._left]
        missing = wanted - len(here) - (len(lost) - len(again))
        for part in [*again, *(p for p in vacant if p.left)][: max(0, missing)]:
            self._left -= not part.left
            self._begin(part)
            missing -= 1
        for index in range(len(self.parts), len(self.parts) + max(0, missing)):
            self._placements.append(self._seats.take(index))
            self.parts.append(self._part(index))
            self.parts[-1].starting, self.parts[-1].dead = True, "is starting"

    def _begin(self, part: _Actor) -> None:
        """Start another actor in this place, which is vacant."""
        self._placements[part.index] = self._seats.take(part.index)
        part.renew(self._start(part.index))
        part.name = UNPLACED.format(part.index)
        part.starting, part.dead = True, f"{part.name} is starting"

    def _started(self, part: _Actor, timeout_s: float) -> bool:
        """Whether it has started, which is waited for so long; then it counts among the living. One that dies or stands still while it
        starts is lost."""
        try:
            while part.ready(timeout_s):
                message = part.receive()
                if message is not None:
                    if message[1] != self._ready:
                        part.end = f"does not start as the others do: {message[1]}"
                        raise EOFError
                    part.starting, part.dead = False, ""
                    if not part.renewing:
                        self.tell("joined", part)
                    return True
            if not part.lives():
                part.give_up(SILENT_S)
                raise EOFError
        except (EOFError, OSError):
            part.starting, part.dead = False, f"{part.name} {part.fate()}"
        return False

    def _leave(self, part: _Actor) -> None:
        """End it; the others go on with what it has in flight."""
        if not part.starting:
            self._hand_over(part)
        part.kill()
        part.starting = False
        part.left = True
        part.dead = f"{part.name} left the run"
        self._seats.leave(part.index)
        self.tell("left", part)

    # -- while it samples ----------------------------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> list[Segment]:
        """Raises `RankLost` when the last engine is gone and no other one can get the weights that it served, but from a checkpoint."""
        done = super().poll(timeout_s)
        if self.again is None and self._left and self._version >= 0 and not self._here():
            why = "; ".join(p.dead for p in self.parts if not p.left)
            raise RankLost(f"no {self.noun} is left: {why}; resume the run with rollkeel train --resume")
        return done

    def _may_renew(self, part: _Actor) -> bool:
        return super()._may_renew(part) and (self._seats.there(part.index) or not self._here())

    def _publish(self, head: WeightUpdate, feed: Feed, asked: Sequence[_Actor]) -> Proof:
        if head.kind == "adapter" and (bare := [p for p in asked if "full" not in p.rooms]):
            self.welcome(bare)
        return super()._publish(head, feed, asked)

    def _renew(self, part: _Actor) -> None:
        assert self.again is not None
        self._begin_anew(part)
        part.starting, part.dead = True, f"{part.name} is starting"
        end = time.monotonic() + START_S
        while not self._started(part, BEAT_S):
            if part.starting and (time.monotonic() > end or not (self._seats.there(part.index) or not self._here())):
                part.end = "has no place" if time.monotonic() <= end else f"did not start within {START_S:g} s"
                part.starting, part.dead = False, f"{part.name} {part.fate()}"
            if not part.starting:
                raise EngineFailure(f"engine {part.dead}")
        self.again([part])
        self.tell("renewed", part)

    def _bury(self, part: _Actor) -> None:
        super()._bury(part)
        if part.dead and not part.renewing:
            with suppress(RollkeelError):
                self.tell("lost", part)
