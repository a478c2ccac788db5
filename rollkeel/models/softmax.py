"""Softmax over a vocabulary and its gradient on a CPU in float32: the kernels of `kernels_head.py`, over as many threads as torch has."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rollkeel.models import jit, kernels_head
from rollkeel.models.jit import array as _np
from rollkeel.models.threads import each, shares


def suits(z: torch.Tensor) -> bool:
    return jit.FOUND and z.device.type == "cpu" and z.dtype == torch.float32 and z.is_contiguous()


def statistics(
    z: torch.Tensor,
    targets: torch.Tensor,
    topk_ids: torch.Tensor | None,
    normaliser: torch.Tensor,
    logprobs: torch.Tensor,
    entropies: torch.Tensor,
    topk: torch.Tensor,
) -> torch.Tensor:
    """Turns logits `z [N, V]` into probabilities, in place. Fills `normaliser` with log Σ exp(z), `logprobs` with those at `targets [N]`,
    `entropies` (nats) unless it is empty, and `topk [N, K]` with log-probs at `topk_ids`."""
    wanted = [(logprobs[:, None], targets[:, None])]
    if topk_ids is not None:
        wanted.append((topk, topk_ids))
    for out, ids in wanted:
        out.copy_(z.gather(1, ids))
    room = entropies if len(entropies) else torch.empty_like(normaliser)
    _over_rows(kernels_head.statistics, z, normaliser, room)
    for out, _ in wanted:
        out.sub_(normaliser[:, None])
    return z


def gradient(
    z: torch.Tensor,
    normaliser: torch.Tensor,
    entropies: torch.Tensor,
    d_logprobs: torch.Tensor | None,
    d_entropy: torch.Tensor | None,
    factor: float,
) -> torch.Tensor:
    """Turns logits `z [N, V]` into their gradient, in place: −factor · p · (d_entropy · (log p + H) + d_logprobs), without the term of the
    target itself."""
    nothing = torch.zeros_like(normaliser)
    by_logprob = nothing if d_logprobs is None else d_logprobs * -factor
    by_entropy = nothing if d_entropy is None else d_entropy * -factor
    known = entropies if len(entropies) else nothing
    _over_rows(kernels_head.gradient, z, normaliser, known, by_logprob, by_entropy)
    return z


def _over_rows(kernel: Callable[..., None], *rows: torch.Tensor) -> None:
    def some(first: int, end: int) -> None:
        kernel(*(_np(t[first:end]) for t in rows))

    each(some, shares(len(rows[0])))
