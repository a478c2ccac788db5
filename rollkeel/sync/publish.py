"""From the trainer's weights to every engine, with proof of arrival."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from rollkeel.errors import DeltaRefused, EngineFailure
from rollkeel.models.checksum import MASK
from rollkeel.models.numerics import update_checksums
from rollkeel.protocols import BoxedEngine, Engine, ProbedEngine
from rollkeel.sync.proof import Probes
from rollkeel.types import WeightSlice, WeightUpdate

if TYPE_CHECKING:
    from rollkeel.sync.history import History


def full_update(
    weights: Iterable[tuple[str, torch.Tensor]], version: int, mode: str | None = None, *, shared: bool = False
) -> WeightUpdate:
    """A full `WeightUpdate` of (checkpoint name, tensor) pairs. Tensors are referenced, not copied.

    `mode`: numeric mode of the engine that must prove its memory; each tensor is rounded here as it must be there. `shared`: they
    are that memory.
    """
    named = [(name, tensor.detach()) for name, tensor in weights]
    slices = [
        WeightSlice(name=name, tensor=tensor, checksum=checksum)
        for (name, tensor), checksum in zip(named, update_checksums(named, mode), strict=True)
    ]
    return WeightUpdate(
        kind="full",
        base_version=None,
        version=version,
        slices=slices,
        checksum=sum(s.checksum for s in slices) & MASK,
        mode=mode,
        shared=shared,
    )


def adapter_update(adapters: Mapping[str, torch.Tensor], version: int, base_version: int) -> WeightUpdate:
    """An update of (PEFT name, tensor) pairs beside the weights of `base_version`: as they are, for no mode rounds them."""
    return replace(full_update(adapters.items(), version, "fp32"), kind="adapter", base_version=base_version)


class DirectPublisher:
    """Hands updates to engines and refuses to go on unless each proves the version and checksum it serves."""

    def __init__(
        self,
        engines: Sequence[Engine],
        probes: Probes | None = None,
        *,
        shared: bool = False,
        kind: str = "full",
        buffer_mb: float = 0.0,
    ) -> None:
        """`probes`: also asked of every engine that is a `ProbedEngine`, after each publication. `shared`: the engines compute with
        the very weights that are published. `kind`: `sync.kind`, for engines that prove their memory and do not share it. `buffer_mb`:
        `sync.buffer_mb`, for those that take boxes; 0 has them take folders."""
        self.engines = tuple(engines)
        self.probes = probes
        self.shared = shared
        self._base: int | None = None
        self._kind = "full" if shared else kind
        self._histories: dict[str | None, History] = {}
        """By numeric mode, with `kind` other than full."""
        for engine in self.engines if buffer_mb else ():
            if isinstance(engine, BoxedEngine):
                from rollkeel.sync.sending import WholeFeed

                engine.boxes.feed = WholeFeed(buffer_mb)

    def publish(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        version: int,
        adapters: Mapping[str, torch.Tensor] | None = None,
    ) -> Mapping[str, float]:
        """Publish `weights` as `version`, or beside them `adapters`: then weights are frozen, and arrive the first time alone.

        Raises `EngineFailure` naming the engine whose proof does not match, or whose
        probes disagree with the trainer a second time, after the same update was published once more."""
        start = time.perf_counter()
        if adapters:
            if self._base is None:
                self.publish(weights, version)
                self._base = version
            update = adapter_update(adapters, version, self._base)
            for engine in self.engines:
                self._bring(engine, update)
            return {"time/sync_s": time.perf_counter() - start}
        weights, updates = list(weights), dict[str | None, WeightUpdate]()
        metrics: dict[str, float] = {}
        for engine in self.engines:
            about = engine.capabilities
            mode = about.dtype if about.proves_memory else None
            if mode not in updates:
                updates[mode] = full_update(weights, version, mode, shared=self.shared)
                if self._kind != "full" and mode is not None:
                    self._note(updates[mode], mode)
            update = updates[mode]
            if mode in self._histories:
                for key, value in self._catch_up(engine, update, self._histories[mode]).items():
                    metrics[key] = metrics.get(key, 0.0) + value
                if (changed := self._histories[mode].changed) is not None:
                    metrics["sync/changed"] = changed
            else:
                self._bring(engine, update)
            if self.probes is not None and isinstance(engine, ProbedEngine):
                told = self.probes.proven(
                    lambda asked, e=engine: [e.score(asked)], partial(self._bring, engine, update), about.name, version
                )
                for key, value in told.items():
                    metrics[key] = max(value, metrics.get(key, 0.0))
        return {"time/sync_s": time.perf_counter() - start, **metrics}

    def _note(self, update: WeightUpdate, mode: str) -> None:
        from rollkeel.sync.history import History

        if mode not in self._histories:
            self._histories[mode] = History(self._kind, mode)
        self._histories[mode].advance(update)

    def _catch_up(self, engine: Engine, full: WeightUpdate, history: History) -> dict[str, float]:
        """Bring an engine the least that it needs, and all weights where it refuses that."""
        from rollkeel.sync.history import nbytes

        update = history.update(full, engine.version)
        sent = 0
        refused = False
        try:
            sent += nbytes(update)
            self._bring(engine, update)
        except DeltaRefused:
            refused = True
            sent += nbytes(full)
            self._bring(engine, full)
        return {
            "sync/bytes": sent,
            "sync/deltas": float(update.kind == "delta"),
            "sync/deltas_refused": float(refused),
        }

    @staticmethod
    def _bring(engine: Engine, update: WeightUpdate) -> None:
        proof = engine.update_weights(update)
        if (proof.version, proof.checksum) != (update.version, update.checksum):
            raise EngineFailure(
                f"engine {engine.capabilities.name}: expected proof of version {update.version} with checksum "
                f"{update.checksum:016x}, got version {proof.version} with {proof.checksum:016x}; weights did not arrive"
            )
        if engine.version != update.version:
            raise EngineFailure(
                f"engine {engine.capabilities.name}: serves version {engine.version} after publishing {update.version}"
            )
