"""What ranks send by the plan is the one-process publication, to the bit: on any mesh, in any order, and whatever goes wrong is refused.

Matters because a box that lands one row off, is rounded with the scale of half a row, or is missing, is a mixture of versions that
nobody sees. Layouts, senders and receivers of meshes of up to 16 ranks, without processes. Not covered: trainers on real ranks
(test_publications_of_meshes.py), Ray (tests/cluster).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))

from engine_kit import engine_of

from rollkeel.engines.intake import Intake, Room, rooms_of
from rollkeel.engines.local import LocalEngine
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.models.names import checkpoint_views
from rollkeel.models.numerics import compute_dtype
from rollkeel.sync.publish import full_update
from rollkeel.sync.sending import MADE, PIECES, Outgoing, Weights, send_part
from rollkeel.train.sharded import pieces_of
from rollkeel.types import WeightSlice, WeightUpdate
from tests.sync.box_kit import (
    BUCKET,
    Fault,
    Kept,
    Ranks,
    doubled,
    dropped,
    flipped,
    model_of,
    overlapping,
    permuted,
    sent,
    shifted,
)
from tests.train.mesh_io_ranks import Watcher

MESHES: list[dict[str, int]] = [
    {},
    {"shard": 2},
    {"shard": 4},
    {"tensor": 2},
    {"expert": 2},
    {"replicate": 2},
    {"context": 2},
    {"shard": 2, "tensor": 2},
    {"shard": 3, "expert": 2},
    {"replicate": 2, "expert": 2, "tensor": 2},
    {"replicate": 2, "shard": 2, "expert": 2, "tensor": 2},
]
PRESETS = ("tiny-qwen3", "tiny-qwen3-tied", "tiny-qwen3-moe")
MODES = ("fp32", "bf16", "int8", "int4", "fp8")


def head_of(mode: str, version: int = 1) -> WeightUpdate:
    return WeightUpdate(kind="full", base_version=None, version=version, slices=(), checksum=0, mode=mode)


def intake_of(engine: LocalEngine, mode: str) -> Intake:
    return Intake(head_of(mode), engine.memory, mode, engine.retire())


def arrive(engine: LocalEngine, mode: str, slices: Sequence[WeightSlice], total: int) -> None:
    """Every other slice comes straight into the engine's memory, where that may be."""
    intake = intake_of(engine, mode)
    for number, piece in enumerate(slices):
        live = intake.live(replace(piece, tensor=piece.tensor.to("meta"))) if number % 2 else None
        if live is not None:
            assert live.untyped_storage().data_ptr() == engine.weights[piece.name].untyped_storage().data_ptr()
            live.view(-1).view(torch.uint8).copy_(piece.tensor.contiguous().view(-1).view(torch.uint8))
        intake.take([piece if live is None else replace(piece, tensor=live)])
    engine.serve(1, *intake.finish(total))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_published(engine: LocalEngine, model: Any, mode: str) -> None:
    """The memory is that of an engine in the process of the trainer."""
    alone = engine_of(model, dtype=mode, max_length=32)
    alone.update_weights(full_update(checkpoint_views(model).items(), 1, mode))
    for name, view in engine.weights.items():
        assert torch.equal(bits(view), bits(alone.weights[name])), name


@pytest.mark.usually("tiny-qwen3-tied-fp32", "tiny-qwen3-moe-int8")
@pytest.mark.parametrize(
    ("preset", "mode"),
    [
        pytest.param(p, m, marks=[] if m == "int8" or (p, m) == (PRESETS[1], "fp32") else [pytest.mark.slow])
        for p in PRESETS
        for m in MODES
    ],
)
def test_any_mesh_publishes_what_one_process_publishes(preset: str, mode: str) -> None:
    draw = np.random.default_rng(0)
    for sizes in MESHES if preset.endswith("moe") else [m for m in MESHES if "expert" not in m]:
        ranks, engine = Ranks(model_of(preset), sizes), engine_of(model_of(preset, 2), dtype=mode, max_length=32)
        kept, sums = sent(ranks, [rooms_of(engine.weights)], mode)
        slices = kept.came[0]
        assert sum(s.tensor.numel() for s in slices) == sum(w.numel() for w in engine.weights.values())
        arrive(engine, mode, [slices[i] for i in draw.permutation(len(slices))], sums[0])
        assert_published(engine, ranks.model, mode)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "int8"])
