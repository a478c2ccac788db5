"""Weights written straight into a vLLM worker's memory are each where its kernels read them, and a publication that lost, doubled or changed
anything is refused.

Matters because a slice in the wrong rows serves a model that nobody trained, without any error. Stand-ins with vLLM's names and sizes
(vllm_modules.py) are loaded by a loader of their own, which the map does not know. Not covered: vLLM itself (test_vllm_boxes.py), calls
over HTTP (test_boxes.py).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from vllm_modules import Sizes, UnquantizedLinearMethod, checkpoint, load, model

from rollkeel.engines import vllm_memory
from rollkeel.engines.intake import Packed, Room
from rollkeel.engines.shared_memory import Ring
from rollkeel.engines.vllm_memory import Arrivals, order, parts, rooms_in_words, rooms_of_words
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.models.checksum import MASK, pitches_of
from rollkeel.models.numerics import held_checksum
from rollkeel.sync.publish import full_update
from rollkeel.sync.sending import WholeFeed
from rollkeel.types import WeightSlice, WeightUpdate

MOE = Sizes(width=8, head=2, heads=4, kv_heads=2, inner=6, experts=4, words=100, tied=False, bias=False)
TIED = Sizes(width=8, head=2, heads=4, kv_heads=2, inner=6, experts=0, words=100, tied=True, bias=True)
KERNEL = object()
"""Of experts that are packed, by `shuffled`."""


def shuffled(weights: torch.Tensor) -> torch.Tensor:
    """A kernel's order that no stride describes."""
    flat = weights.reshape(len(weights), -1)
    to = torch.randperm(flat.shape[1], generator=torch.Generator().manual_seed(flat.shape[1]))
    return flat[:, to].view_as(weights)


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def packing(experts: Any) -> Any:
        return shuffled if experts.quant_method.moe_kernel.fused_experts is KERNEL else None

    monkeypatch.setattr(vllm_memory, "packing", packing)


class Server:
    """Workers of a server without their processes; `fault` may change what they are told."""

    def __init__(self, s: Sizes, ranks: int, spread: bool = False, kernel: Any = None) -> None:
        self.sizes, self.kernel = s, kernel
        self.models = [model(s, rank, ranks, spread, kernel) for rank in range(ranks)]
        for one in self.models:
            load(one, checkpoint(s, 0), shuffled if kernel else None)
        self.workers = [Arrivals(one, "fp32", rank) for rank, one in enumerate(self.models)]
        self.fault: Callable[[dict[str, Any], torch.Tensor], Sequence[dict[str, Any]]] = lambda told, memory: [told]
        self.feed = WholeFeed(1e-3)
        self.ring = Ring(self.feed.bucket_bytes, 2)
        for worker in self.workers:
            worker.open({"path": self.ring.path})

    def put(self, bucket: Sequence[WeightSlice], to: Sequence[int]) -> None:
        start = self.ring.put(bucket).start
        rows = [[s.name, "float32", list(s.tensor.shape), f"{s.checksum:x}", list(s.starts), False] for s in bucket]
        told = {"attempt": self.attempt, "start": start, "to": list(to), "slices": rows}
        for one in self.fault(json.loads(json.dumps(told)), self.ring._bytes):
            for worker in self.workers:
                worker.take(one)

    def flush(self) -> None:
        """Nothing is under way."""

    def publish(self, update: WeightUpdate, attempt: int = 1) -> list[int]:
        self.attempt = attempt
        for worker in self.workers:
            worker.begin({"attempt": attempt, "version": update.version, "mode": "fp32"})
        sums = self.feed(update, [w.rooms for w in self.workers], "fp32", self)
        asked = {"attempt": attempt, "sums": [f"{total:x}" for total in sums]}
        return [worker.finish(asked) for worker in self.workers]

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        """Whether every bit of the workers' memory is what vLLM's own loaders make of the weights."""
        for rank, one in enumerate(self.models):
            truth = model(self.sizes, rank, len(self.models), self._spread(rank), self.kernel)
            load(truth, weights, shuffled if self.kernel else None)
            for (name, a), (_, b) in zip(one.named_parameters(), truth.named_parameters(), strict=True):
                if not torch.equal(a, b):
                    raise AssertionError(f"rank {rank}: {name}")
        return True

    def _spread(self, rank: int) -> bool:
        experts = [m for m in self.models[rank].modules() if hasattr(m, "_expert_map")]
        return any(m._expert_map is not None for m in experts)


