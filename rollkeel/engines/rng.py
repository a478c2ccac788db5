"""Randomness that belongs to the request: a counter-based generator keyed by seed, rollout and position.

The same request draws the same numbers whatever else is in the batch, in any process, before or after a resume.
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15


def _signed(value: int) -> int:
    """Two's-complement int64 of an unsigned 64-bit constant."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


_M1, _M2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on int64 tensors; shifts are made logical by masking."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _M1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _M2
    return x ^ ((x >> 31) & (2**33 - 1))


def request_keys(seeds: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """One int64 key per request from its seed and rollout id (both int64 `[B]`)."""
    return _mix(_mix(seeds + _signed(_GOLDEN)) ^ (ids * _signed(0xD1342543DE82EF95) + 1))


def uniforms(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Float64 numbers in [0, 1), one per request, for the token at `positions` (response index, int64 `[B]`)."""
    bits = _mix(keys + (positions + 1) * _signed(_GOLDEN))
    return ((bits >> 11) & (2**53 - 1)).double() * 2.0**-53
