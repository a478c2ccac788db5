"""Runs inside a vLLM worker: where it has the weights, as views of the memory that its kernels read, and how new ones get there.

    qkv_proj.weight     [(q + k + v) / t, H]     rows of q_proj, k_proj and v_proj of this tensor rank
    experts.w13_weight  [E, 2 I / t, H]          gate_proj and up_proj of each expert
    embed_tokens.weight [V / t + padding, H]     rows below the vocabulary's end; a tied head is the same memory

Modules are told apart by the names of vLLM's classes (0.32). A model with anything else is refused in one line and takes folders. So does
one whose weights, read by this map, do not have the checksum of those that the server was started with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from rollkeel.engines.intake import Intake, Packed, Room
from rollkeel.engines.shared_memory import Slot, opened, read
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.models.checksum import MASK, pitches_of
from rollkeel.models.numerics import held_checksum
from rollkeel.types import WeightSlice, WeightUpdate

PLAIN = {"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
"""vLLM's classes of weights that are stored as they come."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Of models that do not say."""
Pack = Callable[[torch.Tensor], torch.Tensor]
"""Puts `[E, rows, columns]` in the order that a kernel reads."""


class Cut(NamedTuple):
    """So many rows of a live weight are those from `start` on of a checkpoint tensor that has `whole` of them."""

    size: int
    start: int
    whole: int


class Part(NamedTuple):
    """What a worker has of a checkpoint tensor."""

    name: str
    view: Any
    """A tensor, or a `Packed` one."""
    room: Room


def parts(model: Any) -> Iterator[Part]:
    """All of the weights of a model. Raises `BadInput` naming the first that no rule knows."""
    fused, seen = {**FUSED, **getattr(model, "packed_modules_mapping", {})}, set[int]()
    for path, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        own = {n: p for n, p in module.named_parameters(recurse=False) if id(p) not in seen}
        seen.update(map(id, own.values()))
        method = type(getattr(module, "quant_method", None)).__name__
        if method not in PLAIN or "MLAAttention" in kinds:
            raise BadInput(f"{path} computes by {method if method not in PLAIN else 'MLAAttention'}")
        if "RoutedExperts" in kinds:
            yield from _experts(path.removesuffix(".routed_experts"), module, own)
            continue
        for name, weight in own.items():
            dim, cuts = 0, [Cut(len(weight), 0, len(weight))]
            if "VocabParallelEmbedding" in kinds:
                cuts = [_vocabulary(path, name, module)]
            elif "LinearBase" in kinds:
                dim, cuts = _linear(module, kinds, name)
            elif method != "NoneType":
                raise BadInput(f"{path}.{name} is of the unknown class {type(module).__name__}")
            whole, _, last = path.rpartition(".")
            ends = fused[last] if len(cuts) > 1 and len(fused.get(last, ())) == len(cuts) else (last,)
            names = [".".join(filter(None, (whole, end, name))) for end in ends]
            if len(names) != len(cuts):
                raise BadInput(f"{path}.{name} is fused of unknown tensors")
            at = 0
            for one, cut in zip(names, cuts, strict=True):
                if cut.size:  # of a small vocabulary the last ranks have padding alone
                    yield _part(one, weight.data, dim, at, cut)
                at += cut.size


def _part(name: str, weight: Any, dim: int, at: int, cut: Cut) -> Part:
    shape = list(weight.shape)
    starts = [0] * weight.dim()
    stops = list(weight.shape)
    shape[dim], starts[dim], stops[dim] = cut.whole, cut.start, cut.start + cut.size
    inside = (*(slice(None) for _ in range(dim)), slice(at, at + cut.size))
    return Part(name, weight[inside], Room(weight.dtype, tuple(shape), tuple(starts), tuple(stops)))


def _vocabulary(path: str, name: str, module: Any) -> Cut:
    if name != "weight" or module.num_added_embeddings:
        raise BadInput(f"{path}.{name} has more than the model's vocabulary")
    held = module.shard_indices
    first, end = held.org_vocab_start_index, held.org_vocab_end_index
    return Cut(end - first, first, module.org_vocab_size)


