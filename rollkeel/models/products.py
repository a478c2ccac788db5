"""Matrix products of the training passes on a CPU: by oneDNN where it is faster than the BLAS behind `torch.mm`.

MKL keeps its AVX-512 code to Intel's processors; oneDNN is twice as fast on others that have it. It builds a kernel for every new shape,
which takes longer than a small product: a multiple of `ROWS` tokens goes to oneDNN, what is left over to BLAS.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROWS, LEAST = 64, 2**21
"""Tokens of a block for oneDNN; multiplications below which BLAS is as fast, because a call of oneDNN costs ten microseconds."""


def _found() -> bool:
    about, processor = Path("/proc/cpuinfo"), torch.backends.cpu.get_cpu_capability()
    both = torch.backends.mkl.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return both and processor == "AVX512" and about.exists() and b"GenuineIntel" not in about.read_bytes()


FASTER = _found()


def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`a [tokens, k] @ b [k, n]`, into `out` if there is one; not differentiable."""
    whole = _whole(a, b.shape[1])
    if not whole:
        return torch.mm(a, b, out=out)
    main = _linear(a[:whole], b.t())
    if out is None and whole == len(a):
        return main
    out = main.new_empty(len(a), b.shape[1]) if out is None else out
    out[:whole] = main
    torch.mm(a[whole:], b, out=out[whole:])
    return out


def add_mm(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`total [m, n]` += `a [tokens, m]ᵀ @ b [tokens, n]`; not differentiable. Takes the memory of another `total` where oneDNN is faster."""
    whole = _whole(a, b.shape[1])
    if whole:
        left, right = a[:whole].t(), b[:whole].t()
        # oneDNN copies the first factor, because it is transposed: that is to be the smaller one.
        total += _linear(left, right) if len(left) <= len(right) else _linear(right, left).t()
    total.addmm_(a[whole:].t(), b[whole:])


def _whole(a: torch.Tensor, others: int) -> int:
    """How many of the tokens of `a [tokens, n]` go to oneDNN in a product of `tokens · n · others` multiplications."""
    whole = len(a) - len(a) % ROWS if FASTER and a.dtype == torch.float32 and a.device.type == "cpu" else 0
    return whole if whole * a.shape[1] * others >= LEAST else 0


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


class _Linear(torch.autograd.Function):
    """`x [N, in]`, `weight [out, in]` → `[N, out]`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return mm(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_out = grads[0].contiguous()
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        if d_weight is not None:
            add_mm(d_weight, d_out, x)
        return mm(d_out, weight) if ctx.needs_input_grad[0] else None, d_weight


def linear_of(module: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """A forward of this linear layer by `mm`."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return _Linear.apply(x.reshape(-1, x.shape[-1]), module.weight).view(*x.shape[:-1], -1)  # type: ignore[union-attr]

    return forward


def quick(module: torch.nn.Module) -> bool:
    """True for a layer that `linear_of` may stand in for, and whose product of 1,024 tokens is worth it."""
    own = type(module) is torch.nn.Linear and module.bias is None and "forward" not in vars(module)
    return FASTER and own and module.weight.numel() * 1024 >= LEAST  # type: ignore[operator]