def update_of(s: Sizes, version: int) -> WeightUpdate:
    return full_update(checkpoint(s, version).items(), version)


def test_the_map_of_a_rank_by_hand() -> None:
    """Rank 1 of 2: 2 of 4 heads of width 2, 1 of 2 key-value heads, 3 of 6 inner columns, words 64 to 99 of 100."""
    rooms = {part.name: part.room for part in parts(model(TIED, 1, 2))}
    at = "model.layers.0"
    f = torch.float32
    assert rooms == {
        f"{at}.self_attn.q_proj.weight": Room(f, (8, 8), (4, 0), (8, 8)),
        f"{at}.self_attn.k_proj.weight": Room(f, (4, 8), (2, 0), (4, 8)),
        f"{at}.self_attn.v_proj.weight": Room(f, (4, 8), (2, 0), (4, 8)),
        f"{at}.self_attn.q_proj.bias": Room(f, (8,), (4,), (8,)),
        f"{at}.self_attn.k_proj.bias": Room(f, (4,), (2,), (4,)),
        f"{at}.self_attn.v_proj.bias": Room(f, (4,), (2,), (4,)),
        f"{at}.self_attn.o_proj.weight": Room(f, (8, 8), (0, 4), (8, 8)),
        f"{at}.self_attn.o_proj.bias": Room(f, (8,), (0,), (8,)),
        f"{at}.self_attn.q_norm.weight": Room(f, (2,), (0,), (2,)),
        f"{at}.mlp.gate_proj.weight": Room(f, (6, 8), (3, 0), (6, 8)),
        f"{at}.mlp.up_proj.weight": Room(f, (6, 8), (3, 0), (6, 8)),
        f"{at}.mlp.down_proj.weight": Room(f, (8, 6), (0, 3), (8, 6)),
        f"{at}.input_layernorm.weight": Room(f, (8,), (0,), (8,)),
        "model.embed_tokens.weight": Room(f, (100, 8), (64, 0), (100, 8)),
        "model.norm.weight": Room(f, (8,), (0,), (8,)),
    }


def test_ranks_share_key_value_heads_that_are_fewer_than_they() -> None:
    spans = []
    for rank in range(4):
        room = {p.name: p.room for p in parts(model(TIED, rank, 4))}["model.layers.0.self_attn.k_proj.weight"]
        spans.append((room.starts[0], room.stops[0]))
    assert spans == [(0, 2), (0, 2), (2, 4), (2, 4)]


def test_experts_of_a_rank_by_hand() -> None:
    """Dealt over 2 ranks, rank 1 has experts 2 and 3 whole; not dealt, it has half of all four."""
    at = "model.layers.0.mlp.experts"
    dealt = {p.name: p.room for p in parts(model(MOE, 1, 2, spread=True)) if ".experts." in p.name}
    assert {int(name.split(".")[5]) for name in dealt} == {2, 3}
    assert dealt[f"{at}.3.down_proj.weight"] == Room(torch.float32, (8, 6), (0, 0), (8, 6))
    cut = {p.name: p.room for p in parts(model(MOE, 1, 2)) if ".experts." in p.name}
    assert len(cut) == 12
    assert cut[f"{at}.0.up_proj.weight"] == Room(torch.float32, (6, 8), (3, 0), (6, 8))
    assert cut[f"{at}.0.down_proj.weight"] == Room(torch.float32, (8, 6), (0, 3), (8, 6))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_model_over_any_ranks_holds_what_its_own_loaders_would_load(data: st.DataObject) -> None:
    draw = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    ranks = draw(1, 2, 4)
    s = Sizes(
        width=draw(4, 8), head=draw(2, 4), heads=draw(4, 8), kv_heads=draw(1, 2, 4), inner=draw(4, 12),
        experts=draw(0, 4, 8), words=draw(60, 65, 300), tied=draw(True, False), bias=draw(True, False),
    )  # fmt: skip
    server = Server(s, ranks, spread=draw(True, False), kernel=draw(KERNEL, None))
    weights = checkpoint(s, 0)
    assert [w.checksum() for w in server.workers] == [expected(w, weights) for w in server.workers]
    assert server.holds(weights)
    told = server.publish(update_of(s, 1))
    assert server.holds(checkpoint(s, 1))
    assert told == [w.checksum() for w in server.workers]
    assert server.feed.made is not None
    assert server.feed.made.nbytes == 4 * sum(  # each element once
        torch.Size([b - a for a, b in zip(r.starts, r.stops, strict=True)]).numel()
        for w in server.workers
        for r in w.rooms.values()
    )


