"""Whatever happens between publications of changes alone, engines end with the trainer's weights, bit for bit, or with none.

Matters because a delta on the wrong weights is a model that nobody trained. Random histories of updates, restarted and new engines and
restarted ranks, with the controller's, the ranks' and the engines' own code but without Ray. Not covered: actors (test_boxes_to_actors.py),
the codec (tests/models/test_delta.py), one process (tests/sync/test_deltas.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollkeel.cluster import sender
from rollkeel.cluster.arriving import Bucket
from rollkeel.cluster.arriving import Weights as Arriving
from rollkeel.cluster.publish import StreamPublisher
from rollkeel.cluster.stream import bytes_of, layout_of
from rollkeel.config import SyncConfig
from rollkeel.engines.intake import Room
from rollkeel.engines.shared_memory import ALIGN, OpenedFiles, aligned
from rollkeel.errors import DeltaRefused, EngineFailure
from rollkeel.models.numerics import compute_dtype, rounded
from rollkeel.sync.last_sent import LastSent, Traffic
from rollkeel.sync.layouts import engine_layout
from rollkeel.sync.plan import Layout, dealt, plan
from rollkeel.types import Proof, WeightSlice, WeightUpdate

NAMES = {
    "layers.0.proj.weight": (12, 32),
    "layers.0.up.weight": (8, 64),
    "layers.0.norm.weight": (32,),
    "embed.weight": (7, 32),
}
"""The norm travels whole; columns of the first two are rounded by engines where ranks cut them."""


class Engine:
    """As much of an engine as weights need; `half` of the rows of the embedding are another one's."""

    def __init__(self, mode: str, index: int) -> None:
        self.mode, self.index, self.node = mode, index, "here"
        self.capabilities = SimpleNamespace(dtype=mode)
        self.memory = SimpleNamespace(
            destinations={n: torch.full(s, torch.nan).to(compute_dtype(mode)) for n, s in NAMES.items()}, adapters={}
        )
        self.version = self.base = -1
        self.weights = Arriving(self)

    def retire(self) -> int:
        base, self.base, self.version = self.base, -1, -1
        return base

    def serve(self, version: int, checksum: int, base: int) -> Proof:
        self.version = self.base = version
        return Proof(version=version, checksum=checksum)


@dataclass
class Engines:
    """What `StreamPublisher` sees of engine actors."""

    parts: list[Engine]
    attempt: int = 0

    @property
    def capabilities(self) -> Any:
        return self.parts[0].capabilities

    @property
    def version(self) -> int:
        return min(p.version for p in self.parts)

    def publish(self, head: WeightUpdate, feed: Any, to: Sequence[Engine] | None = None) -> Proof:
        self.attempt += 1
        asked = self.parts if to is None else to
        sinks = []
        for part in asked:
            rooms, memory = part.weights.act(part, ("begin", self.attempt, head, True))
            about = {"index": part.index, "node": part.node, "rooms": rooms, "memory": memory}
            sinks.append(SimpleNamespace(name=str(id(part)), part=part, **about))
        sums = feed(sinks)
        proofs = [p.weights.act(p, ("finish", self.attempt, s)) for p, s in zip(asked, sums, strict=True)]
        assert {p.version for p in proofs} == {head.version}
        return proofs[0]


class Carrier:
    """To engines of this process."""

    def __init__(self, head: WeightUpdate, sinks: Sequence[Any], *_: Any) -> None:
        self.head, self.sinks, self.nbytes = head, sinks, 0

    def put(self, bucket: Sequence[WeightSlice], to: Sequence[int]) -> None:
        self.nbytes += len(to) * sum(s.tensor.nbytes for s in bucket)
        layout = layout_of(bucket)
        for number in to:
            part = self.sinks[number].part
            data = [np.array(b) for b in bytes_of(bucket)]
            if refusal := part.weights.take(Bucket(part.weights._attempt, layout, data, Future())):
                raise (DeltaRefused if self.head.kind == "delta" else EngineFailure)(refusal)

    def flush(self) -> None:
        """Nothing is under way."""


