"""Weights from trainer ranks to engine actors: bucket by bucket, past the controller.

    slices with checksums ─▶ bucket ─┬─ Ray's object store ──┬─▶ engine: written, proven, freed
                                     └─ memory of one host ──┘
                                        at most two that some engine has not taken yet

So what a publication needs beside trainer and engines is a few buckets, whatever the size of the model, and nothing for engines whose own
memory is written to (`rollkeel.engines.open_memory`).
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray.exceptions import RayError, RayTaskError

from rollkeel.cluster.line import MOST, Line, silent
from rollkeel.cluster.pulse import Pulse, awaited
from rollkeel.engines.intake import Room
from rollkeel.engines.open_memory import Views, write
from rollkeel.engines.shared_memory import WINDOW, Ring, Slot, buckets
from rollkeel.errors import DeltaRefused, EngineFailure
from rollkeel.models.checksum import MASK
from rollkeel.types import WeightSlice, WeightUpdate

BUCKET_BYTES = 64 << 20
DIED_S = 3.0
DIRECT = 4
"""Buckets under way to engines whose own memory is written to: they take no other memory."""
STORE = {"free_objects_batch_size": 1, "worker_niceness": 0}
"""`_system_config` of a Ray that we start; for one that others start, RAY_free_objects_batch_size=1 and RAY_worker_niceness=0 in its
environment. As it comes, Ray frees objects that nobody holds any more once a second or by the hundred, and until then the store keeps
taking fresh memory; and its actors run 15 nice levels below what else the machine does."""


class Entry(NamedTuple):
    """What travels beside the bytes of a slice."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    checksum: int
    offset: int
    starts: tuple[int, ...]
    box: tuple[int, ...]
    rounded: bool


Layout = list[Entry]
Bytes = Sequence[np.ndarray] | Slot | None
"""Of each slice of a bucket, or where all of them are; None where they are in the engine's memory already."""


@dataclass(frozen=True)
class Sink:
    """One engine actor that waits for weights. It travels to the rank that sends them."""

    name: str
    """As messages name it: actor, node, process."""
    actor: Any
    """Handle of an `EngineActor`."""
    attempt: int
    """Number of the publication, which a bucket of one that was given up does not have."""
    index: int = 0
    """Its number; an actor that takes the place of another one has the same."""
    node: str = ""
    """Ray's name of the machine that it is on."""
    rooms: Mapping[str, Room] = field(default_factory=dict)
    """Where the engine has the weights, by checkpoint name."""
    memory: str = ""
    """Path of the memory in which they have places, now; nothing where senders cannot write to it."""


Feed = Callable[[Sequence[Sink]], Sequence[int]]
"""Sends weights to the sinks; returns the checksum of what each of them got."""


def send(
    slices: Iterable[WeightSlice], head: WeightUpdate, sinks: Sequence[Sink], bucket_bytes: int, deadline_s: float
) -> int:
    """Send slices to all sinks; returns the sum of their checksums.

    `head`: kind, versions and numeric mode. `deadline_s`: longest wait for a bucket to be taken. Raises `EngineFailure` naming the
    engine that died, fell silent or refused."""
    total, carrier = 0, Calls(head, sinks, deadline_s)
    for bucket in buckets(slices, bucket_bytes):
        carrier.put(bucket, range(len(sinks)))
        total += sum(s.checksum for s in bucket)
        del bucket  # nobody needs the slices any more
    carrier.flush()
    return total & MASK