def test_what_is_under_way_and_what_is_made_fit_into_the_buffer(mode: str) -> None:
    """A carrier of its own slots, as a ring has them; weights of several buckets each, cut in both dimensions."""
    names, shape, bucket = ["layers.0.self_attn.q_proj.weight", "layers.0.self_attn.o_proj.weight"], (256, 128), 40_000
    rooms = {name: Room(compute_dtype(mode), shape, (0, 0), shape) for name in names}
    whole = {name: torch.rand(shape) for name in names}
    weights = Weights.whole(whole)
    made = weights.plan([rooms], mode, ([0], [0]))

    class Slots(Kept):
        def put(self, bucket: Sequence[WeightSlice], to: Sequence[int]) -> None:
            for piece in bucket:
                assert piece.tensor.nbytes <= self.slot.nbytes / PIECES
            assert sum(s.tensor.nbytes for s in bucket) <= self.slot.nbytes

        slot = torch.empty(bucket, dtype=torch.uint8)

    with Watcher() as watcher:
        held = {name: [((0, 0), t.add(0))] for name, t in whole.items()}
        begun = watcher.now()
        watcher.most = 0
        send_part(made, 0, held, Outgoing(rooms, mode, bucket), Slots())
    assert watcher.most - begun <= MADE * bucket
    if mode != "fp32":  # where nothing is rounded or narrowed, nothing is made
        assert watcher.most - begun > 0.5 * bucket


def test_weights_that_several_ranks_hold_are_sent_by_all_of_them_and_the_same_host_comes_first() -> None:
    engine, model = engine_of(model_of("tiny-qwen3-moe"), max_length=32), model_of("tiny-qwen3-moe")
    rooms = [rooms_of(engine.weights)]
    for sizes in (
        {"replicate": 2},
        {"context": 2, "shard": 2},
        {"replicate": 4},
        {"replicate": 2, "shard": 2, "tensor": 2},
    ):
        load = Ranks(model, sizes).plan(rooms, "fp32").sent()
        assert load.max() <= 1.1 * load.mean()
    assert Ranks(model, {"replicate": 4}).plan(rooms, "fp32", [5, 99, 6, 7]).sent().nonzero()[0].tolist() == [1]


def test_nobody_but_the_ranks_of_an_expert_sends_it() -> None:
    rooms = [rooms_of(engine_of(model_of("tiny-qwen3-moe"), max_length=32).weights)]
    made = Ranks(model_of("tiny-qwen3-moe"), {"expert": 2, "replicate": 2}).plan(rooms, "fp32")
    senders = {copy.name: copy.sender % 2 for rank in range(4) for copy in made.sends(rank) if ".experts." in copy.name}
    assert {(name.split(".experts.")[1].split(".")[0] in "0123", sender) for name, sender in senders.items()} == {
        (True, 0),
        (False, 1),
    }


@dataclass
class Part:
    """As much of an engine as `Intake` looks at: one that holds some rows of every weight."""

    destinations: dict[str, torch.Tensor]
    adapters: dict[str, torch.Tensor]


def test_engines_that_hold_parts_get_these_and_nothing_else() -> None:
    ranks, mode = Ranks(model_of("tiny-qwen3-moe"), {"shard": 3, "tensor": 2}), "int8"
    alone = engine_of(ranks.model, dtype=mode, max_length=32)
    alone.update_weights(full_update(checkpoint_views(ranks.model).items(), 1, mode))
    rooms: list[dict[str, Room]] = [{}, {}]
    for name, room in rooms_of(alone.weights).items():
        half = room.shape[0] // 2
        rooms[0][name] = room._replace(stops=(half, *room.stops[1:]))
        rooms[1][name] = room._replace(starts=(half, *room.starts[1:]))
    kept, sums = sent(ranks, rooms, mode)
    for own, slices, total in zip(rooms, kept.came, sums, strict=True):
        memory = Part({n: torch.zeros(r.stops[0] - r.starts[0], *r.shape[1:]) for n, r in own.items()}, {})
        intake = Intake(head_of(mode), memory, mode, -1, own)
        intake.take(slices)
        intake.finish(total)
        for name, room in own.items():
            assert torch.equal(memory.destinations[name], alone.weights[name][room.starts[0] : room.stops[0]]), name
        with pytest.raises(EngineFailure, match="the engine expects"):
            Intake(head_of(mode), memory, mode, -1, own).take(kept.came[1 - rooms.index(own)])


def test_a_weight_that_is_no_box_of_its_parameter_is_refused_on_a_mesh_that_cuts_it() -> None:
    model = model_of("tiny-qwen3")
    name, owner, _ = next(piece for piece in pieces_of(model) if "q_proj" in piece[1])
    skewed = torch.empty(32, 64, device="meta").as_strided((32, 64), (65, 1))
    for sizes, refused in (({"tensor": 2}, True), ({}, False)):
        ranks = Ranks(model, sizes)
        weights = replace(ranks.weights(0), pieces=[(name, owner, skewed)])
        rooms = [{name: Room(torch.float32, (32, 64), (0, 0), (32, 64))}]
        if refused:
            with pytest.raises(
                BadInput, match=r"q_proj.weight: not a box of .*q_proj.weight, of which ranks hold parts"
            ):
                weights.plan(rooms, "fp32", (range(2), [0]))
        else:
            assert weights.plan(rooms, "fp32", ([0], [0])).count == 1