class Rank(sender.Sender):
    def __init__(self, rank: int, trainer: Trainer) -> None:
        self._trainer: Any = SimpleNamespace(model=trainer, parts=(rank,), named_adapters=dict, version=0)
        self._mesh: Any = SimpleNamespace(rank=rank)
        self._config, self._deadline_s = SyncConfig(), 1.0
        self._plans, self._bucket_bytes, self._last = {}, 2_000, LastSent()
        self._sent, self._prepared = None, sender.Prepared()
        self._memories, self._lines = OpenedFiles[Any](), {}

    def _weights(self) -> Any:
        return Cut(self._trainer.model, *self._trainer.parts)

    def _hosts(self, sinks: Any) -> Any:
        return [0], [0] * len(sinks)

    def _shared(self, sinks: Any) -> Any:
        return {}

    def _pulse(self, sink: Any) -> Any:
        """Nobody is waited for here."""


@dataclass
class Trainer:
    """Weights cut over ranks, along one dimension."""

    ranks: int
    dim: int
    masters: dict[str, torch.Tensor]
    senders: list[Rank] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)

    def prepare(self, head: WeightUpdate) -> None:
        pass

    def stream(self, head: WeightUpdate, sinks: Sequence[Any]) -> list[int]:
        sent = [one.send(head, sinks) for one in self.senders]
        self.traffic = Traffic(*map(sum, zip(*(t for _, t in sent), strict=True)))
        return [sum(sums) % 2**64 for sums in zip(*(sums for sums, _ in sent), strict=True)]


class Cut:
    """In the place of `sync.sending.Weights`."""

    def __init__(self, trainer: Trainer, rank: int) -> None:
        self.trainer, self.rank = trainer, rank
        self.held = {}
        for name, whole in trainer.masters.items():
            dim = trainer.dim if whole.dim() > 1 else 0
            each = -(-whole.shape[dim] // trainer.ranks)
            start = min(rank * each, whole.shape[dim])
            part = whole.narrow(dim, start, min(each, whole.shape[dim] - start))
            starts = tuple(start if d == dim else 0 for d in range(whole.dim()))
            self.held[name] = [(starts, part)]

    def plan(self, rooms: Sequence[dict[str, Room]], mode: str, hosts: Any) -> Any:
        grid = np.arange(self.trainer.ranks)
        families = [
            dealt([n], s, 4, grid, ("rank",), [("rank", self.trainer.dim if len(s) > 1 else 0)])
            for n, s in NAMES.items()
        ]
        own = dict.fromkeys(NAMES, 4)
        return plan(Layout(families, grid * 0), engine_layout(rooms, mode, own, hosts[1]))


def assert_same(engine: Engine, masters: dict[str, torch.Tensor]) -> None:
    for name, view in engine.memory.destinations.items():
        right = rounded(name, masters[name], engine.mode).to(view.dtype)
        assert torch.equal(view.view(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)), name


def changed(masters: dict[str, torch.Tensor], draw: torch.Generator, share: float) -> None:
    for tensor in masters.values():
        hit = torch.rand(tensor.shape, generator=draw) < share
        tensor[hit] += torch.randn(int(hit.sum()), generator=draw) * 0.01


def history(seed: int, kind: str) -> dict[str, int]:
    """One random history; counts of what happened."""
    draw = np.random.default_rng(seed)
    mode, noise = str(draw.choice(["fp32", "bf16", "int8"])), torch.Generator().manual_seed(seed)
    masters = {n: torch.randn(s, generator=noise) for n, s in NAMES.items()}
    trainer = Trainer(int(draw.integers(1, 4)), int(draw.integers(0, 2)), masters)
    trainer.senders = [Rank(rank, trainer) for rank in range(trainer.ranks)]
    engines = Engines([Engine(mode, i) for i in range(int(draw.integers(1, 4)))])
    told = StreamPublisher(engines, trainer, kind)  # type: ignore[arg-type]
    happened = dict.fromkeys(["deltas", "refused", "full"], 0)
    for version in range(1, int(draw.integers(4, 9))):
        event = draw.choice(["update", "update", "update", "restart", "join", "leave", "rank", "nothing"])
        at = int(draw.integers(len(engines.parts)))
        if event == "restart":  # another one in its place, brought what the others serve
            engines.parts[at] = Engine(mode, engines.parts[at].index)
            if version > 1 and draw.integers(2):
                told.again([engines.parts[at]])
        elif event == "join":
            engines.parts.append(Engine(mode, max(p.index for p in engines.parts) + 1))
        elif event == "leave" and len(engines.parts) > 1:
            del engines.parts[at]
        elif event == "rank":
            number = int(draw.integers(trainer.ranks))
            trainer.senders[number] = Rank(number, trainer)
        elif event == "update":
            changed(masters, noise, float(draw.choice([0.001, 0.05, 0.9])))
        metrics = told.publish(None, version)
        happened["deltas"] += int(metrics["sync/deltas"])
        happened["refused"] += int(metrics["sync/deltas_refused"])
        happened["full"] += 1 - int(metrics["sync/deltas"])
        for engine in engines.parts:
            assert engine.version == version
            assert_same(engine, masters)
    return happened


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "Calls", Carrier)


