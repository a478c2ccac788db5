"""AdamW's moments in one byte each, in blocks that share a scale (block-wise as Dettmers et al., arXiv:2110.02861, section 2).

A code above 0 is 2^(−(last − code) / 8) of its block's largest value: 16 octaves of first moments with their sign, 32 of second ones,
whose root the update divides by. Values are rounded up or down by chance, right on average: second moments change by a thousandth
in an update, and the nearest code would be the old one forever. A second moment that is not 0 never becomes 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

BLOCK = 256
"""Elements with one scale."""
OCTAVE = 8
"""Codes in it."""


def unpack(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 values of `codes [n]`, int8 of first moments and uint8 of second ones, with `scales [⌈n / BLOCK⌉]`."""
    sign = codes.sign()
    unit = _unit(codes.abs() if codes.dtype == torch.int8 else codes, torch.iinfo(codes.dtype).max)
    return unit.mul_(sign).mul_(scales.repeat_interleave(BLOCK)[: len(codes)])


def pack(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, seed: int) -> None:
    """Store float32 `values [n]` in `codes` and `scales`. `seed` decides what is rounded up."""
    last, count = torch.iinfo(codes.dtype).max, len(values)
    blocks = F.pad(values.abs(), (0, -count % BLOCK)).view(-1, BLOCK)
    torch.amax(blocks, 1, out=scales)
    unit = blocks.div_(scales[:, None].clamp_min(torch.finfo(torch.float32).tiny)).view(-1)[:count]
    lower = unit.log2().mul_(OCTAVE).add_(last).floor_().clamp_(0, last)
    below, above = _unit(lower, last), _unit(lower + 1, last)
    chance = torch.Generator(values.device).manual_seed(seed)
    lower += torch.rand(count, generator=chance, device=values.device) < (unit - below) / (above - below)
    if codes.dtype == torch.uint8:
        lower.clamp_min_(1).mul_(values > 0)
    codes.copy_(lower.clamp_(max=last).copysign_(values))


def _unit(codes: torch.Tensor, last: int) -> torch.Tensor:
    return torch.exp2((codes.float() - last) / OCTAVE).mul_(codes > 0)
