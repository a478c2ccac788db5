"""Ranks that train one model together: which of it each holds, who runs which micro-batch, and what they add up.

Every rank runs the same program on the same batch. Model and optimizer lie in `shard` parts, each on `replicate` ranks:

    rank      0        1        2        3            replicate 2 × shard 2
    holds     part 0   part 1   part 0   part 1       parameters, gradients and moments: 1/2 of the model
    runs      its own micro-batches, parts of the weights coming in layer by layer
    adds      gradients over the shards in every pass, over the replicas once for each update

A mesh of one adds nothing, sends nothing and needs no process group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollkeel.errors import BadInput

BUCKET = 2**24
"""Most elements of gradients that travel between replicas in one message."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This process's place among the ranks. `Mesh()` is a process alone."""

    replicate: int = 1
    shard: int = 1
    rank: int = 0
    """Among the ranks of the mesh, replica by replica."""
    group: Any = None
    """Process group of all its ranks."""
    shards: Any = None
    """`DeviceMesh` of the ranks that hold the parts of this rank's replica."""
    replicas: Any = None
    """Process group of the ranks that hold the same part as this one."""

    @property
    def size(self) -> int:
        """Ranks that run micro-batches."""
        return self.replicate * self.shard

    @property
    def part(self) -> int:
        """Which part of the model this rank holds."""
        return self.rank % self.shard

    @property
    def replica(self) -> int:
        """Which copy of the model it belongs to."""
        return self.rank // self.shard

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` added up over all ranks, in place."""
        return _added(tensor, self.group if self.size > 1 else None)

    def over_shards(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` added up over the parts of this replica, in place."""
        return _added(tensor, self.shards.get_group() if self.shard > 1 else None)

    def losses(self, own: Sequence[torch.Tensor]) -> list[float]:
        """Those of this process, or what all ranks' add up to."""
        if self.size == 1:
            return torch.stack(list(own)).tolist()
        return [float(self.total(torch.stack([torch.zeros(()), *own]).sum()))]

    def agree(self, error: Exception | None) -> None:
        """Raise the first rank's error on all of them. Without one: nothing."""
        if self.size == 1:
            if error is not None:
                raise error
            return
        import torch.distributed as dist

        errors: list[Exception | None] = [None] * self.size
        dist.all_gather_object(errors, error, group=self.group)
        for failed in filter(None, errors):
            raise failed

    def rows(self, count: int) -> slice:
        """Which of `count` rows of a parameter lie here."""
        each = -(-count // self.shard)
        return slice(min(self.part * each, count), min((self.part + 1) * each, count))


def join(replicate: int, shard: int, *, device: str = "cpu", ranks: Sequence[int] | None = None) -> Mesh:
    """The mesh of these `ranks` of the default process group, all of them if not given, in their order.

    Every process of the default group calls it, with the same arguments. Raises `BadInput` if the sizes do not multiply to the ranks.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    ranks = range(dist.get_world_size()) if ranks is None else ranks
    if replicate < 1 or shard < 1 or replicate * shard != len(ranks):
        raise BadInput(
            f"train.mesh: replicate={replicate} × shard={shard} is {replicate * shard} ranks, there are {len(ranks)}; set one of them to match"
        )
    mesh = DeviceMesh(device, torch.tensor(ranks).view(replicate, shard), mesh_dim_names=("replicate", "shard"))
    group = dist.new_group(list(ranks))
    if dist.get_rank() not in ranks:
        return Mesh()
    place = list(ranks).index(dist.get_rank())
    replicas = mesh["replicate"].get_group()
    return Mesh(replicate=replicate, shard=shard, rank=place, group=group, shards=mesh["shard"], replicas=replicas)


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
    """Runs `call` where FSDP brings in what belongs to no layer: embeddings, last norm and head."""

    def __init__(self, model: torch.nn.Module, call: Any) -> None:
        super().__init__()
        self.model, self._call = model, call

    def forward(self, *args: Any, **options: Any) -> Any:
        return self._call(*args, **options)


def spread(model: torch.nn.Module, layers: Iterable[torch.nn.Module], call: Any, mesh: Mesh, reduce: Any = None) -> Any:
    """Shard `model` layer by layer over the parts of `mesh`; `call` afterwards, with the weights that it needs brought in.

    Gradients are sums over the parts. `reduce`: what adds them up in place of the process group.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    root = _Root(model, call)
    for module in (*layers, root):
        fully_shard(module, mesh=mesh.shards)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_reduce_scatter_unused_params(True, recurse=False)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
            if reduce is not None:
                module.set_custom_reduce_scatter(reduce)
    return root


def add_over_replicas(gradients: Sequence[torch.Tensor], mesh: Mesh) -> None:
    """Add up what lies here over the replicas, in place."""
    import torch.distributed as dist

    if mesh.replicate == 1:
        return
    for bucket in _buckets([local(g) for g in gradients]):
        flat = torch.cat([g.reshape(-1) for g in bucket])
        dist.all_reduce(flat, group=mesh.replicas)
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
