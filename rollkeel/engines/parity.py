"""What the embedded engine does otherwise under `run.parity`: keys looked at in their order, log-probs as the trainer has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollkeel.engines.kv import PagedCache, Step
from rollkeel.engines.sampling import Sampled, SamplingRows, sample
from rollkeel.models.parity import attention, logprobs


class ParityCache(PagedCache):
    """Keys and values are float32, which those of lower precision are exact in."""

    def attend(
        self,
        step: Step,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `PagedCache.attend`."""
        write = step.written(key.shape[1], self.block_size)
        keys = self._store(self._keys, layer, key.float(), write)
        values = self._store(self._values, layer, value.float(), write)
        places = torch.arange(len(query), device=query.device) if step.scatter is None else step.scatter
        sequence, seen = places // step.query_positions.shape[1], step.query_positions.flatten()[places] + 1
        where = step.table.contiguous(), sequence, seen
        return attention(query, keys, values, where, key.shape[1], scale)


@dataclass(frozen=True)
class _Exact(Sampled):
    def best(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.scores.topk(k, -1).indices
        return logprobs(self.scores, ids), ids


def draw(logits: torch.Tensor, rows: SamplingRows, uniform: torch.Tensor) -> Sampled:
    """As `sample`, with the trainer's log-probs where nothing is truncated."""
    drawn = sample(logits, rows, uniform)
    hot = rows.temperature > 0
    whole = hot & (rows.top_p >= 1) & (rows.top_k == 0) & (rows.min_p == 0)
    scores = logits / torch.where(hot, rows.temperature, 1.0)[:, None]
    exact = torch.where(whole, logprobs(scores, drawn.ids[:, None])[:, 0], drawn.logprobs)
    return _Exact(drawn.ids, exact, drawn.kept_mass, drawn.scores if rows.truncated else scores)
