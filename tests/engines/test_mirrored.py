"""Weights that come in parts go through a copy on the host to an engine that takes whole updates: every token is sampled under the weights of
its stamp, and whatever goes wrong on the way leaves the old ones in service or nothing.

Matters because this is how servers serve over a cluster. `fake_server.py` in a real process, and buckets as ranks send them. Not covered:
Ray (tests/cluster/test_served_engines.py), vLLM (tests/cluster/test_vllm_cluster.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_kit import drain
from fake_backend import FakeBackend, assert_true, ends_well, fake_engine, requests

from rollkeel.cluster.arriving import Bucket, Weights
from rollkeel.cluster.stream import bytes_of, layout_of
from rollkeel.engines.mirrored import Mirrored
from rollkeel.engines.open_memory import OpenMemory, views_of
from rollkeel.engines.shared_memory import AVAILABLE
from rollkeel.errors import BadInput, DeltaRefused, EngineFailure
from rollkeel.models import delta
from rollkeel.models.checksum import MASK, tensor_checksum
from rollkeel.models.numerics import held_checksum
from rollkeel.sync.publish import full_update
from rollkeel.sync.sending import WholeFeed
from rollkeel.types import Capabilities, Proof, WeightSlice, WeightUpdate

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="Linux only")
SHAPES = {"policy": (1,), "rest": (4, 3)}


def pieces(policy: float) -> list[WeightSlice]:
    """As a rank cuts them: `rest` in two."""
    rest = torch.arange(12.0).view(4, 3)
    parts = [("policy", torch.tensor([policy]), 0), ("rest", rest[:1], 0), ("rest", rest[1:], 3)]
    return [WeightSlice(name=n, tensor=t, checksum=tensor_checksum(n, t, o), offset=o) for n, t, o in parts]


class Actor:
    """What an engine actor does with messages and buckets."""

    def __init__(self, engine: Any, shapes: dict[str, Sequence[int]] = SHAPES) -> None:  # type: ignore[assignment]
        self.memory = OpenMemory()
        self.engine = Mirrored(engine, shapes, self.memory.zeros)
        self.weights = Weights(self.engine, self.memory)
        self.attempt = 0

    def begin(self, version: int, kind: str = "full", base: int | None = None) -> Any:
        self.attempt += 1
        head = WeightUpdate(kind=kind, base_version=base, version=version, slices=(), checksum=0, mode="fp32")
        return self.weights.act(self.engine, ("begin", self.attempt, head, True))

    def take(self, slices: list[WeightSlice]) -> str:
        return self.weights.take(Bucket(self.attempt, layout_of(slices), bytes_of(slices), Future()))

    def finish(self, slices: list[WeightSlice]) -> Proof:
        total = sum(piece.checksum for piece in slices) & MASK
        return self.weights.act(self.engine, ("finish", self.attempt, total))

    def publish(self, policy: float, version: int) -> Proof:
        self.begin(version)
        for piece in (slices := pieces(policy)):
            assert self.take([piece]) == ""
        return self.finish(slices)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[Actor, FakeBackend]]:
    engine, backend = fake_engine(tmp_path, publish=False)
    engine.boxes.feed = WholeFeed(1.0)
    actor = Actor(engine)
    yield actor, backend
    actor.engine.close()


def all_true(actor: Actor, policies: dict[int, float], first: int) -> None:
    asked = requests(4, first)
    actor.engine.submit(asked)
    assert actor.engine.busy
    got = drain(actor.engine)
    assert not actor.engine.busy
    for r in asked:
        assert ends_well(r, got[r.id])
        assert_true(r, got[r.id].span, policies)


def test_a_server_serves_what_came_in_parts_and_only_the_first_time_by_a_folder(
    opened: tuple[Actor, FakeBackend],
) -> None:
    actor, backend = opened
    assert actor.engine.version == -1
    for version in range(1, 4):
        whole = full_update(
            [("policy", torch.tensor([float(version)])), ("rest", torch.arange(12.0).view(4, 3))], version
        )
        assert actor.publish(float(version), version) == Proof(version=version, checksum=whole.checksum)
        all_true(actor, {version: float(version)}, 10 * version)
    assert backend.state()["calls"].count("load") == 1
    assert backend.starts() == 1
    asked = [[1, 2, 3]]
    assert (
        actor.weights.act(actor.engine, ("score", asked))[0].tolist() == actor.engine._engine.score(asked)[0].tolist()
    )  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_sender_of_the_host_writes_where_the_copy_lies(opened: tuple[Actor, FakeBackend]) -> None:
    actor, _ = opened
    rooms, path = actor.begin(1)
    views = views_of(path, rooms)
    slices = pieces(2.5)
    views["policy"].copy_(slices[0].tensor)
    views["rest"].copy_(torch.arange(12.0).view(4, 3))
    assert actor.weights.take(Bucket(actor.attempt, layout_of(slices), None, Future())) == ""
    actor.finish(slices)
    all_true(actor, {1: 2.5}, 10)


def test_the_engine_samples_on_while_weights_travel(opened: tuple[Actor, FakeBackend]) -> None:
    actor, backend = opened
    actor.publish(1.0, 1)
    asked = requests(4, length=150)
    actor.engine.submit(asked)
    backend.until_sent(20)
    slices = pieces(2.0)
    actor.begin(2)
    assert actor.take(slices[:2]) == ""
    sent = backend.state()["sent"]
    end = time.monotonic() + 10
    while backend.state()["sent"] <= sent + 8:
        actor.engine.poll(0)
        assert time.monotonic() < end
    assert actor.engine.version == 1
    assert actor.take(slices[2:]) == ""
    actor.finish(slices)
    got = drain(actor.engine)
    for r in asked:
        assert_true(r, got[r.id].span, {1: 1.0, 2: 2.0})
    assert {int(v) for s in got.values() for v in s.span.versions} == {1, 2}


FAULTS = {
    "wrong bytes": "wrong checksum",
    "one missing": "1 weights did not arrive",
    "changed behind its proof": "changed behind",
}


def test_what_did_not_arrive_is_not_served(opened: tuple[Actor, FakeBackend]) -> None:
    actor, _ = opened
    actor.publish(0.0, 1)
    for number, (fault, said) in enumerate(FAULTS.items(), 1):
        slices, before = pieces(9.0), actor.engine.version
        actor.begin(before + 1)
        if fault == "wrong bytes":
            broken = [WeightSlice(name="policy", tensor=torch.tensor([3.0]), checksum=slices[0].checksum)]
            assert "policy arrived with a wrong checksum" in actor.take(broken)
        else:
            assert actor.take(slices[: 2 if fault == "one missing" else 3]) == ""
        if fault == "changed behind its proof":
            actor.engine.weights["rest"][3, 2] += 1
        with pytest.raises(EngineFailure, match=said):
            actor.finish(slices)
        assert actor.engine.version == before
        all_true(actor, {before: float(number - 1)}, 20 * number)
        actor.publish(float(number), before + 2)
        all_true(actor, {before + 2: float(number)}, 20 * number + 10)


def test_a_server_that_is_lost_while_its_copy_is_written_waits_for_what_comes(
    opened: tuple[Actor, FakeBackend],
) -> None:
    """Neither the old weights are anywhere any more, nor all of the new ones."""
    actor, backend = opened
    actor.publish(1.0, 1)
    actor.publish(2.0, 2)  # whose folder was never written
    asked = requests(2, length=150)
    actor.engine.submit(asked)
    backend.until_sent(10)
    actor.begin(3)
    slices = pieces(3.0)
    assert actor.take(slices[:1]) == ""
    actor.engine._engine._keeper.kill()  # type: ignore[attr-defined]
    end = time.monotonic() + 10
    while not actor.engine._engine._keeper.awaits:  # type: ignore[attr-defined]
        assert actor.engine.poll(0) == []
        assert time.monotonic() < end
    assert actor.take(slices[1:]) == ""
    actor.finish(slices)
    got = drain(actor.engine)
    for r in asked:
        assert_true(r, got[r.id].span, {2: 2.0, 3: 3.0})
    assert {int(v) for s in got.values() for v in s.span.versions} == {2, 3}
    assert backend.starts() == 2


def test_changes_are_added_to_what_is_here_and_to_nothing_else(opened: tuple[Actor, FakeBackend]) -> None:
    actor, _ = opened
    actor.publish(1.0, 1)
    before, after = (
        full_update([("policy", torch.tensor([p])), ("rest", torch.arange(12.0).view(4, 3))], 1) for p in (1.0, 4.0)
    )
    changes = []
    for old, new in zip(before.slices, after.slices, strict=True):
        changes.append(torch.from_numpy(delta.encode(delta.bits_of(old.tensor), delta.bits_of(new.tensor))))
    shapes = [tuple(piece.tensor.shape) for piece in after.slices]
    slices = [
        WeightSlice(name=piece.name, tensor=change, checksum=piece.checksum, starts=(0,) * len(shape), box=shape)
        for piece, change, shape in zip(after.slices, changes, shapes, strict=True)
    ]
    with pytest.raises(DeltaRefused):
        actor.begin(2, "delta", base=0)
    actor.publish(1.0, 2)
    actor.begin(3, "delta", base=2)
    assert actor.take(slices) == ""
    actor.finish(slices)
    all_true(actor, {3: 4.0}, 10)


class Whole:
    """An engine of one's own: it remembers what it was given."""

    def __init__(
        self, mode: str = "fp32", proof: Callable[[WeightUpdate], int] = lambda update: update.checksum
    ) -> None:
        self.capabilities = Capabilities(name="own", dtype=mode, max_length=9)
        self.version, self._proof, self.given = -1, proof, dict[str, torch.Tensor]()

    def update_weights(self, update: WeightUpdate) -> Proof:
        self.given = {piece.name: piece.tensor.clone() for piece in update.slices}
        assert all(tensor_checksum(s.name, s.tensor) == s.checksum for s in update.slices)
        return Proof(version=update.version, checksum=self._proof(update))


