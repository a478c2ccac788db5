"""Sums over the sequences of a flat batch. A sequence is one contiguous run of equal ids, always whole.

Accumulated in float64 and in a fixed order on every device, so that a sequence gives the same number wherever it is packed.
"""

from __future__ import annotations

from typing import Any

import torch

from rollkeel.errors import BadInput


def starts(sequence_ids: torch.Tensor) -> torch.Tensor:
    """`[N]` int64, index of the first token of each sequence, from `[T]` ids. Reads N off the device once."""
    if sequence_ids.numel() == 0:
        return sequence_ids.new_zeros(0, dtype=torch.int64)
    changes = (sequence_ids[1:] != sequence_ids[:-1]).nonzero()[:, 0] + 1
    return torch.cat([changes.new_zeros(1), changes])


def lengths(sequence_ids: torch.Tensor) -> torch.Tensor:
    """`[N]` int64, tokens of each sequence. Raises `BadInput` if one lies in pieces: each would count as its own."""
    first = starts(sequence_ids)
    ids, order = sequence_ids[first].sort(stable=True)
    again = (ids[1:] == ids[:-1]).nonzero()
    if again.numel():
        where = int(first[order[again[0, 0] + 1]])
        raise BadInput(
            f"expected the tokens of a sequence side by side, got sequence {int(sequence_ids[where])} again at token {where}"
            " of the batch; sort the batch by sequence"
        )
    return torch.diff(first, append=first.new_full((1,), sequence_ids.numel()))


def per_sequence(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """`[N]`: the value at each sequence's first token, for `[T]` values that are constant over a sequence."""
    return values[starts(sequence_ids)]


def sequence_sum(values: torch.Tensor, sequence_ids: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
    """`[T]`: each token gets the sum over its sequence. Differentiable; dtype of `values`. `counts`: known `lengths`."""
    if values.numel() == 0:
        return values
    return _Spread.apply(values, lengths(sequence_ids) if counts is None else counts)  # type: ignore[return-value]


def sequence_mean(values: torch.Tensor, sequence_ids: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
    """`[T]`: each token gets the mean over its sequence; see `sequence_sum`."""
    if values.numel() == 0:
        return values
    counts = lengths(sequence_ids) if counts is None else counts
    return sequence_sum(values, sequence_ids, counts) / _repeat(counts, counts, values.numel())


def sequence_max(values: torch.Tensor, sequence_ids: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
    """`[T]`: each token gets the largest value of its sequence. Detached."""
    if values.numel() == 0:
        return values
    counts = lengths(sequence_ids) if counts is None else counts
    return _repeat(torch.segment_reduce(values.detach(), "max", lengths=counts, unsafe=True), counts, values.numel())


def _repeat(per_segment: torch.Tensor, counts: torch.Tensor, total: int) -> torch.Tensor:
    return torch.repeat_interleave(per_segment, counts, output_size=total)


class _Spread(torch.autograd.Function):
    """Sum over each run, given to all its tokens. The map is symmetric, so it is its own backward, in the same fixed order."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(counts)
        # `unsafe`: no look at the lengths, which a device would be waited for.
        total = torch.segment_reduce(values.double(), "sum", lengths=counts, unsafe=True)
        return _repeat(total, counts, values.numel()).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (counts,) = ctx.saved_tensors
        return _Spread.apply(gradients[0], counts), None  # type: ignore[return-value]
