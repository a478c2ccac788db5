"""From the trainer's weights to every engine, with proof of arrival."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from rollkeel.errors import EngineFailure
from rollkeel.models.checksum import MASK, tensor_checksum
from rollkeel.protocols import Engine
from rollkeel.types import WeightSlice, WeightUpdate


def full_update(weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate:
    """A full `WeightUpdate` of (checkpoint name, tensor) pairs. Tensors are referenced, not copied."""
    slices = [WeightSlice(name=name, tensor=t.detach(), checksum=tensor_checksum(name, t)) for name, t in weights]
    return WeightUpdate(
        kind="full",
        base_version=None,
        version=version,
        slices=slices,
        checksum=sum(s.checksum for s in slices) & MASK,
    )


class DirectPublisher:
    """Hands full updates to engines and refuses to go on unless each proves the version and checksum it serves."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)

    def publish(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> Mapping[str, float]:
        """Publish `weights` as `version`. Raises `EngineFailure` naming the engine whose proof does not match."""
        start = time.perf_counter()
        update = full_update(weights, version)
        for engine in self.engines:
            proof = engine.update_weights(update)
            if (proof.version, proof.checksum) != (update.version, update.checksum):
                raise EngineFailure(
                    f"engine {engine.capabilities.name}: expected proof of version {update.version} with checksum "
                    f"{update.checksum:016x}, got version {proof.version} with {proof.checksum:016x}; weights did not arrive"
                )
            if engine.version != version:
                raise EngineFailure(
                    f"engine {engine.capabilities.name}: serves version {engine.version} after publishing {version}"
                )
        return {"time/sync_s": time.perf_counter() - start}
