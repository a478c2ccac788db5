"""An engine's weights in memory that senders of its host write to, and what keeps one that was given up from ever being served.

Matters because a process that writes into another one's weights can do what no message can: change what is served behind its proof.
Ways of a plan's boxes into it are covered with every fault by test_boxes_to_actors.py, whose rank has real actors on its host. Not covered:
a container in which other processes cannot be seen, but for the error that it gives.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))
from engine_kit import model_of, prompts_of, requests_of, run, same
from whole_weights import slices_of

from rollkeel.cluster.arriving import Bucket, Weights
from rollkeel.cluster.sender import Sender
from rollkeel.cluster.stream import layout_of
from rollkeel.config import EngineConfig
from rollkeel.engines.intake import Room, rooms_of
from rollkeel.engines.local import LocalEngine
from rollkeel.engines.open_memory import OpenMemory, Views, views_of, write
from rollkeel.engines.shared_memory import AVAILABLE, OpenedFiles
from rollkeel.errors import EngineFailure
from rollkeel.models.checksum import MASK
from rollkeel.models.names import checkpoint_views
from rollkeel.models.numerics import MODES
from rollkeel.types import WeightSlice, WeightUpdate

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="Linux only")
CPU = torch.device("cpu")
PRESETS = ["tiny-qwen3", "tiny-qwen3-tied", "tiny-qwen3-moe"]


class Opened:
    """An engine with its memory open, and the sender's side of publications to it."""

    def __init__(self, model: Any, mode: str = "fp32") -> None:
        self.memory, self.mode = OpenMemory(), mode
        config = EngineConfig(dtype=mode)  # pyright: ignore[reportArgumentType]
        self.engine = LocalEngine(model.config, config, max_length=96, zeros=self.memory.zeros)
        self.weights = Weights(self.engine, self.memory)
        self.attempt, self.rooms = 0, dict[str, Room]()

    def begin(self, version: int) -> Views:
        self.attempt += 1
        head = WeightUpdate(kind="full", base_version=None, version=version, slices=(), checksum=0, mode=self.mode)
        rooms, path = self.weights.act(self.engine, ("begin", self.attempt, head, not self.rooms))
        self.rooms = rooms or self.rooms
        return views_of(path, self.rooms)

    def send(self, pieces: list[WeightSlice], views: Views) -> str:
        assert write(pieces, self.rooms, views, self.mode)
        return self.weights.take(Bucket(self.attempt, layout_of(pieces), None, Future()))

    def finish(self, pieces: list[WeightSlice]) -> int:
        total = sum(piece.checksum for piece in pieces) & MASK
        return self.weights.act(self.engine, ("finish", self.attempt, total)).version


def pieces_of(model: Any, mode: str = "fp32") -> list[WeightSlice]:
    return list(slices_of(checkpoint_views(model).items(), mode, 5_000))


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_sender_writes_is_what_the_engine_computes_with(preset: str) -> None:
    models = [model_of(preset, seed) for seed in (0, 1, 2)]
    opened, requests = Opened(models[0]), requests_of(prompts_of(4), max_new_tokens=8)
    for version, model in enumerate(models):
        views, pieces = opened.begin(version), pieces_of(model)
        for piece in pieces:  # buckets of one, as small as they come
            assert opened.send([piece], views) == ""
        assert opened.finish(pieces) == version
        assert set(views) == set(opened.engine.weights)  # no weight needs another way
        for name, wanted in checkpoint_views(model).items():
            assert torch.equal(opened.engine.weights[name], wanted)
            assert torch.equal(views[name], wanted)
        alone = LocalEngine(model.config, EngineConfig(), max_length=96)
        for name, wanted in checkpoint_views(model).items():
            alone.weights[name].copy_(wanted)
        alone.serve(version, 0, version)
        ours, theirs = run(opened.engine, requests), run(alone, requests)
        assert all(same(ours[i].span, theirs[i].span, 0.0) for i in theirs)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "fp32"])
