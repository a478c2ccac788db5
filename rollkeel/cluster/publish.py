"""Publications whose weights never pass the controller: it says what is to be served, and asks for the proofs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from ray.exceptions import RayError, RayTaskError

from rollkeel.cluster.elastic import ElasticEngine
from rollkeel.cluster.engines import ActorEngine
from rollkeel.cluster.kept import BegunAgain
from rollkeel.cluster.stream import BUCKET_BYTES, DEADLINE_S, Sink, stream
from rollkeel.errors import EngineFailure, RollkeelError
from rollkeel.types import WeightUpdate

Pairs = Iterable[tuple[str, torch.Tensor]]


class Source(Protocol):
    """Where weights are: trainer ranks, or this process."""

    def stream(self, head: WeightUpdate, sinks: Sequence[Sink]) -> Sequence[int]:
        """Send all weights, or with `head.kind == "adapter"` all adapters, from where they are. Returns the checksum of what each sink
        got.

        `head` has kind, versions and numeric mode, and no slices. Waits have deadlines; `EngineFailure` may name an engine."""
        ...


class OwnWeights:
    """A `Source` of tensors in this process."""

    def __init__(
        self,
        weights: Callable[[], Pairs],
        adapters: Callable[[], Pairs] = tuple,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._weights, self._adapters = weights, adapters
        self._bucket_bytes, self._deadline_s = bucket_bytes, deadline_s

    def stream(self, head: WeightUpdate, sinks: Sequence[Sink]) -> Sequence[int]:
        pairs = self._adapters() if head.kind == "adapter" else self._weights()
        limits: dict[str, Any] = {"bucket_bytes": self._bucket_bytes, "deadline_s": self._deadline_s}
        return [stream(pairs, head, sinks, **limits)] * len(sinks)


class StreamPublisher:
    """The surface of `sync.publish.DirectPublisher` for an engine in actors."""

    def __init__(self, engine: ActorEngine, source: Source) -> None:
        self.engine, self.source = engine, source
        self._base: int | None = None
        if isinstance(engine, ElasticEngine):
            engine.welcome = lambda to: self._bring("full", None, self._base or 0, to)

    def publish(self, weights: Any, version: int, adapters: Any = None) -> Mapping[str, float]:
        """Publish the source's weights as `version`, or beside them its adapters: then weights are frozen, and arrive the
        first time alone. `weights` is not looked at, and of `adapters` whether there are any.

        Raises `EngineFailure` naming the engine or the source that failed; nothing is served then."""
        start = time.perf_counter()
        if not adapters:
            self._bring("full", None, version)
        else:
            if self._base is None:
                self._bring("full", None, version)
                self._base = version
            self._bring("adapter", self._base, version)
        return {"time/sync_s": time.perf_counter() - start}

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
