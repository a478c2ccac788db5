"""Which part of a parameter lies on which rank, against parts made by cutting the whole the plain way.

Matters because checkpoints and engines put a model together from these boxes: a box that is off by a row, or gate rows taken for up rows,
gives a model that loads and is wrong. Does not cover what FSDP itself does with the rows (tests/train/test_mesh.py does).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollkeel.models.presets import PRESETS, build_preset
from rollkeel.models.routers import expert_layers
from rollkeel.train.mesh import Mesh
from rollkeel.train.parts import Deal, boxes, cuts, part_shape

LAYER = "model.layers.3."
COLUMNS, ROWS = ("self_attn.q_proj.weight", "self_attn.k_proj.bias", "mlp.up_proj.weight"), ("self_attn.o_proj.weight",)
WHOLE = ("self_attn.q_norm.weight", "self_attn.o_proj.bias", "mlp.gate.weight", "input_layernorm.weight")
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def cut_plainly(whole: torch.Tensor, name: str, mesh: Mesh) -> torch.Tensor:
    """What lies on a rank of a mesh, by cutting in the order that a trainer cuts."""
    part, place, tensor = whole, mesh.place, mesh.tensor
    if "experts" in name:
        part = part.chunk(mesh.expert)[place["expert"]]
    if name.endswith("gate_up_proj"):
        gate, up = part.chunk(2, 1)
        part = torch.cat((gate.chunk(tensor, 1)[place["tensor"]], up.chunk(tensor, 1)[place["tensor"]]), 1)
    elif name.endswith("experts.down_proj"):
        part = part.chunk(tensor, 2)[place["tensor"]]
    elif name.endswith(ROWS):
        part = part.chunk(tensor, 1)[place["tensor"]]
    elif name.endswith(COLUMNS) or ("embed" in name and len(whole) % tensor == 0):
        part = part.chunk(tensor)[place["tensor"]]
    chunks = part.chunk(mesh.shard)
    return chunks[place["shard"]] if place["shard"] < len(chunks) else part[:0]


def drawn(rng: np.random.Generator) -> tuple[dict[str, Any], str, tuple[int, ...]]:
    """A mesh, a parameter's name and a shape that it divides."""
    sizes: dict[str, Any] = {k: int(rng.integers(1, 4)) for k in ("replicate", "shard", "expert", "context", "tensor")}
    name = str(rng.choice([*COLUMNS, *ROWS, *WHOLE, *STACKS, "embed"]))
    a, b, c = (int(n) for n in rng.integers(1, 4, 3))
    t, e = sizes["tensor"], sizes["expert"]
    if name in STACKS:
        shape = (e * a, 2 * t * b, c) if name == STACKS[0] else (e * a, c, t * b)
    elif name in COLUMNS:
        shape = (t * a, b) if name.endswith("weight") else (t * a,)
    else:
        shape = (a, t * b) if name in ROWS else (a, b) if name in ("embed", "mlp.gate.weight") else (a,)
    return sizes, "model.embed_tokens.weight" if name == "embed" else LAYER + name, shape


@pytest.mark.parametrize("seed", range(200))
def test_boxes_are_the_part_of_each_rank(seed: int) -> None:
    sizes, name, shape = drawn(np.random.default_rng(seed))
    whole = torch.arange(int(np.prod(shape))).view(shape)
    times = torch.zeros_like(whole)
    meshes = [Mesh(**sizes, rank=rank) for rank in range(int(np.prod(list(sizes.values()))))]
    for mesh in meshes:
        expected = cut_plainly(whole, name, mesh)
        got = torch.full(part_shape(mesh, name, shape), -1)
        for box in boxes(mesh, name, shape):
            assert min(box.size) > 0
            assert bool((got[box.of_part] == -1).all())
            got[box.of_part] = whole[box.of_whole]
            times[box.of_whole] += 1
        if len(expected):
            assert torch.equal(got, expected)
        else:
            assert got.numel() == 0
    held = {"shard": sizes["shard"]} | {cut.over: getattr(meshes[0], cut.over) for cut in cuts(meshes[0], name, shape)}
    assert times.unique().tolist() == [len(meshes) // int(np.prod(list(held.values())))]


def test_gate_and_up_are_two_boxes() -> None:
    got = boxes(Mesh(tensor=2, rank=1), LAYER + STACKS[0], (3, 8, 5))
    assert [(tuple(b.start), tuple(b.here), tuple(b.size)) for b in got] == [
        ((0, 2, 0), (0, 0, 0), (3, 2, 5)),
        ((0, 6, 0), (0, 2, 0), (3, 2, 5)),
    ]


@pytest.mark.parametrize("preset", PRESETS)
def test_names_tell_what_modules_are(preset: str) -> None:
    model, _ = build_preset(preset)
    of_experts = {id(p) for layer in expert_layers(model) for p in layer.parameters()}
    deal = Deal.of(model, Mesh(expert=2, tensor=2))
    for name, p in model.named_parameters():
        over = deal.named[name].over
        assert ("expert" in over) == (id(p) in of_experts)
        assert ("tensor" in over) == ("norm" not in name and not name.endswith("mlp.gate.weight"))


def test_gradients_that_ranks_have_parts_of() -> None:
    deal = Deal.of(build_preset("tiny-qwen3-moe")[0], Mesh(expert=2, tensor=2, rank=1))
    layer = "model.layers.0."
    assert deal.adds(layer + "self_attn.q_norm.weight") == ("replicate", "expert", "context", "tensor")
    assert deal.adds(layer + "input_layernorm.weight") == ("replicate", "expert", "context")
    assert deal.adds(layer + STACKS[0]) == ("replicate", "context")
    assert deal.counts(layer + STACKS[0])
    assert deal.counts("lm_head.weight")
    assert not deal.counts(layer + "input_layernorm.weight")  # tensor rank 0 does