def test_what_the_engine_holds_otherwise_goes_another_way(mode: str) -> None:
    """A slice that the engine rounds, or has in another dtype; one that was rounded by its sender lies as it is."""
    model = model_of("tiny-qwen3-moe")
    opened = Opened(model, mode)
    views = opened.begin(0)
    before = {name: view.clone() for name, view in views.items()}
    name = "model.layers.0.self_attn.q_proj.weight"
    piece = next(p for p in pieces_of(model, mode) if p.name == name)
    assert not write([piece], opened.rooms, views, mode)  # float32 into what is rounded, or narrower
    held = replace(piece, tensor=torch.full_like(piece.tensor, 0.5).to(views[name].dtype), rounded=True)
    for other in (
        replace(held, name="of nobody"),
        replace(held, box=tuple(held.tensor.shape)),
        replace(held, offset=1),
        replace(held, starts=(len(views[name]), 0)),
        replace(held, tensor=held.tensor[:0]),
        replace(held, tensor=held.tensor.double()),
    ):
        assert not write([held, other], opened.rooms | {"of nobody": opened.rooms[name]}, views, mode)
    assert all(torch.equal(views[n], kept) for n, kept in before.items())  # not one of a bucket either
    assert write([held], opened.rooms, views, mode)
    assert bool((opened.engine.weights[name][: len(held.tensor)] == 0.5).all())


def test_nothing_reaches_an_engine_from_a_publication_that_was_given_up() -> None:
    first, second = (model_of("tiny-qwen3-moe", seed) for seed in (0, 1))
    opened = Opened(first)
    old, pieces, others = opened.begin(0), pieces_of(first), pieces_of(second)
    assert opened.send(pieces[:7], old) == ""
    half = {name: weight.clone() for name, weight in opened.engine.weights.items()}
    addresses = {name: weight.data_ptr() for name, weight in opened.engine.weights.items()}
    new = opened.begin(1)  # nobody told the sender of the first one
    assert all(torch.equal(opened.engine.weights[name], kept) for name, kept in half.items())
    assert {name: weight.data_ptr() for name, weight in opened.engine.weights.items()} == addresses
    assert opened.send(pieces, new) == ""
    assert write(others, opened.rooms, old, "fp32")  # in the middle of the second one, and behind its proof
    assert opened.finish(pieces) == 1
    assert write(others, opened.rooms, old, "fp32")
    for name, wanted in checkpoint_views(first).items():
        assert torch.equal(opened.engine.weights[name], wanted)
    path = opened.memory.path
    assert opened.send(others, opened.begin(2)) == ""  # of the same memory: what it moved to stays
    assert opened.memory.path == path
    assert opened.finish(others) == 2


def test_what_was_not_written_or_written_wrongly_is_refused_and_then_moves_away() -> None:
    model = model_of("tiny-qwen3-moe")
    opened, pieces = Opened(model), pieces_of(model)
    for version, (say, expected) in enumerate(
        [
            (
                lambda _: opened.weights.take(Bucket(opened.attempt, layout_of(pieces), None, Future())),
                "wrong checksum",
            ),
            (lambda views: opened.send([replace(pieces[0], checksum=3), *pieces[1:]], views), "wrong checksum"),
            (lambda views: opened.send([*pieces, pieces[4]], views), "arrived twice"),
            (lambda views: opened.send(pieces[:-1], views), ""),
        ]
    ):
        path = opened.memory.path
        refused = say(opened.begin(version))
        assert expected in refused
        assert bool(refused) == bool(expected)
        with pytest.raises(EngineFailure, match=expected or "did not arrive"):
            opened.finish(pieces)
        assert opened.engine.version == -1
        assert (opened.memory.path == path) == (version == 0)  # moved since the one before
    strange = [replace(pieces[0], tensor=pieces[0].tensor.double())]
    opened.begin(9)
    said = opened.weights.take(Bucket(opened.attempt, layout_of(strange), None, Future()))
    assert said == f"weight update 9: {pieces[0].name} is not held as it was written"


def test_where_no_memory_is_left_to_move_to_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("tiny-qwen3")
    opened, pieces = Opened(model), pieces_of(model)
    opened.begin(0)
    files = len(os.listdir("/proc/self/fd"))

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            EngineFailure, match=r"no memory to move to after a publication that failed \(No space left"
        ):
            opened.begin(1)
    assert len(os.listdir("/proc/self/fd")) == files
    assert opened.engine.version == -1
    assert opened.send(pieces, opened.begin(2)) == ""
    assert opened.finish(pieces) == 2