def test_bytes_come_straight_into_memory_only_where_they_are_what_is_held() -> None:
    names = ["layers.0.self_attn.q_proj.weight", "layers.0.input_layernorm.weight"]
    memory = Part({names[0]: torch.zeros(8, 4), names[1]: torch.zeros(4)}, {})

    def live(mode: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **about: Any) -> Any:
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        piece = WeightSlice(name=names[len(shape) == 1], tensor=tensor, checksum=0, **about)
        return Intake(head_of(mode), memory, mode, -1).live(piece)

    rows = live("fp32", (2, 4), starts=(3, 0))
    assert rows.data_ptr() == memory.destinations[names[0]][3].data_ptr()
    assert rows.shape == (2, 4)
    assert live("fp32", (2, 4), torch.bfloat16, starts=(3, 0)) is None  # of other bytes than are held
    assert live("fp32", (8, 2), starts=(0, 2)) is None  # in many pieces
    assert live("int8", (2, 4), starts=(3, 0)) is None  # to be rounded by the engine
    assert live("int8", (2, 4), starts=(3, 0), rounded=True) is not None
    assert live("int8", (4,), starts=(0,)) is not None  # a norm is not rounded
    with pytest.raises(EngineFailure, match="q_proj"):
        live("fp32", (2, 4), starts=(7, 0))


# -- what goes wrong on the way ----------------------------------------------------------------------------------------


def unrounded(slices: list[WeightSlice], draw: np.random.Generator) -> list[WeightSlice]:
    """A box of half rows whose sender says that it has rounded them."""
    at = int(draw.choice([i for i, s in enumerate(slices) if "down_proj" in s.name]))
    return [*slices[:at], replace(slices[at], rounded=not slices[at].rounded), *slices[at + 1 :]]


FAULTS: dict[Fault, str] = {
    flipped: "arrived with a wrong checksum|is not finite",
    dropped: "1 weights did not arrive",
    doubled: "arrived twice",
    overlapping: "arrived twice: its box at|with a wrong checksum",
    shifted: "with a wrong checksum",
    permuted: "with a wrong checksum",
    unrounded: "arrived rounded in some boxes only",
}


@pytest.mark.parametrize("mode", ["int8", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_hundred_faults_of_each_kind_are_refused(fault: Fault, mode: str) -> None:
    if fault is unrounded and mode == "fp32":
        pytest.skip("nothing is rounded")
    ranks = Ranks(model_of("tiny-qwen3-moe"), {"shard": 2, "tensor": 2})
    engine, draw = engine_of(model_of("tiny-qwen3-moe", 2), dtype=mode, max_length=32), np.random.default_rng(0)
    kept, sums = sent(ranks, [rooms_of(engine.weights)], mode, 8 * BUCKET)
    for _ in range(100):
        with pytest.raises(EngineFailure, match=FAULTS[fault]) as refused:
            arrive(engine, mode, fault(kept.came[0], draw), sums[0])
        assert "\n" not in str(refused.value)
        assert engine.version == -1
    arrive(engine, mode, kept.came[0], sums[0])
    assert engine.version == 1


def test_boxes_for_another_numeric_mode_are_refused() -> None:
    ranks = Ranks(model_of("tiny-qwen3"), {"tensor": 2})
    engine = engine_of(model_of("tiny-qwen3", 2), dtype="int8", max_length=32)
    kept, _ = sent(ranks, [rooms_of(engine.weights)], "int4")
    intake = Intake(head_of("int4"), engine.memory, "int8", engine.retire())
    with pytest.raises(EngineFailure, match=r"was sent for engine\.dtype=int4, the engine's is int8"):
        intake.take(kept.came[0])


def test_an_engine_that_holds_parts_of_rows_cannot_round_them() -> None:
    """It would take the scale of half a row."""
    ranks, name = Ranks(model_of("tiny-qwen3"), {"tensor": 2}), "model.layers.0.self_attn.o_proj.weight"
    whole = dict(checkpoint_views(ranks.model))[name]
    half = {name: Room(torch.float32, tuple(whole.shape), (0, 0), (whole.shape[0], whole.shape[1] // 2))}
    kept, _ = sent(ranks, [half], "int8")
    memory = Part({name: torch.zeros(whole.shape[0], whole.shape[1] // 2)}, {})
    with pytest.raises(EngineFailure, match=r"o_proj.weight is rounded by rows of 128, the engine holds 64 of each"):
        Intake(head_of("int8"), memory, "int8", -1, half).take(kept.came[0])