def expected(worker: Arrivals, weights: dict[str, torch.Tensor]) -> int:
    total = 0
    for name, room in worker.rooms.items():
        pitches = pitches_of(room.shape)
        offset = sum(a * p for a, p in zip(room.starts, pitches, strict=True))
        box = weights[name][tuple(map(slice, room.starts, room.stops))]
        total += held_checksum(name, box, "fp32", offset, pitches)
    return total & MASK


def faults(seed: int) -> Iterator[tuple[str, Callable[[dict[str, Any], torch.Tensor], list[dict[str, Any]]]]]:
    """Kinds of faults, each of which strikes the bucket that the seed says."""
    rng = torch.Generator().manual_seed(seed)
    count, at = 0, int(torch.randint(20, (1,), generator=rng))

    def strikes() -> bool:
        nonlocal count
        count += 1
        return count == at + 1

    def random(below: int) -> int:
        return int(torch.randint(below, (1,), generator=rng))

    def flipped(told: dict[str, Any], memory: torch.Tensor) -> list[dict[str, Any]]:
        if strikes():
            memory[told["start"] + random(4 * torch.Size(told["slices"][0][2]).numel())] ^= 1 << random(8)
        return [told]

    def without(told: dict[str, Any], memory: torch.Tensor) -> list[dict[str, Any]]:
        return [] if strikes() else [told]

    def twice(told: dict[str, Any], memory: torch.Tensor) -> list[dict[str, Any]]:
        return [told, told] if strikes() else [told]

    def older(told: dict[str, Any], memory: torch.Tensor) -> list[dict[str, Any]]:
        return [told | {"attempt": told["attempt"] - 1}] if strikes() else [told]

    def shifted(told: dict[str, Any], memory: torch.Tensor) -> list[dict[str, Any]]:
        if strikes():
            row = told["slices"][random(len(told["slices"]))]
            row[4] = [row[4][0] + 1, *row[4][1:]]
        return [told]

    def exchanged(told: dict[str, Any], memory: torch.Tensor) -> list[dict[str, Any]]:
        found = [row for row in told["slices"] if "experts" in row[0]]
        pairs = [(a, b) for a in found for b in found if a[0] != b[0] and a[2] == b[2]]
        if pairs and strikes():
            a, b = pairs[random(len(pairs))]
            a[0], b[0] = b[0], a[0]
        return [told]

    for kind in (flipped, without, twice, older, shifted, exchanged):
        count, at = 0, at % (4 if kind is exchanged else 20)
        yield kind.__name__, kind


@pytest.mark.parametrize("kind", ["flipped", "without", "twice", "older", "shifted", "exchanged"])
def test_a_hundred_faults_of_each_kind_are_refused(kind: str) -> None:
    server = Server(MOE, 2, kernel=KERNEL)
    update = update_of(MOE, 1)
    for seed in range(100):
        struck = False
        fault = dict(faults(seed))[kind]

        def seen(told: dict[str, Any], memory: torch.Tensor, fault: Any = fault) -> list[dict[str, Any]]:
            nonlocal struck
            before = memory.clone()
            out = fault(copy.deepcopy(told), memory)
            struck = struck or out != [told] or not torch.equal(before, memory)
            return out

        server.fault = seen
        with pytest.raises(EngineFailure):
            server.publish(update, attempt=seed + 1)
        assert struck
        with pytest.raises(EngineFailure, match="which is not awaited"):
            server.workers[0].finish({"attempt": seed + 2, "sums": ["0", "0"]})
    server.fault = lambda told, memory: [told]
    server.publish(update, attempt=200)
    assert server.holds(checkpoint(MOE, 1))


def test_an_older_version_is_refused() -> None:
    server = Server(TIED, 1)
    server.publish(update_of(TIED, 5))
    with pytest.raises(EngineFailure, match="update 4: expected version 5"):
        server.publish(update_of(TIED, 4), attempt=2)
    assert server.holds(checkpoint(TIED, 5))


