"""The engine actor's side of a publication: what it does with the buckets that arrive. And Ray's options of such an actor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rollkeel.cluster.stream import Layout, unpacked
from rollkeel.engines.intake import Intake, Room
from rollkeel.engines.part import unknown
from rollkeel.errors import EngineFailure, RollkeelError
from rollkeel.protocols import RestingEngine
from rollkeel.types import Proof, WeightUpdate

_CALLS = 8
"""That an actor answers at one time: a `take` may be under way, buckets and messages come beside it."""


@dataclass(frozen=True)
class Bucket:
    attempt: int
    layout: Layout
    data: Sequence[Any]
    """Bytes of each slice, as numpy arrays or tensors."""
    done: Future[str]
    """Why it was refused, or nothing."""


class Weights:
    """The engine's side of a publication: `begin`, buckets, `finish`. Until the last one nothing is served."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._attempt, self._newest = 0, -1
        self._intake: Intake | None = None
        self._refusal = "nothing was announced"

    def act(self, engine: Any, message: tuple[Any, ...]) -> Any:
        if message[0] == "begin":
            return self._begin(*message[1:])
        if message[0] == "finish":
            return self._finish(*message[1:])
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

    def _begin(self, attempt: int, head: WeightUpdate, tells: bool = False) -> bool | dict[str, Room]:
        """`tells`: where the memory has what the update brings."""
        self._intake, self._attempt, self._refusal = None, attempt, f"weight update {head.version}: was refused"
        engine = self._engine
        intake = Intake(head, engine.memory, engine.capabilities.dtype, engine.retire())
        if head.version < self._newest:
            raise EngineFailure(
                f"weight update {head.version}: expected version {self._newest}, which this engine had, or a later one"
            )
        self._intake, self._newest = intake, head.version
        return intake.rooms if tells else True

    def _finish(self, attempt: int, checksum: int) -> Proof:
        intake, self._intake = self._intake, None
        if attempt != self._attempt:
            raise EngineFailure(f"weights: publication {self._attempt} is under way, not publication {attempt}")
        if intake is None:
            raise EngineFailure(self._refusal)
        self._refusal = f"weight update {self._newest}: was already finished"
        return self._engine.serve(self._newest, *intake.finish(checksum))


def actor_options(placement: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """Ray's options of an actor. It is never started again: it would come back without weights and requests."""
    given = dict(placement.get("runtime_env") or {})
    # torch reads these when it is imported.
    own = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    environment = {**given, "env_vars": {**own, **given.get("env_vars", {})}}
    fixed = {"max_concurrency": _CALLS, "max_restarts": 0, "max_task_retries": 0, "runtime_env": environment}
    return {"num_cpus": 1, **placement, **fixed}