@pytest.mark.parametrize(
    "seeds", [range(20), *(pytest.param(range(a, a + 245), marks=pytest.mark.slow) for a in (20, 265, 510, 755))]
)
def test_random_histories_end_with_the_trainers_bits(seeds: range) -> None:
    total = dict.fromkeys(["deltas", "refused", "full"], 0)
    for seed in seeds:
        for key, count in history(seed, ("delta", "auto")[seed % 2]).items():
            total[key] += count
    assert total["deltas"] > len(seeds)
    assert total["refused"] > len(seeds) // 4
    assert total["full"] > len(seeds)


def two(kind: str = "delta", mode: str = "bf16") -> tuple[Trainer, Engines, StreamPublisher]:
    masters = {n: torch.randn(s) for n, s in NAMES.items()}
    trainer = Trainer(2, 0, masters)
    trainer.senders = [Rank(rank, trainer) for rank in range(2)]
    engines = Engines([Engine(mode, 0), Engine(mode, 1)])
    return trainer, engines, StreamPublisher(engines, trainer, kind)  # type: ignore[arg-type]


def test_a_small_change_is_a_small_delta() -> None:
    trainer, _, told = two()
    first = told.publish(None, 1)
    trainer.masters["layers.0.proj.weight"][3, 5] += 1.0
    trainer.masters["layers.0.up.weight"][7, 60] += 1.0
    metrics = told.publish(None, 2)
    whole = 2 * 2 * sum(int(np.prod(s)) for s in NAMES.values())  # bf16, to two engines
    assert first["sync/bytes"] == whole
    assert first["sync/deltas"] == 0
    large = sum(int(np.prod(s)) for s in NAMES.values() if len(s) > 1)
    assert metrics["sync/changed"] == 2 / large
    assert metrics["sync/deltas"] == 1
    assert metrics["sync/bytes"] < whole / 2


def test_auto_goes_by_what_the_publication_before_changed() -> None:
    trainer, engines, told = two("auto")
    kinds = []
    for version, share in enumerate([0.0, 0.9, 0.9, 0.001, 0.001, 0.001], 1):
        changed(trainer.masters, torch.Generator().manual_seed(version), share)
        kinds.append(told.publish(None, version)["sync/deltas"])
        assert_same(engines.parts[1], trainer.masters)
    assert kinds == [0, 1, 0, 0, 1, 1]


