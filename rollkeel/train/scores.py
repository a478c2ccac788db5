"""What a pass of a model over response tokens says about each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from rollkeel.batch.build import TrainingBatch
from rollkeel.errors import BadInput
from rollkeel.train.mesh import Mesh
from rollkeel.types import TokenBatch


class TrainableObjective(Protocol):
    """What the trainer asks of an objective."""

    @property
    def needs(self) -> frozenset[str]: ...
    def prepare(self, batch: TokenBatch) -> Any: ...
    def loss(self, tokens: TokenBatch) -> torch.Tensor: ...
    def __call__(self, tokens: TokenBatch) -> Any: ...


class Scores(NamedTuple):
    """Of t response tokens: those of a micro-batch, or of a whole optimizer batch in its own order."""

    logprobs: torch.Tensor
    """`[t]` float32, at the sampling temperature."""
    entropy: torch.Tensor
    """`[t]` float32, nats."""
    topk_logprobs: torch.Tensor | None = None
    """`[t, K]` float32 at the batch's `topk_ids`, without gradient; None if it has none."""
    experts: torch.Tensor | None = None
    """`[t, layers, k]` int16: experts that the routers choose at the position that predicts the token, also where others
    are replayed; None unless asked for."""


@dataclass(frozen=True)
class UpdateOutput:
    """What one optimizer update saw and did."""

    metrics: dict[str, float]
    """The objective's metrics, `optimizer/*` and `policy/*`."""
    logprobs: torch.Tensor
    """`[T]` log-probs of the update's own pass, before the step."""
    entropy: torch.Tensor
    """`[T]` entropies of the same pass, nats."""
    keep: torch.Tensor
    """`[T]` bool: tokens that every mask of the objective kept."""
    weight: torch.Tensor
    """`[T]` correction weight of the objective, 1 where it has none."""
    experts: torch.Tensor | None = None
    """`[T, layers, k]` int16: experts the routers chose in the update's own pass; None unless asked for."""
    cut: torch.Tensor | None = None
    """`[T]` bool: tokens whose gradient the objective's clip took away; None if it has no clip."""


class ScoreSheet:
    """Scores of micro-batches put back into the order of their batch. Threads may fill it at once."""

    def __init__(self, batch: TrainingBatch, *, experts: bool = False) -> None:
        """`experts`: keep those too; `batch.experts` says how many layers and experts there are."""
        device = batch.rollout_logprobs.device
        self.logprobs = torch.zeros(len(batch), device=device)
        self.entropy = torch.zeros_like(self.logprobs)
        self.topk_logprobs = None if batch.topk_ids is None else torch.zeros(batch.topk_ids.shape, device=device)
        self.experts = torch.zeros_like(batch.experts) if experts and batch.experts is not None else None

    def put(self, indices: torch.Tensor, scores: Scores) -> None:
        """File detached `scores` of the tokens `indices [t]`."""
        self.logprobs[indices], self.entropy[indices] = scores.logprobs.detach(), scores.entropy.detach()
        if self.topk_logprobs is not None and scores.topk_logprobs is not None:
            self.topk_logprobs[indices] = scores.topk_logprobs
        if self.experts is not None:
            if scores.experts is None or scores.experts.shape[1:] != self.experts.shape[1:]:
                got = None if scores.experts is None else list(scores.experts.shape[1:])
                raise BadInput(
                    f"routing: the engine chose [layers, experts] {list(self.experts.shape[1:])} per token, the trainer {got};"
                    " set rollout.routing=off"
                )
            self.experts[indices] = scores.experts

    def gather(self, mesh: Mesh) -> None:
        """Add what the other ranks filed; a token was filed by one of them."""
        if mesh.size == 1:
            return
        for tensor in (self.logprobs, self.entropy, self.topk_logprobs):
            if tensor is not None:
                mesh.total(tensor)
        if self.experts is not None:
            self.experts.copy_(mesh.total(self.experts.int()))  # gloo adds no int16

    @property
    def scores(self) -> Scores:
        """All that was filed."""
        return Scores(self.logprobs, self.entropy, self.topk_logprobs, self.experts)
