"""What a rank of the trainer does at a publication: the plan, once, and its part of the sending, every time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from rollkeel.cluster.line import Line
from rollkeel.cluster.pulse import Pulse, awaited
from rollkeel.cluster.stream import Calls, Sink
from rollkeel.config_cluster import SyncConfig
from rollkeel.engines.open_memory import Views, views_of
from rollkeel.engines.shared_memory import ALIGN, AVAILABLE, OpenedFiles, Ring
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.sync.last_sent import LastSent, Traffic
from rollkeel.sync.layouts import Part, parts_of
from rollkeel.sync.plan import Plan
from rollkeel.sync.sending import MADE, WINDOW, Outgoing, Ready, Weights, ready_of, send_part
from rollkeel.train.mesh import Mesh
from rollkeel.train.trainer import LocalTrainer
from rollkeel.types import WeightUpdate

MB = 2**20


class Prepared(NamedTuple):
    """What can be done of a publication before engines are told."""

    of: tuple[Any, ...] = ()
    """Plan, size of a bucket, version of the weights."""
    ready: Ready = ()
    weights: Weights | None = None
    """What lies here."""


class Sender:
    """Sends from one rank. Every rank makes the same plan; none waits for another, but for the names of their nodes at the start."""

    def __init__(
        self, trainer: LocalTrainer, mesh: Mesh, config: SyncConfig, deadline_s: float, *, remembers: bool = False
    ) -> None:
        """`deadline_s`: longest wait for an engine to take a bucket. `remembers`: for deltas. Collective."""
        self._trainer = trainer
        self._mesh = mesh
        self._config = config
        self._deadline_s = deadline_s
        self._node = ray.get_runtime_context().get_node_id()
        self._nodes = mesh.everyone(self._node)
        self._plans = dict[tuple[Any, ...], Plan]()
        self._sent: tuple[tuple[Any, ...], Outgoing] | None = None
        """Key of the plan of the last publication, and how it was cut, if it was one of weights."""
        self._prepared = Prepared()
        self._rings: dict[int, tuple[str, Ring | None]] = {}
        """By number of the engine, and which actor that is; None for one that gets its buckets through Ray's object store."""
        self._addresses, self._lines = dict[int, str](), dict[int, Line]()
        """By number of the engine, of those with a ring."""
        self._memories = OpenedFiles[Views]()
        self._pulses = dict[int, tuple[str, Pulse]]()
        """By number of the engine, and which actor that is."""
        self._bucket_bytes = 0
        self._parts: list[Part] = []
        self._last = LastSent() if remembers else None

    def send(self, head: WeightUpdate, sinks: Sequence[Sink]) -> tuple[list[int], Traffic]:
        """Returns the sum of checksums that each engine got from this rank. Raises `EngineFailure` naming an engine, and
        `DeltaRefused` where this rank or an engine has not what the delta is to be added to."""
        adapters = head.kind == "adapter"
        assert head.mode is not None  # the engines'
        key = adapters, head.mode, *((sink.index, sink.node) for sink in sinks)
        pulses = [self._pulse(sink) for sink in sinks]
        rings = self._shared(sinks)
        about = Outgoing(sinks[0].rooms, head.mode, self._bucket_bytes)
        cuts = key, self._bucket_bytes
        prepared, self._prepared = self._prepared, Prepared()
        if prepared.of != (*cuts, self._trainer.version):
            prepared = Prepared()
        if adapters:
            weights = Weights.whole(self._trainer.named_adapters())
        else:
            weights = prepared.weights or self._weights()
        if key not in self._plans:
            hosts = self._hosts(sinks)
            self._plans = {key: weights.plan([sink.rooms for sink in sinks], head.mode, hosts)}
        self._sent = None if adapters else (key, about)
        lines = self._lines_to(sinks, rings)
        carrier = Calls(head, sinks, self._deadline_s, rings, pulses, self._open(sinks), lines)
        part = self._plans[key], self._mesh.rank, weights.held, about, carrier
        try:
            if self._last is None or adapters:
                return send_part(*part, ready=prepared.ready), Traffic(nbytes=carrier.nbytes)
            through = self._last.through(head, cuts, about)
            sums = send_part(*part, through, prepared.ready)
        except EngineFailure:
            while self._lines:  # answers may be under way in them
                self._lines.popitem()[1].close()
            raise
        self._last.done(head, cuts)
        return sums, self._last.traffic._replace(nbytes=carrier.nbytes)

    def prepare(self, head: WeightUpdate) -> None:
        """Cut and sum what is to be sent to the engines of the last time, while they still sample. `send` finds out whether it is what
        it sends."""
        self._prepared = Prepared()
        if head.kind == "adapter" or self._sent is None:
            return
        (key, about), weights = self._sent, self._weights()
        ready = ready_of(self._plans[key], self._mesh.rank, weights.held, about)
        self._prepared = Prepared((key, about.bucket_bytes, self._trainer.version), ready, weights)

    def _weights(self) -> Weights:
        """What lies on this rank, now: the optimizer may have moved it to the host and back."""
        layout, pieces = self._trainer.parts
        self._parts = self._parts or parts_of(layout, pieces)
        return Weights.of(self._trainer.model, layout, pieces, self._parts)

    def _pulse(self, sink: Sink) -> Pulse:
        name, pulse = self._pulses.get(sink.index) or (sink.name, Pulse(sink.actor))
        if name != sink.name:
            pulse.renew(sink.actor)
        self._pulses[sink.index] = sink.name, pulse
        return pulse

    def _hosts(self, sinks: Sequence[Sink]) -> tuple[list[int], list[int]]:
        theirs = [sink.node for sink in sinks]
        number = {node: i for i, node in enumerate(sorted({*self._nodes, *theirs}))}
        return [number[node] for node in self._nodes], [number[node] for node in theirs]

    def _near(self, sink: Sink) -> bool:
        return AVAILABLE and self._config.transport != "ray" and sink.node == self._node

    def _shared(self, sinks: Sequence[Sink]) -> dict[int, Ring]:
        """Memory shared with those of the sinks that are on this host."""
        self._fit(sinks)
        out = dict[int, Ring]()
        for number, sink in enumerate(sinks):
            name, ring = self._rings.get(sink.index, ("", None))
            if name != sink.name:
                ring = self._mapped(ring, sink)
                self._rings[sink.index] = sink.name, ring
            if ring is not None:
                out[number] = ring
            elif self._config.transport == "shm":
                raise BadInput(f"sync.transport=shm: engine {sink.name} shares no memory with this rank; set auto")
        return out

    def _lines_to(self, sinks: Sequence[Sink], rings: Collection[int]) -> dict[int, Line]:
        """By number of the sink."""
        out = dict[int, Line]()
        for number in rings:
            index = sinks[number].index
            with suppress(OSError):  # it is in a container of its own, or gone
                self._lines[index] = out[number] = self._lines.get(index) or Line(self._addresses[index])
        return out

    def _open(self, sinks: Sequence[Sink]) -> dict[int, Views]:
        """Memory of engines on this host that is written to, by number of the sink."""
        out = dict[int, Views]()
        self._memories.forget()
        for number, sink in enumerate(sinks):
            if sink.memory and self._near(sink):
                with suppress(OSError):  # its processes may not be ours to see, in a container of their own
                    out[number] = self._memories.get_or(sink.memory, lambda s=sink: views_of(s.memory, s.rooms))
        return out

    def _fit(self, sinks: Sequence[Sink]) -> None:
        """Buckets for which the buffer is enough, also when engines have joined. It is what is under way, in rings and the object store,
        and what is made."""
        rings = {index for index, (_, ring) in self._rings.items() if ring is not None}
        rings |= {sink.index for sink in sinks if self._near(sink)}
        under_way = WINDOW * (len(rings) + (not all(map(self._near, sinks))))
        most = max(ALIGN, int(self._config.buffer_mb * MB / (under_way + MADE)))
        if 0 < self._bucket_bytes <= most:
            return
        self._bucket_bytes = most
        for _, ring in self._rings.values():
            if ring is not None:
                ring.close()
        self._rings.clear()

    def _mapped(self, ring: Ring | None, sink: Sink) -> Ring | None:
        """A ring that the engine has mapped, that of an actor whose place it took or a new one; None if it cannot."""
        if not self._near(sink):
            if ring is not None:
                ring.close()
            return None
        try:
            ring = ring or Ring(self._bucket_bytes, WINDOW)
        except OSError:
            return None
        self._rings[sink.index] = "", ring  # for the next one, if this engine dies
        call = sink.actor.attach.remote(ring.path)
        late = awaited({call: (sink.name, self._pulse(sink))}, self._deadline_s)
        if late:
            raise EngineFailure(late)
        try:
            refused, self._addresses[sink.index] = ray.get(call)
        except RayError as error:
            raise EngineFailure(f"engine {sink.name} died before it took weights ({type(error).__name__})") from None
        if line := self._lines.pop(sink.index, None):
            line.close()
        if refused:
            ring.close()
        return None if refused else ring