def test_a_damaged_delta_is_refused_and_all_weights_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, engines, told = two()
    told.publish(None, 1)
    put, refused = Carrier.put, 0
    for version in range(2, 102):
        draw, left = np.random.default_rng(version), deque([1])

        def damaged(self: Any, bucket: Any, to: Any, draw: Any = draw, left: Any = left) -> None:
            at = [i for i, s in enumerate(bucket) if s.box]
            if left and at:
                left.pop()
                i = int(draw.choice(at))
                tensor = bucket[i].tensor.clone()
                tensor[int(draw.integers(len(tensor)))] ^= 1 << int(draw.integers(8))
                bucket = [*bucket[:i], replace(bucket[i], tensor=tensor), *bucket[i + 1 :]]
            put(self, bucket, to)

        changed(trainer.masters, torch.Generator().manual_seed(version), 0.05)
        monkeypatch.setattr(Carrier, "put", damaged)
        metrics = told.publish(None, version)
        refused += int(metrics["sync/deltas_refused"])
        for engine in engines.parts:
            assert_same(engine, trainer.masters)
        monkeypatch.setattr(Carrier, "put", put)
        if metrics["sync/deltas_refused"]:
            told.publish(None, version)
    assert refused > 90  # the others are bits that zstd does not read: the weights came out right


def test_a_hundred_ranks_that_die_in_the_middle_leave_no_engine_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, engines, told = two()
    told.publish(None, 1)
    put = Carrier.put
    for version in range(2, 102):
        draw, sent = np.random.default_rng(version), [0]

        def dying(self: Any, bucket: Any, to: Any, at: int = int(draw.integers(2)), sent: Any = sent) -> None:
            sent[0] += 1
            if sent[0] > at:
                raise EngineFailure("the rank is gone")
            put(self, bucket, to)

        changed(trainer.masters, torch.Generator().manual_seed(version), 0.3)
        told._kind = ("full", "delta")[version % 2]
        monkeypatch.setattr(sender, "Calls", type("Dying", (Carrier,), {"put": dying}))
        with pytest.raises(EngineFailure, match="the rank is gone"):
            told.publish(None, version)
        assert {e.version for e in engines.parts} == {-1}
        monkeypatch.setattr(sender, "Calls", Carrier)
        number = int(draw.integers(2))
        trainer.senders[number] = Rank(number, trainer)
        told.publish(None, version)
        for engine in engines.parts:
            assert_same(engine, trainer.masters)


def test_a_hundred_buffers_smaller_than_weights_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to a bucket of one element."""
    put, largest = Carrier.put, [0]

    def seen(self: Any, bucket: Any, to: Any) -> None:
        largest[0] = max(largest[0], sum(aligned(s.tensor.nbytes) for s in bucket))
        put(self, bucket, to)

    monkeypatch.setattr(Carrier, "put", seen)
    for seed in range(100):
        draw = np.random.default_rng(seed)
        trainer, engines, told = two("full", str(draw.choice(["fp32", "bf16", "int8"])))
        size, largest[0] = int(draw.integers(1, 12)) ** 2 * ALIGN, 0
        for one in trainer.senders:
            one._bucket_bytes = size
        told.publish(None, 1)
        assert largest[0] <= size
        for engine in engines.parts:
            assert_same(engine, trainer.masters)


def test_a_delta_slice_in_a_full_update_is_refused() -> None:
    engine = Engine("bf16", 0)
    head = WeightUpdate(kind="full", base_version=None, version=1, slices=(), checksum=0, mode="bf16")
    engine.weights.act(engine, ("begin", 1, head, True))
    piece = WeightSlice(
        name="embed.weight", tensor=torch.zeros(9, dtype=torch.uint8), checksum=0, starts=(0, 0), box=(7, 32)
    )
    refusal = engine.weights.take(Bucket(1, layout_of([piece]), bytes_of([piece]), Future()))
    assert refusal == "weight update 1: embed.weight arrived as a delta in a full update"
