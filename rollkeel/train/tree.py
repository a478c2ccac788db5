"""Gradients added along one binary tree over the numbers of micro-batches: the same bits on 1, 2, 4, … ranks.

    micro-batch   0   1   2   3   4   5   6        7 of them
                  └─┬─┘   └─┬─┘   └─┬─┘   │
                    └───┬───┘       └──┬──┘        who has no partner rises as it is
                        └──────┬───────┘

Of W ranks, rank r runs r, r + W, r + 2W, …: what is added within a round of W is a subtree, and rounds are added as a binary counter
carries. It costs one gradient more for every doubling of the rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch

from rollkeel.errors import BadInput
from rollkeel.train.mesh import Mesh, local, spread_like

Gradient = list[torch.Tensor | None]
"""Of each parameter, what lies here; None for a parameter that had none."""


class Tree:
    """Takes the gradient of a round after each backward, and gives back their sum."""

    parameters: Sequence[torch.nn.Parameter] = ()
    """Whose gradients; set before the first round."""

    def __init__(self, mesh: Mesh) -> None:
        """Raises `BadInput` for a number of ranks or parts that is no power of two: their rounds would not be subtrees."""
        for name in ("replicate", "shard"):
            if (count := getattr(mesh, name)) & (count - 1):
                raise BadInput(
                    f"train.reduce=tree: train.mesh.{name}={count} is no power of two; set one, or reduce=sum"
                )
        self._mesh = mesh
        self._levels: list[Gradient | None] = []
        """At i the sum of 2^i rounds, of those that no later one has been added to yet."""
        self._real = mesh.size
        """Ranks of the round whose micro-batch is one, the first ones."""

    def begin(self, real: int) -> None:
        """A round in which the first `real` ranks have a micro-batch."""
        self._real = real

    @torch.no_grad()
    def take(self) -> None:
        """The round's gradients, out of the parameters and added over the ranks."""
        gradient: Gradient = []
        for p in self.parameters:
            gradient.append(None if p.grad is None else self._over_replicas(local(p.grad)))
            p.grad = None
        for level, below in enumerate(self._levels):
            if below is None:
                self._levels[level] = gradient
                return
            gradient, self._levels[level] = _sum(below, gradient), None
        self._levels.append(gradient)

    @torch.no_grad()
    def finish(self) -> None:
        """Leave the sum of all rounds in the parameters."""
        total: Gradient = []
        for level in self._levels:
            if level is not None:
                total = _sum(level, total) if total else level
        self._levels = []
        for p, gradient in zip(self.parameters, total, strict=True):
            if gradient is not None:
                p.grad = spread_like(p, gradient)

    def scatter(self, output: torch.Tensor, parts: torch.Tensor, group: Any) -> None:
        """`parts`: this rank's gradient for each rank of the shard group, one after the other; `output`: all ranks' sum for this one."""
        import torch.distributed as dist

        came = torch.empty_like(parts)
        dist.all_to_all_single(came, parts, group=group)
        first = self._mesh.replica * self._mesh.shard
        own = came.view(self._mesh.shard, -1)[: max(0, self._real - first)]
        output.copy_(pairwise(list(own)) if len(own) else torch.zeros_like(output))

    def _over_replicas(self, gradient: torch.Tensor) -> torch.Tensor:
        """Of replicas that had no micro-batch in the round, what came is no summand."""
        import torch.distributed as dist

        if self._mesh.replicate == 1:
            return gradient
        every = [torch.empty_like(gradient) for _ in range(self._mesh.replicate)]
        dist.all_gather(every, gradient.contiguous(), group=self._mesh.group("replicate"))
        return pairwise(every[: -(-self._real // self._mesh.shard)])


def reduce_scatter(tree: Tree) -> Any:
    """`tree.scatter` in the form that FSDP takes."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    class Scatter(ReduceScatter):
        def allocate(
            self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
        ) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            group: Any,
            op: Any,
            async_op: bool = False,
        ) -> None:
            tree.scatter(output_tensor, input_tensor, group)

    return Scatter()


def pairwise(summands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Neighbours added, then neighbours of those."""
    while len(summands) > 1:
        pairs = zip_longest(summands[::2], summands[1::2])
        summands = [a if b is None else a + b for a, b in pairs]
    return summands[0]


def norm(parameters: Sequence[torch.nn.Parameter], mesh: Mesh) -> torch.Tensor:
    """2-norm of their gradients, from sums of squares by row: which rank holds a row does not change a bit."""
    sums = []
    for p in parameters:
        if p.grad is not None:
            squares = local(p.grad).float().square()
            rows = squares.new_zeros(p.shape[0] if p.dim() else 1)
            rows[mesh.rows(len(rows))] = squares.flatten(1).sum(1) if p.dim() > 1 else squares
            sums.append(rows)
    flat = mesh.over_shards(torch.cat(sums))
    return torch.stack([part.sum() for part in flat.split([len(s) for s in sums])]).sum().sqrt()


def _sum(left: Gradient, right: Gradient) -> Gradient:
    return [b if a is None else a if b is None else a.add_(b) for a, b in zip(left, right, strict=True)]


def rounds(micros: Sequence[Any], mesh: Mesh) -> Iterator[tuple[Any, int]]:
    """This rank's micro-batch of each round, None where it has none, and how many ranks have one."""
    for start in range(0, len(micros), mesh.size):
        real = min(mesh.size, len(micros) - start)
        yield (micros[start + mesh.rank] if mesh.rank < real else None), real
