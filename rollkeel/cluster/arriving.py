"""What arrives at an engine actor: messages and buckets of weights, in the order of one queue; and Ray's options of such an actor."""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rollkeel.cluster.pulse import CONTROL
from rollkeel.cluster.stream import Layout, unpacked
from rollkeel.engines.intake import Intake, Room
from rollkeel.engines.open_memory import OpenMemory
from rollkeel.engines.part import unknown
from rollkeel.errors import DeltaRefused, EngineFailure, RollkeelError
from rollkeel.protocols import RestingEngine
from rollkeel.types import Proof, WeightUpdate

_CALLS = 8
"""That an actor answers at one time: a `take` may be under way, buckets and messages come beside it."""
_ENDED = "weights: the engine has ended"
Said = tuple[int, list[bytes]]
"""Messages that nobody has taken yet, and the number of the first of them, counted from 0."""


@dataclass(frozen=True)
class Bucket:
    attempt: int
    layout: Layout
    data: Sequence[Any] | None
    """Bytes of each slice, as numpy arrays or tensors; None where they are in the engine's memory already."""
    done: Future[str] = field(default_factory=Future)
    """Why it was refused, or nothing."""


class Weights:
    """The engine's side of a publication: `begin`, buckets, `finish`. Until the last one nothing is served."""

    def __init__(self, engine: Any, memory: OpenMemory | None = None) -> None:
        """`memory`: in which senders may find the engine's weights."""
        self._engine = engine
        self._memory, self._unproven = memory, False
        self._attempt, self._newest = 0, -1
        self._intake: Intake | None = None
        self._refusal, self._kind = "nothing was announced", ""

    def act(self, engine: Any, message: tuple[Any, ...]) -> Any:
        if message[0] in ("begin", "finish"):
            try:
                return (self._begin if message[0] == "begin" else self._finish)(*message[1:])
            except EngineFailure as error:
                raise (DeltaRefused(str(error)) if self._kind == "delta" else error) from None
        if message[0] == "rewind":
            self._newest = -1
            return True
        if message[0] == "score" and hasattr(engine, "score"):
            return engine.score(message[1])
        if message[0] != "rest":
            raise unknown(message)
        if isinstance(engine, RestingEngine):
            engine.rest()
        return True

    def take(self, bucket: Bucket) -> str:
        """Write and prove a bucket. Returns why not, or nothing."""
        if bucket.attempt != self._attempt:
            return f"weights: a bucket of publication {bucket.attempt} arrived in publication {self._attempt}"
        if self._intake is None:
            return self._refusal
        try:
            self._intake.take(unpacked(bucket.layout, bucket.data))
        except RollkeelError as error:
            self._intake, self._refusal = None, str(error)
            return self._refusal
        return ""

    def _begin(self, attempt: int, head: WeightUpdate, tells: bool = False) -> tuple[dict[str, Room] | None, str]:
        """Where the engine has what the update brings, if it `tells`; and the path of the memory that senders may write to."""
        self._intake = None
        self._attempt = attempt
        self._refusal = f"weight update {head.version}: was refused"
        self._kind = head.kind
        engine = self._engine
        intake = Intake(head, engine.memory, engine.capabilities.dtype, engine.retire())
        if head.version < self._newest:
            raise EngineFailure(
                f"weight update {head.version}: expected version {self._newest}, which this engine had, or a later one"
            )
        if self._memory is None or head.kind == "adapter":
            path, rooms = "", intake.rooms
        else:
            if self._unproven:
                self._memory.renew()
            self._unproven = True
            path, rooms = self._memory.path, self._memory.rooms(intake.rooms, engine.weights) if tells else {}
        self._intake, self._newest = intake, head.version
        return rooms if tells else None, path

    def _finish(self, attempt: int, checksum: int) -> Proof:
        intake, self._intake = self._intake, None
        if attempt != self._attempt:
            raise EngineFailure(f"weights: publication {self._attempt} is under way, not publication {attempt}")
        if intake is None:
            raise EngineFailure(self._refusal)
        self._refusal = f"weight update {self._newest}: was already finished"
        proof = self._engine.serve(self._newest, *intake.finish(checksum))
        self._unproven = False
        return proof


class Channel:
    """The engine's end: what it reads, and what it has said and nobody has taken yet."""

    def __init__(self, beat_s: float) -> None:
        """`beat_s`: longest silence of an engine that decodes on its own."""
        self.inbox: queue.Queue[Any] = queue.Queue()
        self._beat_s = beat_s
        self.weights: Weights | None = None
        self.answers, self.beat = -1, False
        """How many messages have been answered; the first answer is to none. Whether a sign of life is due."""
        self._outbox: list[bytes] = []
        self._taken, self.ended = 0, False
        self._last, self._more = time.monotonic(), threading.Condition()

    def poll(self, timeout: float, /) -> bool:
        if time.monotonic() - self._last > self._beat_s:
            self._tell([], beat=True)
        return not self.inbox.empty()

    def recv(self) -> Any:
        message = self.inbox.get()
        if not isinstance(message, Bucket):
            return message
        assert self.weights is not None
        refusal = _ENDED
        try:
            refusal = self.weights.take(message)
        finally:
            message.done.set_result(refusal)
        return None

    def put(self, bucket: Bucket) -> Future[str]:
        """Have it taken in its turn."""
        with self._more:
            if self.ended:
                bucket.done.set_result(_ENDED)
            else:
                self.inbox.put(bucket)
        return bucket.done

    def send(self, message: Any, /) -> None:
        self._tell([pickle.dumps(message)], answers=message[0] in ("answer", "error"), ended=message[0] == "gone")

    def said(self, number: int | None) -> Said:
        """What is in the outbox, once message `number` is answered; without one, once there is anything."""

        def enough() -> bool:
            return self.ended or (self.beat or bool(self._outbox) if number is None else self.answers > number)

        with self._more:
            self._more.wait_for(enough)
            first = self._taken
            said = self._outbox
            self._outbox = []
            self.beat = False
            self._taken += len(said)
        return first, said

    def _tell(self, messages: list[bytes], answers: bool = False, ended: bool = False, beat: bool = False) -> None:
        with self._more:
            self._outbox += messages
            self.answers += answers
            self.beat = beat
            self.ended = self.ended or ended
            self._last = time.monotonic()
            self._more.notify_all()
            with suppress(queue.Empty):
                while self.ended:
                    if isinstance(left := self.inbox.get_nowait(), Bucket):
                        left.done.set_result(_ENDED)


def actor_options(placement: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """Ray's options of an actor. It is never started again: it would come back without weights and requests."""
    given = dict(placement.get("runtime_env") or {})
    # torch reads these when it is imported.
    own = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    environment = {**given, "env_vars": {**own, **given.get("env_vars", {})}}
    fixed = {"max_concurrency": _CALLS, "max_restarts": 0, "max_task_retries": 0, "runtime_env": environment}
    fixed["concurrency_groups"] = {CONTROL: 1}
    return {"num_cpus": 1, **placement, **fixed}
