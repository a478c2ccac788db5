"""Random numbers that belong to a token or a trajectory: keyed by seed, draw and rollout, not by position in a batch.

Packing, micro-batching and the number of ranks therefore cannot change what anybody draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rollkeel.objectives.segments import lengths
from rollkeel.types import TokenBatch

_MASK64 = (1 << 64) - 1
_GOLDEN, _MUL1, _MUL2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Draw:
    """A seed and how many batches have been drawn for; `advance` begins the next one."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.count = 0

    def advance(self) -> None:
        self.count += 1

    @property
    def key(self) -> int:
        """64-bit key of the current batch's draw."""
        return _mix_int(_mix_int(self.seed & _MASK64) + self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seed, self.count = int(state["seed"]), int(state["count"])


def trajectory_ids(tokens: TokenBatch) -> torch.Tensor:
    """`[T]` int64 that names a trajectory across batches and ranks: `rollout_ids`, or `sequence_ids` without them."""
    return tokens.sequence_ids if tokens.rollout_ids is None else tokens.rollout_ids


def uniform(key: int, ids: torch.Tensor) -> torch.Tensor:
    """`[n]` float64 in [0, 1) from `[n]` int64 ids."""
    return _to_unit(_mix(_mix(ids) + _signed(key)))


def uniform_at(key: int, tokens: TokenBatch) -> torch.Tensor:
    """`[T]` float64 in [0, 1): one number per token, by its trajectory and position."""
    return _to_unit(_mix(_mix(_mix(trajectory_ids(tokens)) + _signed(key)) + positions(tokens)))


def positions(tokens: TokenBatch) -> torch.Tensor:
    """`[T]` int64: `token_index`, or without it the place of each token in its sequence."""
    if tokens.token_index is not None:
        return tokens.token_index
    counts = lengths(tokens.sequence_ids)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts, output_size=len(tokens.sequence_ids))
    return torch.arange(len(first), device=first.device) - first


def normal(key: int, ids: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`[n]` float64 standard normal from `[n]` int64 ids and positions (Box–Muller)."""
    keys = _mix(_mix(_mix(ids) + _signed(key)) + index)
    radius = torch.sqrt(-2.0 * torch.log1p(-_to_unit(keys)))
    return radius * torch.cos(2.0 * math.pi * _to_unit(_mix(keys + 1)))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser on int64 tensors; products wrap modulo 2⁶⁴."""
    x = x.long() + _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(_MUL1)
    x = (x ^ _shift(x, 27)) * _signed(_MUL2)
    return x ^ _shift(x, 31)


def _mix_int(x: int) -> int:
    x = (x + _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * _MUL1) & _MASK64
    x = ((x ^ (x >> 27)) * _MUL2) & _MASK64
    return x ^ (x >> 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right; the tensor's own is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    x &= _MASK64
    return x - (1 << 64) if x >> 63 else x


def _to_unit(x: torch.Tensor) -> torch.Tensor:
    return _shift(x, 11).double() * 2.0**-53