def test_an_engine_whose_proof_is_another_one_is_not_believed() -> None:
    actor = Actor(Whole(proof=lambda update: update.checksum + 1))
    with pytest.raises(
        EngineFailure, match=r"engine own: expected proof of version 5 with checksum .* weights did not arrive"
    ):
        actor.publish(1.0, 5)
    assert actor.weights.act(actor.engine, ("score", [])) is None  # nobody is asked who cannot score


def test_what_is_added_to_scores_of_a_router_is_not_rounded() -> None:
    shapes: dict[str, Sequence[int]] = {
        "a.weight": (3, 5),
        "b.weight": (2,),
        "mlp.gate.e_score_correction_bias": (7,),
    }
    own = Whole("bf16")
    actor = Actor(own, shapes)
    actor.attempt += 1
    head = WeightUpdate(kind="full", base_version=None, version=1, slices=(), checksum=0, mode="bf16")
    actor.weights.act(actor.engine, ("begin", actor.attempt, head, True))
    draw = torch.rand(7, generator=torch.Generator().manual_seed(0))
    named = {
        "a.weight": torch.rand(3, 5).bfloat16(),
        "b.weight": torch.rand(2).bfloat16(),
        "mlp.gate.e_score_correction_bias": draw,
    }
    slices = [WeightSlice(name=n, tensor=t, checksum=held_checksum(n, t, "bf16")) for n, t in named.items()]
    assert actor.take(slices) == ""
    proof = actor.finish(slices)
    assert proof.checksum == sum(piece.checksum for piece in slices) & MASK
    assert torch.equal(own.given["mlp.gate.e_score_correction_bias"], draw)
    assert own.given["a.weight"].dtype == torch.bfloat16
    places = [view.data_ptr() % 128 for name, view in actor.engine.weights.items() if view.dtype == torch.bfloat16]
    assert places == [places[0]] * len(places)


def test_an_engine_of_numbers_that_are_rounded_on_the_way_is_refused() -> None:
    with pytest.raises(
        BadInput, match=r"^engine\.dtype=int8: weights of this engine come over a cluster as fp32, bf16, fp16"
    ):
        Mirrored(SimpleNamespace(capabilities=Capabilities(name="own", dtype="int8", max_length=9)), {})  # type: ignore[arg-type]