def test_memory_of_the_process_alone_where_none_can_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = OpenMemory()
    shared = memory.zeros(3, 5, dtype=torch.bfloat16, device=CPU)

    def full(*_: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", full)
    own = memory.zeros(3, 5, dtype=torch.bfloat16, device=CPU)
    meta, none = (
        memory.zeros(*s, dtype=torch.float32, device=d) for s, d in (((2,), torch.device("meta")), ((0, 4), CPU))
    )
    assert (own.shape, own.dtype, int(own.count_nonzero())) == (shared.shape, shared.dtype, 0)
    assert (meta.device.type, none.shape) == ("meta", (0, 4))
    held = {"shared": shared[1:, 2], "own": own}
    rooms = memory.rooms(rooms_of(held), held)
    place = rooms["shared"].place
    assert rooms["own"].place is None
    assert place is not None
    assert (place.start, place.strides) == (14, (5,))
    views = views_of(memory.path, rooms)
    views["shared"].fill_(2)
    assert list(views) == ["shared"]
    assert shared.tolist() == [[0] * 5, [0, 0, 2, 0, 0], [0, 0, 2, 0, 0]]


def test_the_memory_ends_with_its_process_and_is_in_no_folder() -> None:
    memory = OpenMemory()
    memory.zeros(4, dtype=torch.float32, device=CPU)
    where, _, number = memory.path.partition("#")
    assert "rollkeel-engine" in os.readlink(where)
    assert not Path(os.readlink(where)).exists()
    with pytest.raises(OSError, match="No such file"):
        views_of("/proc/1/fd/99999", {})
    with pytest.raises(OSError, match="Stale file"):  # as where numbers of processes mean others
        views_of(f"{where}#{int(number) + 1}", {})


def test_memory_in_which_nothing_lies_is_not_told() -> None:
    """That of an engine on a GPU."""
    memory = OpenMemory()
    memory.zeros(4, dtype=torch.float32, device=torch.device("meta"))
    assert memory.path == ""
    memory.renew()
    assert memory.path == ""


def test_moving_away_leaves_no_file_and_no_memory_behind() -> None:
    memory, files = OpenMemory(), len(os.listdir("/proc/self/fd"))
    held = [memory.zeros(1000, dtype=torch.float32, device=CPU).fill_(i) for i in range(5)]
    for _ in range(3):
        memory.renew()
        assert len(os.listdir("/proc/self/fd")) == files
        maps = [_area(line.split()) for line in Path("/proc/self/maps").read_text().splitlines()]
        number = memory.path.partition("#")[2]
        assert {n for a, b, n in maps for tensor in held if a <= tensor.data_ptr() < b} == {number}
    assert [float(tensor.mean()) for tensor in held] == [0, 1, 2, 3, 4]


def _area(line: list[str]) -> tuple[int, int, str]:
    """First and one past the last address of a mapping, and the number of its file."""
    first, last = line[0].split("-")
    return int(first, 16), int(last, 16), line[4]


def test_a_sender_keeps_no_memory_of_an_engine_that_is_gone_or_has_moved() -> None:
    memory, zeros = OpenMemory(), torch.zeros(4)
    held = {"weight": memory.zeros(4, dtype=torch.float32, device=CPU)}
    rooms = memory.rooms(rooms_of(held), held)
    sender: Any = SimpleNamespace(_memories=OpenedFiles(), _near=lambda sink: sink.node == "here")

    def opened(index: int, node: str, path: str) -> dict[int, Views]:
        return Sender._open(sender, [SimpleNamespace(index=index, node=node, memory=path, rooms=rooms)])  # type: ignore[list-item]

    first = opened(5, "here", memory.path)[0]["weight"]
    assert opened(5, "here", memory.path)[0]["weight"] is first
    assert opened(6, "there", memory.path) == opened(7, "here", "") == opened(8, "here", "/proc/1/fd/99999") == {}
    before = memory.path
    memory.renew()
    again = opened(5, "here", memory.path)[0]["weight"]
    again.fill_(3)
    assert (held["weight"].tolist(), torch.equal(first, zeros)) == ([3] * 4, True)
    memory.renew()  # the path of the first file may be this one's now
    third = opened(5, "here", memory.path)[0]["weight"]
    third.fill_(4)
    assert held["weight"].tolist() == [4] * 4
    assert before != memory.path or third is not first
    os.close(memory._file)
    assert opened(9, "there", "") == {}
    assert sender._memories == {}
