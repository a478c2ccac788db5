"""From logits to tokens, with the log-probs of the distribution that was actually sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rollkeel.models import gpu


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of a batch as `[B]` tensors, and whether any row needs the slow paths."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor
    truncated: bool
    tempered: bool
    """False when every temperature is 1."""


@dataclass(frozen=True)
class Sampled:
    """`[B]` token ids, float32 log-probs and kept mass; `[B, V]` scores whose log-softmax is the sampled distribution."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    kept_mass: torch.Tensor
    scores: torch.Tensor

    def best(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and ids `[B, k]` of the most likely tokens."""
        values, ids = self.scores.log_softmax(-1).topk(k, -1)
        return values, ids


Sampler = Callable[[torch.Tensor, SamplingRows, torch.Tensor], Sampled]
"""`sample`, or another with its arguments."""


def sample(logits: torch.Tensor, rows: SamplingRows, uniform: torch.Tensor) -> Sampled:
    """Draw one token per row of `logits [B, V]` (float32) by inverting the CDF at `uniform [B]` (float64 in [0, 1)).

    Order of operations: temperature, then top-k, top-p and min-p on the tempered distribution, then renormalisation.
    Temperature 0 keeps only the most likely token of the untempered distribution.
    """
    if rows.tempered:
        logits = logits / torch.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    if rows.truncated:
        logits, kept = _truncate(logits.log_softmax(-1), rows)
    else:
        kept = torch.ones(len(logits), device=logits.device)
    if gpu.taken(logits):
        from rollkeel.models.gpu.sampling import draw

        drawn, chosen = draw(logits, uniform)
        return Sampled(drawn, chosen.clamp_max_(0.0), kept, logits)
    probs = logits.softmax(-1)
    cdf = probs.cumsum(-1)
    total = cdf[:, -1]
    # Strictly below the total, or rounding could select a token of probability 0 behind the last kept one.
    threshold = torch.minimum((uniform * total).float(), torch.nextafter(total, torch.zeros_like(total)))
    # A row with NaN has no index: clamped, its log-prob is NaN; otherwise the gather would fail.
    ids = torch.searchsorted(cdf, threshold[:, None], right=True).clamp_max_(logits.shape[-1] - 1)
    # A token of probability below float32's range cannot move the CDF, so it is never drawn and the log stays finite.
    chosen = probs.gather(1, ids)[:, 0].log()
    return Sampled(ids[:, 0], chosen.clamp_max_(0.0), kept, logits)


def _truncate(logprobs: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Renormalised log-probs (−inf outside the kept set) and the mass of the kept set before renormalising."""
    ordered, order = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    probs = ordered.exp()
    rank = torch.arange(logprobs.shape[-1], device=logprobs.device)
    limit = torch.where(rows.top_k > 0, rows.top_k, logprobs.shape[-1])
    limit = torch.where(rows.temperature > 0, limit, 1)
    keep = rank < limit[:, None]
    # The token that crosses top_p is kept: keep while the mass before it is below top_p (of what top-k left).
    mass = (probs * keep).sum(-1, keepdim=True)
    before = (probs * keep).cumsum(-1) - probs
    keep &= (before < rows.top_p[:, None] * mass) | (rows.top_p >= 1)[:, None]
    keep &= probs >= rows.min_p[:, None] * probs[:, :1]
    keep[:, 0] = True
    keep = torch.empty_like(keep).scatter_(1, order, keep)
    kept = torch.where(keep, logprobs.exp(), 0.0).sum(-1)
    untouched = keep.all(-1)
    kept = torch.where(untouched, 1.0, kept)
    cut = (logprobs - kept.log()[:, None]).masked_fill(~keep, -torch.inf)
    return cut, kept.clamp_max(1.0)
