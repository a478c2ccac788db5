"""Causal attention of sequences that lie end to end, without padding and without a matrix of scores: torch's flash attention on CUDA."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Spans(NamedTuple):
    """Where sequences begin and end. The queries of each are the last of its keys."""

    queries: torch.Tensor
    """`[S + 1]` int32: first query of each sequence, then how many there are."""
    keys: torch.Tensor
    """The same of keys."""
    most_queries: int
    most_keys: int


def suits(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether `attend` computes heads of this `width`, keys and values alike."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and width <= 256
        and width % 8 == 0
        and torch.cuda.get_device_capability(device)[0] >= 8
    )


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans, scale: float | None) -> torch.Tensor:
    """Queries `[N, H, d]` over keys and values `[M, KV, d]` → `[N, H, d]`."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}  # of both the last sees the last
    if _is_told(varlen_attn):
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    out = varlen_attn(q, k, v, spans.queries, spans.keys, spans.most_queries, spans.most_keys, **options)
    assert isinstance(out, torch.Tensor)
    return out


@functools.cache
def _is_told(kernel: Callable[..., Any]) -> bool:
    """torch 2.11 has no such argument, and takes fewer heads of keys without being told."""
    return "enable_gqa" in inspect.signature(kernel).parameters