def test_padding_stays_as_it_was() -> None:
    server = Server(TIED, 2)
    server.publish(update_of(TIED, 1))
    last = server.models[1].get_parameter("model.embed_tokens.weight")
    assert last.shape == (64, 8)
    assert not last[36:].any()
    assert server.models[1].get_parameter("lm_head.weight") is last


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_order_of_a_kernel_is_read_off_whatever_bits_pass(dtype: torch.dtype, monkeypatch: Any) -> None:
    """257 × 300 elements: their numbers have more bits than two of these dtypes."""
    monkeypatch.setattr(vllm_memory, "_ORDERS", {})

    def pack(weights: torch.Tensor) -> torch.Tensor:
        bits = weights.view(torch.uint8 if dtype.itemsize == 1 else torch.int16 if dtype.itemsize == 2 else torch.int32)
        return shuffled(bits).view(dtype)

    where = order((257, 300), dtype, pack)
    weights = torch.arange(257 * 300).remainder(200).view(257, 300).to(dtype)
    memory = pack(weights[None]).view(-1)
    view = Packed(memory, where)
    assert torch.equal(view.read().float(), weights.float())
    view[3:5, 7:9].copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    weights[3:5, 7:9] = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(dtype)
    assert torch.equal(memory.float(), pack(weights[None]).view(-1).float())


def test_what_is_not_only_reordered_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(vllm_memory, "_ORDERS", {})
    with pytest.raises(BadInput, match=r"experts \[4, 6\] are not only reordered"):
        order((4, 6), torch.float32, lambda weights: weights.clone().fill_(1.0))


# -- what is not known -------------------------------------------------------------------------------------------------


def test_what_no_rule_knows_is_refused_by_name() -> None:
    class Fp8LinearMethod: ...

    class MLAAttention(torch.nn.Module): ...

    class Mixer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant_method, self.mixed = UnquantizedLinearMethod(), torch.nn.Parameter(torch.zeros(2))

    def refused(change: Callable[[Any], None], match: str) -> None:
        one = model(MOE, 0, 1)
        change(one)
        with pytest.raises(BadInput, match=match):
            list(parts(one))

    at = "model.layers.0"
    layer = lambda m: m.model.layers[0]  # noqa: E731
    refused(
        lambda m: setattr(layer(m).self_attn.o_proj, "quant_method", Fp8LinearMethod()),
        f"{at}.self_attn.o_proj computes by Fp8LinearMethod",
    )
    refused(lambda m: layer(m).self_attn.add_module("attn", MLAAttention()), "attn computes by MLAAttention")
    refused(lambda m: layer(m).add_module("mixer", Mixer()), "mixer.mixed is of the unknown class Mixer")
    refused(lambda m: setattr(m.lm_head, "num_added_embeddings", 2), "more than the model's vocabulary")
    refused(
        lambda m: layer(m).mlp.experts.routed_experts.register_parameter("w2_bias", torch.nn.Parameter(torch.zeros(2))),
        "experts has w13_weight, w2_bias, w2_weight",
    )
    refused(
        lambda m: m.packed_modules_mapping.update(qkv_proj=["q_proj", "kv_proj"]), "qkv_proj.weight is fused of unknown"
    )


def test_linear_layers_compute_with_their_weights_after_plain() -> None:
    one: Any = model(TIED, 0, 1)
    attention, head = one.model.layers[0].self_attn, one.lm_head
    for layer in (attention.o_proj, head):
        layer.cpu_linear = lambda x, weight, bias: x * 0  # of a packed copy
    attention.o_proj.weight.data = torch.empty(0)
    vllm_memory.plain(one)
    assert attention.o_proj.weight.shape == (8, 8)
    assert attention.o_proj._cpu_skip_gemm_dispatch
    assert not hasattr(attention.qkv_proj, "cpu_linear")
    load(one, checkpoint(TIED, 0))
    x = torch.randn(3, 8)
    for layer, name in (
        (attention.o_proj, "model.layers.0.self_attn.o_proj.weight"),
        (head, "model.embed_tokens.weight"),
    ):
        out = layer.cpu_linear(x, layer.weight, None)
        assert torch.equal(out[:, : len(checkpoint(TIED, 0)[name])], x @ checkpoint(TIED, 0)[name].t())


def test_rooms_travel_as_words() -> None:
    rooms = {p.name: p.room for p in parts(model(MOE, 1, 2))}
    assert rooms_of_words(rooms_in_words(rooms)) == rooms
