"""Weights from the trainer's first rank to engine actors: bucket by bucket through Ray's object store, past the controller.

    (name, tensor) … ─▶ slices with checksums ─▶ bucket ─▶ object store ─▶ every engine: written, proven, freed
                                                    └── at most two that some engine has not taken yet

So what a publication needs beside trainer and engines is a few buckets, whatever the size of the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError

from rollkeel.errors import EngineFailure
from rollkeel.models.checksum import MASK
from rollkeel.models.numerics import update_checksum
from rollkeel.types import WeightSlice, WeightUpdate

BUCKET_BYTES = 64 << 20
WINDOW = 2
"""Buckets in the object store that some engine has not taken yet."""
DEADLINE_S = 600.0
STORE = {"free_objects_batch_size": 1}
"""`_system_config` of a Ray that we start; for one that others start, RAY_free_objects_batch_size=1 in its environment. As it comes,
Ray frees objects that nobody holds any more once a second or by the hundred, and until then the store keeps taking fresh memory."""

Layout = list[tuple[str, torch.dtype, tuple[int, ...], int, int]]
"""Name, dtype, shape, checksum and offset of each slice of a bucket."""


@dataclass(frozen=True)
class Sink:
    """One engine actor that waits for weights. It travels to the rank that sends them."""

    name: str
    """As messages name it: actor, node, process."""
    actor: Any
    """Handle of an `EngineActor`."""
    attempt: int
    """Number of the publication, which a bucket of one that was given up does not have."""


def stream(
    pairs: Iterable[tuple[str, torch.Tensor]],
    head: WeightUpdate,
    sinks: Sequence[Sink],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    deadline_s: float = DEADLINE_S,
) -> int:
    """Send (checkpoint name, whole tensor) pairs to all sinks; returns the checksum of the update.

    Where making a pair is a collective of several ranks, the first of them calls this and the others iterate over theirs:
    after a failure the rest is iterated over, too, so that none of them is left waiting. `head`: kind, versions and numeric
    mode. `deadline_s`: longest wait for a bucket to be taken. Raises `EngineFailure` naming the engine that died, fell
    silent or refused.
    """
    pairs = iter(pairs)
    try:
        return send(slices_of(pairs, head.mode, bucket_bytes), head, sinks, bucket_bytes, deadline_s)
    except (EngineFailure, RayError):
        deque(pairs, maxlen=0)
        raise


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


def send(
    slices: Iterable[WeightSlice], head: WeightUpdate, sinks: Sequence[Sink], bucket_bytes: int, deadline_s: float
) -> int:
    """Send slices to all sinks; returns the sum of their checksums. See `stream`."""
    total, unconsumed = 0, deque[list[ray.ObjectRef]]()
    for bucket in buckets(slices, bucket_bytes):
        if len(unconsumed) == WINDOW:
            _consumed(unconsumed.popleft(), head, sinks, deadline_s)
        layout, arrays = packed(bucket)
        data = ray.put(arrays)
        unconsumed.append([sink.actor.bucket.remote(sink.attempt, layout, data) for sink in sinks])
        total += sum(s.checksum for s in bucket)
        # The calls hold the data; with the last of them the object store lets it go. Nobody needs the slices any more.
        del data, arrays, bucket
    while unconsumed:
        _consumed(unconsumed.popleft(), head, sinks, deadline_s)
    return total & MASK


def buckets(slices: Iterable[WeightSlice], most: int = BUCKET_BYTES) -> Iterator[list[WeightSlice]]:
    """Slices in order, together at most `most` bytes; a larger one alone."""
    bucket, size = list[WeightSlice](), 0
    for piece in slices:
        more = piece.tensor.numel() * piece.tensor.element_size()
        if bucket and size + more > most:
            yield bucket
            bucket, size = [], 0
        bucket.append(piece)
        size += more
    if bucket:
        yield bucket


def packed(bucket: Sequence[WeightSlice]) -> tuple[Layout, list[np.ndarray]]:
    """What travels: the layout, and each slice's bytes. On a CPU they are the tensor's own, so that putting them into the object
    store is the only copy."""
    layout = [(s.name, s.tensor.dtype, tuple(s.tensor.shape), s.checksum, s.offset) for s in bucket]
    return layout, [s.tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy() for s in bucket]


def unpacked(layout: Layout, data: Sequence[np.ndarray]) -> list[WeightSlice]:
    """The slices of a bucket, as read-only views of the object store."""
    return [
        WeightSlice(name=n, tensor=torch.from_numpy(a).view(dtype).view(shape), checksum=checksum, offset=offset)
        for (n, dtype, shape, checksum, offset), a in zip(layout, data, strict=True)
    ]


def _cut(tensor: torch.Tensor, most: int) -> Sequence[torch.Tensor]:
    size = tensor.numel() * tensor.element_size()
    return [tensor] if size <= most or not tensor.dim() else tensor.split(max(1, most * len(tensor) // size))


def _consumed(taken: Sequence[ray.ObjectRef], head: WeightUpdate, sinks: Sequence[Sink], deadline_s: float) -> None:
    """Wait until every sink has taken a bucket."""
    _, late = ray.wait(list(taken), num_returns=len(taken), timeout=deadline_s)
    for ref, sink in zip(taken, sinks, strict=True):
        if ref in late:
            raise EngineFailure(
                f"weight update {head.version}: waited {deadline_s:g} s for engine {sink.name} to take weights"
            )
        try:
            refusal = ray.get(ref)
        except RayError as error:
            raise EngineFailure(
                f"weight update {head.version}: engine {sink.name} died while it took weights ({type(error).__name__})"
            ) from None
        if refusal:
            raise EngineFailure(f"{refusal} (engine {sink.name})")
