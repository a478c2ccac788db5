"""Weights that this process holds whole, sent to engine actors slice by slice: a source for tests that need no trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rollkeel.cluster.stream import BUCKET_BYTES, Layout, Sink, bytes_of, layout_of, send
from rollkeel.errors import DeltaRefused
from rollkeel.models.numerics import update_checksum
from rollkeel.sync.last_sent import Traffic
from rollkeel.types import WeightSlice, WeightUpdate

DEADLINE_S = 600.0
Pairs = Iterable[tuple[str, torch.Tensor]]


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
        self.traffic = Traffic()

    def prepare(self, head: WeightUpdate) -> None:
        """Nothing: pairs are made one by one."""

    def stream(self, head: WeightUpdate, sinks: Sequence[Sink]) -> Sequence[int]:
        if head.kind == "delta":
            raise DeltaRefused("whole weights are sent as they are")
        pairs = self._adapters() if head.kind == "adapter" else self._weights()
        limits: dict[str, Any] = {"bucket_bytes": self._bucket_bytes, "deadline_s": self._deadline_s}
        return [stream(pairs, head, sinks, **limits)] * len(sinks)


def stream(
    pairs: Iterable[tuple[str, torch.Tensor]],
    head: WeightUpdate,
    sinks: Sequence[Sink],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    deadline_s: float = DEADLINE_S,
) -> int:
    """Send (checkpoint name, whole tensor) pairs, which are made one by one, to all sinks; returns the checksum of the update.

    `head`: kind, versions and numeric mode. `deadline_s`: longest wait for a bucket to be taken. Raises `EngineFailure` naming the
    engine that died, fell silent or refused.
    """
    return send(slices_of(pairs, head.mode, bucket_bytes), head, sinks, bucket_bytes, deadline_s)


def slices_of(
    pairs: Iterable[tuple[str, torch.Tensor]], mode: str | None, most: int = BUCKET_BYTES
) -> Iterator[WeightSlice]:
    """Slices of at most `most` bytes, with the checksums of what an engine of `mode` must hold. A larger tensor is cut
    between rows, where every mode's rounding can be cut, so that one row is the least."""
    for name, whole in pairs:
        tensor, offset = whole.detach(), 0
        for part in _cut(tensor, most):
            yield WeightSlice(name=name, tensor=part, checksum=update_checksum(name, part, mode, offset), offset=offset)
            offset += part.numel()


def packed(bucket: Sequence[WeightSlice]) -> tuple[Layout, list[np.ndarray]]:
    """What travels: the layout, and each slice's bytes."""
    return layout_of(bucket), bytes_of(bucket)


def _cut(tensor: torch.Tensor, most: int) -> Sequence[torch.Tensor]:
    size = tensor.numel() * tensor.element_size()
    return [tensor] if size <= most or not tensor.dim() else tensor.split(max(1, most * len(tensor) // size))