class Calls:
    """A `rollkeel.sync.sending.Carrier` to engine actors. They are told of a bucket, by a line or a call of Ray, and answer when it is
    proven."""

    def __init__(
        self,
        head: WeightUpdate,
        sinks: Sequence[Sink],
        deadline_s: float,
        rings: Mapping[int, Ring] | None = None,
        pulses: Sequence[Pulse] = (),
        views: Mapping[int, Views] | None = None,
        lines: Mapping[int, Line] | None = None,
    ) -> None:
        """`rings`: memory shared with those of the sinks, by number, that do not get buckets through Ray's object store. `pulses`: of
        all sinks, from earlier publications; without, new ones. `views`: of sinks whose engines' memory is written to. `lines`: to sinks on this host."""
        self.nbytes = 0
        """Sent so far, to all of them."""
        self._head = head
        self._sinks = sinks
        self._deadline_s = deadline_s
        self._rings = rings or {}
        self._views = views or {}
        self._lines = lines or {}
        self._pulses = list(pulses) or [Pulse(sink.actor) for sink in sinks]
        for pulse in self._pulses:
            pulse.beats()
        self._under_way = deque[dict[ray.ObjectRef | Line, int]]()

    def put(self, bucket: Sequence[WeightSlice], to: Sequence[int]) -> None:
        self._wait_for(DIRECT)
        self.nbytes += len(to) * sum(piece.tensor.nbytes for piece in bucket)
        layout = layout_of(bucket)
        stored = None
        calls = dict[ray.ObjectRef | Line, int]()
        direct = [n for n, views in self._views.items() if n in to and self._written(bucket, n, views)]
        if len(direct) < len(to):
            self._wait_for(WINDOW)
        for number in to:
            ring = self._rings.get(number)
            if number in direct:
                data: Any = None
            elif ring is not None:
                data = ring.put(bucket)
            else:
                data = stored = stored if stored is not None else ray.put(bytes_of(bucket))
            calls[self._told(number, layout, data)] = number
        # The calls hold what is stored; with the last of them the object store lets it go.
        self._under_way.append(calls)

    def _written(self, bucket: Sequence[WeightSlice], number: int, views: Views) -> bool:
        return write(bucket, self._sinks[number].rooms, views, self._head.mode or "")

    def _wait_for(self, most: int) -> None:
        """Until fewer than `most` buckets are under way."""
        while len(self._under_way) >= most:
            self._consumed(self._under_way.popleft())

    def _told(self, number: int, layout: Layout, data: Bytes) -> ray.ObjectRef | Line:
        """What brings the answer."""
        sink, line = self._sinks[number], self._lines.get(number)
        if line is not None and (data is None or isinstance(data, Slot)):
            message = pickle.dumps((sink.attempt, layout, data))
            if len(message) <= MOST:
                with suppress(OSError):  # that it is gone is seen when its answer is awaited
                    line.tell(message)
                return line
        return sink.actor.bucket.remote(sink.attempt, layout, data)

    def flush(self) -> None:
        self._wait_for(1)
        for pulse in self._pulses:
            pulse.beats()

    def _consumed(self, calls: Mapping[ray.ObjectRef | Line, int]) -> None:
        """Wait until every sink has taken a bucket."""
        said = f"weight update {self._head.version}"
        who = {call: (self._sinks[n].name, self._pulses[n]) for call, n in calls.items()}
        lines = {call: who[call] for call in calls if isinstance(call, Line)}
        refs = {call: who[call] for call in calls if not isinstance(call, Line)}
        began = time.monotonic()
        late = awaited(lines, self._deadline_s, silent) or awaited(refs, self._deadline_s, since=began)
        if late:
            raise EngineFailure(f"{said}: {late}")
        for call, number in calls.items():
            sink = self._sinks[number]
            try:
                refusal = call.answer() if isinstance(call, Line) else ray.get(call)
            except (RayError, EOFError, OSError) as error:
                lives = isinstance(error, RayTaskError)
                if isinstance(call, Line):
                    lives = self._pulses[number].answers(DIED_S)  # if not, Ray knows of it too now
                what = "could not take" if lives else "died while it took"
                why = error.cause if isinstance(error, RayTaskError) else error
                raise EngineFailure(f"{said}: engine {sink.name} {what} weights ({type(why).__name__})") from None
            if refusal:
                kind = DeltaRefused if self._head.kind == "delta" else EngineFailure
                raise kind(f"{refusal} (engine {sink.name})")


def layout_of(bucket: Sequence[WeightSlice]) -> Layout:
    return [
        Entry(s.name, s.tensor.dtype, tuple(s.tensor.shape), s.checksum, s.offset, s.starts, s.box, s.rounded)
        for s in bucket
    ]


def bytes_of(bucket: Sequence[WeightSlice]) -> list[np.ndarray]:
    """On a CPU they are the tensor's own, so that putting them into the object store is the only copy."""
    return [s.tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy() for s in bucket]


def unpacked(layout: Layout, data: Sequence[np.ndarray | torch.Tensor] | None) -> list[WeightSlice]:
    """The slices of a bucket, as views of the object store, which are read-only, or of shared memory; without `data` on the meta device."""
    out = []
    nowhere = (torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in layout)
    for entry, came in zip(layout, nowhere if data is None else data, strict=True):
        tensor = came if isinstance(came, torch.Tensor) else torch.from_numpy(came).view(entry.dtype).view(entry.shape)
        known = entry._asdict()
        del known["dtype"], known["shape"]
        out.append(WeightSlice(tensor=tensor, **known))
    return out
