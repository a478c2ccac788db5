"""Prompts on their way into the cache: which of them share a forward pass, and where their keys and values go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rollkeel.engines.kv import Step
from rollkeel.models import varlen
from rollkeel.models.forward import FastForward

Prefill = tuple[list[int], np.ndarray, int]
"""Blocks of a sequence, tokens that it wants in them, and the position of the first."""
LOOSE = 8
"""Most keys that a pass without padding looks at, sequences times those of the longest, in multiples of its tokens."""


def prefill_passes(jobs: Sequence[Prefill], forward: Any, tokens: int, scores: int) -> Iterator[list[Prefill]]:
    """What each forward pass computes of `jobs`, from short to long: several together, in pieces that `Layout` allows."""
    if isinstance(forward, FastForward) and varlen.suits(forward.device, forward.dtype, forward.head_dim):
        yield from _unpadded(jobs, 2 * tokens)
        return
    while jobs:
        count = 1
        while count < len(jobs) and (count + 1) * len(jobs[count][1]) <= tokens:
            count += 1
        group, jobs = jobs[:count], jobs[count:]
        keys = max(start + len(ids) for _, ids, start in group)
        size = max(1, scores // (forward.heads * count * keys))
        for first in range(0, len(group[-1][1]), size):
            piece = slice(first, first + size)
            yield [(blocks, ids[piece], start + first) for blocks, ids, start in group if len(ids) > first]


def _unpadded(jobs: Sequence[Prefill], tokens: int) -> Iterator[list[Prefill]]:
    """Of families whose every layer attends without padding and scores."""
    part, held, longest = list[Prefill](), 0, 0
    for blocks, ids, start in jobs:
        for first in range(0, len(ids), tokens):
            piece, keys = ids[first : first + tokens], start + min(first + tokens, len(ids))
            longest = max(longest, keys)
            if part and (held + len(piece) > tokens or (len(part) + 1) * longest > LOOSE * tokens):
                yield part
                part, held, longest = [], 0, keys
            part.append((blocks, piece, start + first))
            held += len(piece)
    if part:
        yield part


def prefill_step(
    jobs: Sequence[Prefill], size: int, padding: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, Step]:
    """Token ids `[T]`, positions `[T]` and the step of one forward pass over `jobs`: (blocks, tokens, first position) each.

    `size`: tokens per block; `padding`: the block that stands where a sequence has none.
    """
    starts, counts = np.array([start for *_, start in jobs]), np.array([len(tokens) for _, tokens, _ in jobs])
    count, longest = len(jobs), max(counts)
    width = max(-(-(starts + counts) // size))
    table = np.full((count, width), padding, np.int64)
    grid = np.full((count, longest), -1, np.int64)
    for row, (blocks, tokens, start) in enumerate(jobs):
        table[row, : min(width, len(blocks))] = blocks[:width]
        grid[row, : len(tokens)] = np.arange(start, start + len(tokens))
    scatter = np.flatnonzero(grid.ravel() >= 0)
    positions = grid.ravel()[scatter]
    slots = table[scatter // longest, positions // size] * size + positions % size
    step = Step(
        slots=torch.from_numpy(slots).to(device),
        table=torch.from_numpy(table).to(device),
        query_positions=torch.from_numpy(grid).to(device),
        scatter=None if len(scatter) == grid.size else torch.from_numpy(scatter).to(device),
        prompts=(starts, counts),
    )
    ids = torch.from_numpy(np.concatenate([tokens for _, tokens, _ in jobs])).to(device)
    return ids, torch.from_numpy(positions).to(device), step
