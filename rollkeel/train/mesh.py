"""Ranks that train one model together: which of it each holds, who runs which micro-batch, and what they add up.

Every rank runs the same program on the same batch. Model and optimizer lie in `shard` parts, each on `replicate` ranks:

    rank      0        1        2        3            replicate 2 × shard 2
    holds     part 0   part 1   part 0   part 1       parameters, gradients and moments: 1/2 of the model
    runs      its own micro-batches, parts of the weights coming in layer by layer
    adds      gradients over the shards in every pass, over the replicas once for each update

Inside of a part lie, from the outermost to the innermost,

* `expert` ranks, which hold so many experts each and run micro-batches of their own (`expert_parallel`);
* `context` ranks, which share each micro-batch: so many tokens each, and in attention so many heads (`context_parallel`);
* `tensor` ranks, which run the same micro-batches and hold some of the heads, widths and vocabulary (`tensor_parallel`).

A mesh of one adds nothing, sends nothing and needs no process group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from rollkeel.errors import BadInput

SIZES = ("replicate", "shard", "expert", "context", "tensor")
"""Of a mesh, from the outermost to the innermost: ranks that differ in the last one alone are neighbours."""
OF_WORKERS = ("replicate", "shard", "expert")
"""Ranks that differ in one of these run micro-batches of their own."""
OF_MODEL = ("shard", "expert", "tensor")
"""Ranks that differ in these alone hold one copy of the model together."""
IN_STEP = ("shard", "expert", "context", "tensor")
"""Ranks that differ in one of these wait for each other inside of a pass."""
ADDED = tuple(("replicate", *e, "context", *t) for e in ((), ("expert",)) for t in ((), ("tensor",)))
"""Sets of sizes over which the gradients of a parameter may have to be added."""
TRAVELLED = (SIZES, OF_WORKERS, OF_MODEL, *ADDED, ("expert", "tensor"), ("expert",), ("context",), ("tensor",))
"""Sets of sizes that ranks send each other something over."""
BUCKET = 2**24
"""Most elements of gradients that travel between replicas in one message."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This process's place among the ranks. `Mesh()` is a process alone."""

    replicate: int = 1
    shard: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    rank: int = 0
    """Among the ranks of the mesh, replica by replica."""
    shards: Any = None
    """`DeviceMesh` of the ranks that hold the parts of this rank's replica."""
    groups: Mapping[tuple[str, ...], Any] = field(default_factory=dict)
    """Process group of the ranks that differ from this one in these sizes alone; sizes of 1 are left out."""

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.over(*SIZES)

    @property
    def workers(self) -> int:
        """How many run micro-batches of their own."""
        return self.over(*OF_WORKERS)

    @cached_property
    def place(self) -> Mapping[str, int]:
        """This rank's number along each size."""
        left, out = self.rank, dict[str, int]()
        for name in reversed(SIZES):
            left, out[name] = divmod(left, getattr(self, name))
        return out

    @property
    def worker(self) -> int:
        """Which of the workers this rank is."""
        number = 0
        for name in OF_WORKERS:
            number = number * getattr(self, name) + self.place[name]
        return number

    @property
    def part(self) -> int:
        """Which part of the model this rank holds."""
        return self.place["shard"]

    @property
    def replica(self) -> int:
        """Which copy of the model it belongs to."""
        return self.place["replicate"]

    @property
    def in_step(self) -> bool:
        """True if ranks wait for each other inside of a pass, so that all must run equally many."""
        return self.over(*IN_STEP) > 1

    def places(self, *names: str) -> Iterator[Mapping[str, int]]:
        """Places of the ranks that differ from this one in these sizes alone, in the order of their group."""
        names = _several(self, names)
        for numbers in itertools.product(*(range(getattr(self, name)) for name in names)):
            yield {**self.place, **dict(zip(names, numbers, strict=True))}

    def over(self, *names: str) -> int:
        """Ranks along these sizes."""
        return math.prod(getattr(self, name) for name in names)

    def group(self, *names: str) -> Any:
        """Process group of the ranks that differ from this one in these sizes alone; None if there is no other."""
        return self.groups.get(_several(self, names))

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` added up over all workers, in place."""
        return _added(tensor, self.group(*OF_WORKERS))

    def over_model(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` added up over the ranks that hold one copy of the model together, in place."""
        return _added(tensor, self.group(*OF_MODEL))

    def over_shards(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` added up over the parts of this replica, in place."""
        return _added(tensor, self.shards.get_group() if self.shard > 1 else None)

    def losses(self, own: Sequence[torch.Tensor], device: torch.device) -> list[float]:
        """Those of this process, or what all ranks' add up to, which is computed on `device`."""
        if self.size == 1:
            return torch.stack(list(own)).tolist()
        return [float(self.total(summed(own, device)))]

    def everyone(self, value: Any) -> list[Any]:
        """The `value` of every rank, by rank."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, (self.rank, value), group=self.group(*SIZES))
        return [value for _, value in sorted(values, key=lambda pair: pair[0])]

    def agree(self, error: Exception | None) -> None:
        """Raise the first rank's error on all of them. Without one: nothing."""
        for failed in filter(None, self.everyone(error)):
            raise failed

    def attempt(self, call: Callable[[], Any], said: str = "") -> Any:
        """What `call` returns here; an error of it is raised on all ranks, one of the system's as `BadInput` that begins with `said`."""
        value, failed = None, None
        try:
            value = call()
        except OSError as error:
            failed = BadInput(f"{said or 'cannot read'}: {error.strerror or error}")
        except Exception as error:
            failed = error
        self.agree(failed)
        return value

    def rows(self, count: int) -> slice:
        """Which of `count` rows of a parameter lie here."""
        each = -(-count // self.shard)
        return slice(min(self.part * each, count), min((self.part + 1) * each, count))


def summed(scalars: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Their sum on the device where they are; 0 there of none."""
    return torch.stack([torch.zeros((), device=device), *scalars]).sum()


def _several(sizes: Any, names: Iterable[str]) -> tuple[str, ...]:
    """Those of `names` that are no 1, in the order of a mesh."""
    return tuple(name for name in SIZES if name in names and getattr(sizes, name) > 1)


def join(
    replicate: int = 1,
    shard: int = 1,
    *,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    device: str = "cpu",
    ranks: Sequence[int] | None = None,
) -> Mesh:
    """The mesh of these `ranks` of the default process group, all of them if not given, in their order.

    Every process of the default group calls it, with the same arguments. Raises `BadInput` if the sizes do not multiply to the ranks.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    ranks = range(dist.get_world_size()) if ranks is None else ranks
    asked = Mesh(replicate=replicate, shard=shard, expert=expert, context=context, tensor=tensor)
    sizes = [getattr(asked, name) for name in SIZES]
    if min(sizes) < 1 or asked.size != len(ranks):
        said = " × ".join(f"{n}={s}" for n, s in zip(SIZES, sizes, strict=True) if s != 1 or n in SIZES[:2])
        raise BadInput(f"train.mesh: {said} is {asked.size} ranks, there are {len(ranks)}; set one of them to match")
    grid = torch.tensor(ranks).view(sizes)
    rows = grid.movedim(SIZES.index("shard"), -1).reshape(-1, shard)
    shards = DeviceMesh(device, rows, mesh_dim_names=("others", "shard"))
    groups = _groups(asked, grid)
    if dist.get_rank() not in ranks:
        return Mesh()
    return replace(asked, rank=list(ranks).index(dist.get_rank()), shards=shards["shard"], groups=groups)


def _groups(asked: Mesh, grid: torch.Tensor) -> dict[tuple[str, ...], Any]:
    """Of all sets of sizes that gradients, sums or tokens travel over. Collective."""
    import torch.distributed as dist

    out = dict[tuple[str, ...], Any]()
    for names in dict.fromkeys(_several(asked, names) for names in TRAVELLED):
        if names:
            at = [SIZES.index(name) for name in names]
            for members in grid.movedim(at, list(range(-len(at), 0))).reshape(-1, asked.over(*names)).tolist():
                group = dist.new_group(members)
                if dist.get_rank() in members:
                    out[names] = group
    return out


def gather_into(out: torch.Tensor, part: torch.Tensor, group: Any) -> None:
    """All ranks' equal `part`s one behind the other, in `out`, which is all the memory that it takes."""
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    gather(out, part, group=group)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that lies here, as memory; all of it if it is not sharded."""
    return getattr(tensor, "_local_tensor", tensor)


def spread_like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """`part` as what lies here of a tensor that is sharded like `tensor`."""
    if local(tensor) is tensor:
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    about = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements, **about)


class _Root(torch.nn.Module):
    """Runs a call where FSDP brings in what belongs to no layer: embeddings, last norm and head."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Any, *args: Any, **options: Any) -> Any:
        return call(*args, **options)


def spread(model: torch.nn.Module, layers: Iterable[torch.nn.Module], mesh: Mesh, reduce: Any = None) -> Any:
    """Shard `model` layer by layer over the parts of `mesh`. What is returned runs a call with the weights that it needs brought in.

    Gradients are sums over the parts. `reduce`: what adds them up in place of the process group.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    root, policy = _Root(model), MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in (*layers, root):
        fully_shard(module, mesh=mesh.shards, mp_policy=policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_reduce_scatter_unused_params(True, recurse=False)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
            if reduce is not None:
                module.set_custom_reduce_scatter(reduce)
    return root


def keep_float32(root: Any) -> None:
    """Behind a first call of `root`: gradients are float32 from where they arise, whatever the dtype of the weights. FSDP would round
    them, and their sum over the ranks in each micro-batch, to it. Collective."""
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is None or group._orig_dtype in (None, torch.float32):
            continue
        module.unshard()
        for p in group.fsdp_params:
            p.unsharded_param.grad_dtype = torch.float32
        module.reshard()
        group._orig_dtype = torch.float32  # which `unshard` sets


def add_gradients(
    named: Iterable[tuple[str, torch.Tensor]], mesh: Mesh, adds: Callable[[str], tuple[str, ...]]
) -> None:
    """Add up what lies here of parameters' gradients, in place; `adds`: over which sizes of the mesh, for each name."""
    import torch.distributed as dist

    together: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for name, p in named:
        if p.grad is not None:
            together.setdefault(adds(name), []).append(local(p.grad))
    for names, gradients in together.items():
        group = mesh.group(*names)
        for bucket in _buckets(gradients) if group is not None else ():
            flat = torch.cat([g.reshape(-1) for g in bucket])
            dist.all_reduce(flat, group=group)
            for gradient, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(total.view_as(gradient))


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    bucket, size = list[torch.Tensor](), 0
    for tensor in tensors:
        if bucket and size + tensor.numel() > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def _added(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    if group is not None:
        import torch.distributed as dist

        dist.all_reduce(tensor, group=group)
    return tensor