def _linear(module: Any, kinds: set[str], name: str) -> tuple[int, list[Cut]]:
    """The dimension that ranks cut, and the parts of a fused weight along it."""
    rank, ranks = module.tp_rank, module.tp_size
    if "RowParallelLinear" in kinds and name == "weight":
        return 1, [Cut(module.input_size // ranks, rank * (module.input_size // ranks), module.input_size)]
    if "QKVParallelLinear" in kinds:
        q, k = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
        v, place = module.num_kv_heads * module.v_head_size, rank // module.num_kv_head_replicas
        heads, kv_heads = module.total_num_heads, module.total_num_kv_heads
        return 0, [
            Cut(q, rank * q, heads * module.head_size),
            Cut(k, place * k, kv_heads * module.head_size),
            Cut(v, place * v, kv_heads * module.v_head_size),
        ]
    if "ColumnParallelLinear" in kinds:
        sizes = getattr(module, "output_sizes", [module.output_size])
        return 0, [Cut(n // ranks, rank * (n // ranks), n) for n in sizes]
    if not kinds & {"ReplicatedLinear", "RowParallelLinear"}:
        raise BadInput(f"{type(module).__name__} cuts its weights by an unknown rule")
    return 0, [Cut(module.output_size, 0, module.output_size)]


def _experts(path: str, module: Any, own: Mapping[str, torch.Tensor]) -> Iterator[Part]:
    """Gate, up and down projections of the experts that are here."""
    if set(own) != {"w13_weight", "w2_weight"}:
        raise BadInput(f"{path} has {', '.join(sorted(own))}, expected w13_weight and w2_weight")
    about, here = module.moe_config, module._expert_map
    inner, width = about.intermediate_size_per_partition_unpadded, about.hidden_dim_unpadded
    cut = Cut(inner, about.tp_rank * inner, about.tp_size * inner)
    both, down = (_in_order(own[name].data, packing(module)) for name in ("w13_weight", "w2_weight"))
    half = own["w13_weight"].shape[1] // 2
    places = range(module.global_num_experts) if here is None else here.tolist()
    for expert, place in enumerate(places):
        if place < 0:
            continue
        gate = module.ckpt_gate_proj_name
        up = module.ckpt_up_proj_name
        out = module.ckpt_down_proj_name
        yield _part(f"{path}.{expert}.{gate}.weight", both(place)[:, :width], 0, 0, cut)
        yield _part(f"{path}.{expert}.{up}.weight", both(place)[:, :width], 0, half, cut)
        yield _part(f"{path}.{expert}.{out}.weight", down(place)[:width], 1, 0, cut)


# -- memory in the order of a kernel -----------------------------------------------------------------------------------


def packing(experts: Any) -> Pack | None:
    """How the kernel of these experts wants them; None where it takes them as they are."""
    kernel: Any = getattr(getattr(experts.quant_method, "moe_kernel", None), "fused_experts", None)
    if not hasattr(kernel, "isa") or kernel._use_zentorch:
        return None

    def pack(weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(weights)
        torch.ops._C.prepack_moe_weight(weights, out, kernel.isa)
        return out

    return pack


def _in_order(stacked: torch.Tensor, pack: Pack | None) -> Callable[[int], Any]:
    """Weights `[rows, columns]` of an expert by its place in `stacked`."""
    if pack is None:
        return lambda place: stacked[place]
    where = order(stacked.shape[1:], stacked.dtype, pack)
    return lambda place: Packed(stacked[place].view(-1), where)


_ORDERS: dict[tuple[Any, ...], torch.Tensor] = {}


def order(shape: Sequence[int], dtype: torch.dtype, pack: Pack) -> torch.Tensor:
    """`[rows, columns]` int64: where `pack` puts each element of an expert. Elements are given their own numbers as bits, as many of
    these at a time as an element has."""
    key = tuple(shape), dtype
    if key not in _ORDERS:
        count, bits = torch.Size(shape).numel(), 8 * dtype.itemsize
        integers = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits]
        numbers, came = torch.arange(count), torch.zeros(count, dtype=torch.int64)
        for low in range(0, count.bit_length(), bits):
            some = (numbers >> low & 2**bits - 1).to(integers).view(dtype).view(1, *shape)
            came |= (pack(some).view(-1).view(integers).to(torch.int64) & 2**bits - 1) << low
        if not torch.equal(came.sort().values, numbers):
            raise BadInput(f"experts [{shape[0]}, {shape[1]}] are not only reordered for their kernel")
        where = torch.empty_like(numbers)
        where[came] = numbers
        _ORDERS[key] = where.view(*shape)
    return _ORDERS[key]


def plain(model: Any) -> None:
    """Have linear layers on a CPU compute with their weights as they are. vLLM else packs a copy, of which nothing can be written or
    read, and frees the weights, but for embeddings and heads. Freed ones are of any values until they are loaded again."""
    for module in model.modules():
        if not hasattr(module, "cpu_linear"):
            continue
        if not module.weight.numel():
            columns = getattr(module, "input_size_per_partition", module.input_size)
            module.weight.data = module.weight.new_empty(sum(module.output_partition_sizes), columns)
        module._cpu_skip_gemm_dispatch = True
        module.cpu_linear = F.linear


# -- arrival -----------------------------------------------------------------------------------------------------------


@dataclass
class _Memory:
    destinations: dict[str, Any]
    adapters: dict[str, Any]


class Arrivals:
    """This worker's side of a publication: `open` once, then `begin`, `take` and `finish`. After an error nothing is taken until the next one begins."""

    def __init__(self, model: Any, mode: str, rank: int) -> None:
        """`mode`: `engine.dtype`. `rank`: of this worker among all. Raises `BadInput` for a model that must take folders."""
        found = list(parts(model))
        self.rooms = {part.name: part.room for part in found}
        self._memory = _Memory({part.name: part.view for part in found}, {})
        self._mode = mode
        self._rank = rank
        self._attempt = -1
        self._newest = -1
        self._ring: tuple[str, torch.Tensor] = "", torch.empty(0)
        self._intake: Intake | None = None

    def checksum(self, _: Any = None) -> int:
        """Of all that is in this worker's memory."""
        total = 0
        for name, room in self.rooms.items():
            view, pitches = self._memory.destinations[name], pitches_of(room.shape)
            held = view.read() if isinstance(view, Packed) else view
            offset = sum(a * p for a, p in zip(room.starts, pitches, strict=True))
            total += held_checksum(name, held, self._mode, offset, pitches)
        return total & MASK

    def open(self, asked: Mapping[str, Any]) -> None:
        """Map the memory that buckets lie in. Raises `OSError`."""
        self._ring = asked["path"], opened(asked["path"])

    def begin(self, asked: Mapping[str, Any]) -> None:
        version = asked["version"]
        self._intake, self._attempt = None, asked["attempt"]
        if version < self._newest:
            raise EngineFailure(
                f"weight update {version}: expected version {self._newest}, which is here, or a later one"
            )
        head = WeightUpdate(kind="full", base_version=None, version=version, slices=(), checksum=0, mode=asked["mode"])
        self._intake, self._newest = Intake(head, self._memory, self._mode, -1, self.rooms), version

    def take(self, asked: Mapping[str, Any]) -> None:
        """Write and prove a bucket, if it is for this worker."""
        intake = self._of(asked)
        if self._rank not in asked["to"]:
            return
        like = [(getattr(torch, dtype), shape) for _, dtype, shape, *_ in asked["slices"]]
        came = read(Slot(self._ring[0], asked["start"]), like, {self._ring[0]: self._ring[1]})
        self._intake = None  # until all of it is proven
        intake.take(
            [
                WeightSlice(name=name, tensor=tensor, checksum=int(checksum, 16), starts=tuple(starts), rounded=rounded)
                for (name, _, _, checksum, starts, rounded), tensor in zip(asked["slices"], came, strict=True)
            ]
        )
        self._intake = intake

    def finish(self, asked: Mapping[str, Any]) -> int:
        """The checksum of what arrived, which is `sums[rank]` as the sender knows it."""
        intake, self._intake = self._of(asked), None
        return intake.finish(int(asked["sums"][self._rank], 16))[0]

    def _of(self, asked: Mapping[str, Any]) -> Intake:
        if asked["attempt"] != self._attempt or self._intake is None:
            state = "was refused or is over" if asked["attempt"] == self._attempt else f"{self._attempt} is under way"
            raise EngineFailure(f"weights: got a part of publication {asked['attempt']}, which is not awaited: {state}")
        return self._intake


def rooms_in_words(rooms: Mapping[str, Room]) -> str:
    """As a message; `rooms_of_words` reads it."""
    return json.dumps({n: [str(r.dtype).removeprefix("torch."), r.shape, r.starts, r.stops] for n, r in rooms.items()})


def rooms_of_words(text: str) -> dict[str, Room]:
    return {
        name: Room(getattr(torch, dtype), tuple(shape), tuple(starts), tuple(stops))
        for name, (dtype, shape, starts, stops) in json.loads(text).items()
    }
