"""Publications whose weights never pass the controller: it says what is to be served, and asks for the proofs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ray.exceptions import RayError, RayTaskError

from rollkeel.cluster.engines import ActorEngine
from rollkeel.cluster.kept import BegunAgain
from rollkeel.cluster.stream import Sink
from rollkeel.errors import DeltaRefused, EngineFailure, RollkeelError
from rollkeel.sync.history import MOST_CHANGED
from rollkeel.sync.last_sent import Traffic
from rollkeel.sync.proof import Probes
from rollkeel.types import WeightUpdate


class Source(Protocol):
    """Where weights are: trainer ranks, or this process."""

    traffic: Traffic
    """Of the last stream."""

    def prepare(self, head: WeightUpdate) -> None:
        """Do what can be done of `stream` while the engines still sample with what they have."""
        ...

    def stream(self, head: WeightUpdate, sinks: Sequence[Sink]) -> Sequence[int]:
        """Send all weights, or with `head.kind == "adapter"` all adapters, or with `delta` what changed of the weights, from where they
        are. Returns the checksum of what each sink got.

        `head` has kind, versions and numeric mode, and no slices. Waits have deadlines; `EngineFailure` may name an engine, and
        `DeltaRefused` asks for all weights."""
        ...


class StreamPublisher:
    """The surface of `sync.publish.DirectPublisher` for an engine in actors."""

    def __init__(self, engine: ActorEngine, source: Source, kind: str = "full") -> None:
        """`kind`: `sync.kind`, of a source that remembers what it sent. `auto` goes by what the publication before changed."""
        self.engine = engine
        self.source = source
        self._kind = kind
        self._base: int | None = None
        self._last, self._changed = -1, 0.0
        """Version of the last publication, and the share of elements that it changed."""
        engine.welcome = lambda to: self._bring("full", None, self._base or 0, to)

    def publish(
        self, weights: Any, version: int, adapters: Any = None, probes: Probes | None = None
    ) -> Mapping[str, float]:
        """Publish the source's weights as `version`, or beside them its adapters: then weights are frozen, and arrive the
        first time alone. `weights` is not looked at, and of `adapters` whether there are any. `probes`: all engines are asked them.

        Raises `EngineFailure` naming the engine or the source that failed; nothing is served then."""
        start = time.perf_counter()
        metrics = dict[str, float]()
        if not adapters:
            metrics = self._weights(version)
        else:
            if self._base is None:
                self._bring("full", None, version)
                self._base = version
            self._bring("adapter", self._base, version)
        if probes is not None:
            engine = self.engine
            metrics |= probes.proven(engine.scores, lambda: self._bring("full", None, version), engine.kind, version)
        return {"time/sync_s": time.perf_counter() - start, **metrics}

    def _weights(self, version: int) -> dict[str, float]:
        """What changed, where that is asked for, pays and is taken; else all weights."""
        last = self._last
        refused = False
        self._last = -1  # until this one is proven
        by_delta = self._kind != "full" and last >= 0 and (self._kind == "delta" or self._changed <= MOST_CHANGED)
        try:
            self._bring("delta" if by_delta else "full", last if by_delta else None, version)
        except DeltaRefused:
            refused = True
            self._bring("full", None, version)
        self._last = version
        if self._kind == "full":
            return {}
        traffic = self.source.traffic
        metrics = {"sync/bytes": float(traffic.nbytes), "sync/deltas": float(traffic.deltas > 0)}
        if traffic.seen:
            self._changed = metrics["sync/changed"] = traffic.changed / traffic.seen
        return {**metrics, "sync/deltas_refused": float(refused)}

    def again(self, to: Sequence[Any]) -> None:
        """Bring these actors the weights that the others serve, which must still be the source's."""
        version, base = self.engine.version, self._base
        if base is None:
            self._bring("full", None, version, to)
        else:
            self._bring("full", None, base, to)
            self._bring("adapter", base, version, to)

    def _bring(self, kind: str, base: int | None, version: int, to: Sequence[Any] | None = None) -> Any:
        mode = "fp32" if kind == "adapter" else self.engine.capabilities.dtype
        head = WeightUpdate(kind=kind, base_version=base, version=version, slices=(), checksum=0, mode=mode)
        while True:
            self.source.prepare(head)
            try:
                return self.engine.publish(head, lambda sinks: self._feed(head, sinks), to)
            except BegunAgain:
                continue

    def _feed(self, head: WeightUpdate, sinks: Sequence[Sink]) -> Sequence[int]:
        try:
            return self.source.stream(head, sinks)
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, RollkeelError):
                raise cause from None
            raise EngineFailure(
                f"weight update {head.version}: what sends the weights failed before all of them were sent:"
                f" {type(cause).__name__}"
            ) from error
