"""Engines as Ray actors, behind the same protocol as worker processes and with the same bits.

    ActorEngine (controller) ── send ──▶ EngineActor: inbox ─▶ thread: LocalEngine, one decode step at a time
             ▲───────── send, take ◀──── outbox ◀─ answers, segments, errors ─┘        ▲
    trainer's ranks ────────────────────────────────── buckets of weights ─────────────┘

Ray starts calls of one actor in any order, and answers them so. Messages carry numbers on both ways: what arrives, and in which
order, is then what a pipe would bring. What is said stands in `engines.part`.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError

from rollkeel import plugins
from rollkeel.cluster import logs
from rollkeel.cluster.arriving import actor_options
from rollkeel.cluster.calls import reason
from rollkeel.cluster.engine_actor import BEAT_S, Beside, EngineActor
from rollkeel.cluster.patience import Patience
from rollkeel.cluster.pulse import Pulse
from rollkeel.cluster.stream import BUCKET_BYTES, Feed, Sink, send
from rollkeel.config import EngineConfig
from rollkeel.engines.intake import Room
from rollkeel.engines.part import Part
from rollkeel.engines.parts import START_S, PartedEngine
from rollkeel.errors import DeltaRefused, EngineFailure, RollkeelError
from rollkeel.types import FloatArray, IntArray, Proof, WeightUpdate

CLOSE_S = 5.0
UNPLACED = "actor {} (not placed yet)"
DIED_S = 0.2  # for Ray to tell of a death that a sender of weights has seen
DOUBTED_S = 3.0
"""For a process to say that it lives, of which a sender of weights has despaired."""


@dataclass(kw_only=True)
class _Actor(Part):
    handle: Any
    sent: int = 0
    calls: list[ray.ObjectRef] = field(default_factory=list)
    """Under way; all of them return what the engine says."""
    taking: ray.ObjectRef | None = None
    """That of them which is a `take`."""
    came: dict[int, bytes] = field(default_factory=dict)
    """What it said, by number, and was not received yet."""
    received: int = 0
    heard: float = field(default_factory=time.monotonic)
    patience: Patience = field(default_factory=lambda: Patience(float("inf")))
    end: str = "was killed"
    place: tuple[str, int] = ("", 0)
    """Its node's address and its process, once it has told them."""
    node: str = ""
    """Its node, as Ray names it."""
    rooms: dict[str, Mapping[str, Room]] = field(default_factory=dict)
    """Where it has what an update of each kind brings, once it has told."""
    starting: bool = False
    left: bool = False
    """Whether it counts as dead because it has not started yet, or left because there were more engines than wanted."""

    def __post_init__(self) -> None:
        self.pulse = Pulse(self.handle)

    def renew(self, handle: Any) -> None:
        """Another actor in its place."""
        self.handle = handle
        self.pulse.renew(handle)
        self.taking = None
        self.place = ("", 0)
        self.node = ""
        self.rooms = {}
        self.sent = 0
        self.received = 0
        self.steps = 0
        self.calls, self.came = [], {}
        self.heard = time.monotonic()
        self.end = "was killed"
        self.dead = ""
        self.left = False
        self.patience = Patience(float("inf"))

    def send(self, message: tuple[Any, ...]) -> None:
        self.calls.append(self.handle.send.remote(self.sent, pickle.dumps(message)))
        self.sent += 1

    def listen(self) -> None:
        """Have a `take` under way, as is needed for what is no answer."""
        if self.taking is None:
            self.taking = call = self.handle.take.remote()
            self.calls.append(call)
            self.heard = time.monotonic()  # nobody listened before

    @property
    def waits(self) -> bool:
        """True if a message is here."""
        return self.received in self.came

    def ready(self, timeout_s: float) -> bool:
        if self.waits:
            return True
        if not self.calls:
            self.listen()
        if self.pulse.due:
            self.lives()  # how long it takes is to be known before anybody waits for long
        end = time.monotonic() + timeout_s
        while not ray.wait(self.calls, num_returns=1, timeout=max(0.0, min(end - time.monotonic(), BEAT_S)))[0]:
            if time.monotonic() >= end or not self.lives():
                return False
        return True

    def lives(self) -> bool:
        """Whether its process has answered, in a thread that does nothing else, for as long as it may take for that."""
        return not self.place[1] or self.pulse.beats()  # without a place it has not begun yet

    def receive(self) -> tuple[str, Any, int] | None:
        if not self.waits:
            self._collect()
        if not self.waits:
            return None
        message = pickle.loads(self.came.pop(self.received))
        self.received += 1
        if message[0] == "here":
            node, process = message[1]
            address = next((n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node), node)
            self.place, self.node = (address, process), node
            self.name = f"actor {self.index} (node {address}, process {process})"
            return None
        if message[0] == "gone":
            self.end = message[1]
            raise EOFError
        return message

    def _collect(self) -> None:
        """Take what a call brought. Raises `EOFError` if the actor died."""
        (done, *_), _ = ray.wait(self.calls, num_returns=1)
        self.calls.remove(done)
        self.taking = None if done == self.taking else self.taking
        try:
            first, said = ray.get(done)
        except RayError as error:
            self.end = f"died ({reason(error)})"
            raise EOFError from None
        self.came |= dict(enumerate(said, first))
        if self.free:
            self.patience.heard(time.monotonic() - self.heard)
        self.heard = time.monotonic()

    @property
    def patience_s(self) -> float:
        return self.patience.limit_s

    def hung(self, deadline_s: float) -> float:
        if not (self.free and self.flying):
            return 0.0
        limit_s = min(self.patience_s, deadline_s)
        if time.monotonic() - self.heard > limit_s:
            return limit_s
        return self.pulse.patience.limit_s if self.pulse.due and not self.lives() else 0.0

    def give_up(self, after_s: float) -> None:
        self.end = f"said nothing for {after_s:.3g} s and was killed{logs.ask_for_stacks([self.place[1]])}"
        self.kill()

    def kill(self) -> None:
        ray.kill(self.handle, no_restart=True)

    def fate(self) -> str:
        self.kill()
        return self.end


