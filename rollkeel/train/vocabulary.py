"""Log-probs and entropies where the ranks of a group have each some rows of the output head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Vocabulary:
    """The rows that this rank has; others of the group have the rest, as many each."""

    first: int
    rows: int
    group: Any

    def places(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of `ids` among the rows here, 0 for those that are elsewhere; which those are, bool."""
        places = ids - self.first
        others = (places < 0) | (places >= self.rows)
        return places.masked_fill(others, 0), others

    def statistics(
        self,
        z: torch.Tensor,
        targets: torch.Tensor,
        topk_ids: torch.Tensor | None,
        normaliser: torch.Tensor,
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        topk: torch.Tensor,
    ) -> torch.Tensor:
        """Fill the last four from tempered logits `z [n, rows]`, whose memory is taken; gives the probabilities here. Collective.

        One message for the largest logits, one for the sums: of exp(z − max), of z · exp(z − max), and the wanted logits,
        which one rank has and the others count as 0.
        """
        import torch.distributed as dist

        largest = z.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        p = torch.exp(z - largest[:, None])
        wanted = [targets[:, None]] if topk_ids is None else [targets[:, None], topk_ids]
        logits = [self._here(z, ids) for ids in wanted]
        sums = torch.cat([p.sum(-1, keepdim=True), torch.linalg.vecdot(z, p)[:, None], *logits], 1)
        dist.all_reduce(sums, group=self.group)
        total, mean = sums[:, 0], sums[:, 1] / sums[:, 0]
        torch.add(largest, total.log(), out=normaliser)
        torch.sub(sums[:, 2], normaliser, out=logprobs)
        if topk_ids is not None:
            torch.sub(sums[:, 3:], normaliser[:, None], out=topk)
        if len(entropies):
            torch.sub(normaliser, mean, out=entropies)
        return p.div_(total[:, None])

    def _here(self, z: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        places, others = self.places(ids)
        return z.gather(1, places).masked_fill(others, 0.0)