class ActorEngine(PartedEngine[_Actor]):
    """One engine per actor. Another one takes the place of an actor that dies, `renewals` times in all.

    It does again what the dead one was told (`again`: brings it the weights that are served). Where they are not to be had while
    others serve them, the others get its requests, and it joins at the next publication. Requests of the last actor come back
    as `Status.ENGINE_FAILURE`."""

    noun = "engine actor"

    def __init__(
        self,
        hf_config: Any,
        config: EngineConfig,
        placements: Sequence[Mapping[str, Any]],
        *,
        threads: int = 1,
        renewals: int = 0,
        beside: Beside | None = None,
        **options: Any,
    ) -> None:
        """Start the actors; they load in parallel and are waited for at the first use.

        `placements`: Ray's options for each actor, for example `num_cpus` and `scheduling_strategy`. `threads`: of each
        engine on a CPU. `options`: of every `open_engine`. `beside`: for an engine that is no embedded one."""
        assert beside is not None or config.kind == "local"
        super().__init__(int(hf_config.get_text_config().vocab_size), config.deadline_s)
        self.kind = plugins.short(config.kind)
        self._attempt = 0
        self._left = renewals
        self._publishing = False
        self._hands_over = renewals > 0
        self.checksum = 0
        """Of the weights that are served."""
        self.again: Callable[[Sequence[_Actor]], None] | None = None
        self.welcome: Callable[[Sequence[_Actor]], None] = lambda actors: None
        """Brings actors that have just joined the weights that adapters stand beside."""
        self.tell: Callable[[str, _Actor], None] = lambda what, actor: None
        """Called with `lost`, `renewed`, `joined` or `left`."""
        own = config.model_copy(update={"processes": 0})
        self._placements = list(placements)

        def kind(index: int) -> Any:
            return ray.remote(**actor_options(self._placements[index], threads))(EngineActor)

        self._start = lambda index: kind(index).remote(hf_config, own, options, beside)
        self.parts += [self._part(index) for index in range(len(placements))]

    def _part(self, index: int) -> _Actor:
        return _Actor(index, UNPLACED.format(index), handle=self._start(index))

    def update_weights(self, update: WeightUpdate) -> Proof:
        """Send an update whose tensors this process holds, in whole slices; see `publish` for those of others."""
        head = replace(update, slices=(), checksum=0)
        return self.publish(
            head, lambda to: [send(update.slices, update, to, BUCKET_BYTES, self._deadline_s)] * len(to)
        )

    def publish(self, head: WeightUpdate, feed: Feed, to: Sequence[_Actor] | None = None) -> Proof:
        """Serve `head.version` of weights that `feed` sends to the sinks, from wherever they are.

        `head`: the update without slices and checksum. `to`: these alone, while the others serve that version already. Whatever
        fails, nothing is served until the next publication; an actor that died is replaced before, and then it is tried again."""
        _ = self.capabilities
        if to is not None:
            served = self._version, self.checksum
            try:
                return self._publish(head, feed, to)
            finally:  # those alone are at what is on its way to that
                self._version, self.checksum = served
        self._version, self._publishing = -1, True
        try:
            while True:
                self._join()
                asked = self._living()
                try:
                    return self._publish(head, feed, asked)
                except EngineFailure:
                    if not (self._goes_on() and any(p.dead for p in asked)):
                        raise
        finally:
            self._publishing = False

    def _goes_on(self) -> bool:
        """Whether a publication in which an actor died is tried again."""
        return bool(self._left)

    def _join(self) -> None:
        """Start others in the places of dead actors, as long as that may be done."""
        dead = [p for p in self.parts if p.dead][: self._left]
        for part in dead:
            self._begin_anew(part)
        self._answers(dead, START_S, "to start", may_die=True)
        for part in dead:
            if not part.dead:
                self.tell("joined", part)

    def _begin_anew(self, part: _Actor) -> None:
        """Start another actor in the place of this one, which is dead."""
        self._left -= 1
        self.tell("lost", part)
        part.renew(self._start(part.index))

    def _may_renew(self, part: _Actor) -> bool:
        return bool(self._left) and self._version >= 0 and not self._publishing and self.again is not None

    def _renew(self, part: _Actor) -> None:
        assert self.again is not None
        self._begin_anew(part)
        self._answers([part], START_S, "to start")
        self.again([part])
        self.tell("renewed", part)

    def _publish(self, head: WeightUpdate, feed: Feed, asked: Sequence[_Actor]) -> Proof:
        self._attempt, kind = self._attempt + 1, head.kind
        for part in asked:
            self._send(part, ("begin", self._attempt, head, kind not in part.rooms))
        sinks = []
        answers = self._answers(asked, self._deadline_s, "to await weights")
        for part, (told, memory) in zip(asked, answers, strict=True):
            if kind not in part.rooms:  # of engines that are alike the same object, which then travels once
                part.rooms[kind] = next((p.rooms[kind] for p in self.parts if p.rooms.get(kind) == told), told)
            there = {"index": part.index, "node": part.node, "rooms": part.rooms[kind], "memory": memory}
            sinks.append(Sink(part.name, part.handle, self._attempt, **there))
        try:
            sums = feed(sinks)
        except DeltaRefused:
            raise
        except EngineFailure:
            self._look(asked)
            raise
        for part, checksum in zip(asked, sums, strict=True):
            self._send(part, ("finish", self._attempt, checksum))
        proof = self._proven(asked, head.version, "to prove weights")
        self.checksum = proof.checksum
        return proof

    def _look(self, parts: Sequence[_Actor]) -> None:
        """Bury those whom a sender saw die or fall silent, so that they may be replaced."""
        for part in parts:
            if not part.dead and part.ready(DIED_S):
                self._receive(part)
            asked = time.monotonic()
            if not (part.dead or part.pulse.answers(DOUBTED_S)):
                part.give_up(time.monotonic() - asked)
                self._bury(part)

    def scores(self, sequences: Sequence[IntArray]) -> list[list[FloatArray]]:
        """What each living engine says of these sequences, see `ProbedEngine.score`; nothing of engines that are asked nothing."""
        asked = self._living()
        for part in asked:
            self._send(part, ("score", sequences))
        return [said for said in self._answers(asked, self._deadline_s, "to score") if said is not None]

    def rest(self) -> None:
        """See `RestingEngine.rest`: every actor whose engine can gives its device away."""
        asked = self._living()
        for part in asked:
            self._send(part, ("rest",))
        self._answers(asked, self._deadline_s, "to rest")

    def close(self) -> None:
        self._left = 0
        living = [p for p in self.parts if not p.dead]
        for part in living:
            part.send(("close",))
        end = time.monotonic() + CLOSE_S
        for part in living:
            while not part.dead and part.ready(max(0.0, end - time.monotonic())):
                with suppress(RollkeelError):  # closing must work after a failure too
                    self._receive(part)
            part.kill()
            part.dead = part.dead or "closed"

    def _wait(self, parts: Sequence[_Actor], timeout_s: float) -> Sequence[_Actor]:
        for part in parts:
            part.listen()
        calls = [call for part in parts for call in part.calls]
        ready, _ = ray.wait(calls, num_returns=1, timeout=0 if any(p.waits for p in parts) else timeout_s)
        if ready:
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        return [p for p in parts if p.waits or any(call in ready for call in p.calls)]
